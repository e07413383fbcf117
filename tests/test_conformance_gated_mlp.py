"""What every backend of `gated_mlp` must satisfy; the truth is float64 and independent of the package's reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsemlp
from sparsemlp import _triton, activations
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.testing import assert_within_budget
from tests.backends import BUILT, backends, decided_from
from tests.batches import assert_independent
from tests.blocks import small_blocks
from tests.cases import CASES, DTYPES, Case, Sample, Truth, build

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
FEW_AND_MANY = pytest.mark.parametrize("tokens", [1, 4, 40, 130])


def check(sample: Sample, backend: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Runs the sample unless `out` is given, and holds it against the truth; returns it as (T, D)."""
    truth = Truth(sample)
    refusal = not_built(sample, backend)
    if refusal is not None:
        with pytest.raises(sparsemlp.BackendUnavailableError, match=refusal):
            sample.run(sparsemlp.gated_mlp, backend=backend)
        return truth.out
    if out is None:
        with small_blocks(sample, backend):
            out = sample.run(sparsemlp.gated_mlp, backend=backend)
        assert out.shape == sample.x.shape
        assert out.dtype == sample.x.dtype
        assert out.is_contiguous()
    out = out.reshape(truth.out.shape)
    flips = truth.flips(decided_from(backend, truth.x.shape[0], out.dtype))
    assert_within_budget(out, truth.peers(), truth.out, flips=flips)
    return out


def not_built(sample: Sample, backend: str) -> str | None:
    """What a backend's refusal of the sample says, where the kernel does not exist yet."""
    if backend != "triton":
        return None
    return "triton: .*w_gate is int8" if "scale_gate" in sample.options else None


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


@pytest.mark.parametrize(("case", "dtype", "backend"), _every_case())
def test_output(case: Case, dtype: torch.dtype, backend: str) -> None:
    check(build(case, dtype), backend)


@pytest.mark.skipif(not BUILT, reason="no compiled library beside the package")
def test_a_built_library_loads() -> None:
    """Nothing is skipped silently where the library exists."""
    from sparsemlp import _env, _native

    assert _native.problem() is None or not _env.NATIVE


@EVERY_BACKEND
@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith(("size-", "mean-"))], ids=str)
def test_float64(case: Case, backend: str) -> None:
    """float64 inputs get a float64 answer, from the reference where no kernel computes it."""
    sample = build(case, torch.float64)
    if backend not in ("auto", "reference"):
        with pytest.raises(sparsemlp.BackendUnavailableError, match="x is float64"):
            sample.run(sparsemlp.gated_mlp, backend=backend)
        return
    check(sample, backend)


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [24, 40, 130])
def test_a_threshold_one_percent_off_fails(dtype: torch.dtype, tokens: int, backend: str) -> None:
    """The tolerance can tell: the suite would notice thresholds scaled by 0.99 or 1.01."""
    sample = build(Case("one-percent", tokens=tokens, f=300, d=33, density=0.4), dtype)
    check(sample, backend)
    for factor in (0.99, 1.01):
        wrong = sample.run(sparsemlp.gated_mlp, backend=backend, threshold=sample.threshold * factor)
        with pytest.raises(AssertionError, match="outside the budget"):
            check(sample, backend, wrong)


@EVERY_BACKEND
@pytest.mark.parametrize(
    "name", ["w-interleaved-T5", "w-guarded-T33", "x-strided-T6", "mean-gud-neurons-varied-T4"]
)
def test_inputs_and_their_padding_are_untouched(name: str, backend: str) -> None:
    case = next(
        (c for c in CASES if c.name == name), Case(name, mean="mean+out", biases="gud", scale="varied")
    )
    sample = build(case, torch.bfloat16)
    tensors = [sample.x, *sample.weights, sample.threshold, *sample.options.values()]
    before = [
        bits(t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)).clone()
        for t in tensors
    ]
    sample.run(sparsemlp.gated_mlp, backend=backend)
    for old, t in zip(before, tensors, strict=True):
        assert torch.equal(old, bits(t.as_strided((old.numel(),), (1,), 0)))


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("where", ["x", "w_gate", "b_gate"])
def test_nan_before_the_decision_is_never_hidden(
    where: str, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """A NaN activation is active even at threshold inf, and a token run sparse beside it stays as it was."""
    sample = build(Case("nan", tokens=tokens, density=0, biases="g"), dtype)
    target = {"x": sample.x, "w_gate": sample.w_gate, "b_gate": sample.options["b_gate"]}[where]
    target[(0,) * target.dim()] = torch.nan
    out = sample.run(sparsemlp.gated_mlp, backend=backend)
    if where == "x":
        assert out[0].isnan().all()
        assert (out[1:] == 0).all()
    else:
        assert out.isnan().all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", ["w_up", "w_down_t", "b_up"])
def test_rows_count_for_the_tokens_that_want_them(
    where: str, value: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """inf or NaN in an up or down row reaches every token that wants the neuron, and no other of the same call."""
    case = Case("rows", tokens=tokens, f=70, scale="alternate", density="neurons", biases="gu")
    sample = build(case, dtype)
    sample.threshold[33] = torch.inf  # only the tokens of scale 0 want neuron 33
    clean = check(sample, backend)
    poisoned = replace(
        sample, w_up=sample.w_up.clone(), w_down_t=sample.w_down_t.clone(), options=dict(sample.options)
    )
    if where == "b_up":
        poisoned.options["b_up"] = poisoned.options["b_up"].clone()
        poisoned.options["b_up"][33] = value
    else:
        getattr(poisoned, where)[33, 7] = value
    out = poisoned.run(sparsemlp.gated_mlp, backend=backend)
    dense = sample.options["token_scale"] == 0
    hit = out[dense][:, 7:8] if where == "w_down_t" else out[dense]
    assert not hit.isfinite().any()
    if where == "w_down_t":
        assert out[dense][:, :7].isfinite().all()
    assert out[~dense].isfinite().all()
    check(replace(sample, x=sample.x[~dense], options=_without_scale(sample)), backend, out[~dense])
    if backend == "native" and tokens <= 32:
        assert torch.equal(bits(out[~dense]), bits(clean[~dense]))


def _without_scale(sample: Sample) -> dict[str, torch.Tensor]:
    return {k: v for k, v in sample.options.items() if k != "token_scale"}


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize(
    "activation", [a.name for a in activations.ACTIVATIONS.values() if a.zero_at_negative]
)
def test_exact_zeros_are_skipped(activation: str, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """At threshold 0 an activation of exactly 0 is not active: its rows are not read, the rest is the dense MLP."""
    sample = build(Case("zeros", tokens=tokens, activation=activation, density=1, biases="gu"), dtype)
    sample.options["b_gate"][10:20] = -500
    sample.w_up[10:15] = torch.nan
    sample.w_down_t[15:20] = torch.inf
    sample.options["b_up"][12] = torch.nan
    check(sample, backend)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize(
    ("indicator", "unread"), [("up", "w_gate"), ("up", "w_down_t"), ("product", "w_down_t")]
)
def test_rows_that_the_indicator_leaves_unread(
    indicator: str, unread: str, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """What a skipped neuron holds in the rows behind the decision does not reach the output."""
    sample = build(
        Case("unread", tokens=tokens, f=70, density="neurons", biases="gud", indicator=indicator), dtype
    )
    sample.threshold[33] = torch.inf
    check(sample, backend)
    getattr(sample, unread)[33] = torch.nan
    if unread == "w_gate":
        sample.options["b_gate"][33] = torch.inf
    clean = build(
        Case("unread", tokens=tokens, f=70, density="neurons", biases="gud", indicator=indicator), dtype
    )
    clean.threshold[33] = torch.inf
    check(clean, backend, sample.run(sparsemlp.gated_mlp, backend=backend))


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "identity", "relu"])
def test_zero_and_negative_zero_activate_nothing(
    activation: str, zero: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    sample = build(Case("zero", tokens=tokens, activation=activation, density=1, biases="gu"), dtype)
    sample.x.fill_(zero)
    sample.options["b_gate"].fill_(zero)
    sample.w_up.fill_(torch.nan)
    sample.w_down_t.fill_(torch.nan)
    assert (sample.run(sparsemlp.gated_mlp, backend=backend) == 0).all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_a_kept_zero_takes_part_in_mean_compensation(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """With skipped_mean, a neuron at a = 0 and threshold 0 is kept: it contributes a·u − μ = −μ, not nothing."""
    sample = build(
        Case("kept-zero", tokens=tokens, activation="relu", density=1, mean="mean+out", biases="g"), dtype
    )
    sample.options["b_gate"][::2] = -500
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
    sample.w_gate.copy_(torch.tensor([0.5, -0.5] * 4)[:, None])
    sample.w_up.fill_(1)
    sample.w_down_t.fill_(1)
    sample.options["token_scale"] = torch.full((tokens,), 0.25)
    for threshold, kept in ((2.0, True), (torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)), False)):
        sample.threshold = torch.as_tensor(threshold)
        sample.w_gate[1::2] = 0 if kept else -0.5
        out = sample.run(sparsemlp.gated_mlp, backend=backend)
        assert (out == (2.0 if kept else 0.0)).all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_overflow_is_infinite(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """An output beyond the dtype's range is infinite with its sign, its neighbours are what they are."""
    sample = build(Case("overflow", tokens=tokens, f=64, activation="relu", density=1), dtype)
    for w in (sample.w_gate, sample.w_up):
        w.abs_()
    sample.x.abs_()
    sample.w_down_t.abs_()
    sample.w_down_t[:, :5] = torch.finfo(dtype).max
    sample.w_down_t[:, 5:9] = -torch.finfo(dtype).max
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
    sample.w_gate.copy_(sample.w_gate.sign() * big)
    sample.w_up.copy_(sample.w_up.sign() * big)
    check(sample, backend)


@NATIVE
@EVERY_DTYPE
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
def test_a_token_does_not_depend_on_its_batch(activation: str, dtype: torch.dtype, backend: str) -> None:
    """A token's bits do not depend on its mates' numbers, and in small batches not on their being there."""
    for tokens, mean, d in ((2, "", 65), (4, "", 33), (9, "mean+out", 130), (32, "", 100), (40, "", 65)):
        case = Case(
            "mates", tokens=tokens, d=d, f=301, activation=activation, mean=mean, scale="varied", biases="gud"
        )
        assert_independent(build(case, dtype), sparsemlp.gated_mlp, backend)


@NATIVE
@EVERY_DTYPE
def test_a_token_does_not_depend_on_nan_mates(dtype: torch.dtype, backend: str) -> None:
    sample = build(Case("nan-mates", tokens=8, d=100, f=301), dtype)
    before = sample.run(sparsemlp.gated_mlp, backend=backend)
    sample.x[2] = torch.nan
    sample.x[5, 3] = torch.inf
    after = sample.run(sparsemlp.gated_mlp, backend=backend)
    rest = [0, 1, 3, 4, 6, 7]
    assert torch.equal(bits(before[rest]), bits(after[rest]))


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
@pytest.mark.parametrize("tokens", [32, 64])
def test_activation_over_its_whole_range(
    activation: str, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """φ by itself: one neuron, unit weights, so that token i's output is φ(x_i)."""
    case = Case(
        "sweep", tokens=tokens, d=1, f=1, activation=activation, density=1, biases="u", weights="plain"
    )
    sample = build(case, dtype)
    steep = torch.logspace(-3, 1.7, tokens // 2)
    sample.x.copy_(torch.cat([-steep, steep])[:, None])
    sample.w_gate.fill_(1)
    sample.w_down_t.fill_(1)
    sample.w_up.zero_()
    sample.options["b_up"].fill_(1)
    check(sample, backend)
    x = sample.x.clone()
    x[::3] = torch.nan
    out = replace(sample, x=x).run(sparsemlp.gated_mlp, backend=backend)
    assert torch.equal(out.isnan(), x.isnan())


_layouts = st.sampled_from(["plain", "guarded", "end", "interleaved", "triple", "repeated"])
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
    biases=st.sampled_from(["", "g", "ud", "gud"]),
    weights=_layouts,
    indicator=st.sampled_from(["gate", "gate", "up", "product"]),
    inputs=st.sampled_from(["", "", "", 0.5, "channels"]),
    int8=st.sampled_from([False, False, True]),
    x=st.sampled_from(["plain", "guarded", "end", "columns", "strided", "repeated", "leading"]),
)


@EVERY_BACKEND
@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=_random_cases, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_random_shapes_and_layouts(case: Case, dtype: torch.dtype, seed: int, backend: str) -> None:
    check(build(case, dtype, seed), backend)
