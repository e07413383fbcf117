"""Products with float or int8 weights, what is added to them, and how those with inactive entries are taken back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from sparsemlp.activations import wide
from sparsemlp.reference import int8

__all__ = ["add", "neuron_linear", "recomputed", "rows_linear", "unread"]


def rows_linear(x: Tensor, w: Tensor, scale: Tensor | None, b: Tensor | None) -> Tensor:
    """x @ w.T + b; scale, one an output, beside int8 weights, then in float32 and rounded once."""
    return F.linear(x, w, b) if scale is None else int8.linear(x, w, scale, b)


def neuron_linear(h: Tensor, w_t: Tensor, scale: Tensor | None) -> Tensor:
    """h @ w_t; scale (D,) beside int8 weights."""
    return h @ w_t if scale is None else int8.linear(h, w_t.t(), scale)


def recomputed(out: Tensor, row: Callable[[int], Tensor]) -> Tensor:
    """`out` (T, …) with row(i), (1, …), for every row that is not finite."""
    bad = ~out.isfinite().all(dim=-1)
    if not bool(bad.any()):
        return out
    out = out.clone()
    for i in bad.nonzero().flatten().tolist():
        out[i] = row(i)[0]
    return out


def unread(out: Tensor, h: Tensor, active: Tensor, w_t: Tensor) -> Tensor:
    """`out` = h @ w_t with 0·inf and 0·NaN of inactive entries taken back: their rows count as not read."""

    def row(i: int) -> Tensor:
        rows = active[i].nonzero().flatten()
        return h[i : i + 1, rows] @ w_t[rows]

    return recomputed(out, row)


def add(out: Tensor, b: Tensor | None, skipped_out: Tensor | None) -> Tensor:
    """out + b + skipped_out, rounded once to out's dtype."""
    total = wide(out)
    for more in (b, skipped_out):
        if more is not None:
            total = total + more.to(total.dtype)
    return total.to(out.dtype)
