"""Launches the compiled ungated MLP by the same three routes as the gated one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import contiguous, float32_run, with_rows
from sparsemlp._op import raise_value_error
from sparsemlp.ops import _direct
from sparsemlp.ops._checks import number_tensor
from sparsemlp.ops._gated_mlp_native import CHUNK
from sparsemlp.ops._products import active_product, by_chunks, hidden, rows_linear
from sparsemlp.reference.gated_mlp import gemm_bias
from sparsemlp.router.decide import fused_tokens

__all__ = ["ROUTES", "direct", "forward"]

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_mlp_native(Tensor x, Tensor w_in, Tensor w_out_t, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, "
    "Tensor? skipped_out, Tensor? b_in, Tensor? b_out, Tensor? scale_in, Tensor? scale_out, Tensor? activation_params, "
    "int activation, int isa) -> Tensor"
)
_fused = torch.ops.sparsemlp._mlp_native.default


def direct(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: float | Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    scale_in: Tensor | None,
    scale_out: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor | None:
    """The fused kernel for a plain eager call of few tokens on unchecked arguments, x of shape (..., D); None: not so.

    The kernel checks what it needs itself, and the public function's own checks are then only for naming what is wrong.
    """
    name = activations.IDS.get(activation) if type(activation) is str else None
    if name is None or not _direct.allowed():
        return None
    limit = number_tensor(threshold)
    if limit is None:
        return None
    tensors = (
        x, w_in, w_out_t, limit, token_scale, skipped_mean, skipped_out, b_in, b_out, scale_in, scale_out,
        activation_params,
    )  # fmt: skip
    if not _direct.takes(tensors) or x.dim() == 0:
        return None
    if x.numel() > fused_tokens(x.dtype, scale_out is not None) * x.shape[-1]:
        return None
    try:
        return _fused(*tensors, name, _native.isa())
    except RuntimeError as error:
        raise_value_error(error)
        return None


def forward(*args: Any) -> Tensor:
    """The operator's arguments in order; up to `CHUNK` tokens by skipping rows, more by dense products."""
    return run("sparse" if args[0].shape[0] <= CHUNK else "dense", *args)


def run(
    route: str,
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: Tensor,
    input_threshold: Tensor | None,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    scale_in: Tensor | None,
    scale_out: Tensor | None,
    screen_in: Tensor | None,
    screen_scale_in: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor:
    """One of `ROUTES` with the operator's arguments in order; x is (T, D)."""
    act, isa = activations.IDS[activation], _native.isa()
    limit, params, mean, token_scale, skipped_out, scale_in, scale_out = (
        float32_run(t)
        for t in (threshold, activation_params, skipped_mean, token_scale, skipped_out, scale_in, scale_out)
    )
    assert limit is not None
    x, b_in, b_out = with_rows(x), contiguous(b_in), contiguous(b_out)

    def fused(tokens: Tensor, scale: Tensor | None) -> Tensor:
        return _fused(
            tokens, w_in, w_out_t, limit, scale, mean, skipped_out, b_in, b_out, scale_in, scale_out, params, act, isa
        )  # fmt: skip

    if route != "pytorch":
        if x.shape[0] <= CHUNK or route == "dense":
            return fused(x, token_scale)
        return by_chunks(fused, x, token_scale, CHUNK)
    pre = rows_linear(x, w_in, scale_in, b_in)
    h = hidden(pre, None, limit, token_scale, mean, params, act, 0, isa, w_out_t)
    return active_product(
        h, w_out_t, scale_out, gemm_bias(b_out, skipped_out, x.dtype), fused, x, token_scale
    )


ROUTES = {name: functools.partial(run, name) for name in ("sparse", "dense", "pytorch")}
"""As of the gated MLP's launcher."""
