"""NaN, infinities, zeros of both signs, subnormal and huge numbers among a sample's, and what must then come out.

An output is *determined* where float64 and plain PyTorch in the sample's dtype, in several orders of summation, agree
whether it is finite, NaN or an infinity of which sign. There every backend must say the same, and where it is finite
stay within the budget. Elsewhere the order of roundings decides: 3e38 + 3e38 − 3e38 may be 3e38 or infinite.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsemlp import _native
from sparsemlp.testing import assert_within_budget

FIXED = settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
"""The same examples in every run: `make test`."""
MORE = settings(FIXED, max_examples=2000, derandomize=False, print_blob=True)
"""Others in every run: `make test-full`."""
ISAS = st.integers(0, len(_native.isa_names()) - 1 if _native.problem() is None else 0)
TOKENS = st.sampled_from([1, 2, 3, 5, 8, 32, 33, 130])
X_LAYOUTS = st.sampled_from(["plain", "guarded", "end", "columns", "strided", "leading"])
SCALES = st.sampled_from(["", "", "varied", "one_zero", "alternate"])

NUMBERS = ("nan", "inf", "-inf", "0", "-0", "subnormal", "-subnormal", "huge", "-huge", "max", "-max")
LIMITS = ("inf", "0", "normal", "max")
"""What thresholds and token scales may be: ≥ 0, and of products that float32 does not round to 0."""
LARGE = 1000.0
"""Beyond what other than special numbers add up to."""
ALONE = 4
"""Batches up to here have the bits of each token alone."""
JUDGED = 8
"""Tokens of a call that are judged: those with a special number of their own first."""


@dataclass(frozen=True)
class Special:
    """One number of one tensor, at a fraction of its entries, changed."""

    tensor: str
    where: float
    number: str


def specials(tensors: Sequence[str]) -> st.SearchStrategy[list[Special]]:
    """Up to six changes to the tensors named; of those that a sample lacks nothing is changed."""
    one = st.builds(
        Special, st.sampled_from(list(tensors)), st.floats(0, 1, exclude_max=True), st.sampled_from(NUMBERS)
    )
    return st.lists(one, min_size=1, max_size=6)


def value_of(number: str, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    size = {
        "nan": torch.nan,
        "inf": torch.inf,
        "0": 0.0,
        "subnormal": info.smallest_normal / 4,
        "normal": info.smallest_normal * 8,
        "huge": 2.0 ** (12 if dtype == torch.float16 else 100),
        "max": info.max,
    }[number.removeprefix("-")]
    return -size if number.startswith("-") else size


def _allowed(change: Special, integers: bool) -> str | None:
    """The number to be planted, None for none. With int8 weights it matters for inf · 0 and near the range's end
    whether the weight, x or their sum is scaled."""
    if change.tensor.endswith(("threshold", "token_scale")):
        return LIMITS[NUMBERS.index(change.number) % len(LIMITS)]
    if change.tensor.startswith("scale"):
        return change.number.removeprefix("-") if change.number.endswith(("0", "subnormal")) else None
    return None if integers and change.tensor == "x" and change.number.endswith("max") else change.number


def plant(sample: Any, changes: list[Special]) -> tuple[Any, set[int]]:
    """The sample with the changes made in memory of its own, and which tokens have one in their x or scale."""
    sample, touched = copy.deepcopy(sample), set()
    integers = any(name.startswith("scale") for name in sample.options)
    if sample.x.dtype == torch.bfloat16 and any(c.number.endswith(("inf", "max")) for c in changes):
        # The CPU's bfloat16 products take subnormal numbers for 0: PyTorch's and ours, each for sizes of its own.
        changes = [c for c in changes if not c.number.endswith("subnormal")]
    for change in changes:
        t = getattr(sample, change.tensor, None)
        t = sample.options.get(change.tensor) if t is None else t
        if t is None or t.numel() == 0 or not t.is_floating_point():
            continue
        number = _allowed(change, integers)
        if number is None:
            continue
        at = int(change.where * t.numel())
        t[tuple(int(i) for i in torch.unravel_index(torch.tensor(at), t.shape))] = value_of(number, t.dtype)
        if change.tensor == "x":
            touched.add(at // t.shape[-1])
        elif change.tensor == "token_scale":
            touched.add(at)
    return sample, touched


def run(sample: Any, function: Callable[..., Tensor], backend: str, isa: int) -> Tensor:
    """The sample's result (T, N), of a compiled kernel by the instruction set with that id."""
    with mock.patch.object(_native, "isa", return_value=isa):
        out = sample.run(function, backend=backend)
    return out.reshape(-1, out.shape[-1])


def kinds(t: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 −inf."""
    return t.isnan() * 1 + (t == torch.inf) * 2 + (t == -torch.inf) * 3


def chosen(tokens: int, touched: set[int]) -> list[int]:
    rest = [i for i in range(0, tokens, max(1, tokens // JUDGED)) if i not in touched]
    return sorted((sorted(touched) + rest)[:JUDGED])


def _sums(x: Tensor, w: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of Σ_k x_k w_k + Σ more the positive and, as positive numbers, the negative terms' sums, (1, N) float64.

    Args:
        x: (1, K), w: (K, N), more: (N,). Numbers that are not finite count as 0: they decide by themselves.
    """
    terms = torch.cat([x.reshape(-1, 1) * w, *(t.reshape(1, -1).double() for t in more if t is not None)])
    terms = terms.nan_to_num(0.0, 0.0, 0.0)
    return terms.clamp(min=0).sum(0)[None], -terms.clamp(max=0).sum(0)[None]


def fits(most: float, x: Tensor, w: Tensor, *more: Tensor | None) -> Tensor:
    """Where no partial sum of `_sums`' is beyond numbers up to `most`, in any order."""
    return torch.maximum(*_sums(x, w, *more)) < most / 2


def settled(most: float, x: Tensor, w: Tensor, *more: Tensor | None) -> Tensor:
    """Where `_sums`' sum is of one kind in every order of summation of numbers up to `most`: it fits, or partial sums
    of one sign only can overflow, and the sum does by far."""
    up, down = _sums(x, w, *more)
    by_far = (torch.minimum(up, down) < most / 2) & ((up - down).abs() > 2 * most)
    return fits(most, x, w, *more) | by_far


def cancelled(x: Tensor, w: Tensor, *more: Tensor | None) -> Tensor:
    """Where large terms leave a small sum, of which no peer measures how many digits are right."""
    up, down = _sums(x, w, *more)
    return up + down > LARGE * (up - down).abs().clamp(min=1)


def with_mean(
    hidden: Tensor, w: Tensor, mean: Tensor | None, options: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Hidden values and their weights, and once more the weights with the mean that fills in for skipped ones."""
    if mean is None or "skipped_out" in options:
        return hidden, w
    return torch.cat([hidden, mean[None]], dim=1), torch.cat([w, w])


@dataclass
class Judged:
    """A token's outputs (N,), the float64 truth and the peers beside them, and which are determined."""

    out: Tensor
    truth: Tensor
    peers: Tensor
    flips: Tensor
    determined: Tensor

    @classmethod
    def of(
        cls,
        out: Tensor,
        truth: Any,
        flips: Tensor | None,
        *last: Tensor | None,
        integers: Sequence[Tensor] = (),
    ) -> Judged:
        """`truth` is that of the token alone; `flips`, what entries at the threshold may add, None where the decision
        is exact; `last`, the arguments of `_sums` for the last product, and `integers` those before the scale, of int8
        weights: float32 must hold such sums too."""
        peers = torch.stack(truth.peers())
        flips = torch.zeros_like(truth.out) if flips is None else flips
        wanted = kinds(truth.out.to(out.dtype))
        determined = (kinds(peers) == wanted).all(0) & (flips < torch.finfo(out.dtype).max / 4)
        most = torch.finfo(torch.float32).max
        determined &= settled(most, *last) & ~cancelled(*last)
        if integers:
            determined &= fits(most, *integers)
        return cls(out, truth.out[0], peers[:, 0], flips[0], determined[0])


def assert_determined(tokens: list[Judged]) -> int:
    """Raises AssertionError unless what is determined came out; returns how much of it was not finite."""
    if not tokens:
        return 0
    out, truth, flips, determined = (
        torch.cat([getattr(t, name) for t in tokens]) for name in ("out", "truth", "flips", "determined")
    )
    peers = torch.cat([t.peers for t in tokens], dim=1)
    wanted = kinds(truth.to(out.dtype))
    wrong = determined & (kinds(out) != wanted)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {out.numel()} outputs, e.g. {out[wrong][0]} for {truth[wrong][0]:.6g}"
    )
    # Large ones apart, which would lend the others their budget; not those that only rounding brings into the range.
    finite = determined & (wanted == 0) & (truth.abs() <= torch.finfo(out.dtype).max)
    large = truth.abs() > LARGE
    for group in (finite & ~large, finite & large):
        assert_within_budget(out[group], list(peers[:, group]), truth[group], flips=flips[group])
    return int((determined & (wanted != 0)).sum())


def check(sample: Any, touched: set[int], out: Tensor, judge: Callable[[Any, Tensor], Judged | None]) -> int:
    """`assert_determined` of `judge(token's sample, token's output)` for tokens of `out` (T, N), each judged alone: no
    token sees another's numbers. None: nothing is determined."""
    tokens = [judge(sample.token(i), out[i]) for i in chosen(out.shape[0], touched)]
    return assert_determined([t for t in tokens if t is not None])


def assert_apart(
    sample: Any, touched: set[int], function: Callable[..., Tensor], backend: str, isa: int
) -> None:
    """Raises AssertionError unless some tokens have the bits that they have beside others, and up to `ALONE` tokens
    those that each has alone."""
    out = run(sample, function, backend, isa)
    for i in sorted({*touched, 0, out.shape[0] - 1}):
        if out.shape[0] <= ALONE:
            other = run(sample.token(i), function, backend, isa)[0]
        else:
            beside = copy.deepcopy(sample)
            beside.x = sample.x.flip(-1).neg()
            beside.x.reshape(-1, beside.x.shape[-1])[i] = sample.x.reshape(-1, sample.x.shape[-1])[i]
            other = run(beside, function, backend, isa)[i]
        assert same_bits(other, out[i]), f"token {i} of {out.shape[0]}: {out[i]}, otherwise {other}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but for which NaN a NaN is."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0.0, torch.inf, -torch.inf).contiguous().view(whole),
        b.nan_to_num(0.0, torch.inf, -torch.inf).contiguous().view(whole),
    )
