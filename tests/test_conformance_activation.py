"""What every backend of `activation` must satisfy, forward, backward and counts; the truth is float64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsemlp
from sparsemlp import _env, _native, _triton, activations
from sparsemlp.ops.activation import OP
from sparsemlp.testing import assert_within_budget
from tests.activation_cases import (
    KINKED,
    LAYOUTS,
    SHAPES,
    assert_digits,
    extremes,
    params_of,
    peer,
    truth,
    values,
)
from tests.backends import backends
from tests.cases import DTYPES

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
EVERY_NAME = pytest.mark.parametrize("name", list(activations.ACTIVATIONS))
EVERY_ISA = pytest.mark.parametrize("isa", [
    pytest.param(name, marks=[] if _native.problem() or name in _native.isa_names() else
                 [pytest.mark.skip(reason=f"this CPU has no {name}")])
    for name in _env.ISA_NAMES
])  # fmt: skip


def check(samples: Iterable[torch.Tensor], name: str, backend: str, *, counted: bool = True) -> None:
    """Output, gradient and counts of calls against the truth; judged together, so that no budget rests on one value."""
    judged: list[tuple[torch.Tensor, ...]] = []
    params = params_of(name)
    for p in samples:
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p.dtype)
        leaf = p.detach().requires_grad_(True)
        out, counts = sparsemlp.activation(leaf, name, params=params, counts=True, backend=backend)
        (found,) = torch.autograd.grad(out, leaf, grad)
        for actual in (out, found):
            assert (actual.shape, actual.dtype) == (p.shape, p.dtype)
            assert actual.stride() == torch.empty_like(p).stride()
        exact, slope = truth(p, name)
        assert (counts.dtype, counts.shape, counts.requires_grad) == (torch.int64, (2,), False)
        assert counts[0] == (out != 0).sum()
        if counted:
            assert counts.tolist() == [int((exact.to(p.dtype) != 0).sum()), int((slope != 0).sum())]
        plain = sparsemlp.activation(p, name, params=params, backend=backend)
        assert torch.equal(plain, out.detach())
        expected = torch.where(slope == 0, 0, grad.double() * slope)
        judged.append((out.detach(), found, exact, expected, *peer(p, name, grad)))
    out, found, exact, expected, peer_out, peer_grad = (
        torch.cat([t.flatten() for t in column]) for column in zip(*judged, strict=True)
    )
    assert_within_budget(out, peer_out, exact)
    assert_within_budget(found, peer_grad, expected, what="grad")


@EVERY_BACKEND
@EVERY_DTYPE
@EVERY_NAME
def test_shapes(name: str, dtype: torch.dtype, backend: str) -> None:
    samples = [values(shape, dtype, seed=len(shape)) for shape in SHAPES]
    check(samples, name, backend, counted=name in KINKED)


@EVERY_BACKEND
@EVERY_NAME
def test_layouts(name: str, backend: str) -> None:
    p = values((6, 35), torch.float32)
    check([change(p) for change in LAYOUTS.values()], name, backend, counted=name in KINKED)


@EVERY_BACKEND
@EVERY_NAME
def test_gradients_of_another_layout(name: str, backend: str) -> None:
    """A sum's expanded gradient, a transposed one, and one of a view."""
    p = values((6, 35), torch.float32).requires_grad_(True)
    _, slope = truth(p.detach(), name)
    for use in (lambda out: out.sum(), lambda out: (out.t() * 1).sum(), lambda out: out[:, ::2].sum()):
        out = sparsemlp.activation(p, name, params=params_of(name), backend=backend)
        (grad,) = torch.autograd.grad(use(out), p)
        weight = torch.autograd.grad(use(q := p.detach().requires_grad_(True)), q)[0].double()
        assert (grad.double() - weight * slope).abs().max() <= 4e-6


@EVERY_BACKEND
@EVERY_DTYPE
@EVERY_NAME
def test_the_whole_range(name: str, dtype: torch.dtype, backend: str) -> None:
    """No NaN comes of a finite p, through an overflowing power or otherwise; tiny values keep their digits."""
    p = extremes(dtype)
    if backend == "triton" and dtype == torch.bfloat16 and _triton.interpreting():
        p = p[(p == 0) | (p.abs() >= torch.finfo(dtype).smallest_normal)]  # the interpreter reads others as 0
    params = params_of(name)
    out = sparsemlp.activation(p, name, params=params, backend=backend)
    leaf = p.clone().requires_grad_(True)
    sparsemlp.activation(leaf, name, params=params, backend=backend).backward(torch.ones_like(p))
    wide = p.float() if dtype != torch.float32 else p  # where float32 itself overflows, so may the result
    exact, slope = (t.to(torch.float32).to(dtype) for t in truth(wide, name))
    for what, actual, wanted in (("out", out, exact), ("slope", leaf.grad, slope)):
        assert not actual.isnan().any(), what
        tolerance = 2 * torch.finfo(dtype).eps * wanted.double().abs() + 1e-6
        same = (actual == wanted) | ((actual.double() - wanted.double()).abs() <= tolerance)
        near_end = wanted.double().abs() >= torch.finfo(dtype).max * 0.99
        assert bool((same | (near_end & (actual.sign() == wanted.sign()))).all()), (
            what,
            p[~same],
            actual[~same],
        )
    peers = peer(p, name, torch.ones_like(p))
    for actual, other, wanted in zip((out, leaf.grad), peers, truth(p, name), strict=True):
        assert_digits(actual, other, wanted, p, name)


@EVERY_BACKEND
@EVERY_DTYPE
@EVERY_NAME
def test_nan_and_infinity(name: str, dtype: torch.dtype, backend: str) -> None:
    p = torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf, torch.nan], dtype=dtype).repeat(9)
    params = params_of(name)
    out, counts = sparsemlp.activation(p, name, params=params, counts=True, backend=backend)
    leaf = p.clone().requires_grad_(True)
    sparsemlp.activation(leaf, name, params=params, backend=backend).backward(torch.ones_like(p))
    expected, slope = (
        activations.apply(p.float(), name, params, derivative=d).to(dtype) for d in (False, True)
    )
    if name == "gelu":  # PyTorch's own gives NaN or inf for inf, depending on how its loop runs
        assert out[p == torch.inf].isnan().all() or (out[p == torch.inf] == torch.inf).all()
        expected[p == torch.inf] = out[p == torch.inf]
    for actual, wanted in ((out, expected), (leaf.grad, slope)):
        assert torch.equal(actual.isnan(), wanted.isnan())
        assert torch.equal(
            actual[~wanted.isfinite()].nan_to_num(5.0), wanted[~wanted.isfinite()].nan_to_num(5.0)
        )
    assert counts.tolist() == [int((expected != 0).sum()), int((slope != 0).sum())]


@EVERY_BACKEND
@EVERY_DTYPE
def test_a_threshold_of_nan(dtype: torch.dtype, backend: str) -> None:
    """τ = NaN: no p is below it, so that fatrelu is the identity, whose derivative is 1."""
    p, tau = torch.tensor([-2.0, 0.0, 3.0, torch.nan], dtype=dtype).repeat(9), torch.tensor([torch.nan])
    leaf = p.clone().requires_grad_(True)
    out, counts = sparsemlp.activation(leaf, "fatrelu", params=tau, counts=True, backend=backend)
    out.backward(torch.ones_like(p))
    assert torch.equal(out[p.isfinite()], p[p.isfinite()])
    assert bool((leaf.grad[p.isfinite()] == 1).all())
    assert leaf.grad.isnan().equal(p.isnan())
    assert counts.tolist() == [27, 36]


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("name", [n for n in KINKED if n != "identity"])
def test_a_mask_selects(name: str, dtype: torch.dtype, backend: str) -> None:
    """Where φ' is 0 the gradient is 0 even for an infinite or NaN one; where it is not, they come through."""
    p = values((500,), dtype).requires_grad_(True)
    _, slope = truth(p.detach(), name)
    for bad in (torch.inf, -torch.inf, torch.nan):
        out = sparsemlp.activation(p, name, params=params_of(name), backend=backend)
        (grad,) = torch.autograd.grad(out, p, torch.full_like(p, bad))
        assert bool((grad[slope == 0] == 0).all())
        assert not grad[slope != 0].isfinite().any()


@EVERY_BACKEND
@EVERY_DTYPE
def test_smooth_counts(dtype: torch.dtype, backend: str) -> None:
    """Rows without exact zeros, where nothing underflows."""
    p = values((3000,), dtype).clamp(-3, 3)
    p = torch.where(p == 0, 0.5, p)
    for name in ("silu", "gelu", "gelu_tanh"):
        _, counts = sparsemlp.activation(p, name, counts=True, backend=backend)
        assert counts.tolist() == [3000, 3000]


@EVERY_BACKEND
def test_a_wrong_kernel_would_be_seen(backend: str) -> None:
    """The budget can tell a parameter that is a tenth off, and the counts one entry."""
    p = values((4000,), torch.bfloat16)
    for name in ("weird", "fatrelu", "mix"):
        wrong = params_of(name) * 1.1
        out = sparsemlp.activation(p, name, params=wrong, backend=backend)
        exact, _ = truth(p, name)
        with pytest.raises(AssertionError, match="outside the budget"):
            assert_within_budget(out, peer(p, name, torch.ones_like(p))[0], exact)
    _, counts = sparsemlp.activation(p, "relu", counts=True, backend=backend)
    p[int((p > 0).nonzero()[0])] = -1
    _, fewer = sparsemlp.activation(p, "relu", counts=True, backend=backend)
    assert (counts - fewer).tolist() == [1, 1]


@EVERY_BACKEND
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values(data: st.DataObject, backend: str) -> None:
    name = data.draw(st.sampled_from(KINKED))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    numbers = st.floats(-64, 64, width=16, allow_subnormal=False)
    size = int(torch.Size(shape).numel())
    p = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size))).reshape(shape).to(dtype)
    check([p], name, backend)


@NATIVE
@EVERY_ISA
@EVERY_DTYPE
def test_every_instruction_set(dtype: torch.dtype, isa: str, backend: str, use_isa) -> None:
    use_isa(isa)
    for name in activations.ACTIVATIONS:
        samples = [values(shape, dtype) for shape in ((1,), (77,), (4099,))]
        check(samples, name, backend, counted=name in KINKED)


@NATIVE
@EVERY_ISA
@EVERY_DTYPE
@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_threads_or_place(dtype: torch.dtype, isa: str, backend: str, use_isa) -> None:
    """Any number of threads; an entry alone, or anywhere in a tensor."""
    use_isa(isa)
    p = values((131_101,), dtype)
    for name in activations.ACTIVATIONS:
        params, results = params_of(name), []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, counts = sparsemlp.activation(p, name, params=params, counts=True, backend=backend)
            leaf = p.clone().requires_grad_(True)
            sparsemlp.activation(leaf, name, params=params, backend=backend).backward(torch.ones_like(p))
            results.append((out, leaf.grad, counts))
        assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))
        for i in (0, 5, 2047, 131_100):
            assert torch.equal(
                sparsemlp.activation(p[i], name, params=params, backend=backend), results[0][0][i]
            )
        tail = sparsemlp.activation(p[3:].clone(), name, params=params, backend=backend)
        assert torch.equal(tail, results[0][0][3:])


@NATIVE
@EVERY_ISA
def test_half_precision_is_rounded_to_nearest_even(isa: str, backend: str, use_isa) -> None:
    """All 65,536 numbers of each half-precision type through relu2, whose float32 square is then rounded."""
    use_isa(isa)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        p = every.view(dtype)
        out = sparsemlp.activation(p, "relu2", backend=backend)
        expected = p.float().relu().square().to(dtype)
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
        same = sparsemlp.activation(p, "identity", backend=backend)
        assert torch.equal(same.isnan(), p.isnan())
        assert torch.equal(same[~p.isnan()], p[~p.isnan()])
