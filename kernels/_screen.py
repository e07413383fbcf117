"""A low-bit screen's products: tokens rounded to int8 once, codes unpacked in registers (`sparsemlp/screen.py`).

Codes are read as 32-bit words, 16 neurons side by side. 32 inputs of a neuron are as many words as a code has bits, of
which shifts and masks make 8 quads: four neighbouring inputs, an int8 each, multiplied with four inputs of a token in
one instruction. The int8 is the code's value times 2^(8 − bits), its bits on top, where the sign is. A group's sum is
an exact integer; then it is scaled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp import _triton
from sparsemlp._layout import in_memory
from sparsemlp.kernels._launch import Launch
from sparsemlp.reference.screen import LARGEST, SMALLEST
from sparsemlp.screen import ROWS

__all__ = ["NONE", "Screen", "Tokens", "constants", "quantize_tokens", "screen_scores"]

_ROWS = tl.constexpr(ROWS)
_LARGEST = tl.constexpr(float(LARGEST))
_SMALLEST = tl.constexpr(SMALLEST)
_MAX_FLOAT = tl.constexpr(3.402823466e38)
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 · 2^23: added and subtracted again it rounds a small number half to even."""
_SIGNS = tl.constexpr(-0x7F7F7F80)
"""The highest bit of every byte; 0x80808080 as an int32."""
_HALF_SIGNS = tl.constexpr(-0x77777778)
"""The highest bit of every half byte; 0x88888888 as an int32."""
_HIGH = tl.constexpr(-0x0F0F0F10)
"""The high half of every byte; 0xF0F0F0F0 as an int32."""
_MIDDLE = tl.constexpr(0x60606060)
_TILE = 1024
"""Inputs that a program rounds at a time."""


@triton.jit
def dot4(a, b, acc):
    """acc + Σ a_i b_i of the four int8 in a and in b, all int32; broadcasts. For the interpreter."""
    for i in tl.static_range(4):
        acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def dot4_ptx(a, b, acc):
    """`dot4` in one instruction of NVIDIA's GPUs, which the compiler does not find by itself."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dot4_amd(a, b, acc):
    """`dot4` in one instruction of AMD's GPUs."""
    return tl.inline_asm_elementwise(
        "v_dot4_i32_i8 $0, $1, $2, $3", "=v,v,v,v", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _group_sums(
    at, mask, inputs, real, sums, BITS: tl.constexpr, GROUP: tl.constexpr, DOT4: tl.constexpr
):  # fmt: skip
    """sums + a group's codes (at `at`, int32) · its inputs (at `inputs`, int32), exact integers times 2^(8 − BITS)."""
    for part in range(GROUP // 32):  # 32 inputs, 8 quads: BITS words
        words = at + part * (BITS * _ROWS)
        if BITS == 3:
            highest = ~tl.load(words + 2 * _ROWS, mask=mask, other=0)
        for q in tl.static_range(8):
            if BITS == 3:
                if q % 4 == 0:
                    word = tl.load(words + q // 4 * _ROWS, mask=mask, other=0)
                low = word >> 1 if q % 4 == 3 else word << (5 - 2 * (q % 4))
                quad = (low & _MIDDLE) | ((highest << (7 - q)) & _SIGNS)
            elif BITS == 4:
                if q % 2 == 0:
                    word = tl.load(words + q // 2 * _ROWS, mask=mask, other=0) ^ _HALF_SIGNS
                quad = (word << 4 if q % 2 == 0 else word) & _HIGH
            else:
                quad = tl.load(words + q * _ROWS, mask=mask, other=0) ^ _SIGNS
            four = tl.load(inputs + part * 8 + q, mask=real, other=0)
            sums = DOT4(quad, four, sums)
    return sums


@triton.jit
def _products(
    codes, scales, bias, x8, units, j, t, T, F, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCREEN_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr,
    DOT4: tl.constexpr,
):  # fmt: skip
    """x̂ Ŵᵀ + bias of tokens t and consecutive neurons j, (SCREEN_T, BLOCK_F) float32, BLOCK_G groups at a time."""
    block, lane = (j // _ROWS)[None, None, :], (j % _ROWS)[None, None, :]
    inside = block * _ROWS < F
    codes += block * groups * (GROUP * BITS // 32 * _ROWS) + lane
    scales = tl.max_contiguous(scales + block * groups * _ROWS + lane, (1, 1, 4))  # the words' layout
    row = t[:, None, None].to(tl.int64) * groups
    lanes = tl.zeros((SCREEN_T, BLOCK_G, BLOCK_F), tl.float32)
    for start in range(0, groups, BLOCK_G):
        g = (start + tl.arange(0, BLOCK_G))[None, :, None].to(tl.int64)
        mask, real = (g < groups) & inside, (g < groups) & (t < T)[:, None, None]
        sums = _group_sums(
            codes + g * (GROUP * BITS // 32 * _ROWS), mask, x8 + (row + g) * (GROUP // 4), real,
            tl.zeros((SCREEN_T, BLOCK_G, BLOCK_F), tl.int32), BITS, GROUP, DOT4,
        )  # fmt: skip
        scale = tl.load(scales + g * _ROWS, mask=mask, other=0.0).to(tl.float32) * (1 / (1 << (8 - BITS)))
        unit = tl.load(units + row + g, mask=real, other=0.0)
        lanes += sums.to(tl.float32) * scale * unit  # scale · unit may overflow where the product is 0
    p = tl.sum(lanes, axis=1)
    if bias is not None:
        p += tl.load(bias + j, mask=j < F, other=0.0).to(tl.float32)[None, :]
    return p


@triton.jit
def screen_scores(
    codes_gate, codes_up, scales_gate, scales_up, b_gate, b_up, x8, units, a, b, c, j, T, F, groups,
    ACT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCREEN_T: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr, DOT4: tl.constexpr,
):  # fmt: skip
    """By what neurons j (BLOCK_F,), int64, are decided, (neurons, BLOCK_T) float32; 0 beyond the tokens.

    Codes and `x8` are read as int32, for SCREEN_T tokens at a time: for more, codes again, from the cache.
    """
    m = tl.zeros((BLOCK_F, BLOCK_T), tl.float32)
    for t0 in range(0, T, SCREEN_T):
        t = t0 + tl.arange(0, SCREEN_T)
        act = _products(
            codes_gate, scales_gate, b_gate, x8, units, j, t, T, F, groups,
            BITS, GROUP, SCREEN_T, BLOCK_F, BLOCK_G, DOT4,
        )  # fmt: skip
        up = _products(
            codes_up, scales_up, b_up, x8, units, j, t, T, F, groups,
            BITS, GROUP, SCREEN_T, BLOCK_F, BLOCK_G, DOT4,
        )  # fmt: skip
        part = ACT(act, a, b, c) * up
        place = t[:, None, None] == tl.arange(0, BLOCK_T)[None, None, :]
        m += tl.sum(tl.where(place, part[:, :, None], 0.0), axis=0)
    return m


@triton.jit
def _screen_fwd_quantize_kernel(
    x, x8, units, D, groups, stride_x, GROUP: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Compiled without fusing a product and a sum: the bits are those of `reference.screen.quantize_tokens`."""
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + t * stride_x + k, mask=k < D, other=0.0).to(tl.float32)
    size = tl.abs(value)
    finite = size <= _MAX_FLOAT
    most = tl.max(tl.where(finite, size, 0.0), axis=1)
    whole = tl.min(finite.to(tl.int32), axis=1) != 0
    usable = whole & (most >= _SMALLEST)
    largest = tl.full((BLOCK_G,), _LARGEST, tl.float32)
    factor = tl.where(usable, tl.div_rn(largest, tl.where(usable, most, 1.0)), 0.0)
    rounded = tl.where(usable[:, None], value, 0.0) * factor[:, None] + _TO_INTEGER - _TO_INTEGER
    unit = tl.where(whole, tl.where(usable, tl.div_rn(most, largest), 0.0), float("nan"))
    tl.store(x8 + t * groups * GROUP + k, rounded.to(tl.int8), mask=g[:, None] < groups)
    tl.store(units + t * groups + g, unit, mask=g < groups)


class Screen(NamedTuple):
    """The low-bit copies of both weights, as the operator has them: codes uint8 and scales bfloat16."""

    codes_gate: Tensor
    codes_up: Tensor
    scales_gate: Tensor
    scales_up: Tensor

    @property
    def bits(self) -> int:
        return self.codes_gate.shape[2]

    @property
    def group(self) -> int:
        return self.codes_gate.shape[3] // 2

    @property
    def groups(self) -> int:
        return self.codes_gate.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As kernels read them: codes as int32."""
        codes = (c if c.data_ptr() % 4 == 0 else c.clone() for c in (self.codes_gate, self.codes_up))
        gate, up = (c.view(torch.int32) for c in codes)
        return gate, up, in_memory(self.scales_gate), in_memory(self.scales_up)


class Tokens(NamedTuple):
    """Tokens as the screen sees them: x8 (T, groups · group) int8, and a scale a group, units (T, groups) float32."""

    x8: Tensor
    units: Tensor


def quantize_tokens(x: Tensor, screen: Screen) -> tuple[Tokens, Launch]:
    """What the screen sees of x (T, D), not yet computed, and the launch that computes it.

    A launch of its own, of T · D inputs: otherwise every one of the F / 16 programs that read codes would round all
    inputs again, a sixth of the arithmetic that it has with its codes, and wait for groups' maxima in its inner loop.
    """
    (tokens, d), group, groups = x.shape, screen.group, screen.groups
    seen = Tokens(
        torch.empty((tokens, groups * group), dtype=torch.int8, device=x.device),
        torch.empty((tokens, groups), dtype=torch.float32, device=x.device),
    )
    block = _TILE // group
    launch = Launch(
        _screen_fwd_quantize_kernel,
        (tokens, -(-groups // block)),
        (x, *seen, d, groups, x.stride(0)),
        {"GROUP": group, "BLOCK_G": block},
        fp_fusion=False,
    )
    return seen, launch


NONE: dict[str, Any] = {"BITS": 0, "GROUP": 0, "SCREEN_T": 1, "BLOCK_G": 1, "DOT4": dot4}
"""The constants of `screen_scores` in a kernel where nothing is screened."""


def constants(screen: Screen, tokens: int, block_f: int, warps: int, warp_size: int = 32) -> dict[str, Any]:
    """The constants of `screen_scores` for few tokens; `warp_size`: 32, or 64 on AMD's GPUs.

    A thread's tile is a group of four neurons: 16 bytes a load. So few tokens at a time that their groups in a tile
    are fewer than its threads: what a thread needs of x it then loads itself, not by way of shared memory.
    """
    groups = max(1, 4 * warps * warp_size // block_f)
    return {
        "BITS": screen.bits,
        "GROUP": screen.group,
        "SCREEN_T": min(4, max(1, block_f // 8), triton.next_power_of_2(tokens)),
        "BLOCK_G": min(groups, triton.next_power_of_2(screen.groups)),
        "DOT4": dot4 if _triton.interpreting() else dot4_amd if warp_size == 64 else dot4_ptx,
    }
