"""The workloads' own claims: fresh masks, exact quantiles as thresholds, bytes, and that the layer is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks import alternatives, machine, measure, registry, shapes
from benchmarks.gated_mlp import GatedMlp
from benchmarks.weight_bytes import share_read
from benchmarks.workload import Workload, layers_beyond_cache

SMALL = shapes.Shape("small", 96, 640, "silu")
OTHERS = {
    "gated_mlp": SMALL,
    "mlp": shapes.Shape("small", 96, 640, "gelu", "mlp"),
    "sparse_linear": shapes.Shape("small", 96, 640, "identity", "linear"),
}
OPERATORS = sorted(OTHERS)


def small(
    op: str, dtype: torch.dtype = torch.float32, tokens: int = 1, layers: int = 2, **options: Any
) -> Workload:
    shape = OTHERS[op]
    return registry.get(op).workload(shape, dtype, tokens, shape.activation, layers, **options)


@pytest.mark.parametrize("op", OPERATORS)
def test_masks_are_new_on_every_call_at_the_wanted_density(op: str) -> None:
    work = small(op)
    seen = {s: [work.fresh() for _ in range(300)] for s in (0.5, 0.9)}
    for sparsity, density in work.densities(seen).items():
        wanted = 1 - sparsity
        assert density.density == pytest.approx(wanted, rel=0.1)
        assert density.union == pytest.approx(density.density)  # T = 1
        assert density.overlap == pytest.approx(wanted, rel=0.2)  # independent: chance only
        assert density.channels == 1.0


def test_a_fixed_mask_would_be_noticed() -> None:
    work = small("gated_mlp")
    again = work.fresh()
    assert work.densities({0.9: [again] * 20})[0.9].overlap == 1.0


@pytest.mark.parametrize("op", OPERATORS)
def test_inputs_never_repeat(op: str) -> None:
    work = small(op, torch.bfloat16, tokens=2, layers=3)
    inputs = [x for _ in range(20) for x in work.fresh()]
    assert all(x.shape == (2, SMALL.d) and x.dtype == torch.bfloat16 for x in inputs)
    assert len({tuple(x.float().flatten().tolist()) for x in inputs}) == len(inputs)


@pytest.mark.parametrize("op", OPERATORS)
def test_tokens_of_a_call_have_independent_masks(op: str) -> None:
    work = small(op, tokens=4)
    density = work.densities({0.9: [work.fresh() for _ in range(200)]})[0.9]
    assert density.union == pytest.approx(1 - (1 - density.density) ** 4, rel=0.05)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("sparsity", [0.25, 0.9])
def test_threshold_is_the_exact_quantile_of_the_calibration_tokens(sparsity: float, op: str) -> None:
    work = small(op, layers=1)
    threshold = work.threshold(0, sparsity)
    assert threshold.shape == ()
    assert threshold.dtype == torch.float32
    values = work._calibration[work.compares, 0]
    assert (values < threshold).sum().item() == round(sparsity * len(values))


def test_relu_starts_from_its_exact_zeros() -> None:
    work = GatedMlp(SMALL, torch.float32, 1, "relu", layers=1)
    density = work.densities({0.0: [work.fresh() for _ in range(100)]})[0.0]
    assert density.density == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_what_is_timed_computes_the_mlp(dtype: torch.dtype, activation: str) -> None:
    work = GatedMlp(SMALL, dtype, 16, activation, layers=2)
    x, layer = work.fresh()[1], work.layers[1]
    wide = [t.double() for t in (x, layer.w_gate, layer.w_up, layer.w_down)]
    gate_out, up = F.linear(wide[0], wide[1]), F.linear(wide[0], wide[2])
    act = F.silu(gate_out) if activation == "silu" else F.gelu(gate_out, approximate="tanh")
    _is_timed_right(work, x, F.linear(act * up, wide[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_computes_the_mlp_without_a_gate(dtype: torch.dtype) -> None:
    work = small("mlp", dtype, tokens=16)
    x, w = work.fresh()[1], work.layers[1]
    hidden = F.gelu(F.linear(x.double(), w.w_in.double(), w.b_in.double()))
    _is_timed_right(work, x, F.linear(hidden, w.w_out.double(), w.b_out.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_computes_the_linear_layer(dtype: torch.dtype) -> None:
    work = small("sparse_linear", dtype, tokens=16)
    x = work.fresh()[1]
    _is_timed_right(work, x, F.linear(x.double(), work.layers[1].weight.double()))


def _is_timed_right(work: Workload, x: Tensor, truth: Tensor) -> None:
    """This package and both eager peers compute layer 1, within the budget of the first of these."""
    entry = registry.get(work.op)
    baseline = (entry.dense[0].build(work)(1, x) - truth).abs().max()
    budget = 2 * baseline + torch.finfo(work.dtype).eps * truth.abs().max()
    with torch.inference_mode():
        assert (work.own(0.0)(1, x) - truth).abs().max() <= budget
        torch.testing.assert_close(entry.dense[1].build(work)(1, x), entry.dense[0].build(work)(1, x))
        # A threshold that drops nine tenths must change the result, or nothing was skipped.
        assert (work.own(0.9)(1, x) - truth).abs().max() > budget


@pytest.mark.parametrize("op", OPERATORS)
def test_int8_weights_compute_the_same_to_their_resolution(op: str) -> None:
    """8 bits of the largest of a row of uniform numbers: an error of 1/254 · √(1/3)·√3 of their standard deviation."""
    work = small(op, tokens=16)
    x = work.fresh()[0]
    with torch.inference_mode():
        wide, narrow = work.own(0.0)(0, x), work.own(0.0, weights="int8")(0, x)
    distance = ((wide - narrow).norm() / wide.norm()).item()
    assert 0 < distance < work.matrices / 127
    assert work.derived("int8", 0, lambda: pytest.fail("quantised again")) is not None


@pytest.mark.parametrize("input_sparsity", [0.0, 0.5])
@pytest.mark.parametrize("indicator", ["gate", "up", "product"])
@pytest.mark.parametrize("weights", ["float", "int8"])
def test_options_are_the_operators_own(
    indicator: str, input_sparsity: float, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = small("gated_mlp", tokens=2, indicator=indicator, input_sparsity=input_sparsity)
    real, calls = sparsemlp.gated_mlp, []

    def spy(*args: Any, **given: Any) -> Tensor:
        calls.append(given)
        return real(*args, **given)

    monkeypatch.setattr(sparsemlp, "gated_mlp", spy)
    x = work.fresh()[0]
    with torch.inference_mode():
        work.own(0.5, weights=weights)(0, x)
        route = alternatives.explained(work.own(0.5, weights=weights), work).route
    assert route == ("reference" if machine.isa() == "none" else "sparse")
    assert calls[0].get("indicator", "gate") == indicator
    assert (calls[0].get("input_threshold") is not None) is (input_sparsity > 0)
    assert ("scale_gate" in calls[0]) is (weights == "int8")
    density = work.densities({0.5: [work.fresh() for _ in range(200)]})[0.5]
    assert density.density == pytest.approx(0.5, rel=0.1)
    union = 1 - input_sparsity**2 if input_sparsity else 1.0
    assert density.channels == pytest.approx(union, rel=0.05)


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_a_screened_call(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = small("gated_mlp", tokens=2, indicator="screen")
    real, calls = sparsemlp.gated_mlp, []

    def spy(*args: Any, **given: Any) -> Tensor:
        calls.append(given)
        return real(*args, **given)

    monkeypatch.setattr(sparsemlp, "gated_mlp", spy)
    x = work.fresh()[0]
    with torch.inference_mode():
        work.own(0.5, weights=weights)(0, x)
        work.own(0.0, weights=weights)(0, x)
    assert calls[0]["screen_gate"].bits == 4
    assert [call.get("indicator", "gate") for call in calls] == ["screen", "gate"]
    density = work.densities({0.5: [work.fresh() for _ in range(200)]})[0.5]
    assert density.density == pytest.approx(0.5, rel=0.1)
    itemsize = work.dtype.itemsize if weights == "float" else 1
    matrix = work.shape.d * work.shape.f
    assert work.bytes_read(0.25, weights=weights) == pytest.approx(matrix * (0.75 * itemsize + 2 * 4.5 / 8))


@pytest.mark.parametrize("indicator", ["gate", "up", "product"])
def test_what_is_compared_is_the_indicator(indicator: str) -> None:
    work = small("gated_mlp", tokens=5, indicator=indicator)
    x, w = work.fresh()[1], work.layers[1]
    a, u = F.silu(F.linear(x, w.w_gate)), F.linear(x, w.w_up)
    found, nonzero = work.compared(1, x)
    torch.testing.assert_close(found, {"gate": a, "up": u, "product": a * u}[indicator].abs())
    assert torch.equal(nonzero, a != 0)
    cut = small("gated_mlp", tokens=5, indicator=indicator, input_sparsity=0.5)
    read = cut.channels(1, x)
    assert read is not None
    a = F.silu(F.linear(torch.where(read, x, 0), w.w_gate))  # the same seed, the same weights
    torch.testing.assert_close(cut.compared(1, x)[0], {"gate": a, "up": u, "product": a * u}[indicator].abs())


def test_what_is_compared_without_a_gate_has_the_bias() -> None:
    work = small("mlp", tokens=5)
    x, w = work.fresh()[1], work.layers[1]
    found, nonzero = work.compared(1, x)
    torch.testing.assert_close(found, F.gelu(F.linear(x, w.w_in, w.b_in)).abs())
    assert nonzero.all()


def test_wrong_shapes_and_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"^shape is 'vit-b', an MLP without a gate, expected a gated MLP"):
        GatedMlp(shapes.get("vit-b"), torch.float32, 1, "gelu", 1)
    with pytest.raises(ValueError, match="indicator is 'down', expected one of: gate, up, product, screen"):
        small("gated_mlp", indicator="down")
    with pytest.raises(ValueError, match="input_sparsity is given with indicator 'screen'"):
        small("gated_mlp", indicator="screen", input_sparsity=0.5)
    with pytest.raises(ValueError, match="activation is 'fatrelu', which has parameters"):
        GatedMlp(SMALL, torch.float32, 1, "fatrelu", 1)


def test_weights_are_shared_between_token_counts() -> None:
    row = shapes.get("tiny")
    case = measure.Case(
        registry.get("gated_mlp"), row, "fp32", 1, (0.0,), "silu", rounds=1, threads=1, layers=2
    )
    first = measure.build(case)
    second = registry.get("gated_mlp").workload(row, torch.float32, 4, "silu", 2, share=first)
    assert second.layers is first.layers
    assert second._derived is first._derived
    assert second.tokens == 4


def test_layers_leave_the_cache() -> None:
    assert layers_beyond_cache(352_000_000, 32 * 2**20) == 3
    assert layers_beyond_cache(352_000_000, 32 * 2**20, least=1) == 1
    small_mlp = layers_beyond_cache(5_308_416, 32 * 2**20)
    assert small_mlp * 5_308_416 > 4 * 32 * 2**20
    assert small_mlp * 5_308_416 / 3 > 32 * 2**20  # even a walk over the gates alone


def test_bytes_follow_the_rows_read() -> None:
    work = GatedMlp(SMALL, torch.bfloat16, 1, "silu", layers=1)
    assert work.bytes_dense == 3 * SMALL.d * SMALL.f * 2
    assert work.bytes_read(1.0) == work.bytes_dense
    assert work.bytes_read(0.0) == work.bytes_dense / 3


@pytest.mark.parametrize(
    ("arguments", "thirds"),
    [
        (dict(union=0.1), 1 + 0.2),
        (dict(union=0.1, indicator="up"), 1 + 0.2),
        (dict(union=0.1, indicator="product"), 2 + 0.1),
        (dict(union=0.1, channels=0.5), 0.5 + 0.2),
        (dict(union=0.1, channels=0.5, indicator="up"), 0.5 + 1 + 0.1),
        (dict(union=0.1, channels=0.5, indicator="product"), 0.5 + 1 + 0.1),
    ],
)
def test_bytes_of_every_indicator(arguments: dict[str, Any], thirds: float) -> None:
    assert share_read("gated_mlp", **arguments) == pytest.approx(thirds / 3)
    assert share_read("mlp", 0.1) == pytest.approx(0.55)
    assert share_read("sparse_linear", 0.1) == 0.1
