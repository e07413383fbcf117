"""The activation table: formulas, derivatives at and away from kinks, NaN, and the compiled kernels' list of names."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from sparsemlp import activations
from sparsemlp.activations import ACTIVATIONS, Activation
from tests.cases import PARAMS

ROWS = pytest.mark.parametrize("row", ACTIVATIONS.values(), ids=lambda row: row.name)


def params(row: Activation, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    return torch.tensor(PARAMS[row.name], dtype=dtype) if row.params else None


def _jsrelu(p: float) -> float:
    return p + p * p / 2 if p > 0 else 0.0


def _weird(p: float) -> float:
    dx, dy, w = PARAMS["weird"]
    q = p - dx
    return _jsrelu(q - w) - _jsrelu(-q - w) + dy


PLAIN = {
    "relu": lambda p: max(p, 0.0),
    "relu2": lambda p: max(p, 0.0) ** 2,
    "jsrelu": _jsrelu,
    "weird": _weird,
    "fatrelu": lambda p: p if p >= PARAMS["fatrelu"][0] else 0.0,
    "mix": lambda p: (1 - PARAMS["mix"][0]) * max(p, 0.0) + PARAMS["mix"][0] * _jsrelu(p),
    "silu": lambda p: p / (1 + math.exp(-p)),
    "gelu": lambda p: p * 0.5 * math.erfc(-p / math.sqrt(2)),
    "gelu_tanh": lambda p: 0.5 * p * (1 + math.tanh(math.sqrt(2 / math.pi) * (p + 0.044715 * p**3))),
    "identity": lambda p: p,
}
"""φ by the formulas of the papers, in Python's own arithmetic."""

KINKS = {
    "relu": {0.0: 0.0},
    "relu2": {0.0: 0.0},
    "jsrelu": {0.0: 0.0},
    "weird": {0.125: 0.0, 3.125: 0.0, 1.0: 0.0},
    "fatrelu": {0.375: 0.0, 0.0: 0.0},
    "mix": {0.0: 0.0},
    "silu": {0.0: 0.5},
    "gelu": {0.0: 0.5},
    "gelu_tanh": {0.0: 0.5},
    "identity": {0.0: 1.0},
}
"""φ' where it does not exist, or is easily got wrong; the plateau of `weird` is [dx − w, dx + w]."""


def test_every_row_is_covered_here() -> None:
    assert set(PLAIN) == set(ACTIVATIONS) == set(KINKS)
    assert {row.name for row in ACTIVATIONS.values() if row.params} == set(PARAMS)
    assert all(len(PARAMS[row.name]) == len(row.params) for row in ACTIVATIONS.values() if row.params)


@ROWS
def test_formula(row: Activation) -> None:
    points = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    expected = torch.tensor([PLAIN[row.name](p) for p in points.tolist()], dtype=torch.float64)
    actual = activations.apply(points, row.name, params(row))
    assert (actual - expected).abs().max() <= 8 * torch.finfo(torch.float64).eps * expected.abs().max()


@ROWS
def test_derivative_is_the_slope(row: Activation) -> None:
    """φ' against central differences, away from kinks."""
    points = torch.linspace(-6, 6, 997, dtype=torch.float64)
    step = 1e-6
    kinks = torch.tensor(list(KINKS[row.name]), dtype=torch.float64)
    points = points[(points[:, None] - kinks).abs().amin(1) > 1e-3]
    above, below = (activations.apply(points + s, row.name, params(row)) for s in (step, -step))
    slope = (above - below) / (2 * step)
    actual = activations.apply(points, row.name, params(row), derivative=True)
    assert (actual - slope).abs().max() <= 1e-8 * max(1.0, slope.abs().max().item())


@ROWS
def test_derivative_at_kinks(row: Activation) -> None:
    for point, expected in KINKS[row.name].items():
        p = torch.tensor([point, -point] if point == 0 else [point], dtype=torch.float64)
        actual = activations.apply(p, row.name, params(row), derivative=True)
        assert (actual == expected).all(), f"φ'({point})"


@ROWS
def test_autograd_agrees_with_derivative(row: Activation) -> None:
    """What autograd makes of the forward is the table's derivative, at kinks too."""
    points = [*torch.linspace(-30, 30, 301, dtype=torch.float64).tolist(), *KINKS[row.name]]
    p = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    activations.apply(p, row.name, params(row)).sum().backward()
    expected = activations.apply(p.detach(), row.name, params(row), derivative=True)
    assert p.grad is not None
    assert (p.grad - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item())


@ROWS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nan_stays_nan_and_dtype_stays(row: Activation, dtype: torch.dtype) -> None:
    p = torch.tensor([torch.nan, 1.0, -1.0], dtype=dtype)
    for derivative in (False, True):
        out = activations.apply(p, row.name, params(row), derivative=derivative)
        assert out.dtype == dtype
        assert out.isnan().tolist() == [True, False, False]


@ROWS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(row: Activation, dtype: torch.dtype) -> None:
    p = (torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    small = params(row, torch.float32)
    assert torch.equal(
        activations.apply(p, row.name, small), activations.apply(p.float(), row.name, small).to(dtype)
    )


def test_jsrelu_does_not_cancel_near_zero() -> None:
    p = torch.tensor([1e-6, 1e-4, 1e-3])
    exact = p.double() + p.double() ** 2 / 2
    assert ((activations.apply(p, "jsrelu").double() - exact) / exact).abs().max() <= torch.finfo(
        torch.float32
    ).eps


def test_weird_has_the_papers_zero() -> None:
    """weird(1.6, 1.6) is 0 where −q − w = √(1 + 2·1.6) − 1, at p ≈ −1.049."""
    point = torch.tensor([1 - 4.2**0.5], dtype=torch.float64)
    assert abs(point.item() + 1.049) < 5e-4
    value = activations.apply(point, "weird", torch.tensor([1.6, 1.6, 1.6], dtype=torch.float64))
    assert abs(value.item()) < 1e-12


@ROWS
def test_zero_at_negative_is_true(row: Activation) -> None:
    """The flag is exactly: φ(p) = 0 for every p ≤ 0, whatever the parameters."""
    p = -torch.logspace(-6, 2, 50, dtype=torch.float64)
    p = torch.cat([p, torch.zeros(1, dtype=torch.float64)])
    variants = (
        [None]
        if not row.params
        else [torch.full((len(row.params),), v, dtype=torch.float64) for v in (-1.5, 0.3)]
    )
    always = all(bool((activations.apply(p, row.name, v) == 0).all()) for v in variants)
    assert row.zero_at_negative == always


def test_an_unknown_name_lists_the_known_ones() -> None:
    for name in ("swish", None, 3, []):
        with pytest.raises(ValueError, match=r"^activation is .*, expected one of: relu, relu2, .*identity$"):
            activations.get(name)  # type: ignore[arg-type]


def test_the_kernels_list_the_same_names_in_the_same_order() -> None:
    header = Path(__file__).parents[1] / "csrc" / "include" / "activations.h"
    body = re.search(r"enum class Activation[^{]*\{([^}]*)\}", header.read_text())
    assert body is not None
    names = [name.strip() for name in body.group(1).split(",")]
    assert names == [*ACTIVATIONS, "count"]
    assert [activations.IDS[name] for name in ACTIVATIONS] == list(range(len(ACTIVATIONS)))
