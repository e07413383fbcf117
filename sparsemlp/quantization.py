"""int8 weights: symmetric, one float32 scale per output of a layer, a weight's value being q·scale.

An output is a row of a weight as `nn.Linear` stores it, and a column of a transposed one, such as `w_down_t`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_rows", "dequantize_rows", "quantize_columns", "quantize_rows"]

LARGEST = 127
"""|q| at most: symmetric, so that −q exists and 16-bit products of pairs cannot overflow."""

_CHUNK = 1024
"""Rows widened at a time: no wide copy of a matrix."""


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix to int8, each row with a scale of its own.

    Equivalent to::

        scale = weight.float().abs().amax(dim=1) / 127
        q = (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)   # 0 in rows of zeros

    Args:
        weight: (N, K), any floating dtype and strides, finite; it is not changed. On the meta device nothing is read.

    Returns:
        (q, scale): (N, K) int8, contiguous, -127 to 127, halves rounded to even; (N,) float32, 0 for a row of zeros. An
        entry's error |weight − q·scale| is at most scale / 2 (rows below 1e-36, which scales cannot follow, aside).
    Raises:
        ValueError: not a floating-point matrix, or a row holds NaN, inf or a float64 value beyond float32.
    """
    check_rows(weight)
    with torch.no_grad():
        q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        if weight.device.type == "meta":
            return q, scale
        parts = zip(weight.split(_CHUNK), q.split(_CHUNK), scale.split(_CHUNK), strict=True)
        for rows, q_part, scale_part in parts:
            wide = rows.double() if rows.dtype == torch.float64 else rows.float()
            if weight.shape[1]:
                scale_part.copy_(wide.abs().amax(dim=1) / LARGEST)
            else:
                scale_part.zero_()
            divisor = torch.where(scale_part > 0, scale_part, torch.inf).to(wide.dtype)
            q_part.copy_((wide / divisor[:, None]).round_().clamp_(-LARGEST, LARGEST))
    return q, scale


def quantize_columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a scale for each column: for weights that are stored input by input, `w_down_t` and `weight_t`.

    Args:
        weight: (K, N), as for `quantize_rows`.

    Returns:
        (q, scale): (K, N) int8, contiguous; (N,) float32.
    Raises:
        ValueError: as `quantize_rows`, whose rows are this matrix's columns.
    """
    check_rows(weight)
    q, scale = quantize_rows(weight.t())
    return q.t().contiguous(), scale


def dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q·scale in a floating dtype, rounded once.

    Args:
        q: (N, K) int8, any strides. scale: (N,) float32.
        dtype: of the result.

    Returns:
        (N, K) in `dtype`, contiguous.
    """
    if q.dtype != torch.int8 or q.dim() != 2 or scale.shape != q.shape[:1]:
        raise ValueError(
            f"q is {str(q.dtype).removeprefix('torch.')} of shape {tuple(q.shape)} with scales {tuple(scale.shape)}, "
            "expected int8 (N, K) with scales (N,); pass what quantize_rows returned"
        )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for rows, factors, part in zip(q.split(_CHUNK), scale.split(_CHUNK), out.split(_CHUNK), strict=True):
        part.copy_(rows.to(wide) * factors.to(wide)[:, None])
    return out


def check_rows(weight: Tensor, name: str = "weight") -> None:
    """Whether `quantize_rows` can round the matrix; reads it once and changes nothing.

    Raises:
        ValueError: it cannot; the sentence begins with `name`.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        what = (
            f"{str(weight.dtype).removeprefix('torch.')} of shape {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else type(weight).__name__
        )
        raise ValueError(f"{name} is {what}, expected a floating-point matrix (N, K); pass one")
    if weight.device.type == "meta" or weight.numel() == 0:
        return
    for start, rows in enumerate(weight.detach().split(_CHUNK)):
        low, high = (end.float() for end in rows.aminmax())  # NaN where there is one
        if bool((low.isfinite() & high.isfinite()).item()):
            continue
        row = start * _CHUNK + int((~rows.float().isfinite()).any(dim=1).nonzero()[0])
        raise ValueError(
            f"{name} holds NaN, inf or a value beyond float32 in row {row}, expected finite values; repair the "
            "checkpoint or leave it unquantised"
        )
