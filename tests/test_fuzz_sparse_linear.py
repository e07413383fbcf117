"""`sparse_linear` with special numbers anywhere, in random calls: tests/special_values.py says what must come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemlp.ops.sparse_linear import OP, sparse_linear
from tests.backends import backends
from tests.samples import DTYPES
from tests.sparse_linear_cases import Case, Sample, Truth, build
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
    plant,
    run,
    specials,
)

TENSORS = ("x", "weight_t", "threshold", "token_scale", "bias", "scale")
CASES = st.builds(
    Case,
    name=st.just("fuzz"),
    tokens=TOKENS,
    k=st.integers(3, 70),
    n=st.integers(3, 70),
    density=st.sampled_from([0, 0.5, 1, "channels", "some_inf"]),
    scale=SCALES,
    bias=st.booleans(),
    weights=st.sampled_from(["plain", "guarded", "end", "repeated"]),
    x=X_LAYOUTS,
    int8=st.sampled_from([False, False, False, True]),
)
CALL = dict(
    case=CASES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), changes=specials(TENSORS), isa=ISAS
)
EVERY_BACKEND = pytest.mark.parametrize("backend", [*backends(OP, only="native"), "reference"])
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))


def judge_token(sample: Sample, out: torch.Tensor) -> Judged:
    truth = Truth(sample)
    taken = torch.where(truth.active, truth.x, 0)
    return Judged.of(out, truth, None, taken, truth.weight_t, sample.options.get("bias"))


def judge(sample: Sample, changes: list[Special], backend: str, isa: int) -> int:
    sample, touched = plant(sample, changes)
    return check(sample, touched, run(sample, sparse_linear, backend, isa), judge_token)


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
    """Up to 32 tokens, a token's bits do not depend on its mates' numbers, whatever is in the weights."""
    sample, touched = plant(build(replace(case, tokens=min(case.tokens, 32)), dtype, seed), changes)
    assert_apart(sample, touched, sparse_linear, backend, isa)


@pytest.mark.parametrize("wrong", [0.0, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_another_kind_of_number_is_seen(number: str, wrong: float) -> None:
    """An inf or NaN in a bias is in every output of its column: nothing else is accepted there."""
    sample, _ = plant(
        build(Case("seen", k=20, n=30, density=1, bias=True), torch.float32), [Special("bias", 0.5, number)]
    )
    out = run(sample, sparse_linear, "reference", 0)
    assert check(sample, set(), out, judge_token) == 3
    out[1, 15] = wrong if wrong != float(number) else -wrong
    with pytest.raises(AssertionError, match="1 of 90 outputs"):
        check(sample, set(), out, judge_token)
