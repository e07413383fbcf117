"""Products with int8 weights, one float32 scale per neuron: a weight's value is q·scale, and nothing is rounded to it.

The scale of a row of x @ w.T is a factor of the result, that of a row of h @ w_t a factor of h; so the integers, exact
in every float dtype, are multiplied, in float32 (float64 for float64 inputs), a slice of the matrix at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp.activations import wide

__all__ = ["neuron_linear", "rows_linear"]

_CHUNK = 1024
"""Neurons, or columns of the down projection, widened at a time: no wide copy of a matrix."""


def _result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's where x is not float64, as the float products have it."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def rows_linear(x: Tensor, w: Tensor, scale: Tensor, b: Tensor | None) -> Tensor:
    """x @ (scale[:, None]·w).T + b, rounded once to x's dtype: (T, F) from x (T, D), w (F, D) int8, scale (F,)."""
    x_wide = wide(x)
    products = torch.cat([F.linear(x_wide, rows.to(x_wide.dtype)) for rows in w.split(_CHUNK)], dim=-1)
    products = products * scale.to(x_wide.dtype)
    if b is not None:
        products = products + b.to(x_wide.dtype)
    return products.to(_result_dtype(x))


def neuron_linear(h: Tensor, w_t: Tensor, scale: Tensor, b: Tensor | None = None) -> Tensor:
    """h @ (scale[:, None]·w_t) + b, rounded once to h's dtype: (T, D) from h (T, F), w_t (F, D) int8, scale (F,)."""
    h_wide = wide(h)
    scaled = h_wide * scale.to(h_wide.dtype)
    out = torch.cat([scaled @ columns.to(h_wide.dtype) for columns in w_t.split(_CHUNK, dim=1)], dim=-1)
    if b is not None:
        out = out + b.to(h_wide.dtype)
    return out.to(_result_dtype(h))
