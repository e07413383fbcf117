"""The entries of a training call, on a GPU: what is active, what moves, and what a backward pass multiplies of them.

An entry (token, neuron) is *active* where its hidden value counts, and *moving* where it is kept and φ'(p) ≠ 0: the
hidden values and the gradients of the up rows follow the first pattern, everything behind φ the second. Both are
decided from the stored p and u, by the same function in every kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _activations, _configs
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._rule import Rule
from sparsemlp.kernels._tiles import kept_mask, limits

__all__ = ["DEFAULT", "Gradients", "Stored", "gradients", "pattern", "repair"]

_MAX_FLOAT = tl.constexpr(3.402823466e38)

DEFAULT: _configs.Config = {
    "entry_block_f": 1024, "entry_rows": 32, "entry_warps": 4,
    "repair_block_f": 16, "repair_block_d": 1024, "repair_warps": 4,
}  # fmt: skip
"""A configuration that fits every supported GPU's registers and shared memory."""


class Stored(NamedTuple):
    """What a forward pass stores, (T, F) each, and the rule that is applied to it; `up` is None without a gate."""

    pre: Tensor
    up: Tensor | None
    rule: Rule

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.pre, self.up, *self.rule.tensors

    @property
    def constants(self) -> dict[str, Any]:
        return {**self.rule.constants, "DERIVATIVE": _activations.DERIVATIVE[self.rule.activation]}


@triton.jit
def pattern(
    pre, up, threshold, token_scale, skipped_mean, params, t, j, mask, F,
    ACT: tl.constexpr, DERIVATIVE: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr,
    INDICATOR: tl.constexpr,
):  # fmt: skip
    """(a, u, φ'(p), active, moving) of the entries (t, j) in mask, float32; t and j broadcast against each other."""
    b, c, d = _activations.params(params, N_PARAMS)
    p = tl.load(pre + t * F + j, mask=mask, other=0.0).to(tl.float32)
    act = ACT(p, b, c, d)
    slope = DERIVATIVE(p, b, c, d)
    u = tl.full(p.shape, 1.0, tl.float32)
    if up is not None:
        u = tl.load(up + t * F + j, mask=mask, other=0.0).to(tl.float32)
    m = act
    if INDICATOR == "up":
        m = u
    if INDICATOR == "product":
        m = act * u
    limit, scale = limits(threshold, token_scale, t, j, mask, PER_NEURON)
    kept = kept_mask(m, limit, scale, token_scale is not None) & mask
    active = kept
    if skipped_mean is None:
        active = kept & (act != 0)
    return act, u, slope, active, kept & (slope != 0)


@triton.jit
def _training_bwd_entries_kernel(
    grad_hidden, pre, up, threshold, token_scale, skipped_mean, params, places,
    grad_pre, grad_up, hidden, sums_pre, sums_up, sums_mean, T, F,
    ROWS: tl.constexpr, BLOCK_F: tl.constexpr, ACT: tl.constexpr, DERIVATIVE: tl.constexpr, N_PARAMS: tl.constexpr,
    PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """grad_pre may be grad_hidden itself. Neuron j is column places[j] of all but pre and up; sums are in j's order."""
    j = (tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    inside = j < F
    at = j
    if places is not None:
        at = tl.load(places + j, mask=inside, other=0)
    total_pre = tl.zeros((1, BLOCK_F), tl.float32)
    total_up = tl.zeros((1, BLOCK_F), tl.float32)
    total_mean = tl.zeros((1, BLOCK_F), tl.float32)
    for i in range(ROWS):
        t = tl.program_id(0).to(tl.int64) * ROWS + i + tl.zeros((1, 1), tl.int64)
        mask = inside & (t < T)
        act, u, slope, active, moving = pattern(
            pre, up, threshold, token_scale, skipped_mean, params, t, j, mask, F,
            ACT, DERIVATIVE, N_PARAMS, PER_NEURON, INDICATOR,
        )  # fmt: skip
        g = tl.load(grad_hidden + t * F + at, mask=mask, other=0.0).to(tl.float32)
        if grad_pre is not None:
            value = tl.where(moving, g * u * slope, 0.0).to(grad_pre.dtype.element_ty)
            tl.store(grad_pre + t * F + at, value, mask=mask)
            total_pre += value.to(tl.float32)
        if grad_up is not None:
            value = tl.where(active, g * act, 0.0).to(grad_up.dtype.element_ty)
            tl.store(grad_up + t * F + at, value, mask=mask)
            total_up += value.to(tl.float32)
        if hidden is not None:
            h = act * u
            if skipped_mean is not None:
                h -= tl.load(skipped_mean + j, mask=inside, other=0.0)
            tl.store(hidden + t * F + at, tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)
        if sums_mean is not None:
            total_mean -= tl.where(active, g, 0.0)  # with means, active is kept
    row = tl.program_id(0).to(tl.int64) * F
    if sums_pre is not None:
        tl.store(sums_pre + row + j, total_pre, mask=inside)
    if sums_up is not None:
        tl.store(sums_up + row + j, total_up, mask=inside)
    if sums_mean is not None:
        tl.store(sums_mean + row + j, total_mean, mask=inside)


@triton.jit
def _training_repair_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, places, out, values, factor, more_values, more_factor,
    stride, more_stride, D, F, K,
    BY_NEURON: tl.constexpr, MOVING: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, ACT: tl.constexpr,
    DERIVATIVE: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """Row r of values @ factor + more_values @ more_factor (BY_NEURON: of the transposed values), if it is not finite.

    values follow the moving entries or, without MOVING, the active ones; more_values always the active ones.
    """
    r = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < D
    row = out + tl.program_id(0).to(tl.int64) * D
    value = tl.load(row + d, mask=inside, other=0.0).to(tl.float32)
    wrong = tl.max((tl.abs(value) <= _MAX_FLOAT).to(tl.int32) ^ 1, axis=0)
    if wrong != 0:
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
            mask = (k < K) & (r >= 0)
            t = k if BY_NEURON else r
            j = r if BY_NEURON else k
            _, _, _, active, moving = pattern(
                pre, up, threshold, token_scale, skipped_mean, params, t, j, mask, F,
                ACT, DERIVATIVE, N_PARAMS, PER_NEURON, INDICATOR,
            )  # fmt: skip
            at = j
            if places is not None:
                at = tl.load(places + j + tl.zeros_like(k), mask=mask, other=0)
            wanted = moving if MOVING else active
            v = tl.load(values + t * F + at, mask=wanted, other=0.0).to(tl.float32)
            w = tl.load(factor + k * stride + d[None, :], mask=wanted & inside[None, :], other=0.0)
            acc += tl.sum(v * w.to(tl.float32), axis=0)  # what is masked was not loaded, it is 0
            if more_values is not None:
                v = tl.load(more_values + t * F + at, mask=active, other=0.0).to(tl.float32)
                w = tl.load(
                    more_factor + k * more_stride + d[None, :], mask=active & inside[None, :], other=0.0
                )
                acc += tl.sum(v * w.to(tl.float32), axis=0)
        tl.store(row + d, acc.to(out.dtype.element_ty), mask=inside)


class Gradients(NamedTuple):
    """What the products of a backward pass are made of, (T, F) of x's dtype, and column sums, (F,) float32.

    What was not asked for is None.
    """

    grad_pre: Tensor | None
    grad_up: Tensor | None
    hidden: Tensor | None
    sums: dict[str, Tensor]


def gradients(
    grad_hidden: Tensor,
    stored: Stored,
    names: set[str],
    config: _configs.Config,
    places: Tensor | None = None,
) -> tuple[Gradients, Launch]:
    """For the gradients `names`, from ∂ℓ/∂h, which becomes ∂ℓ/∂p in place; `sums` are partial, one row a program.

    places: of neurons among the columns of what is returned and of grad_hidden.
    """
    (tokens, f), gated = stored.pre.shape, stored.up is not None
    rows, block_f = config["entry_rows"], min(config["entry_block_f"], triton.next_power_of_2(f))
    programs = -(-tokens // rows)
    grad_pre = grad_hidden if names & {"x", "w_gate", "b_gate"} else None
    grad_up = torch.empty_like(grad_hidden) if gated and names & {"x", "w_up", "b_up"} else None
    hidden = torch.empty_like(grad_hidden) if "w_down_t" in names else None
    sums = {
        name: torch.empty((programs, f), dtype=torch.float32, device=grad_hidden.device)
        for name in ("b_gate", "b_up", "skipped_mean")
        if name in names
    }
    launch = Launch(
        _training_bwd_entries_kernel,
        (programs, -(-f // block_f)),
        (
            grad_hidden, *stored.tensors, places, grad_pre, grad_up, hidden,
            sums.get("b_gate"), sums.get("b_up"), sums.get("skipped_mean"), tokens, f,
        ),
        {"ROWS": rows, "BLOCK_F": block_f, **stored.constants},
        config["entry_warps"],
    )  # fmt: skip
    return Gradients(grad_pre, grad_up, hidden, sums), launch


def repair(
    out: Tensor, values: Tensor, factor: Tensor, stored: Stored, config: _configs.Config, *,
    by_neuron: bool, moving: bool, places: Tensor | None = None,
    more: tuple[Tensor, Tensor] | None = None,
) -> Launch:  # fmt: skip
    """Computes again, in place, what is not finite in `out`: values @ factor, or their transpose's product.

    Masked entries are left out, whatever the factor holds for them; of `more`, another product that is added, too.
    """
    (tokens, f), d = stored.pre.shape, out.shape[1]
    more_values, more_factor = more or (None, None)
    block_d = min(config["repair_block_d"], triton.next_power_of_2(d))
    return Launch(
        _training_repair_kernel,
        (out.shape[0], -(-d // block_d)),
        (
            *stored.tensors, places, out, values, factor, more_values, more_factor, factor.stride(0),
            0 if more_factor is None else more_factor.stride(0), d, f, tokens if by_neuron else f,
        ),
        {
            "BY_NEURON": by_neuron, "MOVING": moving, "BLOCK_K": config["repair_block_f"], "BLOCK_D": block_d,
            **stored.constants,
        },
        config["repair_warps"],
    )  # fmt: skip
