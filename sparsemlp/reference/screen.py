"""What a low-bit screen makes of tokens: scores by which `indicator="screen"` decides who is computed.

Tokens are rounded to int8, a scale for every group of neighbours as the weights have it, so that kernels multiply
integers; the rounding is part of what the screen is, the same bits on every backend. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations
from sparsemlp.screen import ROWS, PackedWeight, unpack

__all__ = ["SMALLEST", "quantize_tokens", "scores"]

LARGEST = 127
SMALLEST = 2.0**-100
"""Groups of a token whose largest magnitude is below it count as 0."""
_CHUNK = 1024
"""Neurons unpacked at a time."""


def quantize_tokens(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Tokens as int8 with a scale for every `group` inputs.

    Equivalent to, with x in float32 and inputs past the last one 0::

        most = x.view(T, groups, group).abs().amax(2)          # below 2^-100: 0
        q = (x * (127 / most)).round().to(torch.int8)
        scale = most / 127                                      # NaN where most is NaN or inf, and q is 0 there

    Args:
        x: (T, D), floating point.
        group: 32, 64 or 128.

    Returns:
        q (T, ⌈D / group⌉, group) int8 and scale (T, ⌈D / group⌉) float32.
    """
    tokens, d = x.shape
    groups = -(-d // group)
    wide = x.new_zeros(tokens, groups * group, dtype=torch.float32)
    wide[:, :d] = x
    wide = wide.view(tokens, groups, group)
    most = wide.abs().amax(dim=2) if d else wide.new_zeros(tokens, 0)
    usable = (most >= SMALLEST) & most.isfinite()
    largest = torch.full_like(
        most, LARGEST
    )  # a number / tensor is rounded twice, and on GPUs a tensor / number too
    factor = torch.where(usable, largest / most, 0.0)[..., None]
    q = torch.where(usable[..., None], wide * factor, 0.0).round().to(torch.int8)
    scale = torch.where(usable, most / largest, torch.where(most < SMALLEST, 0.0, torch.nan))
    return q, scale


def scores(
    x: Tensor,
    screen_gate: PackedWeight,
    screen_up: PackedWeight,
    neurons: int,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor:
    """m = φ(x̂ Ŵ_gateᵀ + b_gate) ⊙ (x̂ Ŵ_upᵀ + b_up), (T, F) float32 (float64 of a float64 x).

    Args:
        x: (T, D). screen_gate, screen_up: low-bit copies of (F, D) weights. neurons: F.
        b_gate, b_up: (F,) or None.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        sums = []
        for packed, b in ((screen_gate, b_gate), (screen_up, b_up)):
            q, scale = quantize_tokens(x, packed.group)
            seen = (q.to(wide) * scale.to(wide)[..., None]).flatten(1)[:, : x.shape[1]]
            p = torch.cat([F.linear(seen, rows) for rows in _rows(packed, neurons, x.shape[1], wide)], dim=1)
            sums.append(p if b is None else p + b.to(wide))
        return activations.apply(sums[0], activation, activation_params) * sums[1]


def _rows(packed: PackedWeight, neurons: int, width: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The copy's rows, some at a time: no wide copy of a matrix."""
    parts = zip(packed.codes.split(_CHUNK // ROWS), packed.scale.split(_CHUNK // ROWS), strict=True)
    for i, (codes, scale) in enumerate(parts):
        yield unpack(PackedWeight(codes, scale), min(_CHUNK, neurons - i * _CHUNK), width, dtype)
