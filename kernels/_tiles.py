"""Pieces that several kernels share: products with rows of a weight, and the rule of who is active."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dot", "kept_mask", "limits", "rows_dot"]


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32 without TF32; UPCAST: see `_launch.upcast_dot`."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rows_dot(
    w,
    stride_w,
    rows,
    wanted,
    x,
    stride_x,
    T,
    D,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """w[rows] @ x.T, (ROWS, BLOCK_T) float32; rows (ROWS,) int64, of which only the wanted ones are read, else 0.

    Without DOT, products are added in float32 on the vector units; a NaN in one token's x stays in its column.
    """
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((ROWS, BLOCK_T), tl.float32)
    lanes = tl.zeros((ROWS, BLOCK_D), tl.float32)
    begin = w + rows[:, None] * stride_w
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = d < D
        mask = wanted[:, None] & inside[None, :]
        tile = tl.load(begin + d[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if DOT:
            mask = inside[:, None] & (t < T)[None, :]
            tokens = tl.load(x + t[None, :].to(tl.int64) * stride_x + d[:, None], mask=mask, other=0.0)
            acc = dot(tile, tokens, acc, UPCAST)
        elif BLOCK_T == 1:  # one sum at the end instead of one a tile
            lanes += tile.to(tl.float32) * tl.load(x + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        else:
            wide = tile.to(tl.float32)
            for i in tl.static_range(BLOCK_T):
                mask = inside & (tl.full((BLOCK_D,), i, tl.int32) < T)
                token = tl.load(x + tl.cast(i, tl.int64) * stride_x + d, mask=mask, other=0.0)
                sums = tl.sum(wide * token.to(tl.float32)[None, :], axis=1)
                acc += tl.where(t[None, :] == i, sums[:, None], 0.0)
    if BLOCK_T == 1 and not DOT:
        acc = tl.sum(lanes, axis=1)[:, None]
    return acc


@triton.jit
def kept_mask(m, limit, scale, HAS_SCALE: tl.constexpr):
    """Who is kept: not (|m| < s·t), so that a NaN is; s = 0 is dense, even at t = inf. All broadcast to m's shape."""
    if HAS_SCALE:
        limit = tl.where(scale == 0, 0.0, scale * limit)
    return (tl.abs(m) < limit) == 0


@triton.jit
def limits(threshold, token_scale, t, j, mask, PER_NEURON: tl.constexpr):
    """(threshold of neurons j, scale of tokens t), as they broadcast against each other and to mask."""
    limit = tl.load(threshold)
    if PER_NEURON:
        limit = tl.load(threshold + j + tl.zeros_like(t), mask=mask, other=0.0)
    scale = 1.0
    if token_scale is not None:
        scale = tl.load(token_scale + t + tl.zeros_like(j), mask=mask, other=1.0)
    return limit, scale
