"""The thresholded gated MLP on a GPU for many tokens: the vendor's matrix products around a fused mask.

With many tokens nearly every neuron is wanted by some token, and three dense products win. Where whole tiles (tokens ×
neurons) are inactive, `skip_below` in the configuration of a GPU may send a call through products of active tiles
only: the share of active tiles below which that was measured to be faster. The share is then read back by the host, one
wait per call, and never while a CUDA graph is captured. The default is not to look.

An output that is not finite is computed again with a select for every neuron (`_gated_mlp_fwd_repair_kernel`): the
dense product makes NaN of 0 times an inf in the row of a neuron that the token does not want.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from sparsemlp.kernels import _configs
from sparsemlp.kernels._gated_mlp_rule import Rule, active_entries
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run
from sparsemlp.kernels.gated_mlp_tiles import tile_list, tile_products
from sparsemlp.reference.gated_mlp import gemm_bias

__all__ = ["default", "hidden", "prefill", "repair"]

_MAX_FLOAT = tl.constexpr(3.402823466e38)


@triton.jit
def _gated_mlp_fwd_hidden_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, hidden, F,
    BLOCK_F: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    j = (tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    mask = (j < F) & (t >= 0)
    act, active = active_entries(
        pre, up, threshold, token_scale, skipped_mean, params, t, j, mask, F,
        ACT, N_PARAMS, PER_NEURON, INDICATOR,
    )  # fmt: skip
    h = act * tl.load(up + t * F + j, mask=mask, other=0.0).to(tl.float32)
    if skipped_mean is not None:
        h -= tl.load(skipped_mean + j, mask=mask, other=0.0)
    tl.store(hidden + t * F + j, tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _gated_mlp_fwd_repair_kernel(
    pre, up, hidden, w_down_t, threshold, token_scale, skipped_mean, params, b_down, skipped_out, out,
    D, F, stride_down,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
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
            _, active = active_entries(
                pre, up, threshold, token_scale, skipped_mean, params, t, j, mask, F,
                ACT, N_PARAMS, PER_NEURON, INDICATOR,
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
        (pre, up, *rule.tensors, out, f),
        {"BLOCK_F": block_f, **rule.constants},
        config["warps"],
    )


def repair(
    pre: Tensor, up: Tensor, h: Tensor, w_down_t: Tensor, b_down: Tensor | None, skipped_out: Tensor | None,
    out: Tensor, rule: Rule, config: _configs.Config,
) -> Launch:  # fmt: skip
    """Computes again, in place, what is not finite in `out`; `up` is read by the indicators that look at it."""
    d, f = w_down_t.shape[1], w_down_t.shape[0]
    block_d = min(config["repair_block_d"], triton.next_power_of_2(d))
    return Launch(
        _gated_mlp_fwd_repair_kernel,
        (out.shape[0], -(-d // block_d)),
        (pre, up, h, w_down_t, *rule.tensors, b_down, skipped_out, out, d, f, w_down_t.stride(0)),
        {"BLOCK_F": config["repair_block_f"], "BLOCK_D": block_d, **rule.constants},
        config["warps"],
    )  # fmt: skip


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
    indicator: str,
) -> Tensor:
    """The output (T, D) for any number of tokens."""
    (tokens, d), f = x.shape, w_gate.shape[0]
    key = {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[x.dtype]}
    config = _configs.find("gated_mlp_prefill", x.device, key, default(tokens, d, f, x.dtype))
    rule = Rule(threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    pre = F.linear(x, w_gate, b_gate)
    look = config["skip_below"] > 0 and f > 0 and indicator == "gate"  # the others need up for every entry
    if look and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        flags, listed, counts, launches = tile_list(pre, rule, config)
        run(launches)
        if int(counts.sum()) < config["skip_below"] * flags.numel():
            h, out, launches = tile_products(
                x, w_up, w_down_t, b_up, b_down, skipped_out, pre, flags, listed, counts, rule, config
            )
            run([*launches, repair(pre, pre, h, w_down_t, b_down, skipped_out, out, rule, config)])
            return out
    up = F.linear(x, w_up, b_up)
    h, launch = hidden(pre, up, rule, config)
    run([launch])
    out = F.linear(h, w_down_t.t(), gemm_bias(b_down, skipped_out, x.dtype))
    run([repair(pre, up, h, w_down_t, b_down, skipped_out, out, rule, config)])
    return out
