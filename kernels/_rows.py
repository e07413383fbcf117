"""The second half of every call of few tokens: the listed rows of a weight, added in a fixed order.

Programs are (columns of D) × (splits of the list). Each walks its segments of the list that
`_select._select_fwd_kernel` made, adds the weight's rows of the neurons in them, and stores a partial sum. The last
program of a column block to arrive adds the partial sums in order of the splits, so that results repeat bit for bit;
where a counter cannot say that the others' stores are visible, a launch of its own does (`arrived` is None).

A "neuron" is what has a row in the weight: for `sparse_linear` an input channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _configs
from sparsemlp.kernels._launch import Launch, upcast_dot
from sparsemlp.kernels._tiles import dot

__all__ = ["MOST_TOKENS", "Deal", "Listed", "deal", "default", "launches"]

MOST_TOKENS = 16
"""The tokens of a tensor-core tile, and bits of a token mask."""

_MAX_FLOAT = tl.constexpr(3.402823466e38)


@triton.jit
def _slots(item, ends, split, SPLITS: tl.constexpr, BLOCK_F: tl.constexpr):
    """Where a split's items lie in the list: segments split, split + SPLITS, … one after another; ends: their ends."""
    before = ends[None, :] <= item[:, None]
    segment = tl.sum(before.to(tl.int32), axis=1)
    begin = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    return (split + segment * SPLITS).to(tl.int64) * BLOCK_F + (item - begin)


@triton.jit
def _exact_sum(
    ends, total, split, neurons, tokens, hidden, weight_t, stride_w, d, inside,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The partial sum with a select for every (token, row): an inf in a row makes no NaN for who does not want it."""
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, total, BLOCK_I):
        item = start + tl.arange(0, BLOCK_I)
        slot = _slots(item, ends, split, SPLITS, BLOCK_F)
        live = item < total
        j = tl.load(neurons + slot, mask=live, other=0).to(tl.int64)
        bits = tl.load(tokens + slot, mask=live, other=0)
        rows = tl.load(
            weight_t + j[:, None] * stride_w + d[None, :], mask=live[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        for i in range(BLOCK_T):
            h = tl.load(hidden + slot * BLOCK_T + i, mask=live, other=0.0)
            wants = live & (((bits >> i) & 1) != 0)
            sums = tl.sum(tl.where(wants[:, None], h[:, None] * rows, 0.0), axis=0)
            acc += tl.where(t[:, None] == i, sums[None, :], 0.0)
    return acc


@triton.jit
def _sum(partial, step, place, real, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """The partial sums in order of the splits."""
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for s in range(SPLITS):
        acc += tl.load(partial + s * step + place, mask=real, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _finish(acc, bias, skipped_out, out, d, inside, place, real):
    """What is added to every token, and the output."""
    if bias is not None:
        acc += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    if skipped_out is not None:
        acc += tl.load(skipped_out + d, mask=inside, other=0.0)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def _rows_fwd_kernel(
    neurons,
    tokens,
    hidden,
    counts,
    weight_t,
    bias,
    skipped_out,
    partial,
    arrived,
    out,
    T,
    D,
    segments,
    stride_w,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    chunk = tl.program_id(0)
    split = tl.program_id(1)
    d = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    inside = d < D
    segment = split + tl.arange(0, SEGMENTS) * SPLITS
    ends = tl.cumsum(tl.load(counts + segment, mask=segment < segments, other=0), 0)
    total = tl.max(ends, axis=0)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    lanes = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for start in range(0, total, BLOCK_I):
        item = start + tl.arange(0, BLOCK_I)
        slot = _slots(item, ends, split, SPLITS, BLOCK_F)
        live = item < total
        j = tl.load(neurons + slot, mask=live, other=0).to(tl.int64)
        rows = tl.load(
            weight_t + j[:, None] * stride_w + d[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        if DOT:
            h = tl.load(hidden + slot[None, :] * BLOCK_T + t[:, None], mask=live[None, :], other=0.0)
            acc = dot(h.to(rows.dtype), rows, acc, UPCAST)
        elif BLOCK_T == 1:  # one sum at the end instead of one a tile
            lanes += tl.load(hidden + slot, mask=live, other=0.0)[:, None] * rows.to(tl.float32)
        else:
            wide = rows.to(tl.float32)
            for i in tl.static_range(BLOCK_T):
                h = tl.load(hidden + slot * BLOCK_T + i, mask=live, other=0.0)
                acc += tl.where(t[:, None] == i, tl.sum(h[:, None] * wide, axis=0)[None, :], 0.0)
    if BLOCK_T == 1:
        acc = tl.sum(lanes, axis=0)[None, :]
    else:  # 0·inf of a row that one token wants and another does not
        wrong = tl.max(tl.max((tl.abs(acc) <= _MAX_FLOAT).to(tl.int32) ^ 1, axis=1), axis=0)
        if wrong != 0:
            acc = _exact_sum(
                ends, total, split, neurons, tokens, hidden, weight_t, stride_w, d, inside,
                BLOCK_T, BLOCK_F, BLOCK_I, BLOCK_D, SPLITS,
            )  # fmt: skip
    real = (t < T)[:, None] & inside[None, :]
    place = t[:, None].to(tl.int64) * D + d[None, :]
    if SPLITS == 1:
        _finish(acc, bias, skipped_out, out, d, inside, place, real)
    else:
        step = tl.cast(T, tl.int64) * D
        tl.store(partial + split * step + place, acc, mask=real)
        if arrived is not None:
            tl.debug_barrier()  # every thread's part is written before one thread says so
            if tl.atomic_add(arrived + chunk, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                acc = _sum(partial, step, place, real, BLOCK_T, BLOCK_D, SPLITS)
                _finish(acc, bias, skipped_out, out, d, inside, place, real)


@triton.jit
def _rows_fwd_sum_kernel(
    partial, bias, skipped_out, out, T, D,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    inside = d < D
    real = (t < T)[:, None] & inside[None, :]
    place = t[:, None].to(tl.int64) * D + d[None, :]
    acc = _sum(partial, tl.cast(T, tl.int64) * D, place, real, BLOCK_T, BLOCK_D, SPLITS)
    _finish(acc, bias, skipped_out, out, d, inside, place, real)


class Listed(NamedTuple):
    """Neurons that some token wants, in segments; a segment's entries begin at its number times `Deal.block_f`.

    `neurons` int32, `tokens` int32 (bits), `hidden` (…, BLOCK_T) float32; `counts` (segments,) int32; `arrived`: the
    counters of the column blocks, or None.
    """

    neurons: Tensor
    tokens: Tensor
    hidden: Tensor
    counts: Tensor
    arrived: Tensor | None


@dataclass(frozen=True)
class Deal:
    """How a call is dealt to programs.

    `segments` of `block_f` neurons each, `chunks` of `block_d` columns, `splits` of the list; `dot`: whether the tensor
    cores multiply, then for `block_t` = 16 tokens, of which `tokens` are real.
    """

    tokens: int
    d: int
    f: int
    dtype: torch.dtype
    block_t: int
    block_f: int
    block_d: int
    segments: int
    chunks: int
    splits: int
    dot: bool
    last_sums: bool

    @property
    def least(self) -> int:
        """The shortest side of a tile: of `tl.dot`, or any."""
        return 16 if self.dot else 1

    @property
    def constants(self) -> dict[str, object]:
        return {
            "BLOCK_T": self.block_t,
            "BLOCK_F": self.block_f,
            "DOT": self.dot,
            "UPCAST": upcast_dot(self.dtype),
        }

    def width(self, block: int, size: int) -> int:
        """A tile's side along a dimension of `size`: no longer than that needs."""
        return max(self.least, min(block, max(16, triton.next_power_of_2(size))))

    def listed(self, device: torch.device) -> Listed:
        """Memory for the list."""

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        slots = self.segments * self.block_f
        return Listed(
            new(slots),
            new(slots),
            new(slots, self.block_t, dtype=torch.float32),
            new(self.segments),
            new(self.chunks) if self.last_sums else None,
        )


def default(tokens: int, dtype: torch.dtype) -> _configs.Config:
    """The part of a configuration that is read here."""
    half = dtype != torch.float32
    return {
        "dot_from": 2,  # tokens from which half precision goes through the tensor cores, 16 at a time
        "block_i": 16,
        "down_block_d": 512 if tokens == 1 else 256 if half else 64,
        "splits": 32,
        "last_sums": True,  # False: partial sums are added by a launch of their own
        "down_warps": 4,
        "down_stages": 2 if tokens == 1 else 3,
    }


def deal(tokens: int, d: int, f: int, dtype: torch.dtype, config: _configs.Config) -> Deal:
    """The deal of f rows of d columns for at most MOST_TOKENS tokens."""
    use_dot = dtype != torch.float32 and tokens >= config["dot_from"]
    block_t = MOST_TOKENS if use_dot else triton.next_power_of_2(tokens)
    least = 16 if use_dot else 1
    block_f, splits = max(least, config["block_f"]), config["splits"]
    while -(-f // (block_f * splits)) > 1024:  # a split's segments are one tile
        block_f *= 2
    segments = -(-f // block_f)
    splits = max(1, min(splits, segments))
    block_d = max(least, min(config["down_block_d"], max(16, triton.next_power_of_2(d))))
    # On AMD another program's counter does not make its stores visible by itself (docs/design.md).
    last_sums = splits > 1 and config["last_sums"] and torch.version.hip is None
    return Deal(
        tokens, d, f, dtype, block_t, block_f, block_d, segments, -(-d // block_d), splits, use_dot, last_sums
    )


def launches(
    dealt: Deal, listed: Listed, weight_t: Tensor, bias: Tensor | None, skipped_out: Tensor | None,
    out_dtype: torch.dtype, config: _configs.Config,
) -> tuple[Tensor, list[Launch]]:  # fmt: skip
    """The output (T, D), not yet computed, and what computes it from the list and weight_t (F, D)."""
    tokens, d, splits = dealt.tokens, dealt.d, dealt.splits
    partial = (
        torch.empty((splits, tokens, d), dtype=torch.float32, device=weight_t.device) if splits > 1 else None
    )
    out = torch.empty((tokens, d), dtype=out_dtype, device=weight_t.device)
    rows = Launch(
        _rows_fwd_kernel,
        (dealt.chunks, splits),
        (*listed[:4], weight_t, bias, skipped_out, partial, listed.arrived, out,
         tokens, d, dealt.segments, weight_t.stride(0)),
        {
            "BLOCK_I": max(dealt.least, config["block_i"]),
            "BLOCK_D": dealt.block_d,
            "SEGMENTS": triton.next_power_of_2(max(1, -(-dealt.segments // splits))),
            "SPLITS": splits,
            **dealt.constants,
        },
        config["down_warps"],
        config["down_stages"],
    )  # fmt: skip
    if splits == 1 or dealt.last_sums:
        return out, [rows]
    add = Launch(
        _rows_fwd_sum_kernel,
        (dealt.chunks,),
        (partial, bias, skipped_out, out, tokens, d),
        {"BLOCK_T": dealt.block_t, "BLOCK_D": dealt.block_d, "SPLITS": splits},
        config["down_warps"],
    )
    return out, [rows, add]
