"""The thresholded gated MLP on a GPU where whole tiles (tokens × neurons) are inactive: products of the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _configs
from sparsemlp.kernels._launch import Launch, upcast_dot
from sparsemlp.kernels._rule import Rule, active_entries
from sparsemlp.kernels._tiles import dot

__all__ = ["tile_list", "tile_products"]


@triton.jit
def _gated_mlp_fwd_tiles_kernel(
    pre, threshold, token_scale, skipped_mean, params, flags, T, F, tiles,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
):  # fmt: skip
    """flags[token tile, neuron tile] = whether an entry of the tile is active."""
    t = (tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T))[:, None]
    j = (tl.program_id(1).to(tl.int64) * TILE_F + tl.arange(0, TILE_F))[None, :]
    mask = (t < T) & (j < F)
    _, active = active_entries(
        pre, pre, None, threshold, token_scale, skipped_mean, params, t, j, mask, F,
        ACT, N_PARAMS, PER_NEURON, INDICATOR,
    )  # fmt: skip
    found = tl.max(tl.max(active.to(tl.int32), axis=1), axis=0)
    tl.store(flags + tl.program_id(0).to(tl.int64) * tiles + tl.program_id(1), found)


@triton.jit
def _gated_mlp_fwd_compact_kernel(flags, listed, counts, tiles, TILES: tl.constexpr):
    """Each token tile's active neuron tiles, in order, and their number."""
    i = tl.arange(0, TILES)
    row = tl.program_id(0).to(tl.int64) * tiles
    flag = tl.load(flags + row + i, mask=i < tiles, other=0)
    place = tl.cumsum(flag, 0)
    tl.store(listed + row + place - 1, i, mask=flag != 0)
    tl.store(counts + tl.program_id(0), tl.max(place, axis=0))


@triton.jit
def _gated_mlp_fwd_up_tiles_kernel(
    x, w_up, b_up, pre, threshold, token_scale, skipped_mean, params, flags, hidden, T, D, F, tiles,
    stride_x, stride_up,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
    ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
):  # fmt: skip
    """hidden of active tiles; the others are not written, and not read later."""
    if tl.load(flags + tl.program_id(0).to(tl.int64) * tiles + tl.program_id(1)) != 0:
        t = (tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T))[:, None]
        j = (tl.program_id(1).to(tl.int64) * TILE_F + tl.arange(0, TILE_F))[None, :]
        up = tl.zeros((TILE_T, TILE_F), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            tokens = tl.load(x + t * stride_x + d[None, :], mask=(t < T) & (d < D)[None, :], other=0.0)
            rows = tl.load(w_up + j * stride_up + d[:, None], mask=(j < F) & (d < D)[:, None], other=0.0)
            up = dot(tokens, rows, up, UPCAST)
        mask = (t < T) & (j < F)
        if b_up is not None:
            up += tl.load(b_up + j, mask=j < F, other=0.0).to(tl.float32)
        up = up.to(pre.dtype.element_ty).to(tl.float32)  # rounded, as where it is stored
        act, active = active_entries(
            pre, pre, None, threshold, token_scale, skipped_mean, params, t, j, mask, F,
            ACT, N_PARAMS, PER_NEURON, INDICATOR,
        )  # fmt: skip
        h = act * up
        if skipped_mean is not None:
            h -= tl.load(skipped_mean + j, mask=j < F, other=0.0)
        tl.store(hidden + t * F + j, tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _gated_mlp_fwd_down_tiles_kernel(
    hidden, w_down_t, b_down, skipped_out, listed, counts, out, T, D, F, tiles, stride_down,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    t = (tile * TILE_T + tl.arange(0, TILE_T))[:, None]
    d = (tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    acc = tl.zeros((TILE_T, BLOCK_D), tl.float32)
    for i in range(tl.load(counts + tile)):
        j = tl.load(listed + tile * tiles + i).to(tl.int64) * TILE_F + tl.arange(0, TILE_F)
        h = tl.load(hidden + t * F + j[None, :], mask=(t < T) & (j < F)[None, :], other=0.0)
        rows = tl.load(w_down_t + j[:, None] * stride_down + d, mask=(j < F)[:, None] & (d < D), other=0.0)
        acc = dot(h, rows, acc, UPCAST)
    if b_down is not None:
        acc += tl.load(b_down + d, mask=d < D, other=0.0).to(tl.float32)
    if skipped_out is not None:
        acc += tl.load(skipped_out + d, mask=d < D, other=0.0)
    tl.store(out + t * D + d, acc.to(out.dtype.element_ty), mask=(t < T) & (d < D))


def tile_list(
    pre: Tensor, rule: Rule, config: _configs.Config
) -> tuple[Tensor, Tensor, Tensor, list[Launch]]:
    """Which tiles are active: flags (token tiles, neuron tiles), their list, counts (token tiles,), the launches."""
    (tokens, f), tile_t, tile_f = pre.shape, config["tile_t"], config["tile_f"]
    token_tiles, tiles = -(-tokens // tile_t), -(-f // tile_f)
    flags = torch.empty((token_tiles, tiles), dtype=torch.int32, device=pre.device)
    listed, counts = torch.empty_like(flags), torch.empty_like(flags[:, 0])
    mark = Launch(
        _gated_mlp_fwd_tiles_kernel,
        (token_tiles, tiles),
        (
            pre,
            *rule.tensors,
            flags,
            tokens,
            f,
            tiles,
        ),
        {"TILE_T": tile_t, "TILE_F": tile_f, **rule.constants},
        config["warps"],
    )
    compact = Launch(
        _gated_mlp_fwd_compact_kernel,
        (token_tiles,),
        (flags, listed, counts, tiles),
        {"TILES": triton.next_power_of_2(tiles)},
        config["warps"],
    )
    return flags, listed, counts, [mark, compact]


def tile_products(
    x: Tensor, w_up: Tensor, w_down_t: Tensor, b_up: Tensor | None, b_down: Tensor | None, skipped_out: Tensor | None,
    pre: Tensor, flags: Tensor, listed: Tensor, counts: Tensor, rule: Rule, config: _configs.Config,
) -> tuple[Tensor, Tensor, list[Launch]]:  # fmt: skip
    """Up and down projections of active tiles only: (hidden, of inactive tiles not written; out; the launches)."""
    (tokens, d), f = x.shape, w_up.shape[0]
    h, out = torch.empty_like(pre), torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    tile = {"TILE_T": config["tile_t"], "TILE_F": config["tile_f"], "UPCAST": upcast_dot(x.dtype)}
    warps = config["tile_warps"], config["tile_stages"]
    up = Launch(
        _gated_mlp_fwd_up_tiles_kernel,
        tuple(flags.shape),
        (x, w_up, b_up, pre, *rule.tensors, flags, h,
         tokens, d, f, flags.shape[1], x.stride(0), w_up.stride(0)),
        {"BLOCK_D": config["tile_k"], **tile, **rule.constants},
        *warps,
    )  # fmt: skip
    down = Launch(
        _gated_mlp_fwd_down_tiles_kernel,
        (flags.shape[0], -(-d // config["tile_d"])),
        (h, w_down_t, b_down, skipped_out, listed, counts, out,
         tokens, d, f, flags.shape[1], w_down_t.stride(0)),
        {"BLOCK_D": config["tile_d"], **tile},
        *warps,
    )  # fmt: skip
    return h, out, [up, down]
