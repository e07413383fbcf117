"""What every backend of `mlp` must satisfy; the truth is float64 and independent of the package's reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsemlp
from sparsemlp import _env, _native, _triton, activations
from sparsemlp.ops.mlp import OP, mlp
from sparsemlp.testing import assert_within_budget
from tests.backends import backends, decided_from
from tests.batches import assert_independent
from tests.mlp_cases import CASES, Case, Sample, Truth, build
from tests.samples import DTYPES

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
EVERY_ISA = pytest.mark.parametrize("isa", [
    pytest.param(name, marks=[] if _native.problem() or name in _native.isa_names() else
                 [pytest.mark.skip(reason=f"this CPU has no {name}")])
    for name in _env.ISA_NAMES
])  # fmt: skip
FEW_AND_MANY = pytest.mark.parametrize("tokens", [1, 4, 40, 130])


def refuses(sample: Sample, backend: str) -> bool:
    """Whether the backend says that it has no int8 weights, which is then what is tested."""
    if backend != "triton" or "scale_in" not in sample.options:
        return False
    with pytest.raises(sparsemlp.BackendUnavailableError, match=r"triton: .*w_in is int8"):
        sample.run(mlp, backend=backend)
    return True


def check(sample: Sample, backend: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Runs the sample unless `out` is given, and holds it against the truth; returns it as (T, D)."""
    truth = Truth(sample)
    if refuses(sample, backend):
        return truth.out
    if out is None:
        out = sample.run(mlp, backend=backend)
        assert out.shape == sample.x.shape
        assert out.dtype == sample.x.dtype
        assert out.is_contiguous()
    out = out.reshape(truth.out.shape)
    flips = truth.flips(decided_from(backend, truth.x.shape[0], out.dtype))
    assert_within_budget(out, truth.peers(), truth.out, flips=flips)
    return out


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _every_case() -> Iterator[Any]:
    """Every case × dtype × backend; in Triton's interpreter, which is slow, each case in one dtype of three in turn,
    the rest in `make test-full`."""
    for param in backends(OP):
        backend = param.values[0]
        for (i, case), (j, dtype) in itertools.product(enumerate(CASES), enumerate(DTYPES)):
            later = backend == "triton" and _triton.interpreting() and (i + j) % len(DTYPES) != 0
            marks = [*param.marks, *([pytest.mark.slow] if later else [])]
            name = f"{case}-{str(dtype).removeprefix('torch.')}-{backend}"
            yield pytest.param(case, dtype, backend, marks=marks, id=name)


@pytest.mark.parametrize(("case", "dtype", "backend"), list(_every_case()))
def test_output(case: Case, dtype: torch.dtype, backend: str) -> None:
    check(build(case, dtype), backend)


@EVERY_BACKEND
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.startswith(("size-", "mean-", "int8-w-"))], ids=str
)
def test_float64(case: Case, backend: str) -> None:
    """float64 inputs get a float64 answer, from the reference where no kernel computes it."""
    sample = build(case, torch.float64)
    if backend not in ("auto", "reference"):
        with pytest.raises(sparsemlp.BackendUnavailableError, match="x is float64"):
            sample.run(mlp, backend=backend)
        return
    check(sample, backend)


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("tokens", [24, 40, 130])
def test_a_threshold_one_percent_off_fails(tokens: int, int8: bool, dtype: torch.dtype, backend: str) -> None:
    """The tolerance can tell: the suite would notice thresholds scaled by 0.99 or 1.01."""
    case = Case("one-percent", tokens=tokens, f=300, d=33, activation="silu", density=0.4, int8=int8)
    sample = build(case, dtype)
    check(sample, backend)
    if refuses(sample, backend):
        return
    for factor in (0.99, 1.01):
        wrong = sample.run(mlp, backend=backend, threshold=sample.threshold * factor)
        with pytest.raises(AssertionError, match="outside the budget"):
            check(sample, backend, wrong)


@EVERY_BACKEND
@pytest.mark.parametrize(
    "name",
    ["w-interleaved-T5", "w-guarded-T33", "x-strided-T6", "mean+out-io-neurons-varied-T4", "int8-w-end"],
)
def test_inputs_and_their_padding_are_untouched(name: str, backend: str) -> None:
    sample = build(next(c for c in CASES if c.name == name), torch.bfloat16)
    if refuses(sample, backend):
        return
    tensors = [sample.x, *sample.weights, sample.threshold, *sample.options.values()]
    before = [t.untyped_storage().clone() for t in tensors]
    sample.run(mlp, backend=backend)
    for old, t in zip(before, tensors, strict=True):
        assert old.tolist() == t.untyped_storage().tolist()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("where", ["x", "w_in", "b_in"])
def test_nan_before_the_decision_is_never_hidden(
    where: str, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """A NaN activation is active even at threshold inf, and a token run sparse beside it stays as it was."""
    sample = build(Case("nan", tokens=tokens, density=0, biases="i"), dtype)
    target = {"x": sample.x, "w_in": sample.w_in, "b_in": sample.options["b_in"]}[where]
    target[(0,) * target.dim()] = torch.nan
    out = sample.run(mlp, backend=backend)
    if where == "x":
        assert out[0].isnan().all()
        assert (out[1:] == 0).all()
    else:
        assert out.isnan().all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_rows_count_for_the_tokens_that_want_them(
    value: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """inf or NaN in an output row reaches every token that wants the neuron, and no other of the same call."""
    case = Case(
        "rows", tokens=tokens, f=70, activation="silu", scale="alternate", density="neurons", biases="i"
    )
    sample = build(case, dtype)
    sample.threshold[33] = torch.inf  # only the tokens of scale 0 want neuron 33
    clean = check(sample, backend)
    w_out_t = sample.w_out_t.clone()
    w_out_t[33, 7] = value
    out = replace(sample, w_out_t=w_out_t).run(mlp, backend=backend)
    dense = sample.options["token_scale"] == 0
    assert not out[dense][:, 7].isfinite().any()
    assert out[dense][:, :7].isfinite().all()
    assert out[~dense].isfinite().all()
    rest = {name: t for name, t in sample.options.items() if name != "token_scale"}
    check(replace(sample, x=sample.x[~dense], options=rest), backend, out[~dense])
    if backend == "native" and tokens <= 32:
        assert torch.equal(bits(out[~dense]), bits(clean[~dense]))


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_scale_counts_for_its_output(value: float, tokens: int, dtype: torch.dtype, backend: str) -> None:
    sample = build(Case("scales", tokens=tokens, f=70, activation="silu", density=1, int8=True), dtype)
    if refuses(sample, backend):
        return
    before = check(sample, backend)
    sample.options["scale_out"][33] = value
    out = sample.run(mlp, backend=backend)
    rest = torch.arange(out.shape[1]) != 33
    assert torch.equal(out[:, rest], before[:, rest])
    assert not out[:, 33].isfinite().any()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize(
    "activation", [a.name for a in activations.ACTIVATIONS.values() if a.zero_at_negative]
)
def test_exact_zeros_are_skipped(activation: str, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """At threshold 0 an activation of exactly 0 is not active: its row is not read, the rest is the dense MLP."""
    sample = build(Case("zeros", tokens=tokens, activation=activation, density=1, biases="io"), dtype)
    sample.options["b_in"][10:20] = -500
    sample.w_out_t[10:15] = torch.nan
    sample.w_out_t[15:20] = torch.inf
    check(sample, backend)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "identity", "relu"])
def test_zero_and_negative_zero_activate_nothing(
    activation: str, zero: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    sample = build(Case("zero", tokens=tokens, activation=activation, density=1, biases="i"), dtype)
    sample.x.fill_(zero)
    sample.options["b_in"].fill_(zero)
    sample.w_out_t.fill_(torch.nan)
    assert (sample.run(mlp, backend=backend) == 0).all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_a_kept_zero_takes_part_in_mean_compensation(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """With skipped_mean, a neuron at a = 0 and threshold 0 is kept: it contributes a − μ = −μ, not nothing."""
    case = Case("kept-zero", tokens=tokens, activation="relu", density=1, mean="mean+out", biases="i")
    sample = build(case, dtype)
    sample.options["b_in"][::2] = -500
    check(sample, backend)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("mean", ["mean", "mean+out"])
def test_scale_zero_is_the_dense_mlp(mean: str, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """s = 0 runs a token dense even where t = inf, and mean compensation cancels."""
    sample = build(Case("dense", tokens=tokens, density=0, scale="varied", mean=mean), dtype)
    sample.options["token_scale"].zero_()
    check(sample, backend)
    plain = build(Case("dense", tokens=tokens, density=1), dtype)
    assert torch.equal(Truth(sample).kept, Truth(plain).kept)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_the_threshold_itself_is_kept(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """|a| = s·t exactly is active, one representable number more is not."""
    sample = build(Case("edge", tokens=tokens, d=1, f=8, activation="identity", density=1), dtype)
    sample.x.fill_(1)
    sample.w_in.copy_(torch.tensor([0.5, -0.5] * 4)[:, None])
    sample.w_out_t.copy_(torch.tensor([1.0, -1.0] * 4)[:, None])
    sample.options["token_scale"] = torch.full((tokens,), 0.25)
    for threshold, sum_of_kept in (
        (2.0, 4.0),
        (torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)), 0.0),
    ):
        out = sample.run(mlp, backend=backend, threshold=torch.as_tensor(threshold))
        assert (out == sum_of_kept).all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_overflow_is_infinite(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """An output beyond the dtype's range is infinite with its sign, its neighbours are what they are."""
    sample = build(Case("overflow", tokens=tokens, f=64, activation="relu2", density=1), dtype)
    sample.w_in.abs_()
    sample.x.abs_()
    sample.w_out_t.abs_()
    sample.w_out_t[:, :5] = torch.finfo(dtype).max
    sample.w_out_t[:, 5:9] = -torch.finfo(dtype).max
    out = check(sample, backend)
    assert out[:, :9].isinf().all()
    assert out[:, 9:].isfinite().all()


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_subnormal_inputs_count(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Subnormal numbers are not flushed to 0 (bfloat16 dot products with AVX-512-BF16 do flush: documented)."""
    sample = build(Case("subnormal", tokens=tokens, d=40, activation="identity", density=1), dtype)
    tiny, big = torch.finfo(dtype).tiny, 2.0 ** (14 if dtype == torch.float16 else 100)
    sample.x.copy_(sample.x * tiny / 8)
    assert bool(((sample.x != 0) & (sample.x.abs() < tiny)).any())
    sample.w_in.copy_(sample.w_in.sign() * big)
    check(sample, backend)


@NATIVE
@EVERY_DTYPE
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
def test_a_token_does_not_depend_on_its_batch(activation: str, dtype: torch.dtype, backend: str) -> None:
    """A token's bits do not depend on its mates' numbers, and in small batches not on their being there."""
    for tokens, mean, d, int8 in (
        (2, "", 65, False),
        (4, "", 33, True),
        (9, "mean+out", 130, False),
        (32, "", 100, True),
    ):
        case = Case(
            "mates", tokens=tokens, d=d, f=301, activation=activation, mean=mean, scale="varied", biases="io", int8=int8
        )  # fmt: skip
        sample = build(case, dtype)
        out = sample.run(mlp, backend=backend)
        assert_independent(sample, mlp, backend)
        if not int8:
            sample.x[1] = torch.nan
            again = sample.run(mlp, backend=backend)
            rest = [i for i in range(tokens) if i != 1]
            assert torch.equal(bits(again[rest]), bits(out[rest]))


@NATIVE
@EVERY_ISA
@EVERY_DTYPE
@pytest.mark.usefixtures("threads")
def test_every_instruction_set(
    dtype: torch.dtype, isa: str, backend: str, use_isa: Callable[[str], None]
) -> None:
    use_isa(isa)
    torch.set_num_threads(1)  # the other tests run with all; small calls are quicker with one
    for case in CASES:
        try:
            check(build(case, dtype), backend)
        except Exception as error:
            raise AssertionError(f"case {case.name}") from error


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
@pytest.mark.parametrize("tokens", [32, 64])
def test_activation_over_its_whole_range(
    activation: str, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """φ by itself: one neuron, unit weights, so that token i's output is φ(x_i)."""
    sample = build(
        Case("sweep", tokens=tokens, d=1, f=1, activation=activation, density=1, weights="plain"), dtype
    )
    steep = torch.logspace(-3, 1.7, tokens // 2)
    sample.x.copy_(torch.cat([-steep, steep])[:, None])
    sample.w_in.fill_(1)
    sample.w_out_t.fill_(1)
    check(sample, backend)
    x = sample.x.clone()
    x[::3] = torch.nan
    out = replace(sample, x=x).run(mlp, backend=backend)
    assert torch.equal(out.isnan(), x.isnan())


_random_cases = st.builds(
    Case,
    name=st.just("random"),
    tokens=st.integers(0, 40),
    d=st.integers(0, 140),
    f=st.integers(0, 140),
    activation=st.sampled_from(list(activations.ACTIVATIONS)),
    density=st.sampled_from([0, 1, "one_column", "neurons", "some_inf"]),
    scale=st.sampled_from(["", "varied", "one_zero", "alternate"]),
    mean=st.sampled_from(["", "mean", "mean+out"]),
    biases=st.sampled_from(["", "i", "o", "io"]),
    weights=st.sampled_from(["plain", "guarded", "end", "interleaved", "repeated"]),
    x=st.sampled_from(["plain", "guarded", "end", "columns", "strided", "repeated", "leading"]),
    int8=st.sampled_from([False, False, True]),
)


@EVERY_BACKEND
@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=_random_cases, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_random_shapes_and_layouts(case: Case, dtype: torch.dtype, seed: int, backend: str) -> None:
    check(build(case, dtype, seed), backend)
