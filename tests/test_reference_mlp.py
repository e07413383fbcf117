"""The reference of `mlp`: the definition spelled out entry by entry, its mask, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparsemlp
from sparsemlp import activations
from sparsemlp.reference import mlp as reference
from tests.mlp_cases import CASES, Case, Sample, Truth, build


def spelled_out(sample: Sample) -> torch.Tensor:
    """SPEC's formula with Python loops, in float64."""
    o = {name: t.double() for name, t in sample.options.items()}
    d = sample.x.shape[-1]
    x = sample.x.double().reshape(sample.x.shape[:-1].numel(), d)
    w_in, w_out = sample.w_in.double(), sample.w_out_t.double()
    f = w_in.shape[0]
    limit = sample.threshold.double().expand(f)
    scale = o["token_scale"].reshape(-1) if "token_scale" in o else torch.ones(len(x), dtype=torch.float64)
    params = o.get("activation_params")
    out = torch.zeros(len(x), d, dtype=torch.float64)
    for i in range(len(x)):
        for j in range(f):
            p = sum((x[i, k] * w_in[j, k] for k in range(d)), torch.zeros((), dtype=torch.float64))
            p = p + (o["b_in"][j] if "b_in" in o else 0.0)
            a = activations.apply(p, sample.activation, params)
            skips = bool(scale[i] != 0) and bool(a.abs() < scale[i] * limit[j])
            if "skipped_mean" in o:
                out[i] += (o["skipped_mean"][j] if skips else a) * w_out[j]
            elif not skips and bool(a != 0):
                out[i] += a * w_out[j]
        if "b_out" in o:
            out[i] += o["b_out"]
    return out.reshape(sample.x.shape)


SMALL = [
    Case("small", tokens=3, d=7, f=11),
    Case("small-neurons", tokens=3, d=5, f=13, density="some_inf", scale="varied", biases="io"),
    Case("small-route", tokens=4, d=5, f=9, density=0, scale="alternate"),
    Case("small-mean", tokens=3, d=6, f=10, mean="mean", scale="one_zero", biases="o"),
    Case("small-mean-inf", tokens=2, d=6, f=10, mean="mean", density=0, activation="relu"),
    *(Case(f"small-{name}", tokens=2, d=6, f=12, activation=name) for name in activations.ACTIVATIONS),
    Case("small-no-neurons", f=0, biases="o"),
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
    assert torch.allclose(Truth(sample).out.reshape(expected.shape), expected, rtol=0, atol=allowed)
    actual = sample.run(sparsemlp.mlp, backend="reference")
    assert torch.allclose(actual, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.startswith(("mean", "scale", "act", "int8"))], ids=str
)
def test_the_differentiable_form_has_the_same_values(case: Case) -> None:
    sample = build(case, torch.float32)
    plain = sample.run(sparsemlp.mlp, backend="reference")
    sample.x.requires_grad_(True)
    assert torch.equal(sample.run(sparsemlp.mlp, backend="reference"), plain)


def test_mask_and_hidden_values() -> None:
    """`hidden` returns the mask itself: |a| = t is active, a NaN is active, an exact zero is not."""
    pre = torch.tensor([[2.0, -2.0, 1.999, torch.nan, 0.0, -0.0]])
    h, active = reference.hidden(pre, torch.tensor(2.0), None, None, None, "identity")
    assert active.tolist() == [[True, True, False, True, False, False]]
    assert h.nan_to_num(99).tolist() == [[2.0, -2.0, 0.0, 99.0, 0.0, 0.0]]
    mean = torch.full((6,), 0.5)
    h, active = reference.hidden(pre, torch.tensor(0.0), None, mean, None, "identity")
    assert active.all()
    assert h[0, 4:].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("case", [
    Case("grad", tokens=3, d=5, f=9, biases="io"),
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
    names = [n for n in ("b_in", "b_out", "skipped_mean", "skipped_out") if n in sample.options]
    tensors = [sample.x, *sample.weights, *(sample.options[n].double() for n in names)]
    tensors = [t.clone().requires_grad_(True) for t in tensors]
    fixed = {n: v for n, v in sample.options.items() if n not in names}

    def run(*t: torch.Tensor) -> torch.Tensor:
        options = {**fixed, **dict(zip(names, t[3:], strict=True))}
        return sparsemlp.mlp(*t[:3], threshold=sample.threshold, activation=case.activation, **options)

    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("mean", ["", "mean"])
def test_gradients_are_those_of_the_masked_formula(mean: str) -> None:
    """The mask is a constant for autograd."""
    sample = build(Case("gradients", tokens=4, mean=mean, biases="io"), torch.float64)
    leaves = [t.clone().requires_grad_() for t in (sample.x, *sample.weights)]
    x, w_in, w_out_t = leaves
    act = torch.nn.functional.gelu(torch.nn.functional.linear(x, w_in, sample.options["b_in"]))
    mu = sample.options["skipped_mean"].double() if mean else 0.0
    hidden = torch.where(Truth(sample).kept, act - mu, 0.0)
    wanted = hidden @ w_out_t + sample.options["b_out"] + (mu @ w_out_t if mean else 0.0)
    out = replace(sample, x=x, w_in=w_in, w_out_t=w_out_t).run(sparsemlp.mlp)
    g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out, wanted)
    for ours, truth in zip(
        torch.autograd.grad(out, leaves, g), torch.autograd.grad(wanted, leaves, g), strict=True
    ):
        torch.testing.assert_close(ours, truth)


def test_a_zero_activation_still_has_a_gradient() -> None:
    """silu at p = 0: a = 0 is not active, but φ'(0) = ½, and a zero-padded token must learn."""
    x = torch.zeros(1, 4, requires_grad=True)
    w_in, w_out = (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    sparsemlp.mlp(x, w_in, w_out, activation="silu").sum().backward()
    assert torch.allclose(x.grad, ((0.5 * w_out.sum(1)) @ w_in)[None], rtol=1e-5)


@pytest.mark.parametrize("name", ["threshold", "token_scale", "activation_params"])
def test_only_a_side_input_requires_grad(name: str) -> None:
    """Backward then gives what it gives when x requires grad too: φ's parameters a gradient, the others none or 0."""
    sample = build(Case("side", scale="varied", activation="mix"), torch.float32)
    side = {"threshold": sample.threshold, **sample.options}[name].clone().requires_grad_(True)
    out = sample.run(sparsemlp.mlp, **{name: side})
    if name == "activation_params":
        out.sum().backward()
        assert side.grad is not None, "silently no gradient"
        assert side.grad.abs().max() > 0
    elif out.requires_grad:
        out.sum().backward()
        assert side.grad is None or bool((side.grad == 0).all())


def test_int8_weights_have_no_gradient_and_x_has() -> None:
    sample = build(Case("int8-grad", int8=True, density=1, activation="silu"), torch.float64)
    x = sample.x.clone().requires_grad_(True)
    replace(sample, x=x).run(sparsemlp.mlp).sum().backward()
    truth = Truth(sample)
    wide = sample.x.clone().requires_grad_(True)
    hidden = torch.nn.functional.silu(wide @ truth.w_in.T)
    (hidden @ truth.w_out_t).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_forward_mode_and_vmap(backend: str) -> None:
    """A directional derivative is the right one, never silently zero; vmap maps."""
    sample = build(Case("forward-mode", tokens=3, d=5, f=9, density=1), torch.float64)
    direction = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        return sparsemlp.mlp(x, *sample.weights, activation="gelu", backend=backend)

    step = 1e-6
    expected = (run(sample.x + step * direction) - run(sample.x - step * direction)) / (2 * step)
    _, tangent = torch.func.jvp(run, (sample.x,), (direction,))
    assert (tangent - expected).abs().max() <= 1e-8 * expected.abs().max()
    batched = torch.func.vmap(run)(sample.x.reshape(3, 1, 5))
    torch.testing.assert_close(batched.reshape(3, 5), run(sample.x))


def test_a_skipped_row_counts_as_not_read() -> None:
    """In the differentiable composition, which "auto" takes for small calls, it reaches the output, as in the dense
    MLP; in the hand-written pair it does not."""
    sample = build(Case("unread", tokens=3, density="neurons"), torch.float32)
    sample.threshold[33] = torch.inf
    sample.w_out_t[33] = torch.inf
    assert sample.run(sparsemlp.mlp, backend="auto").isfinite().all()
    trained = replace(sample, x=sample.x.clone().requires_grad_(True))
    assert trained.run(sparsemlp.mlp, backend="auto").isnan().all()
    assert trained.run(sparsemlp.mlp, backend="reference").isfinite().all()
