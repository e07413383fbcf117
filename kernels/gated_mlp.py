"""The thresholded gated MLP on a GPU, for few tokens: two launches, nothing of the data is looked at by the host.

1. `_gated_mlp_fwd_select_kernel`: one program a block of neurons. Gate rows, activation, threshold; where some token
   wants a neuron its up row, and no other (by the indicator "up" the other way round, by "product" all of both); then
   the block's active neurons (index, tokens that want it as bits, hidden values) are written to the block's segment of
   a list, and their number beside it.
2. `_gated_mlp_fwd_down_kernel` (`_gated_mlp_down`): down rows of the neurons in the list, in a fixed order.

Many tokens: `kernels.gated_mlp_prefill`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp import activations
from sparsemlp._layout import float32_run, in_memory
from sparsemlp.kernels import _activations, _configs, gated_mlp_prefill
from sparsemlp.kernels._gated_mlp_down import _gated_mlp_fwd_down_kernel, _gated_mlp_fwd_sum_kernel
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run, upcast_dot
from sparsemlp.kernels._tiles import kept_mask, limits, rows_dot

__all__ = ["DECODE_TOKENS", "decode", "default", "forward"]

DECODE_TOKENS = 16
"""Up to here the two launches of this file: the tokens of a tensor-core tile, and bits of a token mask."""


@triton.jit
def _plus(p, bias, j, mask):
    """p (neurons, tokens) and the neurons' bias, which may be None."""
    if bias is not None:
        p += tl.load(bias + j, mask=mask, other=0.0).to(tl.float32)[:, None]
    return p


@triton.jit
def _gated_mlp_fwd_select_kernel(
    x,
    w_gate,
    w_up,
    threshold,
    token_scale,
    skipped_mean,
    b_gate,
    b_up,
    params,
    neurons,
    tokens,
    hidden,
    counts,
    arrived,
    T,
    D,
    F,
    stride_x,
    stride_gate,
    stride_up,
    chunks,
    ACT: tl.constexpr,
    N_PARAMS: tl.constexpr,
    PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    segment = tl.program_id(0)
    if (
        arrived is not None and segment == 0
    ):  # the down kernel's counters, zeroed without a launch of their own
        for start in range(0, chunks, 128):
            c = start + tl.arange(0, 128)
            tl.store(arrived + c, tl.zeros((128,), tl.int32), mask=c < chunks)
    j = segment.to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    t = tl.arange(0, BLOCK_T)
    inside = j < F
    real = inside[:, None] & (t < T)[None, :]
    a, b, c = _activations.params(params, N_PARAMS)
    if INDICATOR != "up":
        act = rows_dot(
            w_gate, stride_gate, j, inside, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST
        )
        act = ACT(_plus(act, b_gate, j, inside), a, b, c)
        m = act
    if INDICATOR != "gate":
        up = rows_dot(w_up, stride_up, j, inside, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST)
        up = _plus(up, b_up, j, inside)
        m = act * up if INDICATOR == "product" else up
    limit, scale = limits(threshold, token_scale, t[None, :], j[:, None], real, PER_NEURON)
    active = kept_mask(m, limit, scale, token_scale is not None) & real
    if INDICATOR != "up" and skipped_mean is None:
        active = active & (act != 0)
    wanted = tl.max(active.to(tl.int32), axis=1) != 0
    count = tl.sum(wanted.to(tl.int32), axis=0)
    if count > 0:
        if INDICATOR == "gate":
            up = rows_dot(
                w_up, stride_up, j, wanted, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST
            )
            up = _plus(up, b_up, j, wanted)
        if INDICATOR == "up":
            act = rows_dot(
                w_gate, stride_gate, j, wanted, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST
            )
            act = ACT(_plus(act, b_gate, j, wanted), a, b, c)
            if skipped_mean is None:
                active = active & (act != 0)
                wanted = tl.max(active.to(tl.int32), axis=1) != 0
                count = tl.sum(wanted.to(tl.int32), axis=0)
        h = act * up
        if skipped_mean is not None:
            h -= tl.load(skipped_mean + j, mask=wanted, other=0.0)[:, None]
        h = tl.where(active, h, 0.0)
        slot = segment.to(tl.int64) * BLOCK_F + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(neurons + slot, j.to(tl.int32), mask=wanted)
        tl.store(tokens + slot, tl.sum(tl.where(active, (1 << t)[None, :], 0), axis=1), mask=wanted)
        tl.store(hidden + slot[:, None] * BLOCK_T + t[None, :], h, mask=wanted[:, None])
    tl.store(counts + segment, count)


def default(tokens: int, d: int, f: int, dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory.

    A program reads all of x for its rows: more rows a program when there are more tokens, or x (from the L2 cache)
    outweighs the weights. From 64 rows on Hopper's tensor-core instruction serves. Between alternatives that remained,
    `benchmarks/gpu_model.py` chose: predicted, not measured.
    """
    half = dtype != torch.float32
    if not half:
        block_f, block_d = (8, 512) if tokens == 1 else (16, 128)
    elif tokens == 1:
        block_f, block_d = 8, 1024
    else:
        block_f, block_d = (32, 256) if tokens <= 8 else (64, 64)
    return {
        "dot_from": 2,  # tokens from which half precision goes through the tensor cores, 16 at a time
        "block_f": block_f,
        "block_d": block_d,
        "select_warps": 4,
        "select_stages": 2 if tokens == 1 else 3 if tokens <= 8 else 4,
        "block_i": 16,
        "down_block_d": 512 if tokens == 1 else 256 if half else 64,
        "splits": 32,
        "last_sums": True,  # False: partial sums are added by a third launch
        "down_warps": 4,
        "down_stages": 2 if tokens == 1 else 3,
    }


def decode(
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
    indicator: str,
) -> tuple[Tensor, list[Launch]]:
    """The output, not yet computed, and the launches that compute it; at most DECODE_TOKENS tokens."""
    (tokens, d), f = x.shape, w_gate.shape[0]
    key = {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[x.dtype]}
    config = _configs.find("gated_mlp", x.device, key, default(tokens, d, f, x.dtype))
    use_dot = x.dtype != torch.float32 and tokens >= config["dot_from"]
    block_t = DECODE_TOKENS if use_dot else triton.next_power_of_2(tokens)
    least = 16 if use_dot else 1  # a side of tl.dot
    block_f, splits = max(least, config["block_f"]), config["splits"]
    while -(-f // (block_f * splits)) > 1024:  # a split's segments are one tile
        block_f *= 2
    segments = -(-f // block_f)
    splits = max(1, min(splits, segments))
    block_d, down_block_d = (
        max(least, min(config[name], max(16, triton.next_power_of_2(d))))
        for name in ("block_d", "down_block_d")
    )
    chunks = -(-d // down_block_d)
    # On AMD another program's counter does not make its stores visible by itself (docs/design.md).
    last_sums = splits > 1 and config["last_sums"] and torch.version.hip is None

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    neurons, bits, counts = new(segments * block_f), new(segments * block_f), new(segments)
    arrived = new(chunks) if last_sums else None
    hidden = new(segments * block_f, block_t, dtype=torch.float32)
    partial = new(splits, tokens, d, dtype=torch.float32) if splits > 1 else None
    out = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    shared = {"BLOCK_T": block_t, "BLOCK_F": block_f, "DOT": use_dot, "UPCAST": upcast_dot(x.dtype)}
    select = Launch(
        _gated_mlp_fwd_select_kernel,
        (segments,),
        (x, w_gate, w_up, threshold, token_scale, skipped_mean, b_gate, b_up, activation_params,
         neurons, bits, hidden, counts, arrived,
         tokens, d, f, x.stride(0), w_gate.stride(0), w_up.stride(0), chunks),
        {
            "ACT": _activations.FORWARD[activation],
            "N_PARAMS": len(activations.get(activation).params),
            "PER_NEURON": threshold.dim() == 1,
            "INDICATOR": indicator,
            "BLOCK_D": block_d,
            **shared,
        },
        config["select_warps"],
        config["select_stages"],
    )  # fmt: skip
    down = Launch(
        _gated_mlp_fwd_down_kernel,
        (chunks, splits),
        (neurons, bits, hidden, counts, w_down_t, b_down, skipped_out, partial, arrived, out,
         tokens, d, segments, w_down_t.stride(0)),
        {
            "BLOCK_I": max(least, config["block_i"]),
            "BLOCK_D": down_block_d,
            "SEGMENTS": triton.next_power_of_2(max(1, -(-segments // splits))),
            "SPLITS": splits,
            **shared,
        },
        config["down_warps"],
        config["down_stages"],
    )  # fmt: skip
    if splits == 1 or last_sums:
        return out, [select, down]
    add = Launch(
        _gated_mlp_fwd_sum_kernel,
        (chunks,),
        (partial, b_down, skipped_out, out, tokens, d),
        {"BLOCK_T": block_t, "BLOCK_D": down_block_d, "SPLITS": splits},
        config["down_warps"],
    )
    return out, [select, down, add]


def forward(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    input_threshold: Tensor | None,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    scale_gate: Tensor | None,
    scale_up: Tensor | None,
    scale_down: Tensor | None,
    screen_gate: Tensor | None,
    screen_up: Tensor | None,
    screen_scale_gate: Tensor | None,
    screen_scale_up: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> Tensor:
    """The operator's arguments in order; x is (T, D)."""
    x, w_gate, w_up, w_down_t = (in_memory(t) for t in (x, w_gate, w_up, w_down_t))
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    if 0 in x.shape:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    b_gate, b_up, b_down = (None if b is None else in_memory(b).contiguous() for b in (b_gate, b_up, b_down))
    args = (
        x, w_gate, w_up, w_down_t, float32_run(threshold), float32_run(token_scale), float32_run(skipped_mean),
        float32_run(skipped_out), b_gate, b_up, b_down, float32_run(activation_params), activation, indicator,
    )  # fmt: skip
    if x.shape[0] > DECODE_TOKENS:
        return gated_mlp_prefill.prefill(*args)
    out, launches = decode(*args)
    run(launches)
    return out
