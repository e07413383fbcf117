"""The training reference in float64: against numerical differences, the composition, and φ' at its kinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsemlp
from sparsemlp import activations
from sparsemlp.reference import gated_mlp as gated_reference
from sparsemlp.reference import mlp as reference
from tests.samples import PARAMS
from tests.training_cases import GATED, KINDS, Kind, changed, grad_of, gradients

EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
EVERY_ACTIVATION = pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))


def sample_of(kind: Kind, **options: Any) -> Any:
    """A small float64 sample whose options are float64 too, no number at a threshold."""
    case = kind.case("differences", **{"tokens": 3, "d": 5, "f": 9, **options})
    sample = kind.cases.build(case, torch.float64)
    sample.threshold = sample.threshold.double() * 1.000123
    names = [n for n in kind.leaves(sample) if n in sample.options]
    return changed(sample, **{n: sample.options[n].double() for n in names})


def as_function(kind: Kind, sample: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The call as a function of everything that has a gradient, and the values."""
    names = kind.leaves(sample)
    given = {**vars(sample), **sample.options}

    def run(*tensors: Tensor) -> Tensor:
        return changed(sample, **dict(zip(names, tensors, strict=True))).run(
            kind.function, backend="reference"
        )

    return run, [given[n].detach().clone().requires_grad_(True) for n in names]


@EVERY_KIND
@EVERY_ACTIVATION
@pytest.mark.parametrize("density", [1, 0.5], ids=["exact", "threshold"])
def test_every_activation(density: float, activation: str, kind: Kind) -> None:
    assert torch.autograd.gradcheck(
        *as_function(kind, sample_of(kind, activation=activation, density=density))
    )


ROUTED = (
    dict(density="some_inf", scale="varied"),
    dict(density="neurons", scale="one_zero", mean="mean+out"),
    dict(density=0.5, mean="mean"),
    dict(density=0),
    dict(density=0, scale="alternate", mean="mean"),
)


@EVERY_KIND
@pytest.mark.parametrize("options", ROUTED, ids=lambda o: "-".join(map(str, o.values())))
def test_thresholds_scales_and_means(options: dict[str, Any], kind: Kind) -> None:
    assert torch.autograd.gradcheck(*as_function(kind, sample_of(kind, **options)))


@pytest.mark.parametrize("mean", ["", "mean+out"])
@pytest.mark.parametrize("indicator", ["up", "product"])
def test_indicators(indicator: str, mean: str) -> None:
    run, tensors = as_function(GATED, sample_of(GATED, indicator=indicator, density=0.5, mean=mean))
    assert torch.autograd.gradcheck(run, tensors)


@EVERY_KIND
@pytest.mark.parametrize("activation", ["jsrelu", "silu", "mix"])
def test_second_derivatives(activation: str, kind: Kind) -> None:
    """Through the composition."""
    sample = sample_of(kind, activation=activation, density=0.5, mean="mean+out", d=3, f=4)
    assert torch.autograd.gradgradcheck(*as_function(kind, sample))


@EVERY_KIND
@EVERY_ACTIVATION
def test_it_is_the_derivative_of_the_composition(activation: str, kind: Kind) -> None:
    """Two ways to the same numbers, also where the forward pass is the one under test."""
    sample = sample_of(kind, activation=activation, density="neurons", scale="varied", mean="mean+out", f=40)
    names, given = kind.leaves(sample), {**vars(sample), **sample.options}
    leaves = {n: given[n].detach().requires_grad_(True) for n in names}
    module = gated_reference if kind.gated else reference
    call: dict[str, Any] = dict.fromkeys(module.differentiable.__annotations__.keys() - {"return"})
    call |= {k: v for k, v in {**given, **leaves}.items() if k in call}
    composed = torch.autograd.grad(module.differentiable(**call), list(leaves.values()), grad_of(sample))
    found = gradients(kind, sample, grad_of(sample), "reference")
    for name, expected in zip(names, composed, strict=True):
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12, msg=name)


KINKS = {
    "relu": (0.0, -0.0),
    "relu2": (0.0, -0.0),
    "jsrelu": (0.0, -0.0),
    "mix": (0.0, -0.0),
    "fatrelu": PARAMS["fatrelu"],
    "weird": (PARAMS["weird"][0] - PARAMS["weird"][2], PARAMS["weird"][0] + PARAMS["weird"][2]),
}
"""Where φ has no derivative; it is taken as 0."""


@EVERY_KIND
@pytest.mark.parametrize("activation", list(KINKS))
def test_at_a_kink_the_derivative_is_0(activation: str, kind: Kind) -> None:
    """One neuron whose p is x."""
    for p in KINKS[activation]:
        x = torch.full((1, 1), p, dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        params = torch.tensor(PARAMS[activation], dtype=torch.float64) if activation in PARAMS else None
        call = dict(activation=activation, activation_params=params, backend="reference")
        if kind.gated:
            up = torch.zeros(1, 1, dtype=torch.float64)
            out = sparsemlp.gated_mlp(x, one, up, one, b_up=one[0], **call)
        else:
            out = sparsemlp.mlp(x, one, one, **call)
        out.backward(torch.ones(1, 1, dtype=torch.float64))
        assert x.grad.item() == 0
        up_share = 2 if kind.gated else 1  # there b_up's, besides ∂V
        assert one.grad.item() == pytest.approx(up_share * activations.apply(x, activation, params).item())


@EVERY_KIND
def test_a_zero_padded_token_learns(kind: Kind) -> None:
    """silu at p = 0: a = 0 is not active, so ∂V has nothing of it, but φ'(0) = ½ and ∂x has."""
    sample = sample_of(kind, activation="silu", biases="u" if kind.gated else "")
    sample.x[1] = 0
    grad = torch.zeros(3, 5, dtype=torch.float64)
    grad[1] = 1
    found = gradients(kind, sample, grad, "reference")
    first, last = getattr(sample, kind.weights[0]), getattr(sample, kind.weights[-1])
    u = sample.options["b_up"] if kind.gated else 1.0
    torch.testing.assert_close(found["x"][1], (0.5 * u * last.sum(1)) @ first)
    assert not found[kind.weights[-1]].any()


@EVERY_KIND
def test_what_has_no_derivative(kind: Kind) -> None:
    """Thresholds and token scales get none or 0; parameters of φ get theirs, from the composition."""
    sample = sample_of(kind, activation="mix", scale="varied", density=0.5)
    side = {n: sample.options[n].clone().requires_grad_(True) for n in ("token_scale", "activation_params")}
    threshold = sample.threshold.clone().requires_grad_(True)
    for backend in ("auto", "reference"):
        out = changed(sample, **side, threshold=threshold).run(kind.function, backend=backend)
        found = torch.autograd.grad(out.sum(), [threshold, *side.values()], allow_unused=True)
        assert all(g is None or not g.any() for g in found[:2])
        assert found[2].abs().max() > 0
    del side["activation_params"]
    out = changed(sample, **side, threshold=threshold).run(kind.function, backend="reference")
    assert all(
        g is None for g in torch.autograd.grad(out.sum(), [threshold, *side.values()], allow_unused=True)
    )
