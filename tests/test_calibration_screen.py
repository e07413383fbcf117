"""Method "screen": what the pass sees against float64 computed the long way, thresholds, means, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import sparsemlp
from sparsemlp import _native
from sparsemlp.calibration import Statistics, calibrate, collect, fingerprints
from sparsemlp.calibration.histogram import Cumulative, LayerStatistics
from sparsemlp.calibration.screen import layer_screens
from sparsemlp.integrations.transformers import densify, sparsify
from sparsemlp.nn._screens import copies
from sparsemlp.screen import pack
from tests.calibration_samples import EPS, correlated, layer_of, statistics_of
from tests.screen_samples import silu_scores
from tests.test_calibration_collect import UpFirst, ids, tiny_llama, tiny_phi3
from tests.tiny_ungated_models import make

WIDE = {"hidden_size": 80, "intermediate_size": 72}
FIRST = "model.layers.0.mlp"


def truth_of(model: nn.Module, batches: list[Tensor], bits: int, group: int) -> dict[str, tuple[Tensor, ...]]:
    """(a, u, m, slack of m) in float64 of each MLP, from its inputs and its own weights."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: seen.setdefault(name, []).append(args[0]))
        for name, module in model.named_modules()
        if name.endswith(".mlp")
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    out = {}
    for name, inputs in seen.items():
        mlp, x = model.get_submodule(name), torch.cat([x.flatten(0, -2) for x in inputs])
        if hasattr(mlp, "gate_up_proj"):
            w_gate, w_up = mlp.gate_up_proj.weight.detach().chunk(2)
        else:
            w_gate, w_up = mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()
        p, u = (x.double() @ w.double().T for w in (w_gate, w_up))
        out[name] = (nn.functional.silu(p), u, *silu_scores(x, w_gate, w_up, bits, group))
    return out


def wide_llama() -> nn.Module:
    return tiny_llama(**WIDE)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_pass_bins_the_exact_h_by_the_screens_score(bits: int, group: int) -> None:
    model, batches = wide_llama(), [ids(2, 30), ids(1, 17)]
    statistics = collect(model, batches, screen=(bits, group), progress=False)
    assert (statistics.screen, statistics.tokens) == ((bits, group), 77)
    check_against_truth(statistics, truth_of(model, batches, bits, group))


def test_merged_gate_and_up() -> None:
    model, batches = tiny_phi3(), [ids(2, 30)]
    statistics = collect(model, batches, screen=(4, 32), progress=False)
    check_against_truth(statistics, truth_of(model, batches, 4, 32))


def check_against_truth(statistics: Statistics, truth: dict[str, tuple[Tensor, ...]]) -> None:
    assert list(statistics.screened) == list(truth)
    for name, (a, u, m, slack) in truth.items():
        layer, h = statistics.screened[name], a * u
        cumulative = Cumulative(layer)
        assert bool((layer.count.sum(0) == len(a)).all())
        sizes = h.abs().sum(0)
        assert bool(((cumulative.total.sum_h - h.sum(0)).abs() <= 1e-4 * sizes).all())
        quantiles = torch.quantile(m.abs().flatten(), torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
        for at in torch.searchsorted(cumulative.edges, quantiles):
            edge = cumulative.edges[at].expand(a.shape[1])
            below, sure = cumulative.below(edge), m.abs() < edge - slack
            unsure = (m.abs() - edge).abs() <= slack
            assert float(unsure.double().mean()) < 0.01, "the check must see nearly every entry"
            assert bool(((below.tokens - sure.sum(0)).abs() <= unsure.sum(0)).all())
            for ours, entries in ((below.sum_h, h), (below.sum_h2, h**2), (below.sum_u2, u**2)):
                off = (ours - entries.where(sure, 0).sum(0)).abs()
                assert bool(
                    (off <= entries.abs().where(unsure, 0).sum(0) + 1e-4 * entries.abs().sum(0)).all()
                )


def test_the_other_methods_see_what_they_see_without_a_screen() -> None:
    model, batches = wide_llama(), [ids(2, 30)]
    plain = collect(model, batches, progress=False)
    assert plain.screen is plain.screened is None
    both = collect(model, batches, screen=(4, 32), progress=False)
    for one, other in zip(plain.layers.values(), both.layers.values(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one.tables(), other.tables(), strict=True))
    assert plain.plan(0.5, "upaware") == both.plan(0.5, "upaware")


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_plan_skips_the_target_by_the_screens_scores(target: float) -> None:
    model, batches = wide_llama(), [ids(4, 100)]
    plan = calibrate(model, batches, target, "screen", bits=3, group=64, progress=False)
    assert (plan.method, plan.bits, plan.group, plan.target) == ("screen", 3, 64, target)
    for name, (a, u, m, slack) in truth_of(model, batches, 3, 64).items():
        layer = plan.layers[name]
        assert layer.threshold.shape == ()
        skip = m.abs() < layer.threshold
        assert float(skip.double().mean()) == pytest.approx(target, abs=0.01)
        assert layer.sparsity == pytest.approx(target, abs=1e-6)
        h = a * u
        exact = h.where(skip, 0).sum(0) / skip.sum(0).clamp(min=1)
        # Only entries in the threshold's bin (1.25× wide at most) can be counted otherwise, as in the methods' test.
        unsure = (m.abs() > layer.threshold / 1.25 - slack) & (m.abs() < layer.threshold * 1.25 + slack)
        counted = (skip & ~unsure).sum(0).clamp(min=1)
        bound = (h.abs().where(unsure, 0).sum(0) + exact.abs() * unsure.sum(0)) / counted
        ours = layer.skipped_mean.double()
        assert bool(((ours - exact).abs() <= bound + 1e-4 * h.abs().mean(0)).all())
        by_gate = h.where(a.abs() < torch.quantile(a.abs(), target), 0).sum(0) / skip.sum(0).clamp(min=1)
        assert float((ours - exact).abs().mean()) < 0.1 * float((by_gate - exact).abs().mean())


def test_bits_default_to_four_in_groups_of_32() -> None:
    model, batches = wide_llama(), [ids(1, 20)]
    plan = calibrate(model, batches, 0.5, "screen", progress=False)
    assert (plan.bits, plan.group) == (4, 32)
    assert plan == collect(model, batches, screen=(4, 32), progress=False).plan(0.5, "screen")
    for method in ("cats", "upaware"):
        other = calibrate(model, batches, 0.5, method, progress=False)
        assert other.bits is other.group is None


def test_without_means() -> None:
    statistics = collect(wide_llama(), [ids(2, 40)], screen=(4, 32), progress=False)
    with_means, without = (statistics.plan(0.6, "screen", mean=mean) for mean in (True, False))
    for name, layer in without.layers.items():
        assert layer.skipped_mean is None
        assert torch.equal(layer.threshold, with_means.layers[name].threshold)
        assert layer.hidden_error > with_means.layers[name].hidden_error


def test_more_bits_lose_less() -> None:
    model, batches = wide_llama(), [ids(4, 100)]
    errors = [
        calibrate(model, batches, 0.5, "screen", bits=bits, progress=False).layers[FIRST].hidden_error
        for bits in (3, 4, 8)
    ]
    assert errors[0] > errors[1] > errors[2]
    gate = calibrate(model, batches, 0.5, "upaware", progress=False).layers[FIRST].hidden_error
    assert gate > errors[0]


@pytest.mark.parametrize("mean", [True, False])
def test_hidden_error_is_the_operators(mean: bool) -> None:
    """With the identity as down projection `gated_mlp` returns h itself, μ where the screen skips."""
    torch.manual_seed(0)
    n = 96
    mlp = UpFirst()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (nn.Linear(n, n) for _ in range(3))
    x = torch.randn(3000, n) * 2
    plan = calibrate(nn.Sequential(mlp), [x], 0.6, "screen", bits=3, mean=mean, progress=False)
    layer = plan.layers["0"]
    with torch.no_grad():
        gate, up = mlp.gate_proj, mlp.up_proj
        out = sparsemlp.gated_mlp(
            x, gate.weight, up.weight, torch.eye(n), threshold=layer.threshold, skipped_mean=layer.skipped_mean,
            b_gate=gate.bias, b_up=up.bias, indicator="screen", screen_gate=pack(gate.weight, plan.bits, plan.group),
            screen_up=pack(up.weight, plan.bits, plan.group),
        )  # fmt: skip
        h = (mlp.act_fn(gate(x).double()) * up(x).double()).double()
    assert layer.hidden_error > 0.01
    exact = float((out.double() - h).square().sum() / h.square().sum())
    assert layer.hidden_error == pytest.approx(exact, rel=0.02)
    replaced = torch.zeros(n) if layer.skipped_mean is None else layer.skipped_mean
    assert float((out == replaced).double().mean()) == pytest.approx(0.6, abs=0.005)


def test_padding_is_left_out() -> None:
    model, text = wide_llama(), ids(2, 12)
    mask = torch.ones_like(text)
    mask[0, 8:] = 0
    batch = {"input_ids": text, "attention_mask": mask}
    padded = collect(model, [batch], screen=(4, 32), progress=False)
    alone = collect(model, [text[:1, :8], text[1:]], screen=(4, 32), progress=False)
    full = collect(model, [text], screen=(4, 32), progress=False)
    assert padded.tokens == 20
    for name, one in padded.screened.items():
        # The same values up to attention's summation order, so nearly all of them in the same bins.
        assert int(one.count.sum()) == 20 * 72
        assert int((one.count - alone.screened[name].count).abs().sum()) <= 40
        assert int((one.count - full.screened[name].count).abs().sum()) >= 4 * 72
        torch.testing.assert_close(one.sum_u2.sum(0), alone.screened[name].sum_u2.sum(0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """What the screen of the same weights and texts sees in float32, nearly."""
    model, batches = wide_llama().to(dtype), [ids(2, 60)]
    plan = calibrate(model, batches, 0.5, "screen", progress=False)
    wide = calibrate(model.float(), batches, 0.5, "screen", progress=False)
    for name, layer in plan.layers.items():
        assert layer.threshold.dtype == layer.skipped_mean.dtype == torch.float32
        assert layer.sparsity == pytest.approx(0.5, abs=1e-6)
        assert float(layer.threshold) == pytest.approx(float(wide.layers[name].threshold), rel=0.05)


def test_without_the_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = wide_llama(), [ids(2, 60)]
    native = collect(model, batches, screen=(4, 32), progress=False)
    monkeypatch.setattr(_native, "problem", lambda: "switched off")
    plain = collect(model, batches, screen=(4, 32), progress=False)
    for name, one in native.screened.items():
        # Sums in another order: an entry at an edge may change bins.
        assert int((one.count - plain.screened[name].count).abs().sum()) <= 0.001 * one.count.sum()


def test_biases_and_an_up_layer_that_is_called_first() -> None:
    torch.manual_seed(0)
    mlp, x = UpFirst(), torch.randn(50, 6)
    statistics = collect(nn.Sequential(mlp), [x], screen=(8, 32), progress=False)
    m, slack = silu_scores(
        x, mlp.gate_proj.weight, mlp.up_proj.weight, 8, 32, mlp.gate_proj.bias, mlp.up_proj.bias
    )
    a, u = mlp.act_fn(mlp.gate_proj(x)), mlp.up_proj(x)
    check_against_truth(statistics, {"0": (a.detach().double(), u.detach().double(), m, slack)})


def test_int8_layers_are_screened_as_what_their_integers_stand_for() -> None:
    model, batches = wide_llama(), [ids(2, 40)]
    sparsify(model, quantize="int8")
    rounded = collect(model, batches, screen=(4, 32), progress=False)
    floats = collect(densify(model), batches, screen=(4, 32), progress=False)
    one, other = rounded.screened[FIRST], floats.screened[FIRST]
    assert torch.equal(one.count, other.count), "the first MLP's input and the weights' values are the same"
    torch.testing.assert_close(one.sum_h2, other.sum_h2, rtol=1e-3, atol=1e-5 * float(other.sum_h2.max()))


def test_sparse_model_gives_the_dense_statistics() -> None:
    model, batches = wide_llama(), [ids(2, 40)]
    dense = collect(model, batches, screen=(4, 32), progress=False)
    sparsify(model, dense.plan(0.7))
    again = collect(model, batches, screen=(4, 32), progress=False)
    for name, layer in dense.screened.items():
        assert all(
            torch.equal(x, y) for x, y in zip(layer.tables(), again.screened[name].tables(), strict=True)
        )


@pytest.mark.parametrize("make_model", [wide_llama, tiny_phi3])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_copies_are_those_of_the_sparse_modules(make_model, quantize: str | None) -> None:
    """Else thresholds would be for other scores than the modules decide by."""
    model, batches = make_model(), [ids(2, 40)]
    if quantize is not None:
        sparsify(model, quantize=quantize)
    plan = calibrate(model, batches, 0.5, "screen", bits=3, group=64, progress=False)
    calibrated = layer_screens(fingerprints.mlps_of(model), fingerprints.fingerprint(model), 3, 64)
    sparsify(model, plan)
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        assert module.indicator == "screen"
        assert torch.equal(module.threshold, layer.threshold)
        for ours, theirs in zip((calibrated[name].gate, calibrated[name].up), copies(module), strict=True):
            assert torch.equal(ours.codes, theirs.codes)
            assert torch.equal(ours.scale, theirs.scale)


def test_the_screens_exact_zeros_need_a_threshold_above_zero() -> None:
    """A score of 0 is a guess: the neuron's a may be anything, so 0 as threshold would keep it."""
    a, u = correlated()
    m = torch.relu(a - 0.5) * u
    share = float((m == 0).double().mean())
    assert share > 0.6
    sizes = {"hidden_size": 1, "intermediate_size": a.shape[1], "activation": "silu"}
    identity = {"architecture": "Test", "layers": {"mlp": sizes}}
    statistics = Statistics(identity, {"mlp": layer_of(a, u)}, (4, 32), {"mlp": layer_of(a, u, 3, m)})
    layer = statistics.plan(0.5, "screen").layers["mlp"]
    assert 0 < float(layer.threshold) < 1e-37
    assert layer.sparsity == pytest.approx(share, abs=1e-9)
    h, skip = (a * u).double(), m == 0
    exact = h.where(skip, 0).sum(0) / skip.sum(0)
    slack = len(a) * EPS * h.abs().where(skip, 0).sum(0) / skip.sum(0)
    assert bool(((layer.skipped_mean.double() - exact).abs() <= slack + EPS * exact.abs()).all())
    none = statistics.plan(0, "screen").layers["mlp"]
    assert (float(none.threshold), none.sparsity, none.skipped_mean) == (0, 0, None)


def test_relu_models() -> None:
    model, batches = tiny_llama(**WIDE, hidden_act="relu"), [ids(2, 60)]
    statistics = collect(model, batches, screen=(4, 32), progress=False)
    for target in (0.2, 0.9):
        for layer in statistics.plan(target, "screen").layers.values():
            assert layer.sparsity >= target - 1e-6
            assert float(layer.threshold) > 0
    assert statistics.plan(0.2, "screen").sparsity > 0.3, "the screen's own zeros"


# What it refuses


def test_statistics_without_a_screen() -> None:
    statistics = collect(wide_llama(), [ids(1, 5)], progress=False)
    with pytest.raises(
        ValueError, match=r"^method is 'screen' and .* expected those of collect\(\.\.\., screen=\(4, 32\)\)"
    ):
        statistics.plan(0.5, "screen")


def test_statistics_of_two_screens_do_not_merge() -> None:
    a, u = correlated(50, 3)
    one, other, none = (copy.copy(statistics_of(a, u)) for _ in range(3))
    other.screen = (3, 32)
    none.screen = none.screened = None
    with pytest.raises(ValueError, match=r"other was collected with screen=\(3, 32\), expected \(4, 32\)"):
        one.merge(other)
    with pytest.raises(ValueError, match=r"other was collected with screen=None, expected \(4, 32\)"):
        one.merge(none)


@pytest.mark.parametrize(
    ("screen", "message"),
    [
        (4, r"screen is 4, expected \(bits, group\), such as \(4, 32\), or None"),
        ((4,), r"screen is \(4,\), expected \(bits, group\)"),
        ([4, 32], r"screen is \[4, 32\], expected \(bits, group\)"),
        ((5, 32), "bits is 5, expected one of: 3, 4, 8"),
        ((4, 16), "group is 16, expected one of: 32, 64, 128"),
        ((True, 32), "bits is True, expected one of: 3, 4, 8"),
    ],
)
def test_wrong_screens(screen: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect(wide_llama(), [ids(1, 4)], screen=screen, progress=False)  # type: ignore[arg-type]


def test_wrong_arguments_of_calibrate_are_named_before_the_pass() -> None:
    model = wide_llama()
    with pytest.raises(ValueError, match="bits is 5, expected one of: 3, 4, 8"):
        calibrate(model, iter([]), 0.5, "screen", bits=5)
    with pytest.raises(
        ValueError, match="bits is 4 and group None with method 'cats', expected them with 'screen'"
    ):
        calibrate(model, iter([]), 0.5, "cats", bits=4)
    with pytest.raises(ValueError, match="bits is None and group 32 with method 'upaware'"):
        calibrate(model, iter([]), 0.5, group=32)


def test_mlps_without_a_gate() -> None:
    with pytest.raises(
        ValueError, match=r"^screen is \(4, 32\) and layer .* has no gate, expected gated MLPs only"
    ):
        collect(make("OPT"), [ids(1, 4)], screen=(4, 32), progress=False)


def test_layers_that_are_more_than_their_weights() -> None:
    model = wide_llama()
    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, args, out: 2 * out)
    message = r"^screen is \(4, 32\) and a gate or up layer of model.layers.1.mlp has forward .*hooks, expected plain"
    with pytest.raises(ValueError, match=message):
        collect(model, [ids(1, 4)], screen=(4, 32), progress=False)
    handle.remove()
    assert collect(model, [ids(1, 4)], screen=(4, 32), progress=False).tokens == 4
    assert all(not m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite(bad: float) -> None:
    a, u = correlated(20, 3)
    m = a * u
    m[3, 1] = bad
    with pytest.raises(ValueError, match="the screen's score holds NaN, infinity"):
        LayerStatistics(3).add(a, u, m)
