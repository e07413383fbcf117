"""Statistics and thresholds against exact computations: sorted percentiles and conditional means in float64."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from sparsemlp.calibration import METHODS, Statistics, calibrate, collect, upaware
from sparsemlp.calibration.histogram import BINS, Cumulative, LayerStatistics
from sparsemlp.integrations.transformers import densify, sparsify
from sparsemlp.nn import SparseGatedMLP

EPS = torch.finfo(torch.float32).eps


def layer_of(a: Tensor, u: Tensor, parts: int = 1) -> LayerStatistics:
    layer = LayerStatistics(a.shape[1])
    for part in zip(a.chunk(parts), u.chunk(parts), strict=True):
        layer.add(*part)
    return layer


def statistics_of(a: Tensor, u: Tensor) -> Statistics:
    """Statistics of a model with the one layer "mlp", from its activations."""
    sizes = {"hidden_size": 1, "intermediate_size": a.shape[1], "activation": "silu"}
    return Statistics({"architecture": "Test", "layers": {"mlp": sizes}}, {"mlp": layer_of(a, u, 3)})


def correlated(tokens: int = 2000, neurons: int = 40) -> tuple[Tensor, Tensor]:
    """a like SiLU's, u whose size depends on the neuron and on |a|, as in real models."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    a = nn.functional.silu(draw(tokens, neurons) * 2 - draw(neurons).abs())
    u = (draw(tokens, neurons) + 0.3) * draw(neurons).exp() * (0.2 + a.abs())
    return a, u


def inside_bin(layer: LayerStatistics, magnitude: Tensor, threshold: Tensor) -> Tensor:
    """Which entries lie in the same bin as their neuron's threshold: only they can be miscounted."""
    edges = layer.edges()
    return torch.searchsorted(edges, magnitude.double().contiguous(), right=True) == torch.searchsorted(
        edges, threshold.double().expand(magnitude.shape[1]).contiguous(), right=True
    )


# Histogram


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, min_value=-(2.0**60), max_value=2.0**60), min_size=1, max_size=60
    ),
    st.integers(1, 5),
)
def test_counts_at_edges_are_exact(values: list[float], parts: int) -> None:
    a = torch.tensor(values, dtype=torch.float32)[:, None]
    layer = layer_of(a, torch.ones_like(a), parts)
    cumulative = Cumulative(layer)
    assert int(layer.count.sum()) == len(values)
    assert float(cumulative.zeros) == int((a == 0).sum())
    for edge in cumulative.edges[[0, 1, 30, 100, -1]]:
        if edge > 0:
            assert float(cumulative.count_below(edge[None])) == int((a.abs().double() < edge).sum())
    if cumulative.edges[0] > 0:  # below the window only exact zeros count
        assert float(cumulative.count_below(cumulative.edges[:1] / 2)) == int((a == 0).sum())
    top = cumulative.edges[-1]
    assert float(a.abs().max()) < float(top) or float(a.abs().max()) == 0


def test_bins_are_at_most_a_quarter_octave_wide() -> None:
    layer = layer_of(torch.tensor([[8.0], [0.0]]), torch.ones(2, 1))
    edges = layer.edges()
    assert len(edges) == BINS - 1
    assert float(edges[-2]) == 8.0
    assert float(edges[0]) < 2.0**-17
    ratio = edges[1:] / edges[:-1]
    assert float(ratio.max()) <= 1.25
    usual = (edges[:-1] >= 2**-5) & (edges[:-1] < 2)
    assert float(ratio[usual].max()) <= 1.125


def test_sums_are_those_of_the_entries_below_an_edge() -> None:
    a, u = correlated()
    cumulative = Cumulative(layer_of(a, u, 4))
    edge = cumulative.edges[90]
    assert 0.1 < float((a.abs() < edge).double().mean()) < 0.9
    below = cumulative.below(edge.expand(a.shape[1]))
    wide_u, h, skip = u.double(), (a * u).double(), a.abs() < edge
    for ours, entries in (
        (below.sum_u2, wide_u**2),
        (below.sum_h, h),
        (below.sum_h2, h**2),
    ):
        entries = entries.where(skip, 0)
        # Each sum of n float32 terms is off by at most n·eps times the sum of their sizes.
        assert bool(((ours - entries.sum(0)).abs() <= len(a) * EPS * entries.abs().sum(0)).all())


def test_window_follows_the_largest_value_in_any_order() -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(90, 7, generator=generator) * torch.logspace(-14, 6, 90, base=10.0)[:, None]
    a[::9] = 0
    u = torch.randn(90, 7, generator=generator)
    once = layer_of(a, u)
    rising, falling = layer_of(a, u, 30), layer_of(a.flip(0), u.flip(0), 30)
    merged = layer_of(a[:20], u[:20]).merge(layer_of(a[20:50], u[20:50])).merge(layer_of(a[50:], u[50:]))
    for other in (rising, falling, merged):
        assert other.top == once.top
        assert other.tokens == once.tokens == 90
        assert torch.equal(other.count, once.count)
    assert int(once.count[1].sum()) > 0, "the data must reach below the window"


def test_merge_of_zeros_only_and_of_other_sizes() -> None:
    zeros = layer_of(torch.zeros(5, 3), torch.ones(5, 3))
    ones = layer_of(torch.ones(2, 3), torch.ones(2, 3))
    for merged in (zeros.merge(ones), ones.merge(zeros)):
        assert merged.count[0].tolist() == [5, 5, 5]
        assert merged.count.sum(0).tolist() == [7, 7, 7]
    assert zeros.merge(zeros).top is None
    with pytest.raises(ValueError, match="other has 4 neurons, expected 3"):
        zeros.merge(LayerStatistics(4))


@pytest.mark.parametrize("power", [-50, -20, 20, 50])
@pytest.mark.parametrize("method", METHODS)
def test_tiny_and_huge_activations(power: int, method: str) -> None:
    a, u = correlated(500, 16)
    plain = statistics_of(a, u).plan(0.5, method).layers["mlp"]
    a = a * 2.0**power
    scaled = statistics_of(a, u).plan(0.5, method).layers["mlp"]
    assert float((a.abs() < scaled.threshold).double().mean()) == pytest.approx(0.5, abs=0.03)
    assert bool((scaled.threshold / 2.0**power < plain.threshold * 1.25).all())
    assert bool((scaled.threshold / 2.0**power > plain.threshold / 1.25).all())
    assert scaled.hidden_error == pytest.approx(plain.hidden_error, rel=0.2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("where", ["a", "u"])
def test_not_finite_is_refused(bad: float, where: str) -> None:
    a, u = torch.ones(4, 3), torch.ones(4, 3)
    (a if where == "a" else u)[2, 1] = bad
    with pytest.raises(ValueError, match="holds NaN, infinity or a value too large to square"):
        LayerStatistics(3).add(a, u)


# Thresholds


@pytest.mark.parametrize("target", [0.01, 0.3, 0.5, 0.7, 0.99])
def test_cats_is_the_sorted_percentile_within_its_bin(target: float) -> None:
    a, u = correlated()
    statistics = statistics_of(a, u)
    threshold = statistics.plan(target, "cats").layers["mlp"].threshold
    assert threshold.shape == ()
    ordered = a.abs().flatten().sort().values
    exact = ordered[int(-(-target * len(ordered) // 1)) - 1]
    edges = statistics.layers["mlp"].edges()
    k = int(torch.searchsorted(edges, exact.double(), right=True))
    assert float(edges[k - 1]) <= float(threshold) <= float(edges[k])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [0.1, 0.3, 0.5, 0.7, 0.95])
def test_sparsity_is_reached_within_the_bins_of_the_thresholds(method: str, target: float) -> None:
    a, u = correlated()
    statistics = statistics_of(a, u)
    layer = statistics.plan(target, method).layers["mlp"]
    exact = float((a.abs() < layer.threshold).double().mean())
    bound = float(inside_bin(statistics.layers["mlp"], a.abs(), layer.threshold).double().mean())
    assert bound < 0.1
    assert abs(exact - target) <= bound
    assert abs(layer.sparsity - exact) <= bound
    assert layer.sparsity == pytest.approx(target, abs=1e-6)
    assert abs(exact - target) < 0.005


@pytest.mark.parametrize("method", METHODS)
def test_mean_is_the_conditional_mean(method: str) -> None:
    a, u = correlated()
    statistics = statistics_of(a, u)
    layer = statistics.plan(0.5, method).layers["mlp"]
    skip, h = a.abs() < layer.threshold, (a * u).double()
    exact = h.where(skip, 0).sum(0) / skip.sum(0)
    # μ̂N̂ − μN = the bin's part of Σh, N̂ − N = its part of the count, so |μ̂ − μ| ≤ (Σ_bin |h| + |μ|·n_bin) / N̂.
    unsure = inside_bin(statistics.layers["mlp"], a.abs(), layer.threshold)
    counted = Cumulative(statistics.layers["mlp"]).below(layer.threshold.double().expand(a.shape[1])).tokens
    bound = (h.abs().where(unsure, 0).sum(0) + exact.abs() * unsure.sum(0)) / counted
    rounding = len(a) * EPS * h.abs().where(skip | unsure, 0).sum(0) / counted
    ours = layer.skipped_mean.double()
    assert bool(((ours - exact).abs() <= bound + rounding).all())
    everywhere = h.mean(0)
    assert bool(((everywhere - exact).abs() > bound + rounding).all()), "the bound must tell another mean"
    assert float((ours - exact).abs().mean()) < 0.01 * float((everywhere - exact).abs().mean())
    assert statistics.plan(0.5, method, mean=False).layers["mlp"].skipped_mean is None


def test_upaware_thresholds_are_tau_over_the_conditional_rms() -> None:
    a, u = correlated()
    layer = layer_of(a, u)
    before, after = upaware.thresholds(layer, 0.5, rounds=1), upaware.thresholds(layer, 0.5, rounds=2)

    def tau_intervals(thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Where τ = t_j·rms(u_j | skipped by `before`) can lie, entries of the threshold's bin being unsure."""
        unsure = inside_bin(layer, a.abs(), before)
        sure = (a.abs() < before) & ~unsure
        u2 = u.double() ** 2
        sums = [u2.where(mask, 0).sum(0) for mask in (sure, sure | unsure)]
        counts = [mask.sum(0) for mask in (sure, sure | unsure)]
        slack = 1e-5
        low = thresholds.double() * (sums[0] / counts[1]).sqrt() * (1 - slack)
        high = thresholds.double() * (sums[1] / counts[0].clamp(min=1)).sqrt() * (1 + slack)
        return low, high

    low, high = tau_intervals(after)
    assert float(low.max()) <= float(high.min())
    low, high = tau_intervals(upaware.thresholds(layer, 0.5, rounds=0))
    assert float(low.max()) > float(high.min()), (
        "the check must tell the rms over all tokens from the conditional one"
    )


def test_upaware_without_rounds_uses_the_rms_over_all_tokens() -> None:
    a, u = correlated()
    threshold = upaware.thresholds(layer_of(a, u), 0.5, rounds=0).double()
    scores = threshold * (u.double() ** 2).mean(0).sqrt()
    torch.testing.assert_close(scores, scores.mean().expand_as(scores), rtol=1e-5, atol=0)


def test_target_zero_changes_nothing() -> None:
    for method in METHODS:
        layer = statistics_of(*correlated()).plan(0, method).layers["mlp"]
        assert layer.threshold.tolist() == 0
        assert layer.skipped_mean is None
        assert layer.sparsity == 0
        assert layer.hidden_error == 0


@pytest.mark.parametrize("method", METHODS)
def test_exact_zeros_beyond_the_target_need_no_threshold(method: str) -> None:
    a, u = correlated()
    a = torch.relu(a - 0.5)
    share = float((a == 0).double().mean())
    assert share > 0.6
    layer = statistics_of(a, u).plan(0.5, method).layers["mlp"]
    assert float(layer.threshold.max()) == 0
    assert layer.skipped_mean is None, "with means, a zero at threshold 0 would count as active"
    assert layer.sparsity == pytest.approx(share, abs=1e-9)
    more = statistics_of(a, u).plan(0.9, method).layers["mlp"]
    assert more.sparsity == pytest.approx(0.9, abs=1e-6)
    assert float(more.threshold.min()) > 0


def test_values_far_below_the_largest_are_skipped_whole() -> None:
    """60 % of |a| below 2^-31 of the largest: the threshold skips all of them and says so."""
    a = torch.full((100, 4), 1e-12)
    a[60:] = torch.linspace(1, 100, 40)[:, None]
    for method in METHODS:
        layer = statistics_of(a, torch.ones_like(a)).plan(0.5, method).layers["mlp"]
        assert float((a.abs() < layer.threshold).double().mean()) == pytest.approx(0.6)
        assert layer.sparsity == pytest.approx(0.6)


def test_infinite_threshold_only_where_u_is_always_zero() -> None:
    a, u = correlated(500, 4)
    u[:, 1] = 0
    u[:, 2] = (100 * u[:, 2]).where(a[:, 2].abs() > 1, 0)  # zero wherever it is skipped, but not always
    layer = statistics_of(a, u).plan(0.5, "upaware").layers["mlp"]
    assert layer.threshold.isinf().tolist() == [False, True, False, False]
    for rounds in (0, 1, 3):
        threshold = upaware.thresholds(layer_of(a, u), 0.5, rounds=rounds)
        assert threshold.isinf().tolist() == [False, True, False, False]
    assert layer.skipped_mean[1] == 0
    assert layer.sparsity == pytest.approx(0.5, abs=1e-6)
    everywhere = statistics_of(a, torch.zeros_like(u)).plan(0.5, "upaware").layers["mlp"]
    assert bool(everywhere.threshold.isinf().all())
    assert everywhere.sparsity == 1
    assert everywhere.hidden_error == 0


@pytest.mark.parametrize("mean", [True, False])
def test_hidden_error_is_the_energy_lost(mean: bool) -> None:
    a, u = correlated(20000, 16)
    u = u.abs()  # far from mean 0, so that the means matter
    layer = statistics_of(a, u).plan(0.5, "upaware", mean=mean).layers["mlp"]
    h, skip = (a * u).double(), a.abs() < layer.threshold
    replaced = layer.skipped_mean.double() if mean else 0.0
    exact = float(((h - replaced) ** 2).where(skip, 0).sum() / (h**2).sum())
    assert layer.hidden_error == pytest.approx(exact, rel=0.05)


def test_upaware_beats_cats_where_u_tells_neurons_apart() -> None:
    """u_j constant: τ on |a_j|·rms(u_j) is τ on |h|, and with W_down = 1 nothing beats leaving out the smallest |h|."""
    generator = torch.Generator().manual_seed(2)
    tokens, neurons = 4000, 64
    a = torch.randn(tokens, neurons, generator=generator)
    u = torch.logspace(-1, 1, neurons).expand(tokens, neurons)
    h, error = a * u, {}
    for method in METHODS:
        layer = statistics_of(a, u).plan(0.5, method, mean=False).layers["mlp"]
        kept = h.where(~(a.abs() < layer.threshold), 0)
        assert float((kept == 0).double().mean()) == pytest.approx(0.5, abs=0.005)
        error[method] = float((h - kept).square().sum())
    best = float(h.square().flatten().sort().values[: h.numel() // 2].sum())
    assert error["upaware"] <= 1.1 * best
    assert error["cats"] > 4 * error["upaware"]


@pytest.mark.parametrize("target", [-0.1, 1.0, float("nan"), True, "half"])
def test_bad_target(target: object) -> None:
    with pytest.raises(ValueError, match=r"target is .*, expected a share in \[0, 1\)"):
        statistics_of(*correlated(50, 3)).plan(target)  # type: ignore[arg-type]


def test_bad_method_is_named_before_the_pass() -> None:
    with pytest.raises(ValueError, match="method is 'best', expected one of: cats, upaware"):
        calibrate(tiny_llama(), iter([]), method="best")


# Models


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # the default initialisation leaves |a| near 0 everywhere
        for parameter in model.model.layers.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def tiny_phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3))


def same(one: Statistics, other: Statistics) -> bool:
    pairs = zip(one.layers.values(), other.layers.values(), strict=True)
    tables = (zip(a.tables(), b.tables(), strict=True) for a, b in pairs)
    return one.fingerprint == other.fingerprint and all(torch.equal(x, y) for pair in tables for x, y in pair)


def activations_of(model: nn.Module, batches: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """a and u in float64 from the MLPs' inputs and their own weights."""
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
        mlp, x = model.get_submodule(name), torch.cat([x.flatten(0, -2) for x in inputs]).double()
        if hasattr(mlp, "gate_up_proj"):
            p, u = (x @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
        else:
            p, u = x @ mlp.gate_proj.weight.double().T, x @ mlp.up_proj.weight.double().T
        out[name] = (nn.functional.silu(p).detach(), u.detach())
    return out


@pytest.mark.parametrize("make", [tiny_llama, tiny_phi3])
def test_collect_sees_every_mlp(make) -> None:
    model, batches = make(), [ids(2, 30), ids(1, 17)]
    statistics = collect(model, batches, progress=False)
    assert statistics.tokens == 77
    truth = activations_of(model, batches)
    assert list(statistics.layers) == list(truth) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for name, (a, u) in truth.items():
        cumulative = Cumulative(statistics.layers[name])
        torch.testing.assert_close(
            cumulative.total.sum_h, (a * u).sum(0), rtol=1e-4, atol=1e-4 * float((a * u).abs().max())
        )
        torch.testing.assert_close(cumulative.total.sum_u2, (u**2).sum(0), rtol=1e-4, atol=0)
        edge = cumulative.edges[[80, 100, 110]]
        for value in edge:
            near = ((a.abs() - value).abs() < 1e-4 * value).sum(0)  # float32 may put these on the other side
            off = (cumulative.count_below(value.expand(a.shape[1])) - (a.abs() < value).sum(0)).abs()
            assert bool((off <= near).all())


def test_one_pass_is_the_merge_of_two() -> None:
    model, batches = tiny_llama(), [ids(2, 20), ids(1, 31), ids(3, 5)]
    whole = collect(model, batches, progress=False)
    merged = collect(model, batches[:1], progress=False).merge(collect(model, batches[1:], progress=False))
    assert merged.tokens == whole.tokens == 86
    for one, other in zip(whole.layers.values(), merged.layers.values(), strict=True):
        assert torch.equal(one.count, other.count)
        torch.testing.assert_close(one.sum_h2, other.sum_h2, rtol=1e-5, atol=0)
    for method in METHODS:
        for one, other in zip(
            whole.plan(0.5, method).layers.values(), merged.plan(0.5, method).layers.values(), strict=True
        ):
            torch.testing.assert_close(one.threshold, other.threshold, rtol=1e-5, atol=0)
    with pytest.raises(
        ValueError, match=r"other is of another model \(2 layers in these statistics, 1 in the others"
    ):
        whole.merge(collect(tiny_llama(num_hidden_layers=1), batches, progress=False))


def test_padding_is_left_out() -> None:
    model = tiny_llama()
    text = ids(2, 12)
    mask = torch.ones_like(text)
    mask[0, 8:] = 0
    padded = collect(model, [{"input_ids": text, "attention_mask": mask}], progress=False)
    assert padded.tokens == 20
    alone = collect(model, [text[:1, :8], text[1:]], progress=False)
    for one, other in zip(padded.layers.values(), alone.layers.values(), strict=True):
        # The same values up to attention's summation order, so nearly all of them in the same bins.
        assert int((one.count - other.count).abs().sum()) <= 8
        torch.testing.assert_close(one.sum_u2.sum(0), other.sum_u2.sum(0), rtol=1e-4, atol=0)
    full = collect(model, [{"input_ids": text, "attention_mask": torch.ones_like(text)}], progress=False)
    assert full.tokens == 24


@pytest.mark.parametrize("make", [tiny_llama, tiny_phi3])
def test_sparse_model_gives_the_dense_statistics(make) -> None:
    model, batches = make(), [ids(2, 20)]
    dense = collect(model, batches, progress=False)
    sparsify(model, dense.plan(0.7))
    before = model(batches[0]).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # our hooks must not count as a reason to run dense for good
        assert same(collect(model, batches, progress=False), dense)
    assert torch.equal(model(batches[0]).logits, before), "sparse again afterwards"
    assert all("forward" not in module.__dict__ for module in model.modules())
    densify(model)


def test_plain_model_of_sparse_mlps() -> None:
    mlp = tiny_llama().model.layers[0].mlp
    model = nn.Sequential(nn.Linear(6, 24), SparseGatedMLP.from_dense(mlp, threshold=0.3))
    statistics = collect(model, [torch.randn(4, 9, 6), torch.randn(2, 6)], progress=False)
    assert statistics.tokens == 38
    plan = statistics.plan(0.5, "cats")
    assert list(plan.layers) == ["1"]
    plan.check(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype)
    statistics = collect(model, [ids(2, 40)], progress=False)
    for layer in statistics.plan(0.5).layers.values():
        assert layer.sparsity == pytest.approx(0.5, abs=1e-6)
        assert layer.threshold.dtype == torch.float32


def test_model_is_left_as_it_was() -> None:
    model = tiny_llama(attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    sparsify(model)
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = hooks()

    def failing():
        yield ids(1, 8)
        raise KeyboardInterrupt

    first = collect(model, [ids(1, 8)], progress=False)
    assert same(first, collect(model, [ids(1, 8)], progress=False)), "dropout must be off"
    with pytest.raises(KeyboardInterrupt):
        collect(model, failing(), progress=False)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert hooks() == before
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)


def test_only_one_row_of_logits_is_computed() -> None:
    model, seen = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    collect(
        model,
        [ids(2, 9), {"input_ids": ids(2, 9)}, {"input_ids": ids(2, 9), "labels": ids(2, 9)}],
        progress=False,
    )
    assert seen == [(2, 1, 50), (2, 1, 50), (2, 9, 50)]


def test_calibrate_is_collect_and_plan() -> None:
    model, batches = tiny_llama(), [ids(2, 20)]
    assert calibrate(model, batches, 0.3, "cats", progress=False) == collect(
        model, batches, progress=False
    ).plan(0.3, "cats")


def test_planned_sparsity_is_what_the_operator_skips() -> None:
    model, batches = tiny_llama(), [ids(4, 100)]
    truth = activations_of(model, batches)
    for method in METHODS:
        plan = calibrate(model, batches, 0.5, method, progress=False)
        for name, (a, _) in truth.items():
            skipped = float((a.abs() < plan.layers[name].threshold).double().mean())
            assert skipped == pytest.approx(0.5, abs=0.02)
    sparsify(model, plan)
    mlp = model.model.layers[0].mlp
    assert torch.equal(mlp.threshold, plan.layers["model.layers.0.mlp"].threshold)
    assert bool(model(batches[0]).logits.isfinite().all())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches is empty, expected at least one"),
        ([ids(1, 4), ids(1, 0)], r"batch 1 has shape \(1, 0\) and no token"),
        ([{"input_ids": ids(1, 0)}], "batch 0 has no token that counts"),
        ([{"input_ids": ids(1, 4), "attention_mask": torch.zeros(1, 4)}], "batch 0 has no token that counts"),
        (
            [{"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)}],
            r"attention_mask of batch 0 is shape \(1, 1, 4, 4\), expected \(B, S\)",
        ),
        (ids(2, 4), r"batch 0 has shape \(4,\), expected \(B, S\) token ids"),
        (["some text"], "batch 0 is str, expected a .* tokenize the text first"),
    ],
)
def test_bad_batches(batches, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect(tiny_llama(), batches, progress=False)


def test_not_finite_activations_name_the_layer() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
    with pytest.raises(
        ValueError, match=r"^layer model.layers.1.mlp: u holds NaN.*check the model's weights and dtype$"
    ):
        collect(model, [ids(1, 4)], progress=False)


def test_model_without_gated_mlp() -> None:
    with pytest.raises(ValueError, match="model is Sequential without a gated MLP"):
        collect(nn.Sequential(nn.Linear(3, 3)), [torch.ones(1, 3)], progress=False)


class UpFirst(nn.Module):
    """Calls its up layer before its gate layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def test_order_of_gate_and_up_does_not_matter() -> None:
    torch.manual_seed(0)
    mlp, x = UpFirst(), torch.randn(7, 6)
    layer = collect(nn.Sequential(mlp), [x, x[:3]], progress=False).layers["0"]
    assert layer.tokens == 10
    both = torch.cat([x, x[:3]])
    truth = layer_of(mlp.act_fn(mlp.gate_proj(both)), mlp.up_proj(both))
    torch.testing.assert_close(layer.sum_h2.sum(0), truth.sum_h2.sum(0), rtol=1e-5, atol=0)


class Detour(nn.Module):
    """Has a gated MLP that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = tiny_llama().model.layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_mlp_that_never_runs() -> None:
    with pytest.raises(ValueError, match="layer mlp saw no token"):
        collect(Detour(), [torch.ones(1, 24)], progress=False)


def test_progress_bar_is_optional(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = tiny_llama(), [ids(1, 4)]
    collect(model, batches, progress=False)
    assert capsys.readouterr() == ("", "")
    collect(model, batches)
    assert "calibrating: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert collect(model, batches).tokens == 4
    assert capsys.readouterr() == ("", "")


def test_example_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    example = Path(__file__).parent.parent / "examples" / "calibrate_model.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path / "plan")])
    runpy.run_path(str(example), run_name="__main__")
    assert "sparsity" in capsys.readouterr().out
    assert (tmp_path / "plan" / "plan.json").is_file()
