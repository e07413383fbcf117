"""Launches the compiled sparse linear layer: one kernel for few tokens, a mask and a matrix product for many."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import float32_run, in_memory
from sparsemlp._op import PLAIN_TENSORS, VALUE_ERROR, is_plain_eager, value_error
from sparsemlp.ops._checks import number_tensor
from sparsemlp.ops._products import neuron_linear
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
    if torch.compiler.is_compiling() or _native.problem() is not None or not is_plain_eager("cpu"):
        return None
    limit = number_tensor(threshold)
    if limit is None:
        return None
    tensors = (x, weight_t, limit, token_scale, bias, scale)
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (type(t) not in PLAIN_TENSORS or (grad and t.requires_grad)):
            return None
    if x.dim() == 0 or x.numel() > CHUNK * x.shape[-1]:
        return None
    try:
        return _fused(*tensors, False, _native.isa())
    except RuntimeError as error:
        if VALUE_ERROR in str(error):
            raise value_error(error) from None
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
    isa, limit = _native.isa(), in_memory(threshold).float().contiguous()
    token_scale, scale = float32_run(token_scale), float32_run(scale)
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    bias = None if bias is None else bias.contiguous()

    def fused(tokens: Tensor, s: Tensor | None) -> Tensor:
        return _fused(tokens, weight_t, limit, s, bias, scale, False, isa)

    if x.shape[0] <= CHUNK:
        return fused(x, token_scale)
    if x.shape[0] <= MAX_FUSED_TOKENS[weight_t.dtype]:
        scales = (None,) * -(-x.shape[0] // CHUNK) if token_scale is None else token_scale.split(CHUNK)
        return torch.cat([fused(part, s) for part, s in zip(x.split(CHUNK), scales, strict=True)])
    if scale is not None:
        return reference.sparse_linear(x, weight_t, limit, token_scale, bias, scale)
    # The mask is that of a gated MLP's hidden values; its operator is defined beside that launcher, which imports this.
    masked = torch.ops.sparsemlp._hidden_native.default
    h = masked(x.contiguous(), None, limit, token_scale, None, None, activations.IDS["identity"], 0, isa)
    out = neuron_linear(h, weight_t, bias)
    bad = out.sum(dim=-1, dtype=torch.float32).isfinite().logical_not_()
    # 0·inf of a skipped channel, or a true inf or NaN: the fused kernel tells them apart. With finite weights it is the
    # latter; their sum is not finite where one of them is not.
    if bool(bad.any()) and not bool(weight_t.sum(dtype=torch.float32).isfinite()):
        out = out.clone()
        for i in bad.nonzero().flatten().tolist():
            out[i : i + 1] = fused(x[i : i + 1], None if token_scale is None else token_scale[i : i + 1])
    return out
