"""What the CPU launchers share for many tokens: a mask, PyTorch's matrix products, and tokens a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp.reference import int8

__all__ = ["Fused", "active_product", "by_chunks", "hidden", "rows_linear"]

Fused = Callable[[Tensor, Tensor | None], Tensor]
"""A call's fused kernel, for any of its tokens and their token scales."""

_SLICE = 2048
"""Neurons, or columns of the down projection, of int8 weights that are widened at a time."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_hidden_native(Tensor pre, Tensor? up, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, "
    "Tensor? activation_params, int activation, int indicator, int isa, Tensor? weight=None) -> Tensor"
)
hidden = torch.ops.sparsemlp._hidden_native.default
"""The hidden values, 0 where inactive; the density that was seen is noted for `weight`."""


def rows_linear(x: Tensor, w: Tensor, scale: Tensor | None, b: Tensor | None) -> Tensor:
    """x @ w.T + b; of int8 weights a slice at a time, the integers as x's dtype (exact), rounded again by the scale.

    float16 does not hold sums of integers: there everything is float32, rounded once.
    """
    if scale is None:
        return F.linear(x, w, b)
    if x.dtype == torch.float16:
        return int8.rows_linear(x, w, scale, b)
    wide = torch.cat([F.linear(x, rows.to(x.dtype)) for rows in w.split(_SLICE)], dim=-1).mul_(scale)
    return wide if b is None else wide.add_(b)


def _neuron_linear(h: Tensor, w_t: Tensor, scale: Tensor | None, b: Tensor | None) -> Tensor:
    """h @ w_t + b, likewise; h is overwritten."""
    if scale is None:
        return F.linear(h, w_t.t(), b)
    if h.dtype == torch.float16:
        return int8.neuron_linear(h, w_t, scale, b)
    h = h.mul_(scale)
    slices = w_t.split(_SLICE, dim=1)
    biases = (None,) * len(slices) if b is None else b.split(_SLICE)
    parts = [F.linear(h, c.to(h.dtype).t(), bias) for c, bias in zip(slices, biases, strict=True)]
    return torch.cat(parts, dim=-1)


def active_product(
    h: Tensor,
    w_t: Tensor,
    scale: Tensor | None,
    b: Tensor | None,
    fused: Fused,
    x: Tensor,
    token_scale: Tensor | None,
    w_by_input: Tensor | None = None,
) -> Tensor:
    """h @ w_t + b where the rows of w_t that belong to an inactive, so 0, value count as not read; h is overwritten.

    Args:
        h: `hidden`'s values, (T, F). w_t, scale, b: the weight (F, D), its scales where it is int8, and what is added.
        fused: computes tokens of x with their token scales anew.
        w_by_input: another weight of which columns count as not read.
    """
    out = _neuron_linear(h, w_t, scale, b)
    bad = out.sum(dim=-1, dtype=torch.float32).isfinite().logical_not_()
    # 0·inf of something skipped, or a true inf or NaN: the fused kernel tells them apart. With finite weights it is the
    # latter; their sum is not finite where one of them is not.
    skipped = (w_t if scale is None else scale, w_by_input)
    if bool(bad.any()) and not all(
        bool(w.sum(dtype=torch.float32).isfinite()) for w in skipped if w is not None
    ):
        out = out.clone()
        for i in bad.nonzero().flatten().tolist():
            out[i : i + 1] = fused(x[i : i + 1], None if token_scale is None else token_scale[i : i + 1])
    return out


def by_chunks(fused: Fused, x: Tensor, token_scale: Tensor | None, chunk: int) -> Tensor:
    """The fused kernel's output for `chunk` tokens at a time."""
    parts = x.split(chunk)
    scales = (None,) * len(parts) if token_scale is None else token_scale.split(chunk)
    return torch.cat([fused(part, s) for part, s in zip(parts, scales, strict=True)])
