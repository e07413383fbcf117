"""A low-bit screen's scores for many tokens: products of int8 tiles, a group of inputs at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _configs
from sparsemlp.kernels._activations import params as activation_params
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._rule import Rule
from sparsemlp.kernels._screen import _HALF_SIGNS, _SIGNS, Screen, quantize_tokens
from sparsemlp.screen import ROWS

__all__ = ["scores"]

_ROWS = tl.constexpr(ROWS)


@triton.jit
def _unpacked(at, mask, BITS: tl.constexpr, GROUP: tl.constexpr, TILE_F: tl.constexpr):
    """A group's values (GROUP, TILE_F) int8; at (1, 1, TILE_F): where its codes begin, as int32."""
    if BITS == 3:
        u = tl.arange(0, GROUP // 32)[:, None, None]
        k = tl.arange(0, 32)[None, :, None]
        first = tl.load(at + u * (3 * _ROWS), mask=mask & (u >= 0), other=0)
        second = tl.load(at + u * (3 * _ROWS) + _ROWS, mask=mask & (u >= 0), other=0)
        third = tl.load(at + u * (3 * _ROWS) + 2 * _ROWS, mask=mask & (u >= 0), other=0)
        low = tl.where(k < 16, first, second) >> (k % 4 * 8 + k // 4 % 4 * 2)
        high = third >> (k % 4 * 8 + k // 4)
        value = ((low & 3) | ((high & 1) << 2)) - 4
    elif BITS == 4:
        u = tl.arange(0, GROUP // 8)[:, None, None]
        k = tl.arange(0, 8)[None, :, None]
        word = tl.load(at + u * _ROWS, mask=mask & (u >= 0), other=0) ^ _HALF_SIGNS
        value = (word << (28 - k % 4 * 8 - k // 4 * 4)) >> 28
    else:
        u = tl.arange(0, GROUP // 4)[:, None, None]
        k = tl.arange(0, 4)[None, :, None]
        word = tl.load(at + u * _ROWS, mask=mask & (u >= 0), other=0) ^ _SIGNS
        value = (word << (24 - k * 8)) >> 24
    return tl.reshape(value.to(tl.int8), (GROUP, TILE_F))


@triton.jit
def _products(
    codes, scales, bias, x8, units, t, j, T, F, groups,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x̂ Ŵᵀ + bias of tokens t and consecutive neurons j, int64, as (TILE_T, TILE_F) float32."""
    k = tl.arange(0, GROUP)
    block, lane = j // _ROWS, j % _ROWS
    inside, real = block * _ROWS < F, t < T
    begin = codes + block * groups * (GROUP * BITS // 32 * _ROWS) + lane
    acc = tl.zeros((TILE_T, TILE_F), tl.float32)
    for g in range(groups):
        seen = tl.load(
            x8 + t[:, None] * groups * GROUP + (g * GROUP + k)[None, :], mask=real[:, None], other=0
        )
        at = begin + g * (GROUP * BITS // 32 * _ROWS)
        values = _unpacked(at[None, None, :], inside[None, None, :], BITS, GROUP, TILE_F)
        sums = tl.dot(seen, values, out_dtype=tl.int32)
        scale = tl.load(scales + (block * groups + g) * _ROWS + lane, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(units + t * groups + g, mask=real, other=0.0)
        acc += sums.to(tl.float32) * scale[None, :] * unit[:, None]
    if bias is not None:
        acc += tl.load(bias + j, mask=j < F, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _screen_fwd_scores_kernel(
    codes_gate, codes_up, scales_gate, scales_up, x8, units, b_gate, b_up, params, scores, T, F, groups,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ACT: tl.constexpr, N_PARAMS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    j = tl.program_id(1).to(tl.int64) * TILE_F + tl.arange(0, TILE_F)
    a, b, c = activation_params(params, N_PARAMS)
    act = _products(
        codes_gate, scales_gate, b_gate, x8, units, t, j, T, F, groups, TILE_T, TILE_F, BITS, GROUP
    )
    act = ACT(act, a, b, c)
    up = _products(codes_up, scales_up, b_up, x8, units, t, j, T, F, groups, TILE_T, TILE_F, BITS, GROUP)
    tl.store(scores + t[:, None] * F + j[None, :], act * up, mask=(t < T)[:, None] & (j < F)[None, :])


def scores(
    x: Tensor, screen: Screen, b_gate: Tensor | None, b_up: Tensor | None, f: int, rule: Rule, config: _configs.Config
) -> tuple[Tensor, list[Launch]]:  # fmt: skip
    """By what the screen decides, (T, F) float32, not yet computed, and the launches that compute it."""
    tokens, tile_t, tile_f = x.shape[0], config["tile_t"], config["tile_f"]
    seen, quantize = quantize_tokens(x, screen)
    m = torch.empty((tokens, f), dtype=torch.float32, device=x.device)
    launch = Launch(
        _screen_fwd_scores_kernel,
        (-(-tokens // tile_t), -(-f // tile_f)),
        (*screen.tensors, *seen, b_gate, b_up, rule.activation_params, m, tokens, f, screen.groups),
        {
            "TILE_T": tile_t, "TILE_F": tile_f, "BITS": screen.bits, "GROUP": screen.group,
            **{name: rule.constants[name] for name in ("ACT", "N_PARAMS")},
        },
        config["tile_warps"],
        config["tile_stages"],
    )  # fmt: skip
    return m, [quantize, launch]
