"""The second half of the gated MLP for few tokens: down rows of the listed neurons, added in a fixed order.

Programs are (columns of D) × (splits of the list). Each walks its segments of the list that
`gated_mlp._gated_mlp_fwd_select_kernel` made, adds the down rows of the neurons in them, and stores a partial sum. The
last program of a column block to arrive adds the partial sums in order of the splits, so that results repeat bit for
bit; where a counter cannot say that the others' stores are visible, a launch of its own does (`arrived` is None).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemlp.kernels._tiles import dot

__all__ = ["_gated_mlp_fwd_down_kernel", "_gated_mlp_fwd_sum_kernel"]

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
    ends, total, split, neurons, tokens, hidden, w_down_t, stride_down, d, inside,
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
            w_down_t + j[:, None] * stride_down + d[None, :], mask=live[:, None] & inside[None, :], other=0.0
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
def _finish(acc, b_down, skipped_out, out, d, inside, place, real):
    """What is added to every token, and the output."""
    if b_down is not None:
        acc += tl.load(b_down + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    if skipped_out is not None:
        acc += tl.load(skipped_out + d, mask=inside, other=0.0)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def _gated_mlp_fwd_down_kernel(
    neurons,
    tokens,
    hidden,
    counts,
    w_down_t,
    b_down,
    skipped_out,
    partial,
    arrived,
    out,
    T,
    D,
    segments,
    stride_down,
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
            w_down_t + j[:, None] * stride_down + d[None, :],
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
                ends, total, split, neurons, tokens, hidden, w_down_t, stride_down, d, inside,
                BLOCK_T, BLOCK_F, BLOCK_I, BLOCK_D, SPLITS,
            )  # fmt: skip
    real = (t < T)[:, None] & inside[None, :]
    place = t[:, None].to(tl.int64) * D + d[None, :]
    if SPLITS == 1:
        _finish(acc, b_down, skipped_out, out, d, inside, place, real)
    else:
        step = tl.cast(T, tl.int64) * D
        tl.store(partial + split * step + place, acc, mask=real)
        if arrived is not None:
            tl.debug_barrier()  # every thread's part is written before one thread says so
            if tl.atomic_add(arrived + chunk, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                acc = _sum(partial, step, place, real, BLOCK_T, BLOCK_D, SPLITS)
                _finish(acc, b_down, skipped_out, out, d, inside, place, real)


@triton.jit
def _gated_mlp_fwd_sum_kernel(
    partial, b_down, skipped_out, out, T, D,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    inside = d < D
    real = (t < T)[:, None] & inside[None, :]
    place = t[:, None].to(tl.int64) * D + d[None, :]
    acc = _sum(partial, tl.cast(T, tl.int64) * D, place, real, BLOCK_T, BLOCK_D, SPLITS)
    _finish(acc, b_down, skipped_out, out, d, inside, place, real)
