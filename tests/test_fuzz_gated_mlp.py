"""`gated_mlp` with special numbers anywhere, in random calls: tests/special_values.py says what must come out."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsemlp
from sparsemlp import _native, activations
from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends, decided_from
from tests.cases import DTYPES, Case, Sample, Truth, build
from tests.special_values import Special, check, plant, same_bits, specials

TENSORS = (
    "x", "w_gate", "w_up", "w_down_t", "threshold", "token_scale", "skipped_mean", "skipped_out", "b_gate", "b_up",
    "b_down", "input_threshold",
)  # fmt: skip
CASES = st.builds(
    Case,
    name=st.just("fuzz"),
    tokens=st.sampled_from([1, 2, 3, 5, 8, 32, 33, 130]),
    d=st.integers(1, 70),
    f=st.integers(1, 70),
    activation=st.sampled_from(list(activations.ACTIVATIONS)),
    density=st.sampled_from([0, 0.5, 1, "neurons", "some_inf"]),
    scale=st.sampled_from(["", "", "varied", "one_zero", "alternate"]),
    mean=st.sampled_from(["", "", "mean", "mean+out"]),
    biases=st.sampled_from(["", "g", "ud", "gud"]),
    weights=st.sampled_from(["plain", "guarded", "end", "interleaved", "triple", "repeated"]),
    x=st.sampled_from(["plain", "guarded", "end", "columns", "strided", "leading"]),
    indicator=st.sampled_from(["gate", "gate", "up", "product"]),
    inputs=st.sampled_from(["", "", "", 0.5, "channels"]),
    int8=st.sampled_from([False, False, False, True]),
)
CALL = dict(case=CASES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), changes=specials(TENSORS))
ISA = st.integers(0, len(_native.isa_names()) - 1 if _native.problem() is None else 0)
BACKENDS = [p for p in backends(OP) if p.values[0] in ("native", "reference")]
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
FIXED = settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MORE = settings(FIXED, max_examples=2000, derandomize=False, print_blob=True)


def run(sample: Sample, backend: str, isa: int) -> torch.Tensor:
    with mock.patch.object(_native, "isa", return_value=isa):
        out = sample.run(sparsemlp.gated_mlp, backend=backend)
    return out.reshape(-1, out.shape[-1])


def judge(sample: Sample, changes: list[Special], backend: str, isa: int) -> int:
    sample, touched = plant(sample, changes)
    out = run(sample, backend, isa)
    return check(sample, touched, out, Truth, decided_from(backend, out.shape[0], out.dtype))


@EVERY_BACKEND
@FIXED
@given(**CALL, isa=ISA)
def test_special_values(case, dtype, seed, changes, isa, backend) -> None:
    judge(build(case, dtype, seed), changes, backend, isa)


@pytest.mark.slow
@EVERY_BACKEND
@MORE
@given(**CALL, isa=ISA)
def test_special_values_at_random(case, dtype, seed, changes, isa, backend) -> None:
    judge(build(case, dtype, seed), changes, backend, isa)


@NATIVE
@FIXED
@given(**CALL, isa=ISA)
def test_a_token_alone(case, dtype, seed, changes, isa, backend) -> None:
    """Of up to 32 tokens each has the bits that it has alone, whatever is in its mates' numbers or in the weights."""
    sample, touched = plant(build(replace(case, tokens=min(case.tokens, 32)), dtype, seed), changes)
    out = run(sample, backend, isa)
    for i in sorted({*touched, 0, out.shape[0] - 1}):
        assert same_bits(run(sample.token(i), backend, isa)[0], out[i]), f"token {i} of {out.shape[0]}"
