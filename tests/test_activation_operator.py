"""`activation` as PyTorch sees it: autograd in every mode, compile, autocast, checks of the registration, errors."""

from __future__ import annotations

import pytest
import torch

import sparsemlp
from sparsemlp import activations
from sparsemlp.functional import ActivationFunction
from sparsemlp.nn import Activation
from sparsemlp.ops.activation import BACKWARD, COUNTED, OP
from sparsemlp.testing import assert_within_budget
from tests.activation_cases import LAYOUTS, params_of, peer, truth, values
from tests.backends import backends

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))
EVERY_NAME = pytest.mark.parametrize("name", list(activations.ACTIVATIONS))
SMOOTH = ("silu", "gelu", "gelu_tanh", "identity")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def away_from_kinks(name: str) -> torch.Tensor:
    p = torch.linspace(-4.03, 4.07, 24, dtype=torch.float64)
    return p.requires_grad_(True)


@EVERY_NAME
def test_gradcheck(name: str) -> None:
    params = params_of(name, torch.float64)
    p = away_from_kinks(name)
    assert torch.autograd.gradcheck(lambda p: sparsemlp.activation(p, name, params=params), p)
    assert torch.autograd.gradgradcheck(lambda p: sparsemlp.activation(p, name, params=params), p)


@pytest.mark.parametrize("name", ["weird", "mix"])
def test_gradients_of_parameters(name: str) -> None:
    params = params_of(name, torch.float64).requires_grad_(True)
    p = away_from_kinks(name)
    assert torch.autograd.gradcheck(lambda p, v: sparsemlp.activation(p, name, params=v), (p, params))
    for backend in ("native", "triton"):
        with pytest.raises(ValueError, match=r"has no derivative in params.*use backend='auto'"):
            sparsemlp.activation(p, name, params=params, backend=backend)


@EVERY_BACKEND
@EVERY_NAME
def test_second_derivative(name: str, backend: str) -> None:
    """create_graph: φ'' of float64 autograd, also at the minimum of a smooth row, where φ' is nearly 0."""
    p = torch.tensor([-3.1, -1.278, -0.4, 0.3, 0.9, 2.2, 3.7], requires_grad=True)
    params = params_of(name)
    out = sparsemlp.activation(p, name, params=params, backend=backend)
    (first,) = torch.autograd.grad(out.sum(), p, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), p, allow_unused=True)
    q = p.detach().double().requires_grad_(True)
    (exact,) = torch.autograd.grad(activations.apply(q, name, params).sum(), q, create_graph=True)
    wanted = torch.zeros_like(q)
    if exact.requires_grad:
        (found,) = torch.autograd.grad(exact.square().sum(), q, allow_unused=True)
        wanted = wanted if found is None else found
    second = torch.zeros_like(p) if second is None else second
    assert (second.double() - wanted).abs().max() <= 3e-6 * max(1.0, wanted.abs().max().item())


@EVERY_BACKEND
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("name", ["jsrelu", "weird", "silu", "identity"])
def test_opcheck(name: str, layout: str | None, backend: str) -> None:
    p = values((6, 35), torch.float32)
    p = LAYOUTS[layout](p) if layout else p
    params = params_of(name)
    for q in (p, p.clone().requires_grad_(True)):
        torch.library.opcheck(OP.overload, (q, params, name, backend))
        torch.library.opcheck(COUNTED.overload, (q, params, name, backend))
    torch.library.opcheck(BACKWARD.overload, (torch.ones_like(p), p, params, name, backend))


def test_the_schemas_are_whole() -> None:
    """Adding an argument later breaks exported graphs."""
    for op, names in ((OP, "p params name backend"), (COUNTED, "p params name backend"),
                      (BACKWARD, "grad p params name backend")):  # fmt: skip
        assert " ".join(a.name for a in op.overload._schema.arguments) == names
        assert torch.Tag.needs_exact_strides in op.overload.tags


def test_the_backward_operator_has_no_derivative() -> None:
    grad = torch.ones(3, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"activation_bwd has no derivative; differentiate .* create_graph=True"
    ):
        BACKWARD.overload(grad, torch.ones(3), None, "silu", "auto").sum().backward()


@EVERY_BACKEND
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("name", ["jsrelu", "mix"])
def test_compile(name: str, counts: bool, backend: str) -> None:
    """Forward and backward in one graph each, the operators whole in them; another λ or size is the same graph."""
    graphs: list[torch.fx.GraphModule] = []

    def run(p: torch.Tensor, params: torch.Tensor | None) -> torch.Tensor:
        out = sparsemlp.activation(p * 2, name, params=params, counts=counts, backend=backend)
        return out[0] + out[1].sum() if counts else out + 1

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=keep))
    params = params_of(name)
    for i, size in enumerate((40, 41, 77)):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            results = []
            for function in (run, compiled):
                p = values((3, size), torch.float32).requires_grad_(True)
                out = function(p, params)
                out.square().sum().backward()
                results.append((out.detach(), p.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        params = None if params is None else params * 1.5
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert (COUNTED if counts else OP).overload in targets
    assert BACKWARD.overload in targets


@EVERY_BACKEND
def test_compile_by_inductor(backend: str) -> None:
    p = values((5, 35), torch.float32)

    def run(p: torch.Tensor) -> torch.Tensor:
        return sparsemlp.activation(p.t() + 1, "jsrelu", backend=backend).t() * 2

    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        q = p.clone().requires_grad_(True)
        out = function(q)
        out.sum().backward()
        results.append((out.detach(), q.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@EVERY_BACKEND
def test_autocast_changes_nothing(backend: str) -> None:
    p = values((50,), torch.float32).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparsemlp.activation(p, "silu", backend=backend)
        out.sum().backward()
    assert out.dtype == torch.float32
    assert torch.equal(out, sparsemlp.activation(p, "silu", backend=backend))


@EVERY_BACKEND
@EVERY_NAME
def test_the_function_is_the_operator(name: str, backend: str) -> None:
    params, results = params_of(name), []
    for run in (
        lambda p: ActivationFunction.apply(p, params, name, backend),
        lambda p: sparsemlp.activation(p, name, params=params, backend=backend),
    ):
        p = values((300,), torch.float32).requires_grad_(True)
        out = run(p)
        out.backward(torch.linspace(-1, 1, 300))
        results.append((out.detach(), p.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@EVERY_NAME
def test_function_transforms(name: str) -> None:
    params = params_of(name)
    p = torch.linspace(-4.03, 4.07, 12).reshape(3, 4)
    value, slope = truth(p, name)
    value_peer, slope_peer = peer(p, name, torch.ones_like(p))

    def run(p: torch.Tensor) -> torch.Tensor:
        return sparsemlp.activation(p, name, params=params)

    assert_within_budget(torch.func.grad(lambda p: run(p).sum())(p), slope_peer, slope)
    assert_within_budget(torch.func.vmap(run)(p), value_peer, value)
    assert_within_budget(torch.func.jvp(run, (p,), (torch.ones_like(p),))[1], slope_peer, slope)
    out, counts = torch.func.vmap(lambda p: sparsemlp.activation(p, name, params=params, counts=True))(p)
    assert torch.equal(counts[:, 0], (out != 0).sum(1))
    with pytest.raises(ValueError, match=r"none under torch\.func transforms.*use backend='auto'"):
        torch.func.vmap(lambda p: sparsemlp.activation(p, name, params=params, backend="native"))(p)


@EVERY_BACKEND
def test_results_are_fresh(backend: str) -> None:
    """The output never shares memory with the input, also under a composition."""
    p = values((50,), torch.float32)
    before = p.clone()
    sparsemlp.activation(p, "identity", backend=backend).fill_(3)
    assert torch.equal(p, before)


def gradient(p: torch.Tensor, name: str, params: torch.Tensor | None, grad: torch.Tensor, backend: str):
    leaf = p.detach().requires_grad_(True)
    out, counts = sparsemlp.activation(leaf, name, params=params, counts=True, backend=backend)
    return out.detach(), counts, torch.autograd.grad(out, leaf, grad)[0]


@EVERY_BACKEND
@pytest.mark.parametrize("lazy", ["p", "params", "grad"])
def test_lazily_negated_tensors(lazy: str, backend: str) -> None:
    arguments = {
        "p": values((5, 7), torch.float32),
        "params": params_of("weird"),
        "grad": torch.linspace(-1, 1, 35).reshape(5, 7),
    }
    negated = {**arguments, lazy: torch._neg_view(arguments[lazy])}
    assert negated[lazy].is_neg()
    plain = {**arguments, lazy: -arguments[lazy]}
    for actual, wanted in zip(
        gradient(name="weird", backend=backend, **negated),
        gradient(name="weird", backend=backend, **plain),
        strict=True,
    ):
        assert torch.equal(actual, wanted)
    first = [
        sparsemlp.activation(a["p"], "weird", params=a["params"], backend=backend) for a in (negated, plain)
    ]
    assert torch.equal(*first)


@EVERY_BACKEND
def test_zeros_without_memory(backend: str) -> None:
    zeros, p = torch._efficientzerotensor(3), torch.ones(3)
    for lazy, plain in (((zeros, None), (p * 0, None)), ((p, zeros), (p, p * 0))):
        name = "silu" if lazy[1] is None else "weird"
        outs = [sparsemlp.activation(a, name, params=b, backend=backend) for a, b in (lazy, plain)]
        assert torch.equal(*outs)
        grads = [BACKWARD.overload(p, a, b, name, backend) for a, b in (lazy, plain)]
        assert torch.equal(*grads)
    assert torch.equal(BACKWARD.overload(zeros, p, None, "silu", backend), p * 0)


@EVERY_BACKEND
@EVERY_NAME
def test_many_gradients_at_once(name: str, backend: str) -> None:
    """`is_grads_batched`, and what uses it: the older vmap, whose tensors have no memory of their own."""
    p, params = values((6,), torch.float32).requires_grad_(True), params_of(name)
    grads = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    out = sparsemlp.activation(p, name, params=params, backend=backend)
    (together,) = torch.autograd.grad(out, p, grads, is_grads_batched=True, retain_graph=True)
    exact, slope = truth(p.detach(), name)[1], peer(p.detach(), name, torch.ones(6))[1]
    assert_within_budget(together, grads * slope, grads.double() * exact)

    def run(p: torch.Tensor) -> torch.Tensor:
        return sparsemlp.activation(p, name, params=params, backend=backend)

    jacobian = torch.autograd.functional.jacobian(run, p.detach(), vectorize=True)
    assert_within_budget(jacobian, slope.diag(), exact.diag())


@EVERY_BACKEND
def test_the_operator_does_not_drop_the_gradient_of_parameters(backend: str) -> None:
    p, params = torch.ones(4, requires_grad=True), params_of("weird").requires_grad_(True)
    for out in (
        ActivationFunction.apply(p, params, "weird", backend),
        OP.overload(p, params, "weird", backend),
        COUNTED.overload(p, params, "weird", backend)[0],
    ):
        with pytest.raises(ValueError, match=r"^params requires grad, expected one that does not.*detach"):
            out.sum().backward()


@EVERY_BACKEND
def test_the_operators_read_nothing_out_of_bounds(backend: str) -> None:
    """What nothing has checked before: arguments of another shape, each an error of one sentence."""
    p, one = torch.ones(3), torch.ones(1)
    for op in (OP, COUNTED, BACKWARD):
        first = (p, p) if op is BACKWARD else (p,)
        for params, name, message in (
            (one, "weird", r"^params is shape \(1,\), expected a float32 tensor of shape \(3,\)"),
            (None, "mix", r"^params is NoneType, expected a float32 tensor of shape \(1,\)"),
            (one, "relu", r"^params is shape \(1,\), expected None"),
            (None, "swish", r"^name is 'swish', expected one of: relu"),
        ):
            with pytest.raises(ValueError, match=message):
                op.overload(*first, params, name, backend)
    for grad in (torch.ones(2), one, torch.ones(1, 3), torch.ones(3, 3)):
        with pytest.raises(ValueError, match=r"^grad has shape \(.*\), expected p's, \(3,\)"):
            BACKWARD.overload(grad, p, None, "relu", backend)
    with pytest.raises(ValueError, match=r"^grad is float16 on cpu, expected p's float32"):
        BACKWARD.overload(p.half(), p, None, "relu", backend)


@pytest.mark.parametrize("device", ["meta"])
def test_meta(device: str) -> None:
    out, counts = sparsemlp.activation(torch.empty(3, 4, device=device), "silu", counts=True)
    assert (out.shape, counts.shape, out.device.type) == ((3, 4), (2,), device)


def test_float64_by_the_reference_only() -> None:
    p = values((20,), torch.float64)
    assert sparsemlp.activation(p, "gelu").dtype == torch.float64
    for backend in ("native", "triton"):
        with pytest.raises(sparsemlp.BackendUnavailableError, match=r"p is float64|not built"):
            sparsemlp.activation(p, "gelu", backend=backend)


def test_errors() -> None:
    p, one = torch.ones(3), torch.ones(1)
    no_params = r"^params is NoneType, expected a float32 tensor of shape \(1,\): \(lam\)"
    for message, call in {
        r"^p is list, expected a tensor": lambda: sparsemlp.activation([1.0], "relu"),
        r"^p is int64, expected float32": lambda: sparsemlp.activation(p.long(), "relu"),
        r"^p has layout torch.sparse_coo": lambda: sparsemlp.activation(p.to_sparse(), "relu"),
        r"^name is 'swish', expected one of: relu": lambda: sparsemlp.activation(p, "swish"),
        r"^name is 'Relu', expected one of: relu": lambda: Activation("Relu"),
        r"^backend is 'zz', expected one of: auto": lambda: Activation("relu", backend="zz"),
        r"^params has layout torch.sparse_coo": lambda: sparsemlp.activation(
            p, "mix", params=one.to_sparse()
        ),
        r"^backend is 'fast', expected one of: auto": lambda: sparsemlp.activation(p, "relu", backend="fast"),
        no_params: lambda: sparsemlp.activation(p, "mix"),
        r"^params is shape \(3,\), expected a float32": lambda: sparsemlp.activation(p, "mix", params=p),
        r"^params is shape \(1,\), expected None": lambda: sparsemlp.activation(p, "relu", params=one),
        r"^params is float, expected": lambda: sparsemlp.activation(p, "mix", params=0.5),
        r"^params is int64 on cpu, expected float32": lambda: sparsemlp.activation(
            p, "mix", params=one.long()
        ),
        r"^params is 0.5, expected 3 numbers": lambda: Activation("weird", 0.5),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_module() -> None:
    module = Activation("mix", [0.25])
    p = values((30,), torch.float32)
    assert torch.equal(module(p), sparsemlp.activation(p, "mix", params=torch.tensor([0.25])))
    module.params.copy_(torch.tensor([1.0]))
    assert torch.equal(module(p), sparsemlp.activation(p, "jsrelu"))
    module.params.fill_(0.3)
    module.to(torch.bfloat16)
    assert module.params.dtype == torch.float32
    assert module.params.item() == pytest.approx(0.3, abs=1e-7)
    assert "params" in module.state_dict()
    assert "mix, params=" in repr(module)
    assert Activation("jsrelu").state_dict() == {}
