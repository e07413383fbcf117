"""A layer's histogram: exact counts at edges, sums below them, merging, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsemlp.calibration import METHODS
from sparsemlp.calibration.histogram import BINS, Cumulative, LayerStatistics
from tests.calibration_samples import EPS, correlated, decides, layer_of, statistics_of


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
    assert float((decides(method, a, u) < scaled.threshold).double().mean()) == pytest.approx(0.5, abs=0.03)
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
