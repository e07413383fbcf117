"""`gated_mlp` by the screen: special values, what decides and what is computed, reproducibility, gradients, errors.

Numbers under every size, layout and option are cases of `tests.cases`, which `test_conformance_gated_mlp` runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import sparsemlp
from sparsemlp import _native, activations
from sparsemlp.ops import _gated_mlp_native as native
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.reference import screen as reference
from sparsemlp.screen import PackedWeight, pack
from tests.backends import backends
from tests.batches import assert_independent
from tests.cases import DTYPES, Case, Sample, build
from tests.test_conformance_gated_mlp import bits, check

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
FEW_AND_MANY = pytest.mark.parametrize("tokens", [1, 4, 40, 130])
SCREEN: dict[str, Any] = dict(indicator="screen", screen="4x32")


def scores(sample: Sample, isa: int) -> Tensor:
    """The compiled kernel's, by the instruction set with that id."""
    (gate, s_gate), (up, s_up) = sample.screens  # type: ignore[misc]
    options, f = sample.options, sample.w_up.shape[0]
    x = sample.x.reshape(-1, sample.x.shape[-1])
    act = activations.IDS[sample.activation]
    return native.screen_scores(
        x, gate, up, s_gate, s_up, options.get("b_gate"), options.get("b_up"), None, f, act, isa
    )


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [24, 40, 130])
def test_a_threshold_one_percent_off_fails(tokens: int, dtype: torch.dtype, backend: str) -> None:
    sample = build(Case("one-percent", tokens=tokens, f=300, d=33, density=0.4, **SCREEN), dtype)
    check(sample, backend)
    for factor in (0.98, 1.02):
        wrong = sample.run(sparsemlp.gated_mlp, backend=backend, threshold=sample.threshold * factor)
        with pytest.raises(AssertionError, match="outside the budget"):
            check(sample, backend, wrong)


@EVERY_BACKEND
@FEW_AND_MANY
@pytest.mark.parametrize("part", ["codes", "scale"])
@pytest.mark.parametrize("name", ["screen_gate", "screen_up"])
def test_the_copies_decide_and_the_rows_are_computed(name: str, part: str, tokens: int, backend: str) -> None:
    """Another copy changes who is kept; at threshold 0 nothing."""
    sample = build(Case("decides", tokens=tokens, f=120, d=100, density=0.4, **SCREEN), torch.float32)
    gate, up = sample.screens  # type: ignore[misc]
    right = gate if name == "screen_gate" else up
    other = right._replace(**{part: getattr(right, part).roll(1, 0)})
    wrong = sample.run(sparsemlp.gated_mlp, backend=backend, **{name: other})
    with pytest.raises(AssertionError, match="outside the budget"):
        check(sample, backend, wrong)
    everyone = replace(sample, threshold=torch.zeros(()))
    check(everyone, backend, everyone.run(sparsemlp.gated_mlp, backend=backend, **{name: other}))


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", ["x", "screen_gate", "screen_up", "b_gate"])
def test_nan_before_the_decision_keeps(
    where: str, number: float, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    """At threshold inf: a token with it is dense, so NaN; a neuron whose copy has it is computed for every token."""
    if where == "b_gate" and number == torch.inf:
        number = torch.nan  # φ(inf)·û may be smaller than the threshold inf
    sample = build(Case("nan", tokens=tokens, f=70, density=0, biases="g", **SCREEN), dtype)
    assert (sample.run(sparsemlp.gated_mlp, backend=backend) == 0).all()
    if where == "x":
        sample.x[0, 5] = number
        out = sample.run(sparsemlp.gated_mlp, backend=backend)
        assert not out[0].isfinite().any()
        assert (out[1:] == 0).all()
        return
    if where == "b_gate":
        sample.options["b_gate"][33] = number
        assert sample.run(sparsemlp.gated_mlp, backend=backend).isnan().all()
        return
    weights = torch.zeros(70, 65)
    weights[33, 40] = number
    copies = list(sample.screens)  # type: ignore[arg-type]
    copies[where == "screen_up"] = pack(weights)
    out = sample.run(sparsemlp.gated_mlp, backend=backend, **dict(zip(("screen_gate", "screen_up"), copies)))  # noqa: B905
    limit = torch.full((70,), torch.inf)
    limit[33] = 0
    expected = replace(sample, indicator="gate", screens=None, threshold=limit)
    check(expected, backend, out)


@EVERY_BACKEND
@EVERY_DTYPE
@FEW_AND_MANY
@pytest.mark.parametrize("where", ["w_gate", "w_up", "w_down_t"])
def test_rows_of_who_is_not_kept_are_not_read(
    where: str, tokens: int, dtype: torch.dtype, backend: str
) -> None:
    sample = build(Case("unread", tokens=tokens, f=70, density="neurons", biases="gud", **SCREEN), dtype)
    sample.threshold[10:20] = torch.inf
    clean = check(sample, backend)
    getattr(sample, where)[10:20] = torch.tensor([torch.nan, torch.inf]).repeat(5)[:, None].to(dtype)
    out = sample.run(sparsemlp.gated_mlp, backend=backend)
    check(sample, backend, out)
    if backend == "native" and tokens <= 32:
        assert torch.equal(bits(out.reshape(clean.shape)), bits(clean))


@NATIVE
@EVERY_DTYPE
def test_a_token_does_not_depend_on_its_batch(dtype: torch.dtype, backend: str) -> None:
    for tokens in (2, 5, 9, 32):
        case = Case("independent", tokens=tokens, f=200, d=130, density=0.4, **SCREEN)
        assert_independent(build(case, dtype), sparsemlp.gated_mlp, backend)


@NATIVE
@EVERY_DTYPE
@pytest.mark.parametrize("screen", ["3x32", "4x32", "4x64", "8x32", "8x128"])
def test_scores_of_every_instruction_set(screen: str, dtype: torch.dtype, backend: str) -> None:
    """Within float32 rounding of the reference's; integers and groups are exact, so x rounded otherwise would show."""
    for tokens, d, f in ((1, 576, 100), (3, 95, 33), (7, 700, 16)):
        case = Case("scores", tokens=tokens, d=d, f=f, biases="gu", indicator="screen", screen=screen)
        sample = build(case, dtype)
        options = sample.options
        expected = reference.scores(
            sample.x.double(),
            *sample.screens,
            f,
            options["b_gate"],
            options["b_up"],
            None,
            "silu",  # type: ignore[misc]
        )
        for isa in range(len(_native.isa_names())):
            found = scores(sample, isa)
            assert (found.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


@NATIVE
@pytest.mark.parametrize("route", ["sparse", "dense", "pytorch"])
def test_every_route(route: str, backend: str) -> None:
    sample = build(
        Case("routes", tokens=50, f=90, density=0.3, biases="gud", mean="mean+out", **SCREEN), torch.float32
    )
    chosen = native.ROUTES[route]
    with mock.patch.object(OP, "route", return_value=chosen), torch.inference_mode():
        check(sample, backend, sample.run(sparsemlp.gated_mlp, backend="auto"))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradients_are_those_of_the_mask(backend: str) -> None:
    """The copies decide and have no gradient; what is kept has that of the dense formula."""
    sample = build(Case("grads", tokens=4, f=40, d=33, density=0.5, biases="gud", **SCREEN), torch.float64)
    leaves = [t.clone().requires_grad_() for t in (sample.x, *sample.weights)]
    call = {**sample.options, "threshold": sample.threshold, "indicator": "screen", "activation": "silu"}
    gate, up = sample.screens  # type: ignore[misc]
    out = sparsemlp.gated_mlp(*leaves, screen_gate=gate, screen_up=up, backend=backend, **call)
    mask = (
        reference.scores(sample.x, gate, up, 40, call["b_gate"], call["b_up"], None, "silu").abs()
        >= sample.threshold
    )
    assert 0.3 < mask.double().mean() < 0.7
    others = [t.detach().clone().requires_grad_() for t in leaves]
    x, w_gate, w_up, w_down_t = others
    a = torch.nn.functional.silu(x @ w_gate.t() + call["b_gate"])
    expected = (a * (x @ w_up.t() + call["b_up"]) * mask) @ w_down_t + call["b_down"]
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((out * weights).sum(), leaves)
    for ours, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), others), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled() -> None:
    sample = build(Case("compiled", tokens=3, **SCREEN), torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a, **k: sparsemlp.gated_mlp(*a, **k), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        check(sample, "auto", sample.run(compiled, backend="auto"))


def _changed(packed: PackedWeight, **changes: Tensor) -> PackedWeight:
    return packed._replace(**changes)


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda g, u: dict(screen_gate=None), "screen_gate is NoneType, expected a PackedWeight with indi"),
        (lambda g, u: dict(screen_up=tuple(u)), "screen_up is tuple, expected a PackedWeight"),
        (lambda g, u: dict(screen_up=pack(torch.zeros(40, 65))), r"screen_up has codes \(3, 3, 4, 64\) .*expected"),
        (lambda g, u: dict(screen_up=pack(torch.zeros(100, 65), 8)), "screen_up has 8 bits in groups of 32, expected"),
        (lambda g, u: dict(screen_gate=_changed(g, scale=g.scale.half())), "scales of torch.float16, expected uint8"),
        (lambda g, u: dict(screen_gate=_changed(g, codes=g.codes.transpose(0, 1).contiguous().transpose(0, 1))),
         "screen_gate has .*not contiguous"),
        (lambda g, u: dict(indicator="product"), "screen_gate is given with indicator 'product', expected it with"),
        (lambda g, u: dict(input_threshold=0.1), "input_threshold is given with indicator 'screen', expected None"),
    ],
)  # fmt: skip
def test_errors(changes: Any, message: str, backend: str) -> None:
    sample = build(Case("errors", tokens=2, **SCREEN), torch.float32)
    with pytest.raises(ValueError, match=message), torch.inference_mode():
        sample.run(sparsemlp.gated_mlp, backend=backend, **changes(*sample.screens))  # type: ignore[misc]


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_copies_have_no_gradient(backend: str) -> None:
    sample = build(Case("no-gradient", tokens=2, **SCREEN), torch.float32)
    gate = sample.screens[0]  # type: ignore[index]
    asking = gate._replace(scale=gate.scale.clone().requires_grad_())
    out = sample.run(sparsemlp.gated_mlp, backend=backend, screen_gate=asking)
    assert not out.requires_grad
    check(sample, backend, out)


@NATIVE
def test_an_overflowing_scale_of_a_sum_of_zero(backend: str) -> None:
    """x̂ and ŵ that are orthogonal give 0, although the product of their scales is beyond float32."""
    x = torch.zeros(1, 32)
    x[0, 0] = 3e38
    w = torch.zeros(1, 32)
    w[0, 1] = 3e38
    packed = pack(w)
    expected = reference.scores(x, packed, packed, 1, None, None, None, "silu")
    assert (expected == 0).all()
    for isa in range(len(_native.isa_names())):
        arguments = packed.codes, packed.codes, packed.scale, packed.scale, None, None, None, 1
        assert torch.equal(native.screen_scores(x, *arguments, activations.IDS["silu"], isa), expected)
