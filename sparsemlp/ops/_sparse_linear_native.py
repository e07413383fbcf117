"""Launches the compiled sparse linear layer: one kernel for few tokens, a mask and a matrix product for many."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import contiguous, float32_run, with_rows
from sparsemlp._op import raise_value_error
from sparsemlp.ops import _direct
from sparsemlp.ops._checks import number_tensor
from sparsemlp.ops._products import active_product, by_chunks, hidden
from sparsemlp.reference import sparse_linear as reference

__all__ = ["CHUNK", "MAX_FUSED_TOKENS", "direct", "forward"]

CHUNK = 32
"""Tokens in one call of the fused kernel."""

MAX_FUSED_TOKENS = {torch.bfloat16: CHUNK, torch.float32: CHUNK, torch.float16: 2**62, torch.int8: 4 * CHUNK}
"""Up to here the fused kernel, chunk by chunk, above it a matrix product; by the dtype of the weights."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_sparse_linear_native(Tensor x, Tensor weight_t, Tensor threshold, Tensor? token_scale, Tensor? bias, "
    "Tensor? scale, bool wide, int isa) -> Tensor"
)
_fused = torch.ops.sparsemlp._sparse_linear_native.default


def direct(
    x: Tensor,
    weight_t: Tensor,
    threshold: float | Tensor,
    token_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor | None:
    """The kernel for a plain eager call of few tokens on unchecked arguments, x of shape (..., K); None: not so.

    The kernel checks what it needs itself, and the public function's own checks are then only for naming what is wrong.
    """
    if not _direct.allowed():
        return None
    limit = number_tensor(threshold)
    if limit is None:
        return None
    tensors = (x, weight_t, limit, token_scale, bias, scale)
    if not _direct.takes(tensors) or x.dim() == 0 or x.numel() > CHUNK * x.shape[-1]:
        return None
    try:
        return _fused(*tensors, False, _native.isa())
    except RuntimeError as error:
        raise_value_error(error)
        return None


def forward(
    x: Tensor,
    weight_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """The operator's arguments in order; x is (T, K)."""
    isa, limit, x, bias = _native.isa(), float32_run(threshold), with_rows(x), contiguous(bias)
    token_scale, scale = float32_run(token_scale), float32_run(scale)
    assert limit is not None

    def fused(tokens: Tensor, s: Tensor | None) -> Tensor:
        return _fused(tokens, weight_t, limit, s, bias, scale, False, isa)

    if x.shape[0] <= CHUNK:
        return fused(x, token_scale)
    if x.shape[0] <= MAX_FUSED_TOKENS[weight_t.dtype]:
        return by_chunks(fused, x, token_scale, CHUNK)
    if scale is not None:
        return reference.sparse_linear(x, weight_t, limit, token_scale, bias, scale)
    h = hidden(x.contiguous(), None, limit, token_scale, None, None, activations.IDS["identity"], 0, isa)
    return active_product(h, weight_t, None, bias, fused, x, token_scale)
