"""Calls of many tokens: the fused mask before a dense product, and what the product cannot know after it.

The pre-activations and up values are stored, (T, F); `_masked_fwd_kernel` makes hidden values of them, 0 where a neuron
is not active, and a library's dense product multiplies those with the weight. That makes NaN of 0 times an inf in the
row of a neuron which the token does not want: `_masked_fwd_repair_kernel` computes an output that is not finite again,
with a select for every neuron. For `sparse_linear` the stored values are its input and φ is the identity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _configs
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._rule import Rule, active_entries

__all__ = ["DEFAULT", "hidden", "repair"]

_MAX_FLOAT = tl.constexpr(3.402823466e38)


@triton.jit
def _masked_fwd_kernel(
    pre, up, scores, threshold, token_scale, skipped_mean, params, places, hidden, F,
    BLOCK_F: tl.constexpr, ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    j = (tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    mask = (j < F) & (t >= 0)
    act, active = active_entries(
        pre, up, scores, threshold, token_scale, skipped_mean, params, t, j, mask, F,
        ACT, N_PARAMS, PER_NEURON, INDICATOR,
    )  # fmt: skip
    h = act
    if up is not None:
        h *= tl.load(up + t * F + j, mask=mask, other=0.0).to(tl.float32)
    if skipped_mean is not None:
        h -= tl.load(skipped_mean + j, mask=mask, other=0.0)
    at = j
    if places is not None:
        at = tl.load(places + j, mask=j < F, other=0)
    tl.store(hidden + t * F + at, tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _masked_fwd_repair_kernel(
    pre, up, scores, hidden, weight_t, threshold, token_scale, skipped_mean, params, places, bias, skipped_out, out,
    D, F, stride_w,
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
                pre, up, scores, threshold, token_scale, skipped_mean, params, t, j, mask, F,
                ACT, N_PARAMS, PER_NEURON, INDICATOR,
            )  # fmt: skip
            at = j
            if places is not None:
                at = tl.load(places + j, mask=j < F, other=0)
            h = tl.load(hidden + t * F + at, mask=active, other=0.0).to(tl.float32)
            column = tl.trans(active)
            rows = tl.load(
                weight_t + tl.trans(j) * stride_w + d[None, :], mask=column & inside[None, :], other=0.0
            ).to(tl.float32)
            acc += tl.sum(tl.trans(h) * rows, axis=0)  # what is not active was not loaded, it is 0
        if bias is not None:
            acc += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
        if skipped_out is not None:
            acc += tl.load(skipped_out + d, mask=inside, other=0.0)
        tl.store(row + d, acc.to(out.dtype.element_ty), mask=inside)


DEFAULT: _configs.Config = {"block_f": 2048, "warps": 4, "repair_block_f": 16, "repair_block_d": 1024}
"""A configuration that fits every supported GPU's registers and shared memory."""


def hidden(
    pre: Tensor, up: Tensor | None, rule: Rule, config: _configs.Config, scores: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """C(φ(pre)) ⊙ up, rounded once: the tensor (T, F) and the launch that computes it; up None: without it.

    scores: (T, F) float32, by what the indicator "screen" decides. places: the neurons' columns in the result.
    """
    out, f = torch.empty_like(pre), pre.shape[1]
    block_f = min(config["block_f"], triton.next_power_of_2(max(f, 1)))
    return out, Launch(
        _masked_fwd_kernel,
        (pre.shape[0], -(-f // block_f)),
        (pre, up, scores, *rule.tensors, places, out, f),
        {"BLOCK_F": block_f, **rule.constants},
        config["warps"],
    )


def repair(
    pre: Tensor, up: Tensor | None, h: Tensor, weight_t: Tensor, bias: Tensor | None, skipped_out: Tensor | None,
    out: Tensor, rule: Rule, config: _configs.Config, scores: Tensor | None = None, places: Tensor | None = None,
) -> Launch:  # fmt: skip
    """Computes again, in place, what is not finite in `out`; `up`, `scores`, `places`: as for `hidden`."""
    d, f = weight_t.shape[1], weight_t.shape[0]
    block_d = min(config["repair_block_d"], triton.next_power_of_2(d))
    return Launch(
        _masked_fwd_repair_kernel,
        (out.shape[0], -(-d // block_d)),
        (
            pre, up, scores, h, weight_t, *rule.tensors, places, bias, skipped_out, out, d, f, weight_t.stride(0),
        ),
        {"BLOCK_F": config["repair_block_f"], "BLOCK_D": block_d, **rule.constants},
        config["warps"],
    )  # fmt: skip
