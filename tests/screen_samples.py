"""A screen computed the long way: weights and tokens rounded group by group, products in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rounded_weight(weight: Tensor, bits: int, group: int) -> Tensor:
    """What a low-bit copy of (F, D) stands for, in float64."""
    levels, out = 2 ** (bits - 1), torch.zeros(weight.shape, dtype=torch.float64)
    for row, values in enumerate(weight.detach().float()):
        for start in range(0, weight.shape[1], group):
            part = values[start : start + group]
            largest = max(part.tolist(), key=lambda value: (abs(value), value))  # of ±v the positive one
            scale = torch.tensor(largest / -levels).bfloat16().float()
            codes = (
                (part / scale).round().clamp(-levels, levels - 1) if scale != 0 else torch.zeros_like(part)
            )
            out[row, start : start + group] = codes.double() * scale.double()
    return out


def rounded_tokens(x: Tensor, group: int) -> Tensor:
    """What int8 tokens (T, D) stand for, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group].float()
        most = part.abs().amax(1, keepdim=True)
        codes = (part * (torch.full_like(most, 127) / most)).round().nan_to_num(0.0)
        out[:, start : start + group] = codes.double() * (most / torch.full_like(most, 127)).double()
    return out


def silu_scores(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    bits: int,
    group: int,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """m in float64 of an MLP with SiLU, and how far float32 sums may be off, both (T, F)."""
    seen = rounded_tokens(x, group)
    sums, slacks = [], []
    for weight, bias in ((w_gate, b_gate), (w_up, b_up)):
        copy = rounded_weight(weight, bits, group)
        add = 0.0 if bias is None else bias.detach().double()
        sums.append(seen @ copy.T + add)
        sizes = seen.abs() @ copy.abs().T + (0.0 if bias is None else bias.detach().double().abs())
        slacks.append((x.shape[1] + 4) * torch.finfo(torch.float32).eps * sizes)
    p, u = sums
    a = nn.functional.silu(p)
    # silu' is at most 1.1
    return a * u, 1.1 * slacks[0] * (u.abs() + slacks[1]) + (a.abs() + 1e-6) * slacks[1] + 1e-6 * (
        a * u
    ).abs()
