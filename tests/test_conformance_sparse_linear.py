"""What every backend of `sparse_linear` must satisfy; the truth is float64, apart from the package's reference."""

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
from sparsemlp import _env, _native, _triton, sparse_linear
from sparsemlp.ops.sparse_linear import OP
from sparsemlp.testing import assert_within_budget
from tests.backends import backends
from tests.samples import DTYPES
from tests.sparse_linear_cases import CASES, Case, Sample, Truth, build, small_blocks
from tests.test_conformance_gated_mlp import bits

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
EVERY_ISA = pytest.mark.parametrize("isa", [
    pytest.param(name, marks=[] if _native.problem() or name in _native.isa_names() else
                 [pytest.mark.skip(reason=f"this CPU has no {name}")])
    for name in _env.ISA_NAMES
])  # fmt: skip


def _tokens(*counts: int) -> pytest.MarkDecorator:
    """Every backend with every number of tokens; in Triton's interpreter 40 are many, and 140 slow."""
    return pytest.mark.parametrize(("backend", "tokens"), [
        pytest.param(param.values[0], tokens, marks=[
            *param.marks,
            *([pytest.mark.slow] if param.values[0] == "triton" and tokens > 40 and _triton.interpreting() else []),
        ])
        for param in backends(OP) for tokens in counts
    ])  # fmt: skip


FEW_AND_MANY = _tokens(1, 4, 40, 140)
WEIGHTS = pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])


def refuses(sample: Sample, backend: str) -> bool:
    """Whether the backend says that it has no int8 weights, which is then what is tested."""
    if backend != "triton" or "scale" not in sample.options:
        return False
    with pytest.raises(sparsemlp.BackendUnavailableError, match="weight_t is int8"):
        sample.run(sparse_linear, backend=backend)
    return True


def check(sample: Sample, backend: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Runs the sample unless `out` is given, and holds it against the truth; returns it as (T, N)."""
    truth = Truth(sample)
    if refuses(sample, backend):
        return truth.out
    if out is None:
        with small_blocks(sample, backend):
            out = sample.run(sparse_linear, backend=backend)
        assert out.shape == (*sample.x.shape[:-1], sample.weight_t.shape[1])
        assert out.dtype == sample.x.dtype
        assert out.is_contiguous()
    out = out.reshape(truth.out.shape)
    assert_within_budget(out, truth.peers(), truth.out)
    return out


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
    "case", [c for c in CASES if c.name.startswith(("size-", "int8-", "scale-"))], ids=str
)
def test_float64(case: Case, backend: str) -> None:
    """float64 inputs get a float64 answer, from the reference where no kernel computes it."""
    sample = build(case, torch.float64)
    if backend not in ("auto", "reference"):
        with pytest.raises(sparsemlp.BackendUnavailableError, match="x is float64"):
            sample.run(sparse_linear, backend=backend)
        return
    check(sample, backend)


@EVERY_DTYPE
@WEIGHTS
@_tokens(24, 40, 140)
def test_a_threshold_one_percent_off_fails(tokens: int, int8: bool, dtype: torch.dtype, backend: str) -> None:
    """The tolerance can tell: the suite would notice thresholds scaled by 0.99 or 1.01."""
    sample = build(Case("one-percent", tokens=tokens, k=300, n=33, density=0.4, int8=int8), dtype)
    check(sample, backend)
    if refuses(sample, backend):
        return
    for factor in (0.99, 1.01):
        wrong = sample.run(sparse_linear, backend=backend, threshold=sample.threshold * factor)
        with pytest.raises(AssertionError, match="outside the budget"):
            check(sample, backend, wrong)


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["w-guarded-T5", "x-strided-T6", "x-swapped-T34", "int8-end-strided-T2"])
def test_inputs_and_their_padding_are_untouched(name: str, backend: str) -> None:
    sample = build(replace(next(c for c in CASES if c.name == name), bias=True), torch.bfloat16)
    if refuses(sample, backend):
        return
    tensors = [sample.x, sample.weight_t, sample.threshold, *sample.options.values()]
    before = [t.untyped_storage().clone() for t in tensors]
    sample.run(sparse_linear, backend=backend)
    for old, t in zip(before, tensors, strict=True):
        assert old.tolist() == t.untyped_storage().tolist()


@EVERY_DTYPE
@WEIGHTS
@FEW_AND_MANY
def test_nan_is_never_hidden(tokens: int, int8: bool, dtype: torch.dtype, backend: str) -> None:
    """A NaN is kept even at threshold inf, and a token beside it stays as it was."""
    sample = build(Case("nan", tokens=tokens, density=0, int8=int8), dtype)
    if refuses(sample, backend):
        return
    sample.x[0, 7] = torch.nan
    out = sample.run(sparse_linear, backend=backend)
    assert out[0].isnan().all()
    assert (out[1:] == 0).all()


@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinite_inputs(value: float, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """inf is kept below threshold inf and gives what IEEE arithmetic gives: ±inf, and NaN beside a weight of 0."""
    sample = build(Case("inf", tokens=tokens, density=0.2, bias=True), dtype)
    sample.x[0, 7] = value
    sample.weight_t[7, 3] = 0
    out = check(sample, backend)
    assert out[0, 3].isnan()
    assert out[0, :3].isinf().all()


@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_rows_count_for_the_tokens_that_want_them(
    value: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """inf or NaN in a channel's weights reaches every token that wants the channel, and no other of the same call."""
    sample = build(Case("rows", tokens=tokens, k=70, scale="alternate", density="channels", bias=True), dtype)
    sample.threshold[33] = torch.inf  # only the tokens of scale 0 want channel 33
    sample.x[:, 33] = 1
    clean = check(sample, backend)
    weight_t = sample.weight_t.clone()
    weight_t[33, 7] = value
    out = sample.with_weights(weight_t).run(sparse_linear, backend=backend)
    dense = sample.options["token_scale"] == 0
    assert not out[dense][:, 7].isfinite().any()
    assert out[dense][:, :7].isfinite().all()
    assert out[~dense].isfinite().all()
    rest = {name: t for name, t in sample.options.items() if name != "token_scale"}
    check(replace(sample, x=sample.x[~dense], options=rest), backend, out[~dense])
    if backend == "native" and tokens <= 32:
        assert torch.equal(bits(out[~dense]), bits(clean[~dense]))


@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_scale_counts_for_its_output(value: float, tokens: int, dtype: torch.dtype, backend: str) -> None:
    sample = build(Case("scales", tokens=tokens, k=70, density=1, int8=True), dtype)
    if refuses(sample, backend):
        return
    before = check(sample, backend)
    sample.options["scale"][33] = value
    out = sample.run(sparse_linear, backend=backend)
    rest = torch.arange(out.shape[1]) != 33
    assert torch.equal(out[:, rest], before[:, rest])
    assert not out[:, 33].isfinite().any()


@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_are_skipped(zero: float, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """At threshold 0 an input of 0 or −0 is not active: its weights are not read, the rest is the dense layer."""
    sample = build(Case("zeros", tokens=tokens, density=1, bias=True), dtype)
    sample.x[:, 10:20] = zero
    sample.weight_t[10:15] = torch.nan
    sample.weight_t[15:20] = torch.inf
    check(sample, backend)
    sample.x.fill_(zero)
    sample.weight_t.fill_(torch.nan)
    assert torch.equal(sample.run(sparse_linear, backend=backend), sample.options["bias"].expand(tokens, -1))


@EVERY_DTYPE
@FEW_AND_MANY
def test_scale_zero_is_the_dense_layer(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """s = 0 runs a token dense even where t = inf."""
    sample = build(Case("dense", tokens=tokens, density=0, scale="varied", bias=True), dtype)
    sample.options["token_scale"].zero_()
    assert torch.equal(Truth(sample).active, sample.x != 0)
    check(sample, backend)


@EVERY_DTYPE
@FEW_AND_MANY
def test_the_threshold_itself_is_kept(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """|x| = s·t exactly is kept, one representable number more is not; t is not rounded to x's dtype."""
    sample = build(Case("edge", tokens=tokens, k=8, n=3, density=1), dtype)
    sample.x.copy_(torch.tensor([0.5, -0.5] * 4))
    sample.weight_t.copy_(torch.arange(8)[:, None])
    dense = sample.x.double() @ sample.weight_t.double()
    for s, t in ((None, 0.5), (0.25, 2.0)):
        scale = {} if s is None else {"token_scale": torch.full((tokens,), s)}
        call = replace(sample, options=scale)
        for threshold in (torch.tensor(t), torch.full((8,), t)):
            assert torch.equal(call.run(sparse_linear, backend=backend, threshold=threshold).double(), dense)
            more = torch.nextafter(threshold, torch.tensor(9.0))
            assert (call.run(sparse_linear, backend=backend, threshold=more) == 0).all()


@EVERY_DTYPE
@FEW_AND_MANY
def test_the_product_of_scale_and_threshold_is_float32s(
    tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """All backends skip the same entries: s·t is rounded once to float32. Inputs lie on both sides of the rounding."""
    s, t = torch.tensor(1 / 3), torch.tensor(3 * 1.0078125)  # 1.0078125 is exact in bfloat16
    limit = s * t
    sample = build(Case("product", tokens=tokens, k=4, n=2, density=1), dtype)
    around = torch.stack([torch.nextafter(limit, torch.tensor(0.0)), limit, limit, limit])
    sample.x.copy_(around)
    sample.weight_t.copy_(torch.tensor([[1.0], [2.0], [4.0], [8.0]]).expand(4, 2))
    sample = replace(sample, threshold=t, options={"token_scale": s.expand(tokens).contiguous()})
    out, kept = sample.run(sparse_linear, backend=backend), Truth(sample).active
    expected = torch.where(kept, sample.x.double(), 0) @ sample.weight_t.double()
    assert_within_budget(out, expected.to(dtype), expected)


@EVERY_DTYPE
@FEW_AND_MANY
def test_overflow_is_infinite(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """An output beyond the dtype's range is infinite with its sign, its neighbours are what they are."""
    sample = build(Case("overflow", tokens=tokens, k=64, density=1), dtype)
    sample.x.abs_().add_(1)
    sample.weight_t[:, :5] = torch.finfo(dtype).max
    sample.weight_t[:, 5:9] = -torch.finfo(dtype).max
    out = check(sample, backend)
    assert out[:, :9].isinf().all()
    assert out[:, 9:].isfinite().all()


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_subnormal_inputs_count(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Subnormal numbers are not flushed to 0, neither where they are compared nor where they are multiplied."""
    sample = build(Case("subnormal", tokens=tokens, k=40, density=1), dtype)
    tiny, big = torch.finfo(dtype).tiny, 2.0 ** (14 if dtype == torch.float16 else 100)
    sample.x.copy_(sample.x * tiny / 8)
    assert bool(((sample.x != 0) & (sample.x.abs() < tiny)).any())
    sample.weight_t.copy_(sample.weight_t.sign() * big)
    check(sample, backend)
    sample.threshold = torch.tensor(tiny / 8)
    assert 0.1 < Truth(sample).active.double().mean() < 0.9
    check(sample, backend)


@EVERY_DTYPE
@FEW_AND_MANY
def test_int8_products_are_rounded_once(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Whole numbers, and scales that are powers of two, add up exactly in float32: only the output is rounded."""
    sample = build(Case("exact", tokens=tokens, k=60, n=40, density=1, int8=True, bias=True), dtype)
    if refuses(sample, backend):
        return
    g = torch.Generator().manual_seed(0)
    sample.x = torch.randint(-8, 9, sample.x.shape, generator=g).to(dtype)
    sample.options["scale"] = 2.0 ** torch.randint(-5, 3, (40,), generator=g)
    sample.options["bias"] = (torch.randint(-99, 99, (40,), generator=g) / 16).to(dtype)
    assert torch.equal(sample.run(sparse_linear, backend=backend), Truth(sample).out.to(dtype))


@NATIVE
@EVERY_DTYPE
@WEIGHTS
def test_a_token_does_not_depend_on_its_batch(int8: bool, dtype: torch.dtype, backend: str) -> None:
    """Up to 32 tokens a token's result has the same bits alone and in any batch, whatever its mates hold."""
    for tokens, k in ((2, 65), (5, 33), (9, 130), (32, 1500)):
        sample = build(Case("mates", tokens=tokens, k=k, n=301, scale="varied", bias=True, int8=int8), dtype)
        out = sample.run(sparse_linear, backend=backend)
        for i in range(tokens):
            alone = sample.token(i).run(sparse_linear, backend=backend)
            assert torch.equal(bits(alone[0]), bits(out[i])), f"token {i} of {tokens}"
        sample.x[1] = torch.nan
        again = sample.run(sparse_linear, backend=backend)
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


@pytest.mark.parametrize("backend", backends(OP, only="triton"))
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("n", [96, 577])
def test_default_blocks(n: int, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """The cases run with small blocks; these with what a GPU without a file of its own gets."""
    sample = build(Case("default", tokens=tokens, k=210, n=n, bias=True, density="channels"), dtype)
    check(sample, backend, sample.run(sparse_linear, backend=backend))


_random_cases = st.builds(
    Case,
    name=st.just("random"),
    tokens=st.integers(0, 40),
    k=st.integers(0, 140),
    n=st.integers(0, 140),
    density=st.sampled_from([0, 0.3, 1, "one_channel", "channels", "some_inf"]),
    scale=st.sampled_from(["", "varied", "one_zero", "alternate"]),
    bias=st.booleans(),
    weights=st.sampled_from(["plain", "guarded", "end", "repeated"]),
    x=st.sampled_from(["plain", "guarded", "end", "columns", "strided", "repeated", "leading"]),
    int8=st.sampled_from([False, False, True]),
)


@EVERY_BACKEND
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=_random_cases, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_random_shapes_and_layouts(case: Case, dtype: torch.dtype, seed: int, backend: str) -> None:
    check(build(case, dtype, seed), backend)
