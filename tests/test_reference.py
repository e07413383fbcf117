"""The reference is the specification: its formula spelled out in plain Python, and its two forms compared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import sparsemlp
from sparsemlp import activations
from sparsemlp.reference import gated_mlp as reference
from tests.cases import CASES, Case, Sample, Truth, build
from tests.test_activations import PLAIN


def spelled_out(sample: Sample) -> torch.Tensor:
    """The definition entry by entry, in Python floats: nothing of the package or of PyTorch's kernels in it."""
    x = sample.x.double().tolist()
    gate, up, down = (w.double().tolist() for w in sample.weights)
    o = {name: value.double().tolist() for name, value in sample.options.items()}
    f, d = len(gate), sample.x.shape[1]
    threshold = sample.threshold.double().expand(f).tolist()
    out = []
    for i, token in enumerate(x):
        y = [0.0] * d
        for j in range(f):
            p = math.fsum(a * b for a, b in zip(token, gate[j], strict=True)) + (
                o["b_gate"][j] if "b_gate" in o else 0
            )
            u = math.fsum(a * b for a, b in zip(token, up[j], strict=True)) + (
                o["b_up"][j] if "b_up" in o else 0
            )
            a = PLAIN[sample.activation](p)
            s = o["token_scale"][i] if "token_scale" in o else 1.0
            kept = True if s == 0 else not abs(a) < s * threshold[j]
            mean = o["skipped_mean"][j] if "skipped_mean" in o else None
            active = kept and (a != 0 or mean is not None)
            h = a * u - (mean or 0.0) if active else 0.0
            for k in range(d):
                y[k] += h * down[j][k] + (mean * down[j][k] if mean is not None else 0.0)
        out.append([y[k] + (o["b_down"][k] if "b_down" in o else 0.0) for k in range(d)])
    return torch.tensor(out, dtype=torch.float64).reshape(len(x), d)


SMALL = [
    Case("small", tokens=3, d=7, f=11),
    Case("small-neurons", tokens=3, d=5, f=13, density="some_inf", scale="varied", biases="gud"),
    Case("small-route", tokens=4, d=5, f=9, density=0, scale="alternate", activation="gelu"),
    Case("small-mean", tokens=3, d=6, f=10, mean="mean", scale="one_zero", biases="d"),
    Case("small-mean-inf", tokens=2, d=6, f=10, mean="mean", density=0, activation="relu"),
    *(Case(f"small-{name}", tokens=2, d=6, f=12, activation=name) for name in activations.ACTIVATIONS),
    Case("small-no-neurons", f=0, biases="d"),
    Case("small-no-tokens", tokens=0),
    Case("small-no-width", d=0),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_definition(case: Case) -> None:
    """The reference, and the truth that the conformance tests use, are the definition to float64 rounding."""
    sample = build(case, torch.float64)
    expected = spelled_out(sample)
    size = expected.abs().max().item() if expected.numel() else 0.0
    allowed = 64 * torch.finfo(torch.float64).eps * max(size, 1.0)
    assert torch.allclose(Truth(sample).out, expected, rtol=0, atol=allowed)
    actual = sample.run(sparsemlp.gated_mlp, backend="reference")
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    "case", [c for c in CASES if "mean" in c.name or "scale" in c.name or "act" in c.name], ids=str
)
def test_the_differentiable_form_has_the_same_values(case: Case) -> None:
    sample = build(case, torch.float32)
    plain = sample.run(sparsemlp.gated_mlp, backend="reference")
    sample.x.requires_grad_(True)
    assert torch.equal(sample.run(sparsemlp.gated_mlp, backend="reference"), plain)


def test_mask_and_hidden_values() -> None:
    """`hidden` returns the mask itself: |a| = t is active, a NaN is active, an exact zero is not."""
    pre = torch.tensor([[2.0, -2.0, 1.999, torch.nan, 0.0, 0.0]])
    up = torch.tensor([[3.0, 3.0, torch.nan, 3.0, 3.0, torch.inf]])
    h, active = reference.hidden(pre, up, torch.tensor(2.0), None, None, None, "identity")
    assert active.tolist() == [[True, True, False, True, False, False]]
    assert h.nan_to_num(99).tolist() == [[6.0, -6.0, 0.0, 99.0, 0.0, 0.0]]
    h, active = reference.hidden(pre, up, torch.tensor(0.0), None, None, None, "identity")
    assert active.tolist() == [[True, True, True, True, False, False]]
    assert h[0, 4:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", [
    Case("grad", tokens=3, d=5, f=9, biases="gud"),
    Case("grad-mean", tokens=3, d=5, f=9, mean="mean+out", scale="varied"),
    Case("grad-neurons", tokens=3, d=5, f=9, density="some_inf", activation="gelu_tanh"),
    Case("grad-relu", tokens=3, d=5, f=9, activation="jsrelu", density=1),
], ids=str)  # fmt: skip
def test_gradients(case: Case) -> None:
    """Of every tensor that has one, against numerical differences; the mask is held by a threshold between values."""
    sample = build(case, torch.float64)
    if sample.threshold.dim() == 0 and sample.threshold > 0:
        ordered = Truth(sample).act.abs().flatten().sort().values
        middle = len(ordered) // 2
        sample.threshold = ((ordered[middle] + ordered[middle + 1]) / 2).float()
    names = [n for n in ("b_gate", "b_up", "b_down", "skipped_mean", "skipped_out") if n in sample.options]
    tensors = [sample.x, *sample.weights, *(sample.options[n].double() for n in names)]
    tensors = [t.clone().requires_grad_(True) for t in tensors]
    fixed = {n: v for n, v in sample.options.items() if n not in names}

    def run(*t: torch.Tensor) -> torch.Tensor:
        options = {**fixed, **dict(zip(names, t[4:], strict=True))}
        return sparsemlp.gated_mlp(*t[:4], threshold=sample.threshold, activation=case.activation, **options)

    assert torch.autograd.gradcheck(run, tensors)


def test_a_zero_activation_still_has_a_gradient() -> None:
    """silu at p = 0: a = 0 is not active, but φ'(0) = ½, and a zero-padded token must learn."""
    x = torch.zeros(1, 4, requires_grad=True)
    w_gate, w_up, w_down = (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    b_up = torch.ones(6)
    out = sparsemlp.gated_mlp(x, w_gate, w_up, w_down, b_up=b_up)
    out.sum().backward()
    expected = (0.5 * w_down.sum(1)) @ w_gate
    assert torch.allclose(x.grad, expected[None], rtol=1e-5)


def test_threshold_and_scale_have_no_gradient() -> None:
    sample = build(Case("no-grad", scale="varied"), torch.float32)
    sample.x.requires_grad_(True)
    threshold = sample.threshold.clone().requires_grad_(True)
    scale = sample.options["token_scale"].requires_grad_(True)
    sample.run(sparsemlp.gated_mlp, threshold=threshold).sum().backward()
    for t in (threshold, scale):
        assert t.grad is None or bool((t.grad == 0).all())


@pytest.mark.parametrize("name", ["threshold", "token_scale", "activation_params"])
def test_only_a_side_input_requires_grad(name: str) -> None:
    """Backward then gives what it gives when x requires grad too: φ's parameters a gradient, the others none or 0."""
    sample = build(Case("side", scale="varied", activation="mix"), torch.float32)
    side = {"threshold": sample.threshold, **sample.options}[name].clone().requires_grad_(True)
    out = sample.run(sparsemlp.gated_mlp, **{name: side})
    if name == "activation_params":
        out.sum().backward()
        assert side.grad is not None, "silently no gradient"
        assert side.grad.abs().max() > 0
    elif out.requires_grad:
        out.sum().backward()
        assert side.grad is None or bool((side.grad == 0).all())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_forward_mode(backend: str) -> None:
    """A directional derivative is the right one, never silently zero."""
    sample = build(Case("forward-mode", tokens=3, d=5, f=9, density=1), torch.float64)
    direction = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        return sparsemlp.gated_mlp(x, *sample.weights, backend=backend)

    step = 1e-6
    expected = (run(sample.x + step * direction) - run(sample.x - step * direction)) / (2 * step)
    for dtype, allowed in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        weights = [w.to(dtype) for w in sample.weights]
        _, tangent = torch.func.jvp(
            lambda x, weights=weights: sparsemlp.gated_mlp(x, *weights, backend=backend),
            (sample.x.to(dtype),),
            (direction.to(dtype),),
        )
        assert (tangent.double() - expected).abs().max() <= allowed * expected.abs().max()


def test_vmap() -> None:
    sample = build(Case("vmap", tokens=6, density="neurons"), torch.float32)
    expected = sample.run(sparsemlp.gated_mlp)
    for size in (1, 2, 3):
        batched = torch.func.vmap(
            lambda x: sparsemlp.gated_mlp(x, *sample.weights, threshold=sample.threshold)
        )
        out = batched(sample.x.reshape(-1, size, sample.x.shape[1]))
        assert torch.allclose(out.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_a_numpy_number_is_a_threshold() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not a dependency")
    sample = build(Case("numpy"), torch.float32)
    expected = sparsemlp.gated_mlp(sample.x, *sample.weights, threshold=0.25)
    assert torch.equal(
        sparsemlp.gated_mlp(sample.x, *sample.weights, threshold=numpy.float32(0.25)), expected
    )


def test_a_number_beyond_float32_is_infinite() -> None:
    sample = build(Case("numpy"), torch.float32)
    assert bool((sparsemlp.gated_mlp(sample.x, *sample.weights, threshold=1e300) == 0).all())


@pytest.mark.parametrize("mean", ["", "mean"])
@pytest.mark.parametrize("indicator", ["gate", "up", "product"])
def test_gradients_are_those_of_the_masked_formula(indicator: str, mean: str) -> None:
    """The mask is a constant for autograd, whichever value decides it."""
    sample = build(Case("gradients", tokens=4, mean=mean, biases="gud", indicator=indicator), torch.float64)
    leaves = [t.clone().requires_grad_() for t in (sample.x, *sample.weights)]
    x, w_gate, w_up, w_down_t = leaves
    pre = torch.nn.functional.linear(x, w_gate, sample.options["b_gate"])
    up = torch.nn.functional.linear(x, w_up, sample.options["b_up"])
    mu = sample.options["skipped_mean"].double() if mean else 0.0
    hidden = torch.where(Truth(sample).kept, torch.nn.functional.silu(pre) * up - mu, 0.0)
    wanted = hidden @ w_down_t + sample.options["b_down"] + (mu @ w_down_t if mean else 0.0)
    out = replace(sample, x=x, w_gate=w_gate, w_up=w_up, w_down_t=w_down_t).run(sparsemlp.gated_mlp)
    g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out, wanted)
    for ours, truth in zip(
        torch.autograd.grad(out, leaves, g), torch.autograd.grad(wanted, leaves, g), strict=True
    ):
        torch.testing.assert_close(ours, truth)
