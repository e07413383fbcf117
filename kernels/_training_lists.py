"""A training call's entries as lists, where so few are left that gathering rows beats the tensor cores.

The list is in CSR order, made in two passes: entries are counted for each token, the sums of counts say where a token's
begin, and they are filled in. Nothing is capped, no place depends on the order in which programs run, and indices of
entries are int64. The same entries ordered by neuron, which the gradients of all weights share, are made once, by a
stable sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _configs
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._training_entries import Stored, pattern

__all__ = ["DEFAULT", "Lists", "Values", "by_neuron", "counts", "filled", "product", "values"]

_ACTIVE = tl.constexpr(1)
_MOVING = tl.constexpr(2)

DEFAULT: _configs.Config = {
    "list_block_f": 1024, "list_warps": 4,
    "value_block_e": 8, "value_block_d": 256, "value_warps": 4,
    "gather_block_e": 8, "gather_block_d": 512, "gather_warps": 4,
}  # fmt: skip
"""A configuration that fits every supported GPU's registers and shared memory."""


@triton.jit
def _entry_bits(active, moving, BOTH: tl.constexpr):
    """1 for an active entry plus, with BOTH, 2 for a moving one."""
    bits = tl.where(active, _ACTIVE, 0)
    if BOTH:
        bits += tl.where(moving, _MOVING, 0)
    return bits


@triton.jit
def _training_count_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, counts, F,
    BOTH: tl.constexpr, BLOCK_F: tl.constexpr, ACT: tl.constexpr, DERIVATIVE: tl.constexpr, N_PARAMS: tl.constexpr,
    PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """counts[t]: how many entries token t has."""
    t = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    found = tl.zeros((1, BLOCK_F), tl.int32)
    for start in range(0, F, BLOCK_F):
        j = (start + tl.arange(0, BLOCK_F)).to(tl.int64)[None, :]
        _, _, _, active, moving = pattern(
            pre, up, threshold, token_scale, skipped_mean, params, t, j, (j < F) & (t >= 0), F,
            ACT, DERIVATIVE, N_PARAMS, PER_NEURON, INDICATOR,
        )  # fmt: skip
        found += (_entry_bits(active, moving, BOTH) != 0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(found, axis=1), axis=0))


@triton.jit
def _training_fill_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, starts, tokens, neurons, bits, F,
    BOTH: tl.constexpr, BLOCK_F: tl.constexpr, ACT: tl.constexpr, DERIVATIVE: tl.constexpr, N_PARAMS: tl.constexpr,
    PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """Token t's entries, by neuron, from place starts[t] on."""
    t = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    place = tl.load(starts + tl.program_id(0))
    for start in range(0, F, BLOCK_F):
        j = (start + tl.arange(0, BLOCK_F)).to(tl.int64)[None, :]
        _, _, _, active, moving = pattern(
            pre, up, threshold, token_scale, skipped_mean, params, t, j, (j < F) & (t >= 0), F,
            ACT, DERIVATIVE, N_PARAMS, PER_NEURON, INDICATOR,
        )  # fmt: skip
        kind = _entry_bits(active, moving, BOTH)
        wanted = (kind != 0).to(tl.int32)
        at = place + tl.cumsum(wanted, 1) - 1
        tl.store(tokens + at, (t + tl.zeros_like(j)).to(tl.int32), mask=wanted != 0)
        tl.store(neurons + at, j.to(tl.int32), mask=wanted != 0)
        tl.store(bits + at, kind.to(tl.int8), mask=wanted != 0)
        place += tl.sum(tl.sum(wanted, axis=1), axis=0)


@triton.jit
def _training_values_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, grad, w_down_t, tokens, neurons,
    grad_pre, grad_up, hidden, grad_mean, D, F, entries, stride_grad, stride_down,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, ACT: tl.constexpr, DERIVATIVE: tl.constexpr, N_PARAMS: tl.constexpr,
    PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """Of each entry: ∂ℓ/∂h = grad row · down row if something is made of it, and what is made of it; float32."""
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = e < entries
    t = tl.load(tokens + e, mask=mask, other=0).to(tl.int64)
    j = tl.load(neurons + e, mask=mask, other=0).to(tl.int64)
    act, u, slope, active, moving = pattern(
        pre, up, threshold, token_scale, skipped_mean, params, t, j, mask, F,
        ACT, DERIVATIVE, N_PARAMS, PER_NEURON, INDICATOR,
    )  # fmt: skip
    if hidden is not None:
        h = act * u
        if skipped_mean is not None:
            h -= tl.load(skipped_mean + j, mask=mask, other=0.0)
        tl.store(hidden + e, tl.where(active, h, 0.0), mask=mask)
    if grad is not None:
        lanes = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            inside = mask[:, None] & (d < D)[None, :]
            left = tl.load(grad + t[:, None] * stride_grad + d[None, :], mask=inside, other=0.0)
            right = tl.load(w_down_t + j[:, None] * stride_down + d[None, :], mask=inside, other=0.0)
            lanes += left.to(tl.float32) * right.to(tl.float32)
        g = tl.sum(lanes, axis=1)
        if grad_pre is not None:
            tl.store(grad_pre + e, tl.where(moving, g * u * slope, 0.0), mask=mask)
        if grad_up is not None:
            tl.store(grad_up + e, tl.where(active, g * act, 0.0), mask=mask)
        if grad_mean is not None:
            tl.store(grad_mean + e, tl.where(active, -g, 0.0), mask=mask)  # with means, active is kept


@triton.jit
def _training_gather_kernel(
    starts, places, rows, bits, values, weight, more_values, more_weight, bias, skipped_out, out,
    D, stride, more_stride,
    MOVING: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row r of out: the sum of values[e] * weight[rows[e]] (and of the other pair) over its list's entries e.

    values count for moving entries or, without MOVING, for active ones; more_values for active ones.
    """
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (d < D)[None, :]
    first = tl.load(starts + tl.program_id(0))
    last = tl.load(starts + tl.program_id(0) + 1)
    lanes = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        mask = e < last
        if places is not None:
            e = tl.load(places + e, mask=mask, other=0)
        row = tl.load(rows + e, mask=mask, other=0).to(tl.int64)[:, None]
        kind = tl.load(bits + e, mask=mask, other=0).to(tl.int32)
        wanted = (kind & (_MOVING if MOVING else _ACTIVE)) != 0
        v = tl.load(values + e, mask=wanted, other=0.0)
        w = tl.load(weight + row * stride + d[None, :], mask=wanted[:, None] & inside, other=0.0)
        lanes += v[:, None] * w.to(tl.float32)  # what is masked was not loaded, it is 0
        if more_values is not None:
            wanted = (kind & _ACTIVE) != 0
            v = tl.load(more_values + e, mask=wanted, other=0.0)
            w = tl.load(
                more_weight + row * more_stride + d[None, :], mask=wanted[:, None] & inside, other=0.0
            )
            lanes += v[:, None] * w.to(tl.float32)
    acc = tl.sum(lanes, axis=0)
    if bias is not None:
        acc += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    if skipped_out is not None:
        acc += tl.load(skipped_out + d, mask=d < D, other=0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


class Lists(NamedTuple):
    """Entries in CSR order: where each row's begin (rows + 1,) int64, their token, neuron and pattern.

    places: None, or where the entries of this order are in `tokens`, `neurons`, `bits` and the values.
    """

    starts: Tensor
    tokens: Tensor
    neurons: Tensor
    bits: Tensor
    places: Tensor | None = None


class Values(NamedTuple):
    """A float32 value of each entry, in the first order; what was not asked for is None."""

    grad_pre: Tensor | None
    grad_up: Tensor | None
    hidden: Tensor | None
    grad_mean: Tensor | None


def counts(stored: Stored, config: _configs.Config, *, both: bool) -> tuple[Tensor, Launch]:
    """How many active entries each token has (with `both`, active or moving ones), (T,) int32."""
    tokens, f = stored.pre.shape
    found = torch.empty((tokens,), dtype=torch.int32, device=stored.pre.device)
    constants = {"BOTH": both, "BLOCK_F": _block(config, f), **stored.constants}
    launch = Launch(
        _training_count_kernel, (tokens,), (*stored.tensors, found, f), constants, config["list_warps"]
    )
    return found, launch


def _block(config: _configs.Config, f: int) -> int:
    return int(min(config["list_block_f"], triton.next_power_of_2(f)))


def filled(
    stored: Stored, starts: Tensor, entries: int, config: _configs.Config, *, both: bool
) -> tuple[Lists, Launch]:
    """The lists of `entries` entries, by token; starts (T + 1,) int64 are the sums of `counts`."""
    tokens, f = stored.pre.shape
    device = stored.pre.device
    kinds = (torch.int32, torch.int32, torch.int8)
    lists = Lists(starts, *(torch.empty((entries,), dtype=kind, device=device) for kind in kinds))
    return lists, Launch(
        _training_fill_kernel,
        (tokens,),
        (*stored.tensors, *lists[:4], f),
        {"BOTH": both, "BLOCK_F": _block(config, f), **stored.constants},
        config["list_warps"],
    )


def by_neuron(lists: Lists, f: int) -> Lists:
    """The same entries by neuron, a neuron's by token."""
    ordered, places = torch.sort(lists.neurons, stable=True)
    ids = torch.arange(f + 1, dtype=torch.int32, device=ordered.device)
    return lists._replace(starts=torch.searchsorted(ordered, ids), places=places)


def values(
    stored: Stored, lists: Lists, names: set[str], config: _configs.Config,
    grad: Tensor | None = None, w_down_t: Tensor | None = None,
) -> tuple[Values, Launch]:  # fmt: skip
    """What the gradients `names` are made of; grad (T, D) and w_down_t (F, D) where any but "w_down_t" is asked for."""
    entries, f = lists.tokens.numel(), stored.pre.shape[1]
    wanted = (
        bool(names & {"x", "w_gate", "b_gate"}),
        stored.up is not None and bool(names & {"x", "w_up", "b_up"}),
        "w_down_t" in names,
        "skipped_mean" in names,
    )
    found = Values(*(
        torch.empty((entries,), dtype=torch.float32, device=stored.pre.device) if want else None for want in wanted
    ))  # fmt: skip
    if grad is None or w_down_t is None or names <= {"w_down_t"}:
        grad = w_down_t = None
    d, stride, down = (0, 0, 0) if grad is None else (grad.shape[1], grad.stride(0), w_down_t.stride(0))
    block_e = config["value_block_e"]
    block_d = min(config["value_block_d"], triton.next_power_of_2(max(d, 1)))
    return found, Launch(
        _training_values_kernel,
        (-(-entries // block_e),),
        (*stored.tensors, grad, w_down_t, lists.tokens, lists.neurons, *found, d, f, entries, stride, down),
        {"BLOCK_E": block_e, "BLOCK_D": block_d, **stored.constants},
        config["value_warps"],
    )


def product(
    lists: Lists, value: Tensor, weight: Tensor, dtype: torch.dtype, config: _configs.Config, *, moving: bool,
    more: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None, skipped_out: Tensor | None = None,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """For each row of the lists the sum of value · row of the weight: neurons' rows by token, tokens' rows by neuron.

    more: another pair, which follows the active entries.
    """
    rows, d = lists.starts.numel() - 1, weight.shape[1]
    more_value, more_weight = more or (None, None)
    out = torch.empty((rows, d), dtype=dtype, device=weight.device)
    block_d = min(config["gather_block_d"], triton.next_power_of_2(d))
    return out, Launch(
        _training_gather_kernel,
        (rows, -(-d // block_d)),
        (
            lists.starts, lists.places, lists.neurons if lists.places is None else lists.tokens, lists.bits,
            value, weight, more_value, more_weight, bias, skipped_out, out, d, weight.stride(0),
            0 if more_weight is None else more_weight.stride(0),
        ),
        {"MOVING": moving, "BLOCK_E": config["gather_block_e"], "BLOCK_D": block_d},
        config["gather_warps"],
    )  # fmt: skip
