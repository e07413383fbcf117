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
"""Outputs whose int8 weights are widened at a time."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_hidden_native(Tensor pre, Tensor? up, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, "
    "Tensor? activation_params, int activation, int indicator, int isa, Tensor? weight=None, "
    "Tensor? scores=None) -> Tensor"
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
        return int8.linear(x, w, scale, b)
    wide = torch.cat([F.linear(x, rows.to(x.dtype)) for rows in w.split(_SLICE)], dim=-1).mul_(scale)
    return wide if b is None else wide.add_(b)


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
    """h @ w_t + b where the rows of w_t that belong to an inactive, so 0, value count as not read.

    Args:
        h: `hidden`'s values, (T, F). w_t, scale, b: the weight (F, D), its scales where it is int8, and what is added.
        fused: computes tokens of x with their token scales anew.
        w_by_input: another weight of which columns count as not read.
    """
    out = rows_linear(h, w_t.t(), scale, b)
    bad = out.sum(dim=-1, dtype=torch.float32).isfinite().logical_not_()
    # 0·inf of something skipped, or a true inf or NaN: the fused kernel tells them apart. With finite weights it is the
    # latter; their sum is not finite where one of them is not.
    skipped = (w_t, w_by_input) if scale is None else ()
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
