"""Products with int8 weights, one float32 scale per output: a weight's value is q·scale, and nothing is rounded to it.

The scale is a factor of the result; so the integers, exact in every float dtype, are multiplied, in float32 (float64
for float64 inputs), a slice of the matrix at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp.activations import wide

__all__ = ["linear"]

_CHUNK = 1024
"""Outputs whose weights are widened at a time: no wide copy of a matrix."""


def _result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's where x is not float64, as the float products have it."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def linear(x: Tensor, w: Tensor, scale: Tensor, b: Tensor | None = None) -> Tensor:
    """x @ (scale[:, None]·w).T + b, rounded once to x's dtype.

    x (T, K), w (N, K) int8 of any strides, scale (N,), b (N,); returns (T, N).
    """
    x_wide = wide(x)
    products = torch.cat([F.linear(x_wide, rows.to(x_wide.dtype)) for rows in w.split(_CHUNK)], dim=-1)
    products = products * scale.to(x_wide.dtype)
    if b is not None:
        products = products + b.to(x_wide.dtype)
    return products.to(_result_dtype(x))
