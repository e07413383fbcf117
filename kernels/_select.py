"""The first half of every call of few tokens: who is active, listed, with the hidden values.

One program a block of neurons. Their pre-activations are dots with rows of the gate (of an MLP without a gate: of its
only matrix), or are given: by input sparsity, or as `sparse_linear`'s input itself. Then the activation and the
threshold; where some token wants a neuron its up row is read, and no other (by the indicator "up" the other way round,
by "product" all of both; by "screen" low-bit copies of all rows, then both rows of wanted ones); and the block's active
neurons (index, tokens that want it as bits, hidden values) are written to the block's segment of a list, and their
number beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _activations, _configs, _screen
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._rows import Deal, Listed
from sparsemlp.kernels._rule import Rule
from sparsemlp.kernels._screen import Screen, Tokens, screen_scores
from sparsemlp.kernels._tiles import kept_mask, limits, rows_dot

__all__ = ["default", "launch"]


@triton.jit
def _plus(p, bias, j, mask):
    """p (neurons, tokens) and the neurons' bias, which may be None."""
    if bias is not None:
        p += tl.load(bias + j, mask=mask, other=0.0).to(tl.float32)[:, None]
    return p


@triton.jit
def _pre(
    pre, stride_pre, w_gate, stride_gate, j, wanted, x, stride_x, T, D,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Pre-activations of the wanted neurons, (neurons, tokens) float32, bias not yet added: given in pre, or dots."""
    if pre is None:
        p = rows_dot(
            w_gate, stride_gate, j, wanted, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST
        )
    else:
        t = tl.arange(0, BLOCK_T)
        mask = wanted[:, None] & (t < T)[None, :]
        p = tl.load(pre + t[None, :].to(tl.int64) * stride_pre + j[:, None], mask=mask, other=0.0)
        p = p.to(tl.float32)
    return p


@triton.jit
def _select_fwd_kernel(
    x,
    w_gate,
    w_up,
    pre,
    codes_gate,
    codes_up,
    scales_gate,
    scales_up,
    x8,
    units,
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
    stride_pre,
    chunks,
    groups,
    ACT: tl.constexpr,
    N_PARAMS: tl.constexpr,
    PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCREEN_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DOT4: tl.constexpr,
):
    LATE: tl.constexpr = (
        INDICATOR == "up" or INDICATOR == "screen"
    )  # the activation is known of wanted neurons only
    segment = tl.program_id(0)
    if (
        arrived is not None and segment == 0
    ):  # the second half's counters, zeroed without a launch of their own
        for start in range(0, chunks, 128):
            c = start + tl.arange(0, 128)
            tl.store(arrived + c, tl.zeros((128,), tl.int32), mask=c < chunks)
    j = segment.to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    t = tl.arange(0, BLOCK_T)
    inside = j < F
    real = inside[:, None] & (t < T)[None, :]
    a, b, c = _activations.params(params, N_PARAMS)
    if INDICATOR == "screen":
        m = screen_scores(
            codes_gate, codes_up, scales_gate, scales_up, b_gate, b_up, x8, units, a, b, c, j, T, F, groups,
            ACT, BITS, GROUP, SCREEN_T, BLOCK_T, BLOCK_F, BLOCK_G, DOT4,
        )  # fmt: skip
    if not LATE:
        act = _pre(
            pre, stride_pre, w_gate, stride_gate, j, inside, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST
        )  # fmt: skip
        act = ACT(_plus(act, b_gate, j, inside), a, b, c)
        m = act
    if INDICATOR == "up" or INDICATOR == "product":
        up = rows_dot(w_up, stride_up, j, inside, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST)
        up = _plus(up, b_up, j, inside)
        m = act * up if INDICATOR == "product" else up
    limit, scale = limits(threshold, token_scale, t[None, :], j[:, None], real, PER_NEURON)
    active = kept_mask(m, limit, scale, token_scale is not None) & real
    if not LATE and skipped_mean is None:
        active = active & (act != 0)
    wanted = tl.max(active.to(tl.int32), axis=1) != 0
    count = tl.sum(wanted.to(tl.int32), axis=0)
    if count > 0:
        if LATE:
            act = _pre(
                pre, stride_pre, w_gate, stride_gate, j, wanted, x, stride_x, T, D,
                BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST,
            )  # fmt: skip
            act = ACT(_plus(act, b_gate, j, wanted), a, b, c)
            if skipped_mean is None:
                active = active & (act != 0)
                wanted = tl.max(active.to(tl.int32), axis=1) != 0
                count = tl.sum(wanted.to(tl.int32), axis=0)
        if INDICATOR == "gate" or INDICATOR == "screen":
            up = rows_dot(
                w_up, stride_up, j, wanted, x, stride_x, T, D, BLOCK_F, BLOCK_T, BLOCK_D, DOT, UPCAST
            )
            up = _plus(up, b_up, j, wanted)
        h = act if INDICATOR == "ungated" else act * up
        if skipped_mean is not None:
            h -= tl.load(skipped_mean + j, mask=wanted, other=0.0)[:, None]
        h = tl.where(active, h, 0.0)
        slot = segment.to(tl.int64) * BLOCK_F + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(neurons + slot, j.to(tl.int32), mask=wanted)
        tl.store(tokens + slot, tl.sum(tl.where(active, (1 << t)[None, :], 0), axis=1), mask=wanted)
        tl.store(hidden + slot[:, None] * BLOCK_T + t[None, :], h, mask=wanted[:, None])
    tl.store(counts + segment, count)


def default(tokens: int, dtype: torch.dtype) -> _configs.Config:
    """The part of an MLP's configuration that is read here.

    A program reads all of x for its rows: more rows a program when there are more tokens, or x (from the L2 cache)
    outweighs the weights. From 64 rows on Hopper's tensor-core instruction serves. Between alternatives that remained,
    `benchmarks/gpu_model.py` chose: predicted, not measured.
    """
    if dtype == torch.float32:
        block_f, block_d = (8, 512) if tokens == 1 else (16, 128)
    elif tokens == 1:
        block_f, block_d = 8, 1024
    else:
        block_f, block_d = (32, 256) if tokens <= 8 else (64, 64)
    stages = 2 if tokens == 1 else 3 if tokens <= 8 else 4
    return {"block_f": block_f, "block_d": block_d, "select_warps": 4, "select_stages": stages}


def launch(
    dealt: Deal,
    listed: Listed,
    rule: Rule,
    x: Tensor | None,
    w_gate: Tensor | None,
    w_up: Tensor | None,
    pre: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    block_d: int,
    warps: int,
    stages: int,
    screen: Screen | None = None,
    seen: Tokens | None = None,
) -> Launch:
    """What fills the list.

    Args:
        rule: who is active; its indicator "ungated" needs no w_up.
        x: (T, D); None where nothing is multiplied with it.
        w_gate, w_up: (F, D) or None.
        pre: (T, F) of any float dtype in place of x @ w_gate.T, or None.
        block_d: columns of a tile of the gate and up rows.
        screen, seen: the low-bit copies and what they see of x, by the indicator "screen"; neurons are then dealt in
            multiples of 16.
    """

    def stride(t: Tensor | None) -> int:
        return 0 if t is None else t.stride(0)

    d = 0 if x is None else x.shape[1]
    copies: tuple[Tensor | None, ...] = (None,) * 6
    screened, on_amd, groups = _screen.NONE, {}, 0
    if screen is not None and seen is not None:
        copies, groups = (*screen.tensors, seen.x8.view(torch.int32), seen.units), screen.groups
        screened, on_amd = (
            _screen.constants(screen, dealt.tokens, dealt.block_f, warps, warp_size) for warp_size in (32, 64)
        )
    return Launch(
        _select_fwd_kernel,
        (dealt.segments,),
        (x, w_gate, w_up, pre, *copies, rule.threshold, rule.token_scale, rule.skipped_mean, b_gate, b_up,
         rule.activation_params, *listed,
         dealt.tokens, d, dealt.f, stride(x), stride(w_gate), stride(w_up), stride(pre), dealt.chunks, groups),
        {**rule.constants, "BLOCK_D": dealt.width(block_d, d), **dealt.constants, **screened},
        warps,
        stages,
        on_amd=on_amd,
    )  # fmt: skip
