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

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsemlp.testing import assert_within_budget

NUMBERS = ("nan", "inf", "-inf", "0", "-0", "subnormal", "-subnormal", "huge", "-huge", "max", "-max")
LIMITS = ("inf", "0", "normal", "max")
"""What thresholds and token scales may be: ≥ 0, and of products that float32 does not round to 0."""
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


def plant(sample: Any, changes: list[Special]) -> tuple[Any, set[int]]:
    """The sample with the changes made in memory of its own, and which tokens have one in their x or scale."""
    sample, touched = copy.deepcopy(sample), set()
    for change in changes:
        t = getattr(sample, change.tensor, None)
        t = sample.options.get(change.tensor) if t is None else t
        if t is None or t.numel() == 0 or not t.is_floating_point():
            continue
        number = change.number
        if change.tensor in ("threshold", "token_scale"):
            number = LIMITS[NUMBERS.index(number) % len(LIMITS)]
        at = int(change.where * t.numel())
        t[tuple(int(i) for i in torch.unravel_index(torch.tensor(at), t.shape))] = value_of(number, t.dtype)
        if change.tensor == "x":
            touched.add(at // t.shape[-1])
        elif change.tensor == "token_scale":
            touched.add(at)
    return sample, touched


def kinds(t: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 inf, 3 −inf."""
    return t.isnan() * 1 + (t == torch.inf) * 2 + (t == -torch.inf) * 3


def judged(tokens: int, touched: set[int]) -> list[int]:
    rest = [i for i in range(0, tokens, max(1, tokens // JUDGED)) if i not in touched]
    return sorted((sorted(touched) + rest)[:JUDGED])


def assert_determined(truth: Any, out: Tensor, flips: Tensor | None) -> int:
    """Raises AssertionError unless `out` (1, N), of the truth's one token, is right wherever it is determined.

    Returns:
        How many entries were determined and not finite.
    """
    peers = truth.peers()
    wanted = kinds(truth.out.to(out.dtype))
    fixed = torch.stack([kinds(peer) == wanted for peer in peers]).all(0)
    if flips is not None:  # an entry at the threshold that carries inf or NaN
        fixed &= flips.isfinite()
    wrong = fixed & (kinds(out) != wanted)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {out.numel()} outputs: {out[wrong][:3].tolist()}, truth {truth.out[wrong][:3].tolist()}"
    )
    finite = fixed & (wanted == 0)
    assert_within_budget(
        out[finite],
        [p[finite] for p in peers],
        truth.out[finite],
        flips=None if flips is None else flips[finite],
    )
    return int((fixed & (wanted != 0)).sum())


def check(
    sample: Any,
    touched: set[int],
    out: Tensor,
    truth_of: Callable[[Any], Any],
    decided_from: torch.dtype | None,
) -> int:
    """`assert_determined` for tokens of `out` (T, N), each beside the truth of itself alone: no token sees another's
    numbers. `decided_from` is None where the decision is exact. Returns what they add up to."""
    found = 0
    for i in judged(out.shape[0], touched):
        truth = truth_of(sample.token(i))
        flips = None if decided_from is None else truth.flips(decided_from)
        try:
            found += assert_determined(truth, out[i : i + 1], flips)
        except AssertionError as error:
            raise AssertionError(f"token {i} of {out.shape[0]}: {error}") from None
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but for which NaN a NaN is."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0.0, torch.inf, -torch.inf).contiguous().view(whole),
        b.nan_to_num(0.0, torch.inf, -torch.inf).contiguous().view(whole),
    )
