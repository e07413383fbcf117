"""Where a training step's products go by lists: the density at which the measured times meet."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparsemlp.router import decide, training
from tests.router_profiles import flat


def timed_by(monkeypatch: pytest.MonkeyPatch, by_lists: float, dense: float) -> None:
    """Lists take `by_lists` seconds at density 1, in proportion to the density; PyTorch's products `dense`."""
    monkeypatch.setattr(
        training,
        "_step",
        lambda x, grad, w_in, w_out, b, *, by_lists: (
            rate * float(torch.special.ndtr(b[0].double())) if by_lists else least
        ),
    )
    rate, least = by_lists, dense


@pytest.mark.parametrize("density", [0.1, 0.4, 0.9, 3.0])
def test_the_times_meet_at_the_break_even(monkeypatch: pytest.MonkeyPatch, density: float) -> None:
    timed_by(monkeypatch, 10.0, 10.0 * density)
    found = training.measured(8, 16)
    assert found["float32"] == pytest.approx(density, rel=1e-3)
    assert found["bfloat16"] == pytest.approx(density, rel=1e-2)  # the bias of a density is rounded
    assert list(found) == ["float32", "bfloat16", "float16"]


def test_hopeless_products_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, 1.0, 100.0)
    assert training.measured(8, 16)["float16"] > 1


def test_the_profile_says_and_nothing_known_is_careful(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(flat(), training={"float32": 0.21})
    monkeypatch.setattr(decide, "current_profile", lambda: profile)
    assert training.break_even(torch.float32) == 0.21
    assert training.break_even(torch.bfloat16) == 0.05
    monkeypatch.setattr(decide, "current_profile", lambda: None)
    assert training.break_even(torch.float32) == 0.05


def test_a_real_measurement_is_a_density() -> None:
    found = training.measured(16, 64)
    assert all(0 < v < math.inf for v in found.values())
