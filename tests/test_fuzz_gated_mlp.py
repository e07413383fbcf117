"""`gated_mlp` with special numbers anywhere, in random calls: tests/special_values.py says what must come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemlp import activations
from sparsemlp.ops.gated_mlp import OP, gated_mlp
from tests.backends import backends, decided_from
from tests.batches import ALONE
from tests.cases import DTYPES, Case, Sample, Truth, build
from tests.special_values import (
    FIXED,
    ISAS,
    MORE,
    SCALES,
    TOKENS,
    X_LAYOUTS,
    Judged,
    Special,
    assert_apart,
    check,
    fits,
    plant,
    run,
    specials,
    with_mean,
)

TENSORS = (
    "x", "w_gate", "w_up", "w_down_t", "threshold", "token_scale", "skipped_mean", "skipped_out", "b_gate", "b_up",
    "b_down", "input_threshold",
)  # fmt: skip
CASES = st.builds(
    Case,
    name=st.just("fuzz"),
    tokens=TOKENS,
    d=st.integers(3, 70),
    f=st.integers(3, 70),
    activation=st.sampled_from(list(activations.ACTIVATIONS)),
    density=st.sampled_from([0, 0.5, 1, "neurons", "some_inf"]),
    scale=SCALES,
    mean=st.sampled_from(["", "", "mean", "mean+out"]),
    biases=st.sampled_from(["", "g", "ud", "gud"]),
    weights=st.sampled_from(["plain", "guarded", "end", "interleaved", "triple", "repeated"]),
    x=X_LAYOUTS,
    indicator=st.sampled_from(["gate", "gate", "up", "product", "screen"]),
    inputs=st.sampled_from(["", "", "", 0.5, "channels"]),
    int8=st.sampled_from([False, False, False, True]),
    screen=st.sampled_from(["4x32", "3x32", "8x64"]),
).map(lambda case: replace(case, inputs="") if case.indicator == "screen" else replace(case, screen=""))
CALL = dict(
    case=CASES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), changes=specials(TENSORS), isa=ISAS
)
EVERY_BACKEND = pytest.mark.parametrize("backend", [*backends(OP, only="native"), "reference"])
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))


def decision_settled(truth: Truth, most: float) -> bool:
    """Whether numbers up to `most` leave no doubt about which neurons are active, but for those at the threshold: what
    overflows has an activation unlike float64's (silu of −inf is NaN)."""
    options = truth.sample.options
    if truth.sample.indicator == "screen":
        low = torch.finfo(torch.float32).max
        by_copy = (
            fits(low, truth.rounded, truth.low_gate.T, options.get("b_gate")),
            fits(low, truth.rounded, truth.low_up.T, options.get("b_up")),
        )
        if not bool(torch.cat(by_copy).all()):
            return False
    sums = (
        fits(most, truth.seen, truth.w_gate.T, options.get("b_gate")),
        fits(most, truth.x, truth.w_up.T, options.get("b_up")),
    )
    size = torch.stack([t.abs() for t in (truth.act, truth.up, truth.m)]).nan_to_num(0.0, 0.0).amax(0)
    too_large = (size > most / 2) & truth.limit.isinf()  # an indicator rounded to inf would be kept
    return bool(torch.cat(sums).all()) and not bool(too_large.any())


def judge_token(sample: Sample, out: torch.Tensor, decides: torch.dtype) -> Judged | None:
    truth, options = Truth(sample), sample.options
    if not decision_settled(truth, torch.finfo(decides).max):
        return None
    terms = with_mean(truth.hidden, truth.w_down_t, truth.mean, options)
    last = *terms, options.get("b_down"), options.get("skipped_out")
    integers = ()
    if "scale_down" in options:
        integers = with_mean(truth.hidden, sample.w_down_t.double(), truth.mean, options)
    return Judged.of(out, truth, truth.flips(decides), *last, integers=integers)


def judge(sample: Sample, changes: list[Special], backend: str, isa: int) -> int:
    sample, touched = plant(sample, changes)
    out = run(sample, gated_mlp, backend, isa)
    decides = decided_from(backend, out.shape[0], out.dtype)
    return check(sample, touched, out, lambda sample, out: judge_token(sample, out, decides))


@EVERY_BACKEND
@FIXED
@given(**CALL)
def test_special_values(
    case: Case, dtype: torch.dtype, seed: int, changes: list[Special], isa: int, backend: str
) -> None:
    judge(build(case, dtype, seed), changes, backend, isa)


@pytest.mark.slow
@EVERY_BACKEND
@MORE
@given(**CALL)
def test_special_values_at_random(
    case: Case, dtype: torch.dtype, seed: int, changes: list[Special], isa: int, backend: str
) -> None:
    judge(build(case, dtype, seed), changes, backend, isa)


@NATIVE
@FIXED
@given(**CALL)
def test_a_token_among_others(
    case: Case, dtype: torch.dtype, seed: int, changes: list[Special], isa: int, backend: str
) -> None:
    """Of up to four tokens each has the bits that it has alone, whatever is in its mates' numbers or in the weights."""
    sample, touched = plant(build(replace(case, tokens=min(case.tokens, ALONE)), dtype, seed), changes)
    assert_apart(sample, touched, gated_mlp, backend, isa)


@pytest.mark.parametrize("wrong", [0.0, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_another_kind_of_number_is_seen(number: str, wrong: float) -> None:
    """An inf or NaN in a bias is in every output of its column: nothing else is accepted there."""
    case = Case("seen", tokens=3, d=20, f=30, activation="relu", density=1, biases="d")
    sample, _ = plant(build(case, torch.float32), [Special("b_down", 0.5, number)])
    out = run(sample, gated_mlp, "reference", 0)
    assert check(sample, set(), out, lambda s, o: judge_token(s, o, torch.float32)) == 3
    out[1, 10] = wrong if wrong != float(number) else -wrong
    with pytest.raises(AssertionError, match="1 of 60 outputs"):
        check(sample, set(), out, lambda s, o: judge_token(s, o, torch.float32))
