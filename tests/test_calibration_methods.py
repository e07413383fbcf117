"""Thresholds against exact computations: sorted percentiles and conditional means in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsemlp.calibration import METHODS, Statistics, upaware
from sparsemlp.calibration.histogram import Cumulative, LayerStatistics
from tests.calibration_samples import EPS, correlated, decides, layer_of, statistics_of


def inside_bin(layer: LayerStatistics, magnitude: Tensor, threshold: Tensor) -> Tensor:
    """Which entries lie in the same bin as their neuron's threshold: only they can be miscounted."""
    edges = layer.edges()
    return torch.searchsorted(edges, magnitude.double().contiguous(), right=True) == torch.searchsorted(
        edges, threshold.double().expand(magnitude.shape[1]).contiguous(), right=True
    )


def source(statistics: Statistics, method: str) -> LayerStatistics:
    """The statistics that the method's plans are made of."""
    return (statistics.screened if method == "screen" else statistics.layers)["mlp"]


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
    layer, m = statistics.plan(target, method).layers["mlp"], decides(method, a, u)
    exact = float((m < layer.threshold).double().mean())
    bound = float(inside_bin(source(statistics, method), m, layer.threshold).double().mean())
    assert bound < 0.1
    assert abs(exact - target) <= bound
    assert abs(layer.sparsity - exact) <= bound
    assert layer.sparsity == pytest.approx(target, abs=1e-6)
    assert abs(exact - target) < 0.005


@pytest.mark.parametrize("method", METHODS)
def test_mean_is_the_conditional_mean(method: str) -> None:
    a, u = correlated()
    statistics = statistics_of(a, u)
    layer, m = statistics.plan(0.5, method).layers["mlp"], decides(method, a, u)
    skip, h = m < layer.threshold, (a * u).double()
    exact = h.where(skip, 0).sum(0) / skip.sum(0)
    # μ̂N̂ − μN = the bin's part of Σh, N̂ − N = its part of the count, so |μ̂ − μ| ≤ (Σ_bin |h| + |μ|·n_bin) / N̂.
    unsure = inside_bin(source(statistics, method), m, layer.threshold)
    counted = Cumulative(source(statistics, method)).below(layer.threshold.double().expand(a.shape[1])).tokens
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


@pytest.mark.parametrize("method", ["cats", "upaware"])
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
        skipped = float((decides(method, a, torch.ones_like(a)) < layer.threshold).double().mean())
        assert skipped == pytest.approx(0.6)
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
@pytest.mark.parametrize("method", ["upaware", "screen"])
def test_hidden_error_is_the_energy_lost(method: str, mean: bool) -> None:
    a, u = correlated(20000, 16)
    u = u.abs()  # far from mean 0, so that the means matter
    layer = statistics_of(a, u).plan(0.5, method, mean=mean).layers["mlp"]
    h, skip = (a * u).double(), decides(method, a, u) < layer.threshold
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
        kept = h.where(~(decides(method, a, u) < layer.threshold), 0)
        assert float((kept == 0).double().mean()) == pytest.approx(0.5, abs=0.005)
        error[method] = float((h - kept).square().sum())
    best = float(h.square().flatten().sort().values[: h.numel() // 2].sum())
    assert error["upaware"] <= 1.1 * best
    assert error["cats"] > 4 * max(error["upaware"], error["screen"])


@pytest.mark.parametrize("target", [-0.1, 1.0, float("nan"), True, "half"])
def test_bad_target(target: object) -> None:
    with pytest.raises(ValueError, match=r"target is .*, expected a share in \[0, 1\)"):
        statistics_of(*correlated(50, 3)).plan(target)  # type: ignore[arg-type]
