"""Launches the compiled ungated MLP by the same three routes as the gated one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import float32_run
from sparsemlp._op import PLAIN_TENSORS, VALUE_ERROR, is_plain_eager, value_error
from sparsemlp.ops import _gated_mlp_native as gated
from sparsemlp.ops._checks import number_tensor
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
    if (
        name is None
        or torch.compiler.is_compiling()
        or _native.problem() is not None
        or not is_plain_eager("cpu")
    ):
        return None
    limit = number_tensor(threshold)
    if limit is None:
        return None
    tensors = (
        x, w_in, w_out_t, limit, token_scale, skipped_mean, skipped_out, b_in, b_out, scale_in, scale_out,
        activation_params,
    )  # fmt: skip
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (type(t) not in PLAIN_TENSORS or (grad and t.requires_grad)):
            return None
    if x.dim() == 0 or x.numel() > fused_tokens(x.dtype, scale_out is not None) * x.shape[-1]:
        return None
    try:
        return _fused(*tensors, name, _native.isa())
    except RuntimeError as error:
        if VALUE_ERROR in str(error):
            raise value_error(error) from None
        return None


def forward(*args: Any) -> Tensor:
    """The operator's arguments in order; up to `CHUNK` tokens by skipping rows, more by dense products."""
    return run("sparse" if args[0].shape[0] <= gated.CHUNK else "dense", *args)


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
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    b_in, b_out = (None if b is None else b.contiguous() for b in (b_in, b_out))

    def fused(tokens: Tensor, scale: Tensor | None) -> Tensor:
        return _fused(
            tokens, w_in, w_out_t, limit, scale, mean, skipped_out, b_in, b_out, scale_in, scale_out, params, act, isa
        )  # fmt: skip

    if route != "pytorch":
        if x.shape[0] <= gated.CHUNK or route == "dense":
            return fused(x, token_scale)
        count = -(-x.shape[0] // gated.CHUNK)
        scales = (None,) * count if token_scale is None else token_scale.split(gated.CHUNK)
        return torch.cat([fused(part, s) for part, s in zip(x.split(gated.CHUNK), scales, strict=True)])
    pre = gated._rows(x, w_in, scale_in, b_in)
    h = gated._hidden(pre, None, limit, token_scale, mean, params, act, 0, isa, w_out_t)
    out = gated._down(h, w_out_t, scale_out, gemm_bias(b_out, skipped_out, x.dtype))
    bad = out.sum(dim=-1, dtype=torch.float32).isfinite().logical_not_()
    # 0·inf of a neuron that is not active, or a true inf or NaN: the fused kernel tells them apart. With finite weights
    # it is the latter; their sum is not finite where one of them is not.
    weights = w_out_t if scale_out is None else scale_out
    if bool(bad.any()) and not bool(weights.sum(dtype=torch.float32).isfinite()):
        out = out.clone()
        for i in bad.nonzero().flatten().tolist():
            out[i : i + 1] = fused(x[i : i + 1], None if token_scale is None else token_scale[i : i + 1])
    return out


ROUTES = {name: functools.partial(run, name) for name in ("sparse", "dense", "pytorch")}
"""As of the gated MLP's launcher."""
