"""`sparsemlp.explain`: every route that a call can take is named, with a reason, and nothing is computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsemlp
from sparsemlp import _native
from sparsemlp.nn import SparseGatedMLP
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.router import Explanation, decide, explain_calls, training
from tests.router_profiles import flat, forced, using

LIBRARY = pytest.mark.skipif(_native.problem() is not None, reason=f"native: {_native.problem()}")
D, F = 64, 100
TRADE_OFF = flat(sparse=(10.0, 200.0, 300.0), dense=5.0, pytorch=6.0)
"""From 33 tokens on rows are worth skipping at low densities only."""


def operands(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(n, D, generator=g).to(dtype) for n in (tokens, F, F, F))


def gated(tokens: int, **options: Any) -> Explanation:
    return sparsemlp.explain(sparsemlp.gated_mlp, *operands(tokens), **options)


def seen(density: float) -> Callable[[Tensor], float]:
    return lambda weight: density


@LIBRARY
@pytest.mark.parametrize(
    ("tokens", "route", "taken", "why"),
    [
        (3, "sparse", "sparse", "predicted fastest whatever the density"),
        (3, "dense", "sparse", "predicted fastest whatever the density"),
        (3, "pytorch", "pytorch", "predicted fastest at every density, by more than the 3 %"),
        (40, "sparse", "sparse", "predicted fastest whatever the density"),
        (40, "dense", "dense", "predicted fastest at every density$"),
        (40, "pytorch", "pytorch", "predicted fastest at every density, by more than the 3 %"),
    ],
)
def test_every_route_of_a_cpu(tokens: int, route: str, taken: str, why: str) -> None:
    with using(forced(route)):
        for call in (
            lambda: gated(tokens),
            lambda: sparsemlp.explain(sparsemlp.mlp, *operands(tokens)[:2], operands(tokens)[3]),
        ):
            found = call()
            assert found.route == taken
            assert (found.sizes, found.kind) == ({"T": tokens, "D": D, "F": F}, "float32")
            assert set(found.milliseconds) == {"sparse", "pytorch"} | ({"dense"} if tokens > 32 else set())
            assert min(found.milliseconds, key=found.milliseconds.__getitem__) == taken
            assert set(found.others) == {"sparse", "dense", "pytorch", "triton"} - {taken}
            assert re.search(why, found.why), found.why
            assert (found.profile, found.router, found.backend) == ("made up", "auto", "auto")


@LIBRARY
@pytest.mark.parametrize(
    ("density", "route", "why", "source"),
    [
        (math.nan, "dense", "rows are worth skipping below a density of", "no call of this layer seen yet: 100 %"),
        (0.9, "dense", "at more, this is predicted fastest", r"90 % of the neurons active, the mean of recent calls"),
        (0.001, "sparse", "predicted fastest below a density of", r"0\.1 % of the neurons active"),
    ],
)  # fmt: skip
def test_the_density(
    density: float, route: str, why: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "observed_density", seen(density))
    with using(TRADE_OFF):
        found = gated(64)
    assert found.route == route
    assert why in found.why
    assert re.match(source, found.density_source)
    assert found.density == (1.0 if math.isnan(density) else density)
    assert 0.001 < found.break_even < 0.9
    slower = {"dense": "sparse", "sparse": "dense"}[route]
    assert found.others[slower].startswith("predicted ")
    assert found.milliseconds[route] < found.milliseconds[slower]


@LIBRARY
def test_what_is_explained_is_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tokens and densities on both sides of every border."""
    router: Any = OP.route
    for density in (math.nan, 0.0, 0.002, 0.01, 0.5, 1.0):
        monkeypatch.setattr(decide, "observed_density", seen(density))
        for profile in (TRADE_OFF, None, *map(forced, ("sparse", "dense", "pytorch"))):
            for mode in ("auto", "off", "frozen"):
                monkeypatch.setattr(decide, "_frozen", {})
                for tokens in (1, 32, 33, 100):
                    x, *weights = operands(tokens)
                    args = (x, *weights, torch.zeros(()), *(None,) * 15, "silu", "gate")
                    with using(profile, mode):
                        found = sparsemlp.explain(sparsemlp.gated_mlp, x, *weights).route
                        chosen = OP.select(args, "auto")
                        own = "sparse" if tokens <= 32 else "dense"
                        assert chosen is (OP.backends[0] if mode == "off" else router.routes[found])
                        assert mode != "off" or found == own


@LIBRARY
def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_frozen", {})
    density = [1.0]
    monkeypatch.setattr(decide, "observed_density", lambda weight: density[0])
    x, *weights = operands(64)

    def found() -> Explanation:
        return sparsemlp.explain(sparsemlp.gated_mlp, x, *weights)

    with using(TRADE_OFF, "frozen"):
        assert not found().why.startswith("frozen")
        sparsemlp.gated_mlp(x, *weights)
        density[0] = 0.0
        assert found().route == "dense"
        assert found().why == "frozen: the first call of this layer with 64 tokens took it"
        assert found().router == "frozen"
    with using(TRADE_OFF, "off"):
        assert found().route == "dense"
        assert found().why.startswith("the router is off")
        assert found().milliseconds == {}


@LIBRARY
def test_explaining_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_frozen", {})
    with using(TRADE_OFF, "frozen"):
        gated(64)
    assert decide._frozen == {}


@LIBRARY
def test_the_native_backend_by_name() -> None:
    with using(forced("pytorch")):
        for tokens, route in ((3, "sparse"), (40, "dense")):
            found = gated(tokens, backend="native")
            assert (found.route, found.backend) == (route, "native")
            assert "nothing but the number of tokens" in found.why


@LIBRARY
def test_nothing_measured() -> None:
    with using(None):
        found = gated(40)
    assert (found.route, found.milliseconds) == ("dense", {})
    assert found.why.startswith("there are no measured times")
    assert found.profile == "nothing was measured for this kind of call"


def test_the_reference_and_why_nobody_else() -> None:
    found = sparsemlp.explain(sparsemlp.gated_mlp, *operands(3, torch.float64))
    assert (found.route, found.why) == ("reference", "no backend computes this call")
    assert "native" in found.others
    assert "triton" in found.others
    if _native.problem() is None:
        assert found.others["native"] == "computes float32, bfloat16, float16, x is float64"
    named = gated(3, backend="reference")
    assert named.route == "reference"
    assert named.why == "the call asks for backend='reference', which never falls back"


def test_a_training_step_says_when_lists_are_taken() -> None:
    x, w = torch.empty(512, 512), torch.empty(1024, 512, requires_grad=True)
    found = sparsemlp.explain(sparsemlp.mlp, x, w, w)
    assert (found.operator, found.route) == ("mlp_fwd", "native")
    limit = training.break_even(torch.float32)
    assert f"by lists of entries below a density of {100 * limit:.3g} %, counted in every call" in found.why
    assert "whatever their density" in sparsemlp.explain(sparsemlp.mlp, x.half(), w.half(), w.half()).why


def test_the_differentiable_composition() -> None:
    x, *weights = operands(3)
    found = sparsemlp.explain(sparsemlp.gated_mlp, x.requires_grad_(), *weights)
    assert found.route == "differentiable"
    assert "torch.inference_mode()" in found.why
    assert found.others["native"] in ("has no derivative", _native.problem())
    assert torch.is_grad_enabled()


def test_operators_with_one_way() -> None:
    for call, args in (
        (sparsemlp.activation, (torch.randn(3, 8), "relu")),
        (sparsemlp.sparse_linear, (torch.randn(3, 8), torch.randn(8, 5))),
    ):
        found = sparsemlp.explain(call, *args)
        assert found.route == ("native" if _native.problem() is None else "reference")
        assert found.operator == call.__name__
        assert found.why
        assert str(found)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj, self.act_fn = nn.Linear(F, D, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_modules_and_models() -> None:
    layers = [SparseGatedMLP.from_dense(Dense().requires_grad_(False)) for _ in range(3)]
    x = torch.randn(2, 3, D)
    found = sparsemlp.explain(layers[0], x)
    assert found.operator == "gated_mlp"
    assert found.sizes["T"] == 6
    model = nn.Sequential(*layers, nn.Linear(D, 5))
    assert [e.sizes["T"] for e in explain_calls(model, x)] == [6, 6, 6]
    with pytest.raises(
        ValueError, match=r"^call makes 3 calls of this package's operators, expected one; use"
    ):
        sparsemlp.explain(model, x)
    with pytest.raises(ValueError, match=r"^call makes 0 calls"):
        sparsemlp.explain(torch.neg, x)
    assert explain_calls(torch.neg, x) == []


def test_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*args: Any) -> Tensor:
        raise AssertionError("computed")

    router: Any = OP.route
    for name in router.routes:
        monkeypatch.setitem(router.routes, name, computed)
    monkeypatch.setattr(OP, "reference", computed)
    for dtype in (torch.float32, torch.float64):
        sparsemlp.explain(sparsemlp.gated_mlp, *operands(40, dtype))
    gated(3)
    _, *weights = operands(3)
    assert sparsemlp.explain(sparsemlp.gated_mlp, torch.empty(40, D), *weights).sizes["T"] == 40


def test_wrong_arguments_are_what_the_call_says() -> None:
    x, *weights = operands(3)
    with pytest.raises(ValueError, match=r"^w_up is shape"):
        sparsemlp.explain(sparsemlp.gated_mlp, x, weights[0], weights[1][:-1], weights[2])
    with pytest.raises(ValueError, match="backend is 'fast'"):
        sparsemlp.explain(sparsemlp.gated_mlp, x, *weights, backend="fast")
    with pytest.raises(sparsemlp.BackendUnavailableError, match="x is float64"):
        sparsemlp.explain(sparsemlp.gated_mlp, *operands(3, torch.float64), backend="native")


def test_no_tokens() -> None:
    found = gated(0)
    assert found.sizes["T"] == 0
    assert str(found)


@LIBRARY
def test_int8_and_product() -> None:
    from sparsemlp.quantization import quantize_columns, quantize_rows

    x, *weights = operands(40, torch.bfloat16)
    pairs = [quantize_rows(w) for w in weights[:2]] + [quantize_columns(weights[2])]
    scales = dict(zip(("scale_gate", "scale_up", "scale_down"), (s for _, s in pairs), strict=True))
    with using(TRADE_OFF):
        found = sparsemlp.explain(sparsemlp.gated_mlp, x, *(q for q, _ in pairs), **scales)
        assert found.kind == "bfloat16/int8"
        gate, product = gated(40), gated(40, indicator="product")
    assert product.milliseconds["sparse"] != gate.milliseconds["sparse"]


@LIBRARY
def test_it_prints() -> None:
    with using(TRADE_OFF):
        lines = str(gated(64)).splitlines()
    assert lines[0] == "gated_mlp, T 64, D 64, F 100, float32, backend='auto'"
    starts = [line.split()[0] for line in lines[1:7]]
    assert starts == ["route", "why", "predicted", "density", "profile", "router"]
    assert all(line.startswith("  not  ") for line in lines[7:])
