"""The dense matrix products of the CPU launchers for many tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["neuron_linear", "rows_linear"]


def rows_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x @ w.T + b for x (T, D) and w (F, D), both with unit inner stride."""
    return F.linear(x, w, b)


def neuron_linear(h: Tensor, w_t: Tensor, b: Tensor | None) -> Tensor:
    """h @ w_t + b for h (T, F) and a neuron-major w_t (F, D)."""
    return F.linear(h, w_t.t(), b)
