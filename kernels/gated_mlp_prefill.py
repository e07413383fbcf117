"""The thresholded gated MLP on a GPU for many tokens: the vendor's matrix products around a fused mask.

With many tokens nearly every neuron is wanted by some token, and three dense products win. Where whole tiles (tokens ×
neurons) are inactive, `skip_below` in the configuration of a GPU may send a call through products of active tiles
only: the share of active tiles below which that was measured to be faster. The share is then read back by the host, one
wait per call, and never while a CUDA graph is captured. The default is not to look.

An output that is not finite is computed again with a select for every neuron (`_gated_mlp_fwd_repair_kernel`): the
dense product makes NaN of 0 times an inf in the row of a neuron that the token does not want.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations
from sparsemlp.kernels import _activations, _configs
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run, upcast_dot
from sparsemlp.kernels._tiles import active_mask, dot, limits

__all__ = ["Rule", "default", "hidden", "prefill", "repair", "tile_list", "tile_products"]

_MAX_FLOAT = tl.constexpr(3.402823466e38)


class Rule(NamedTuple):
    """Who is active, and what a kept neuron's hidden value is reduced by: see `sparsemlp.gated_mlp`; float32."""

    threshold: Tensor
    token_scale: Tensor | None
    skipped_mean: Tensor | None
    activation_params: Tensor | None
    activation: str

    @property
    def constants(self) -> dict[str, object]:
        return {
            "ACT": _activations.FORWARD[self.activation],
            "N_PARAMS": len(activations.get(self.activation).params),
            "PER_NEURON": self.threshold.dim() == 1,
        }


@triton.jit
def _active(
    pre, threshold, token_scale, params, t, j, mask, F, HAS_MEAN: tl.constexpr,
    ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
):  # fmt: skip
    """(activation, active) of entries (t, j) of pre (T, F); t is a column of int64, j a row of int64."""
    a, b, c = _activations.params(params, N_PARAMS)
    act = ACT(tl.load(pre + t * F + j, mask=mask, other=0.0).to(tl.float32), a, b, c)
    limit, scale = limits(threshold, token_scale, t, j, mask, PER_NEURON)
    return act, active_mask(act, limit, scale, token_scale is not None, HAS_MEAN) & mask


@triton.jit
def _gated_mlp_fwd_hidden_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, hidden, F,
    BLOCK_F: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    j = (tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    mask = (j < F) & (t >= 0)
    act, active = _active(
        pre,
        threshold,
        token_scale,
        params,
        t,
        j,
        mask,
        F,
        skipped_mean is not None,
        ACT,
        N_PARAMS,
        PER_NEURON,
    )
    h = act * tl.load(up + t * F + j, mask=mask, other=0.0).to(tl.float32)
    if skipped_mean is not None:
        h -= tl.load(skipped_mean + j, mask=mask, other=0.0)
    tl.store(hidden + t * F + j, tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _gated_mlp_fwd_repair_kernel(
    pre, hidden, w_down_t, threshold, token_scale, skipped_mean, params, b_down, skipped_out, out, D, F, stride_down,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < D
    row = out + tl.program_id(0).to(tl.int64) * D
    value = tl.load(row + d, mask=inside, other=0.0).to(tl.float32)
    wrong = tl.max((tl.abs(value) <= _MAX_FLOAT).to(tl.int32) ^ 1, axis=0)
    if wrong != 0:
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, F, BLOCK_F):
            j = (start + tl.arange(0, BLOCK_F)).to(tl.int64)[None, :]
            mask = (j < F) & (t >= 0)
            _, active = _active(
                pre, threshold, token_scale, params, t, j, mask, F, skipped_mean is not None,
                ACT, N_PARAMS, PER_NEURON,
            )  # fmt: skip
            h = tl.load(hidden + t * F + j, mask=active, other=0.0).to(tl.float32)
            column = tl.trans(active)
            rows = tl.load(
                w_down_t + tl.trans(j) * stride_down + d[None, :], mask=column & inside[None, :], other=0.0
            ).to(tl.float32)
            acc += tl.sum(tl.trans(h) * rows, axis=0)  # what is not active was not loaded, it is 0
        if b_down is not None:
            acc += tl.load(b_down + d, mask=inside, other=0.0).to(tl.float32)
        if skipped_out is not None:
            acc += tl.load(skipped_out + d, mask=inside, other=0.0)
        tl.store(row + d, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_mlp_fwd_tiles_kernel(
    pre, threshold, token_scale, skipped_mean, params, flags, T, F, tiles,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
):  # fmt: skip
    """flags[token tile, neuron tile] = whether an entry of the tile is active."""
    t = (tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T))[:, None]
    j = (tl.program_id(1).to(tl.int64) * TILE_F + tl.arange(0, TILE_F))[None, :]
    mask = (t < T) & (j < F)
    _, active = _active(
        pre,
        threshold,
        token_scale,
        params,
        t,
        j,
        mask,
        F,
        skipped_mean is not None,
        ACT,
        N_PARAMS,
        PER_NEURON,
    )
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
    x, w_up, b_up, pre, threshold, token_scale, skipped_mean, params, flags, hidden, T, D, F, tiles, stride_x, stride_up,
    TILE_T: tl.constexpr, TILE_F: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
    ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
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
        up = up.to(pre.dtype.element_ty).to(
            tl.float32
        )  # stored values decide and multiply, as in the dense path
        act, active = _active(
            pre,
            threshold,
            token_scale,
            params,
            t,
            j,
            mask,
            F,
            skipped_mean is not None,
            ACT,
            N_PARAMS,
            PER_NEURON,
        )
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


def default(tokens: int, d: int, f: int, dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory."""
    half = dtype != torch.float32
    return {
        "block_f": 2048,
        "warps": 4,
        "repair_block_f": 16,
        "repair_block_d": 1024,
        "skip_below": 0.0,  # the share of active tiles below which only they are multiplied; 0: never
        "tile_t": 64,
        "tile_f": 64 if half else 32,
        "tile_d": 128 if half else 64,
        "tile_k": 64 if half else 32,
        "tile_warps": 4,
        "tile_stages": 3,
    }


def hidden(pre: Tensor, up: Tensor, rule: Rule, config: _configs.Config) -> tuple[Tensor, Launch]:
    """C(φ(pre)) ⊙ up, rounded once: the tensor (T, F) and the launch that computes it."""
    out, f = torch.empty_like(pre), pre.shape[1]
    block_f = min(config["block_f"], triton.next_power_of_2(max(f, 1)))
    return out, Launch(
        _gated_mlp_fwd_hidden_kernel,
        (pre.shape[0], -(-f // block_f)),
        (pre, up, rule.threshold, rule.token_scale, rule.skipped_mean, rule.activation_params, out, f),
        {"BLOCK_F": block_f, **rule.constants},
        config["warps"],
    )


def repair(
    pre: Tensor, h: Tensor, w_down_t: Tensor, b_down: Tensor | None, skipped_out: Tensor | None, out: Tensor,
    rule: Rule, config: _configs.Config,
) -> Launch:  # fmt: skip
    """Computes again, in place, what is not finite in `out`."""
    d, f = w_down_t.shape[1], w_down_t.shape[0]
    block_d = min(config["repair_block_d"], triton.next_power_of_2(d))
    return Launch(
        _gated_mlp_fwd_repair_kernel,
        (out.shape[0], -(-d // block_d)),
        (pre, h, w_down_t, rule.threshold, rule.token_scale, rule.skipped_mean, rule.activation_params, b_down,
         skipped_out, out, d, f, w_down_t.stride(0)),
        {"BLOCK_F": config["repair_block_f"], "BLOCK_D": block_d, **rule.constants},
        config["warps"],
    )  # fmt: skip


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
            rule.threshold,
            rule.token_scale,
            rule.skipped_mean,
            rule.activation_params,
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
        (x, w_up, b_up, pre, rule.threshold, rule.token_scale, rule.skipped_mean, rule.activation_params, flags, h,
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


def _constant(b_down: Tensor | None, skipped_out: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to every token's output, as the GEMM's bias."""
    if skipped_out is None:
        return b_down
    return (skipped_out if b_down is None else skipped_out + b_down.float()).to(dtype)


def prefill(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor:
    """The output (T, D) for any number of tokens."""
    (tokens, d), f = x.shape, w_gate.shape[0]
    key = {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[x.dtype]}
    config = _configs.find("gated_mlp_prefill", x.device, key, default(tokens, d, f, x.dtype))
    rule = Rule(threshold, token_scale, skipped_mean, activation_params, activation)
    pre = F.linear(x, w_gate, b_gate)
    look = config["skip_below"] > 0 and f > 0
    if look and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        flags, listed, counts, launches = tile_list(pre, rule, config)
        run(launches)
        if int(counts.sum()) < config["skip_below"] * flags.numel():
            h, out, launches = tile_products(
                x, w_up, w_down_t, b_up, b_down, skipped_out, pre, flags, listed, counts, rule, config
            )
            run([*launches, repair(pre, h, w_down_t, b_down, skipped_out, out, rule, config)])
            return out
    up = F.linear(x, w_up, b_up)
    h, launch = hidden(pre, up, rule, config)
    run([launch])
    out = F.linear(h, w_down_t.t(), _constant(b_down, skipped_out, x.dtype))
    run([repair(pre, h, w_down_t, b_down, skipped_out, out, rule, config)])
    return out
