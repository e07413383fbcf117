"""Every route of the router computes what the operators say, special values included: `auto` with a forced profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsemlp
from sparsemlp import _native
from sparsemlp.ops.gated_mlp import OP as GATED
from sparsemlp.ops.mlp import OP as UNGATED
from sparsemlp.testing import assert_within_budget
from tests import cases, mlp_cases, test_conformance_gated_mlp, test_conformance_mlp
from tests.router_profiles import forced, using
from tests.samples import DTYPES

pytestmark = pytest.mark.skipif(
    _native.problem() is not None,
    reason=f"there are no routes without the compiled library: {_native.problem()}",
)
ROUTES = ("sparse", "dense", "pytorch")
EVERY_ROUTE = pytest.mark.parametrize("route", ROUTES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
SHARE = 6
"""One case of so many runs in `make test`, each route in another one; all in `make test-full`."""


def routed(count: int, every: list[Any]) -> Iterator[Any]:
    """Cases × routes, where the route is not what `native` would do anyway; dtypes in turn."""
    for i, case in enumerate(every):
        for j, route in enumerate(ROUTES):
            own = "sparse" if case.tokens <= 32 else "dense"
            if route == own or (route == "dense" and case.tokens <= 32):
                continue
            dtype = DTYPES[(i + j) % 3]
            marks = (
                [] if (i + j) % count == 0 or case.name.startswith(("mean-", "int8-")) else [pytest.mark.slow]
            )
            name = f"{case}-{str(dtype).removeprefix('torch.')}-{route}"
            yield pytest.param(case, dtype, route, marks=marks, id=name)


@pytest.mark.parametrize(("case", "dtype", "route"), list(routed(SHARE, cases.CASES)))
def test_gated_mlp(case: cases.Case, dtype: torch.dtype, route: str) -> None:
    with using(forced(route)):
        test_conformance_gated_mlp.check(cases.build(case, dtype), "auto")


@pytest.mark.parametrize(("case", "dtype", "route"), list(routed(SHARE, mlp_cases.CASES)))
def test_mlp(case: mlp_cases.Case, dtype: torch.dtype, route: str) -> None:
    with using(forced(route)):
        test_conformance_mlp.check(mlp_cases.build(case, dtype), "auto")


def operands(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x and three weights; half of the neurons' gates are certain to be far below the threshold, half far above."""
    g = torch.Generator().manual_seed(0)
    x, gate, up, down = (torch.rand(n, 33, generator=g) + 0.5 for n in (tokens, 80, 80, 80))
    gate[::2] *= -1
    return tuple(t.to(dtype) for t in (x, gate, up, down))


def masked(x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor) -> Tensor:
    """The MLP with threshold 1 by plain PyTorch operations, in the tensors' dtype."""
    act = torch.nn.functional.silu(x @ gate.T)
    return torch.where(act.abs() < 1, 0, act if up is None else act * (x @ up.T)) @ down


@EVERY_ROUTE
@EVERY_DTYPE
@pytest.mark.parametrize("gated", [True, False], ids=["gated_mlp", "mlp"])
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_a_skipped_neuron_adds_nothing_even_with_inf(
    value: float, tokens: int, gated: bool, dtype: torch.dtype, route: str
) -> None:
    """Neuron 0's up and down rows; one token wants it, the others do not."""
    x, gate, up, down = operands(tokens, dtype)
    x[1] *= -1  # wants the even neurons, which the others skip
    others = torch.arange(tokens) != 1
    peer, truth = (
        masked(x.to(kind), gate.to(kind), up.to(kind) if gated else None, down.to(kind))[others]
        for kind in (dtype, torch.float64)
    )
    up[0], down[0] = value, value
    with using(forced(route)):
        if gated:
            out = sparsemlp.gated_mlp(x, gate, up, down, threshold=1.0)
        else:
            out = sparsemlp.mlp(x, gate, down, threshold=1.0, activation="silu")
    assert not out[1].isfinite().any()
    assert_within_budget(out[others], peer, truth)


@EVERY_ROUTE
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_wrong_threshold_is_named_by_every_route(tokens: int, route: str) -> None:
    x, *weights = operands(tokens, torch.float32)
    for bad in (-1.0, torch.nan):
        wrong = torch.full((80,), bad)
        with using(forced(route)), pytest.raises(ValueError, match="threshold"):
            sparsemlp.gated_mlp(x, *weights, threshold=wrong)
        with using(forced(route)), pytest.raises(ValueError, match="threshold"):
            sparsemlp.mlp(x, weights[0], weights[2], threshold=wrong)
        limit = torch.full((33,), bad)
        by_input = weights[0].t().contiguous().t(), *weights[1:]
        with using(forced(route)), pytest.raises(ValueError, match="input_threshold"):
            sparsemlp.gated_mlp(x, *by_input, threshold=0.5, input_threshold=limit)


@EVERY_ROUTE
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [1, 32, 33, 100])
def test_a_route_repeats_its_bits(tokens: int, dtype: torch.dtype, route: str) -> None:
    g = torch.Generator().manual_seed(1)
    x, gate, up, down = (torch.randn(n, 65, generator=g).to(dtype) for n in (tokens, 300, 300, 300))
    with using(forced(route)):
        first = sparsemlp.gated_mlp(x, gate, up, down, threshold=0.5)
        for _ in range(3):
            assert torch.equal(sparsemlp.gated_mlp(x, gate, up, down, threshold=0.5), first)


@pytest.mark.parametrize("op", [GATED, UNGATED], ids=lambda op: op.name)
def test_every_route_counts_the_density(op: Any) -> None:
    """What one route has seen, the choice for the next call is made from."""
    from sparsemlp.router.decide import observed_density

    g = torch.Generator().manual_seed(2)
    for route in ROUTES:
        for tokens in (40,) if route == "dense" else (3, 40):
            x, gate, up, down = (torch.randn(n, 64, generator=g) for n in (tokens, 256, 256, 256))
            act = torch.nn.functional.silu(x @ gate.T)
            limit = act.abs().flatten().quantile(0.75)
            for _ in range(100):
                if op is GATED:
                    args = (x, gate, up, down, limit, *(None,) * 15, "silu", "gate")
                else:
                    args = (x, gate, down, limit, *(None,) * 11, "silu")
                op.route.routes[route](*args)
            assert observed_density(down) == pytest.approx(0.25, abs=0.01), (route, tokens)
