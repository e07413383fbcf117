"""`mlp` with special numbers anywhere, in random calls: tests/special_values.py says what must come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemlp import activations
from sparsemlp.ops.mlp import OP, mlp
from tests.backends import backends, decided_from
from tests.batches import ALONE
from tests.mlp_cases import Case, Sample, Truth, build
from tests.samples import DTYPES
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
    "x", "w_in", "w_out_t", "threshold", "token_scale", "skipped_mean", "skipped_out", "b_in", "b_out", "scale_in",
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
    biases=st.sampled_from(["", "i", "o", "io"]),
    weights=st.sampled_from(["plain", "guarded", "end", "interleaved", "repeated"]),
    x=X_LAYOUTS,
    int8=st.sampled_from([False, False, False, True]),
)
CALL = dict(
    case=CASES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), changes=specials(TENSORS), isa=ISAS
)
EVERY_BACKEND = pytest.mark.parametrize("backend", [*backends(OP, only="native"), "reference"])
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))


def decision_settled(truth: Truth, most: float) -> bool:
    """Whether numbers up to `most` leave no doubt about which neurons are active, but for those at the threshold: what
    overflows has an activation unlike float64's (silu of −inf is NaN)."""
    sums = fits(most, truth.x, truth.w_in.T, truth.sample.options.get("b_in"))
    size = truth.act.abs().nan_to_num(0.0, 0.0)
    too_large = (size > most / 2) & truth.limit.isinf()  # an activation rounded to inf would be kept
    return bool(sums.all()) and not bool(too_large.any())


def judge_token(sample: Sample, out: torch.Tensor, decides: torch.dtype) -> Judged | None:
    truth, options = Truth(sample), sample.options
    if not decision_settled(truth, torch.finfo(decides).max):
        return None
    hidden = torch.where(truth.active, truth.act - (0 if truth.mean is None else truth.mean), 0)
    terms = with_mean(hidden, truth.w_out_t, truth.mean, options)
    last = *terms, options.get("b_out"), options.get("skipped_out")
    integers = ()
    if "scale_out" in options:
        integers = with_mean(hidden, sample.w_out_t.double(), truth.mean, options)
    return Judged.of(out, truth, truth.flips(decides), *last, integers=integers)


def judge(sample: Sample, changes: list[Special], backend: str, isa: int) -> int:
    sample, touched = plant(sample, changes)
    out = run(sample, mlp, backend, isa)
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
    assert_apart(sample, touched, mlp, backend, isa)


@pytest.mark.parametrize("wrong", [0.0, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_another_kind_of_number_is_seen(number: str, wrong: float) -> None:
    """An inf or NaN in a bias is in every output of its column: nothing else is accepted there."""
    case = Case("seen", tokens=3, d=20, f=30, activation="relu", density=1, biases="o")
    sample, _ = plant(build(case, torch.float32), [Special("b_out", 0.5, number)])
    out = run(sample, mlp, "reference", 0)
    assert check(sample, set(), out, lambda s, o: judge_token(s, o, torch.float32)) == 3
    out[1, 10] = wrong if wrong != float(number) else -wrong
    with pytest.raises(AssertionError, match="1 of 60 outputs"):
        check(sample, set(), out, lambda s, o: judge_token(s, o, torch.float32))
