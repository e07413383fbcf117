"""`gated_mlp` with a threshold on what the gate sees: special values, the threshold's edge, how the weight is stored.

Numbers under every indicator, size and layout are cases of `tests.cases`, which `test_conformance_gated_mlp` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparsemlp
from sparsemlp import _triton
from sparsemlp.ops import _gated_mlp_native as launcher
from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends
from tests.batches import assert_independent
from tests.cases import DTYPES, Case, Sample, Truth, build
from tests.test_conformance_gated_mlp import check


def _marked() -> Iterator[Any]:
    """Every backend; Triton's interpreter, which is slow, computes `tests.cases` and leaves these to a full run."""
    for p in backends(OP):
        later = p.values[0] == "triton" and _triton.interpreting()
        yield pytest.param(*p.values, marks=[*p.marks, *([pytest.mark.slow] if later else [])])


BACKENDS = list(_marked())
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
KERNELS = pytest.mark.parametrize("backend", [p for p in backends(OP) if p.values[0] in ("native", "triton")])
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
KERNELS = pytest.mark.parametrize(
    "backend", [p for p in BACKENDS if p.values[0] not in ("auto", "reference")]
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
FEW_AND_MANY = pytest.mark.parametrize("tokens", [1, 4, 40, 130])


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [8, 40, 130])
def test_an_input_threshold_one_percent_off_fails(tokens: int, dtype: torch.dtype, backend: str) -> None:
    sample = build(Case("one-percent", tokens=tokens, d=300, f=33, density=1, inputs=0.4), dtype)
    check(sample, backend)
    for factor in (0.97, 1.03):
        limit = sample.options["input_threshold"] * factor
        wrong = sample.run(sparsemlp.gated_mlp, backend=backend, input_threshold=limit)
        with pytest.raises(AssertionError, match="outside the budget"):
            check(sample, backend, wrong)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_the_threshold_itself_is_seen(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """|x_k| = t is seen, one representable number more is not; only the gate is cut off."""
    sample = build(Case("edge", tokens=tokens, d=2, f=8, activation="identity", density=1, inputs=1), dtype)
    sample.x.copy_(torch.tensor([0.5, -1.0]))
    sample.w_gate.copy_(torch.tensor([4.0, 0.5]).expand(8, 2))
    sample.w_up.copy_(torch.tensor([2.0, 0.0]).expand(8, 2))
    sample.w_down_t.fill_(1)
    above = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    for threshold, gate in ((torch.tensor(0.5), 1.5), (above, -0.5), (torch.tensor(torch.inf), 0.0)):
        out = sample.run(sparsemlp.gated_mlp, backend=backend, input_threshold=threshold)
        assert (out == 8 * gate * 1.0).all()


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
def test_nan_is_seen(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """A NaN of x is below no threshold, not even an infinite one; the other tokens are what they were."""
    sample = build(Case("nan", tokens=tokens, inputs=0, biases="g"), dtype)
    before = check(sample, backend)
    x = sample.x.clone()
    x[tokens // 2, 3] = torch.nan
    out = replace(sample, x=x).run(sparsemlp.gated_mlp, backend=backend)
    rest = torch.arange(tokens) != tokens // 2
    assert out[tokens // 2].isnan().all()
    if backend == "triton":  # which adds in another order where an output is not finite
        check(replace(sample, x=x[rest]), backend, out[rest])
    else:
        assert torch.equal(out[rest], before[rest])


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_columns_that_the_gate_does_not_see_are_not_read(
    value: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """inf or NaN in a column of the gate reaches the tokens that see it and no other; an exact 0 is not seen."""
    sample = build(Case("columns", tokens=tokens, f=70, inputs="channels", biases="gud"), dtype)
    limit = sample.options["input_threshold"]
    limit[5], limit[6], limit[7] = torch.inf, 0, 1
    sample.x[:, 6] = 0
    sample.x[:, 7] = 0.5
    sample.x[tokens // 2, 7] = 2
    check(sample, backend)
    w_gate = sample.w_gate.t().clone().t()
    w_gate[:, 5] = value
    w_gate[:, 6] = value
    out = replace(sample, w_gate=w_gate).run(sparsemlp.gated_mlp, backend=backend)
    check(sample, backend, out)
    w_gate[3, 7] = value
    out = replace(sample, w_gate=w_gate).run(sparsemlp.gated_mlp, backend=backend)
    sees = torch.arange(tokens) == tokens // 2
    assert not out[sees].isfinite().any()
    check(replace(sample, x=sample.x[~sees]), backend, out[~sees])


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [3, 40, 130])
@pytest.mark.parametrize("threshold", [-1.0, torch.nan])
def test_values_inside_an_input_threshold_tensor(threshold: float, tokens: int, backend: str) -> None:
    sample = build(Case("bad", tokens=tokens, inputs="channels"), torch.float32)
    sample.options["input_threshold"][2] = threshold
    if backend == "triton":
        return  # a GPU would have to stall for it
    message = r"input_threshold holds a negative or NaN value, expected values (>=|≥) 0"
    with pytest.raises(ValueError, match=message):
        sample.run(sparsemlp.gated_mlp, backend=backend)


@NATIVE
@EVERY_DTYPE
@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_a_token_does_not_depend_on_its_batch(int8: bool, dtype: torch.dtype, backend: str) -> None:
    for tokens, indicator in ((2, "gate"), (9, "product"), (32, "up")):
        case = Case("mates", tokens=tokens, d=100, f=301, biases="gud", inputs="channels", int8=int8)
        assert_independent(build(replace(case, indicator=indicator), dtype), sparsemlp.gated_mlp, backend)


def by_row(sample: Sample) -> Sample:
    return replace(sample, w_gate=sample.w_gate.contiguous())


@KERNELS
def test_a_gate_stored_by_row_is_refused_by_name(backend: str) -> None:
    sample = build(Case("by-row", inputs=0.5), torch.float32)
    message = r"needs w_gate stored input by input with input_threshold .* it has strides \(65, 1\)"
    with pytest.raises(sparsemlp.BackendUnavailableError, match=message):
        by_row(sample).run(sparsemlp.gated_mlp, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_gate_stored_by_row_is_computed_all_the_same(tokens: int, backend: str) -> None:
    sample = build(Case("by-row", tokens=tokens, inputs=0.5, indicator="product"), torch.float32)
    check(sample, backend, by_row(sample).run(sparsemlp.gated_mlp, backend=backend))


def test_a_number_is_an_input_threshold() -> None:
    sample = build(Case("number", inputs=0.5), torch.float32)
    limit = sample.options.pop("input_threshold")
    number, tensor = (sample.run(sparsemlp.gated_mlp, input_threshold=t) for t in (float(limit), limit))
    assert torch.equal(number, tensor)


@NATIVE
@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_few_tokens_go_straight_to_the_kernel(
    int8: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain call takes neither the public function's checks nor the dispatcher, and gives the same bits."""
    sample = build(Case("direct", inputs=0.5, int8=int8, mean="mean+out"), torch.bfloat16)
    straight = sample.run(sparsemlp.gated_mlp)
    made = []
    direct = launcher.direct
    monkeypatch.setattr(launcher, "direct", lambda *args: made.append(direct(*args)))
    assert torch.equal(sample.run(sparsemlp.gated_mlp), straight)
    assert torch.equal(made[0], straight)


def test_gradients_are_those_of_the_cut_formula() -> None:
    """The gate's path is closed where x_k is below its threshold, the up path is not."""
    sample = build(Case("gradients", tokens=4, biases="gud", inputs="channels"), torch.float64)
    leaves = [t.clone().requires_grad_() for t in (sample.x, *sample.weights)]
    x, w_gate, w_up, w_down_t = leaves
    limit = sample.options["input_threshold"].double()
    seen = torch.where(x.abs() < limit, 0.0, x)
    pre = torch.nn.functional.linear(seen, w_gate, sample.options["b_gate"])
    up = torch.nn.functional.linear(x, w_up, sample.options["b_up"])
    hidden = torch.where(Truth(sample).kept, torch.nn.functional.silu(pre) * up, 0.0)
    wanted = hidden @ w_down_t + sample.options["b_down"]
    out = replace(sample, x=x, w_gate=w_gate, w_up=w_up, w_down_t=w_down_t).run(sparsemlp.gated_mlp)
    g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out, wanted)
    for ours, truth in zip(
        torch.autograd.grad(out, leaves, g), torch.autograd.grad(wanted, leaves, g), strict=True
    ):
        torch.testing.assert_close(ours, truth)
