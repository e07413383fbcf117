"""`gated_mlp` with int8 weights: special values, reproducibility, gradients, autocast.

Numbers under every indicator, size and layout are cases of `tests.cases`, which `test_conformance_gated_mlp` runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparsemlp
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.testing import assert_within_budget
from tests.backends import backends
from tests.batches import assert_independent
from tests.cases import DTYPES, Case, Sample, Truth, build
from tests.test_conformance_gated_mlp import bits, check, not_built

BACKENDS = [
    p for p in backends(OP) if not_built(build(Case("any", int8=True), torch.float32), p.values[0]) is None
]
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
FEW_AND_MANY = pytest.mark.parametrize("tokens", [1, 4, 40, 130])


def as_float(sample: Sample, dtype: torch.dtype) -> Sample:
    """The same call with float weights of the values that the int8 ones stand for."""
    options = {name: t for name, t in sample.options.items() if not name.startswith("scale_")}
    w_gate, w_up, w_down_t = (w.to(dtype) for w in sample.values)
    return replace(sample, w_gate=w_gate, w_up=w_up, w_down_t=w_down_t, options=options)


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [24, 40, 130])
def test_a_threshold_one_percent_off_fails(tokens: int, dtype: torch.dtype, backend: str) -> None:
    sample = build(Case("one-percent", tokens=tokens, f=300, d=33, density=0.4, int8=True), dtype)
    check(sample, backend)
    for factor in (0.98, 1.02):
        wrong = sample.run(sparsemlp.gated_mlp, backend=backend, threshold=sample.threshold * factor)
        with pytest.raises(AssertionError, match="outside the budget"):
            check(sample, backend, wrong)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("name", ["scale_gate", "scale_up", "scale_down"])
def test_a_scale_off_fails(name: str, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Each matrix's scales count, and each output's own."""
    sample = build(Case("scales", tokens=tokens, density=1, int8=True), dtype)
    check(sample, backend)
    wrong = sample.run(sparsemlp.gated_mlp, backend=backend, **{name: sample.options[name].roll(1)})
    with pytest.raises(AssertionError, match="outside the budget"):
        check(sample, backend, wrong)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_x_that_is_not_finite(value: float, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Such a token gives what float arithmetic gives; the others are what they were."""
    sample = build(Case("not-finite", tokens=tokens, d=70, density=1, biases="gud", int8=True), dtype)
    before = check(sample, backend)
    x, i = sample.x.clone(), tokens // 2
    x[i, 9] = value
    changed = replace(sample, x=x)
    out = changed.run(sparsemlp.gated_mlp, backend=backend)
    rest = torch.arange(tokens) != i
    assert torch.equal(out[rest], before[rest])
    expected = as_float(changed, torch.float64)
    expected = replace(expected, x=x.double(), options={k: v.double() for k, v in expected.options.items()})
    truth = expected.run(sparsemlp.gated_mlp, backend="reference")[i]
    assert torch.equal(out[i].isnan(), truth.isnan())
    assert torch.equal(out[i].isinf(), truth.isinf())


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_large_and_small_entries_of_one_token(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """One outlier among the activations, as language models have them, leaves the others within the budget."""
    sample = build(Case("outlier", tokens=tokens, d=300, density=0.5, int8=True), dtype)
    sample.x[:, 7] = 300.0
    sample.w_gate[::2, 7] = 0
    check(sample, backend)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_what_is_skipped_is_not_read(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """A NaN scale of a neuron reaches the tokens that want it and no other of the same call."""
    case = Case("rows", tokens=tokens, f=70, scale="alternate", density="neurons", biases="gu", int8=True)
    sample = build(case, dtype)
    sample.threshold[33] = torch.inf  # only the tokens of scale 0 want neuron 33
    check(sample, backend)
    options = {**sample.options, "scale_up": sample.options["scale_up"].clone()}
    options["scale_up"][33] = torch.nan
    out = replace(sample, options=options).run(sparsemlp.gated_mlp, backend=backend)
    dense = sample.options["token_scale"] == 0
    assert out[dense].isnan().all()
    sparse = {name: t for name, t in sample.options.items() if name != "token_scale"}
    check(replace(sample, x=sample.x[~dense], options=sparse), backend, out[~dense])


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_a_large_neuron_leaves_the_others_their_precision(
    tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """Hidden values of thousands, whose down rows are 0 in most columns: there the other neurons are the output."""
    case = Case("large", tokens=tokens, d=130, f=200, activation="relu", density=1, biases="g", int8=True)
    sample = build(case, dtype)
    sample.options["b_gate"][77:79] = 3000
    sample.w_down_t[77:79, 1:] = 0
    truth, out = Truth(sample), check(sample, backend)
    assert_within_budget(out[:, 1:], [peer[:, 1:] for peer in truth.peers()], truth.out[:, 1:])


@NATIVE
@EVERY_DTYPE
@pytest.mark.parametrize("indicator", ["gate", "up", "product"])
def test_a_token_does_not_depend_on_its_batch(indicator: str, dtype: torch.dtype, backend: str) -> None:
    """Not even one with larger activations."""
    for tokens, d in ((2, 65), (4, 33), (9, 130), (32, 100), (40, 65)):
        case = Case(
            "mates", tokens=tokens, d=d, f=301, mean="mean+out", scale="varied", biases="gud", int8=True
        )
        sample = build(replace(case, indicator=indicator), dtype)
        sample.x[0] *= 100
        out = sample.run(sparsemlp.gated_mlp, backend=backend)
        assert torch.equal(bits(out), bits(sample.run(sparsemlp.gated_mlp, backend=backend)))
        assert_independent(sample, sparsemlp.gated_mlp, backend)


@pytest.mark.parametrize("extremes", [(-128, 127), (-127, -128)])
@EVERY_BACKEND
@FEW_AND_MANY
def test_every_int8_value_counts(tokens: int, extremes: tuple[int, int], backend: str) -> None:
    """-128, which `quantize_rows` never makes, is a weight like the others; long rows of extremes do not overflow."""
    sample = build(Case("extremes", tokens=tokens, d=2500, f=40, density=1, int8=True), torch.bfloat16)
    for w in sample.weights:
        w.copy_(torch.tensor(extremes, dtype=torch.int8).repeat(w.shape[0], w.shape[1] // 2))
        w[::3] = extremes[0]
    sample.x.copy_(sample.x.abs() + 1)
    check(sample, backend)


def test_gradients_of_x_biases_and_means() -> None:
    """Those of the float weights that the integers stand for; the integers and their scales have none."""
    sample = build(
        Case("gradients", tokens=4, mean="mean", biases="gud", density="neurons", int8=True), torch.float64
    )
    plain = as_float(sample, torch.float64)
    names = ("b_gate", "b_up", "b_down", "skipped_mean")

    def gradients(s: Sample) -> list[torch.Tensor]:
        leaves = [t.double().clone().requires_grad_() for t in (s.x, *(s.options[n] for n in names))]
        options = {**s.options, **dict(zip(names, leaves[1:], strict=True))}
        out = replace(s, x=leaves[0], options=options).run(sparsemlp.gated_mlp)
        g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return [out, *torch.autograd.grad(out, leaves, g)]

    for ours, truth in zip(gradients(sample), gradients(plain), strict=True):
        torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [3, 40])
def test_autocast_casts_x_and_biases_only(tokens: int, dtype: torch.dtype, grad: bool) -> None:
    """The result has the region's dtype with gradients and without, and the accuracy of that dtype."""
    sample = build(Case("autocast", tokens=tokens, density=1, biases="gud", int8=True), torch.float32)
    cast = {k: v.to(dtype) if k.startswith("b_") else v for k, v in sample.options.items()}
    low = replace(sample, x=sample.x.to(dtype), options=cast)
    truth = Truth(low)
    with torch.autocast("cpu", dtype):
        out = replace(sample, x=sample.x.requires_grad_(grad)).run(sparsemlp.gated_mlp)
    assert out.dtype == dtype
    assert out.requires_grad == grad
    assert_within_budget(out.detach(), truth.peers(), truth.out)
    if not grad:
        assert torch.equal(out, low.run(sparsemlp.gated_mlp))


def test_jvp_and_vmap_see_through() -> None:
    sample = build(Case("transforms", tokens=6, density="neurons", int8=True), torch.float64)
    plain = as_float(sample, torch.float64)
    direction = torch.randn(sample.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for s in (sample, plain):
        results.append(
            torch.func.jvp(lambda x, s=s: replace(s, x=x).run(sparsemlp.gated_mlp), (s.x,), (direction,))
        )
        results[-1] += (torch.func.vmap(lambda x, s=s: replace(s, x=x).run(sparsemlp.gated_mlp))(s.x),)
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth)
