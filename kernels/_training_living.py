"""Dead neurons left out of a training call's dense products, exactly: those without an entry in the whole batch.

The neurons are put in an order with the living ones first. Only the device knows how many these are: shapes and grids
are those of all neurons, values (T, F) have their columns in that order, weights are read and written through it, and
programs beyond the last living neuron end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp.kernels import _configs
from sparsemlp.kernels._launch import Launch, upcast_dot
from sparsemlp.kernels._tiles import dot
from sparsemlp.kernels._training_entries import Stored, pattern

__all__ = ["Living", "default", "flags", "hidden_product", "ordered", "rows_product", "weight_product"]


@triton.jit
def _training_living_kernel(
    pre, up, threshold, token_scale, skipped_mean, params, flags, T, F,
    BOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr, ACT: tl.constexpr, DERIVATIVE: tl.constexpr,
    N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """flags[block of tokens, j] = whether neuron j has an active entry there, with BOTH: an active or moving one."""
    j = (tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    found = tl.zeros((1, BLOCK_F), tl.int32)
    for i in range(ROWS):
        t = tl.program_id(0).to(tl.int64) * ROWS + i + tl.zeros((1, 1), tl.int64)
        _, _, _, active, moving = pattern(
            pre, up, threshold, token_scale, skipped_mean, params, t, j, (j < F) & (t < T), F,
            ACT, DERIVATIVE, N_PARAMS, PER_NEURON, INDICATOR,
        )  # fmt: skip
        if BOTH:
            active = active | moving
        found = found | active.to(tl.int32)
    tl.store(flags + tl.program_id(0).to(tl.int64) * F + j, found, mask=j < F)


@triton.jit
def _training_product_kernel(
    left, right, out, neurons, count, added, bias, skipped_out, M, N, K, left_m, left_k, right_k, right_n, out_m,
    LIVING: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out = left @ right (+ added + bias + skipped_out), one of whose dimensions, LIVING, is of the living neurons.

    m: rows neurons[m] of out. n: columns neurons[n] of right. k: rows neurons[k] of right. All else is in order: what
    left has of dead neurons is 0, and read where bounds that nobody knows would keep loads narrow.
    """
    living = tl.load(count)
    last_m = living if LIVING == "m" else M
    last_n = living if LIVING == "n" else N
    last_k = living if LIVING == "k" else K
    first_m = tl.program_id(0).to(tl.int64) * TILE_M
    first_n = tl.program_id(1).to(tl.int64) * TILE_N
    if (first_m < last_m) & (first_n < last_n):
        m = (first_m + tl.arange(0, TILE_M))[:, None]
        n = (first_n + tl.arange(0, TILE_N))[None, :]
        column = n
        if LIVING == "n":
            column = tl.load(neurons + n, mask=n < last_n, other=0)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start in range(0, last_k, TILE_K):
            k = (start + tl.arange(0, TILE_K)).to(tl.int64)
            row = k
            if LIVING == "k":
                row = tl.load(neurons + k, mask=k < last_k, other=0)
            a = tl.load(left + m * left_m + k[None, :] * left_k, mask=(m < M) & (k < K)[None, :], other=0.0)
            wanted = (k < last_k)[:, None] & (n < last_n)
            b = tl.load(right + row[:, None] * right_k + column * right_n, mask=wanted, other=0.0)
            acc = dot(a, b, acc, UPCAST)
        place = m
        if LIVING == "m":
            place = tl.load(neurons + m, mask=m < last_m, other=0)
        mask = (m < last_m) & (n < N)
        if added is not None:
            acc += tl.load(added + place * out_m + n, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if skipped_out is not None:
            acc += tl.load(skipped_out + n, mask=n < N, other=0.0)
        tl.store(out + place * out_m + n, acc.to(out.dtype.element_ty), mask=mask)


def default(dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory."""
    half = dtype != torch.float32
    return {
        "tile_m": 64,
        "tile_n": 128 if half else 64,
        "tile_k": 64 if half else 32,
        "tile_warps": 4,
        "tile_stages": 3,
    }


class Living(NamedTuple):
    """All neurons with the living ones first, (F,) int64, the place of each among them, and how many live, int64."""

    neurons: Tensor
    places: Tensor
    count: Tensor


def flags(stored: Stored, config: _configs.Config, *, both: bool) -> tuple[Tensor, Launch]:
    """Which neurons have an active entry (with `both`, an active or moving one), a row for each block of tokens."""
    (tokens, f), rows = stored.pre.shape, config["entry_rows"]
    block_f = min(config["entry_block_f"], triton.next_power_of_2(f))
    found = torch.empty((-(-tokens // rows), f), dtype=torch.int32, device=stored.pre.device)
    launch = Launch(
        _training_living_kernel,
        (found.shape[0], -(-f // block_f)),
        (*stored.tensors, found, tokens, f),
        {"BOTH": both, "ROWS": rows, "BLOCK_F": block_f, **stored.constants},
        config["entry_warps"],
    )
    return found, launch


def ordered(found: Tensor) -> Living:
    """The order of the neurons that `flags` found."""
    alive = found.amax(dim=0)
    neurons = torch.argsort(alive, descending=True, stable=True)
    return Living(neurons, torch.argsort(neurons), alive.sum())


def _product(
    a: Tensor, b: Tensor, out: Tensor, living: Living, dimension: str, config: _configs.Config,
    added: Tensor | None = None, bias: Tensor | None = None, skipped_out: Tensor | None = None,
) -> Launch:  # fmt: skip
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    tile_m, tile_n = config["tile_m"], config["tile_n"]
    return Launch(
        _training_product_kernel,
        (-(-m // tile_m), -(-n // tile_n)),
        (
            a, b, out, living.neurons, living.count, added, bias, skipped_out, m, n, k,
            *a.stride(), *b.stride(), out.stride(0),
        ),
        {
            "LIVING": dimension, "TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": config["tile_k"],
            "UPCAST": upcast_dot(a.dtype),
        },
        config["tile_warps"],
        config["tile_stages"],
    )  # fmt: skip


def rows_product(
    values: Tensor, w: Tensor, living: Living, config: _configs.Config, *,
    added: Tensor | None = None, bias: Tensor | None = None, skipped_out: Tensor | None = None,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """values @ w (T, D) of w (F, D), plus what is given; values (T, F) in the order of `living`."""
    out = torch.empty((values.shape[0], w.shape[1]), dtype=values.dtype, device=values.device)
    return out, _product(values, w, out, living, "k", config, added, bias, skipped_out)


def hidden_product(x: Tensor, w: Tensor, living: Living, config: _configs.Config) -> tuple[Tensor, Launch]:
    """x @ w.T (T, F) of w (F, D), in the order of `living`; what belongs to dead neurons is anything."""
    out = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    return out, _product(x, w.t(), out, living, "n", config)


def weight_product(
    values: Tensor, x: Tensor, living: Living, config: _configs.Config
) -> tuple[Tensor, Launch]:
    """values.T @ x (F, D), rows in the neurons' own order, 0 for the dead; values (T, F) in the order of `living`."""
    out = torch.zeros((values.shape[1], x.shape[1]), dtype=x.dtype, device=x.device)
    return out, _product(values.t(), x, out, living, "m", config)
