"""The training operators as PyTorch sees them: registration, compile, checkpointing, autocast, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from sparsemlp._op import Op
from sparsemlp.functional import GatedMLPFunction, MLPFunction
from sparsemlp.ops import mlp_training
from sparsemlp.testing import assert_within_budget
from tests.training_calls import EVERY_BACKEND, sparse
from tests.training_cases import GATED, KINDS, UNGATED, Kind, Truth, changed, grad_of, gradients, raw, stored

EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
def _fresh(threads: None) -> None:
    torch._dynamo.reset()
    torch.set_num_threads(1)


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the operators whatever the size."""
    monkeypatch.setattr(mlp_training, "is_small", lambda tokens, w: False)


def sample_of(kind: Kind, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    case = kind.case("torch", **{"activation": "relu", "tokens": 9, "d": 16, "f": 40, **options})
    return sparse(kind.cases.build(case, dtype))


def leaves_of(kind: Kind, sample: Any) -> dict[str, Tensor]:
    given = {**vars(sample), **sample.options}
    return {n: given[n].detach().clone().requires_grad_(True) for n in kind.leaves(sample)}


def used(out: Tensor, op: Op) -> bool:
    """Whether the operator is in the autograd graph of an output, up to three nodes deep."""
    nodes = [out.grad_fn]
    for _ in range(3):
        nodes += [n for node in nodes if node is not None for n, _ in node.next_functions]
    return any(f"sparsemlp_{op.name}_" in type(n).__name__ for n in nodes if n is not None)


@EVERY_BACKEND
@EVERY_KIND
@pytest.mark.parametrize("options", [
    dict(biases=""), dict(mean="mean+out", scale="varied", density="neurons", activation="mix"),
    dict(x="strided", weights="interleaved"), dict(x="columns"),
], ids=["plain", "everything", "strided", "columns"])  # fmt: skip
def test_opcheck(options: dict[str, Any], kind: Kind, backend: str) -> None:
    sizes = dict(tokens=5, d=7, f=12)
    case = kind.case("check", **{"activation": "relu", **sizes, **options})
    sample = kind.cases.build(case, torch.float32)
    torch.library.opcheck(kind.forward.overload, raw(kind.forward, sample, backend))
    torch.library.opcheck(
        kind.forward.overload, raw(kind.forward, changed(sample, **leaves_of(kind, sample)), backend)
    )
    saved = dict(zip(("pre", "up"), stored(kind, sample, backend)[1:], strict=False))
    for wanted in ("", "x", "x," + ",".join(kind.weights)):
        more = {"grad": grad_of(sample), "wanted": wanted, **saved}
        torch.library.opcheck(kind.backward.overload, raw(kind.backward, sample, backend, **more))


def test_the_schemas_are_whole() -> None:
    """Adding an argument later breaks exported graphs."""
    more = "threshold token_scale skipped_mean skipped_out"
    for kind, forward, backward in (
        (UNGATED, f"x w_in w_out_t {more} b_in b_out activation_params activation backend",
         "grad x w_in w_out_t pre threshold token_scale skipped_mean activation_params activation wanted backend"),
        (GATED, f"x w_gate w_up w_down_t {more} b_gate b_up b_down activation_params activation indicator backend",
         "grad x w_gate w_up w_down_t pre up threshold token_scale skipped_mean activation_params activation indicator "
         "wanted backend"),
    ):  # fmt: skip
        for op, names in ((kind.forward, forward), (kind.backward, backward)):
            assert " ".join(a.name for a in op.overload._schema.arguments) == names
            assert torch.Tag.needs_exact_strides in op.overload.tags
            assert not op.overload._schema.is_mutable


@EVERY_KIND
def test_the_backward_operator_has_no_derivative(kind: Kind) -> None:
    sample = sample_of(kind)
    saved = dict(zip(("pre", "up"), stored(kind, sample, "reference")[1:], strict=False))
    grad = grad_of(sample).requires_grad_(True)
    out = kind.backward.overload(*raw(kind.backward, sample, "reference", grad=grad, wanted="x", **saved))
    with pytest.raises(
        RuntimeError, match=rf"{kind}_bwd has no derivative; differentiate .* create_graph=True"
    ):
        out[0].sum().backward()


@EVERY_KIND
def test_which_calls_auto_leaves_to_the_operators(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones; small ones are PyTorch's own layers, or the composition where something is masked."""

    def run(threshold: float = 0.0) -> Tensor:
        sample = sample_of(kind, tokens=64)
        return changed(sample, x=sample.x.requires_grad_(True)).run(kind.function, threshold=threshold)

    assert not used(run(), kind.forward)
    assert not used(run(0.5), kind.forward)
    monkeypatch.setattr(mlp_training, "_SMALL", 64 * 16 * 40)
    assert used(run(), kind.forward)
    monkeypatch.setattr(mlp_training, "_SMALL", 64 * 16 * 40 + 1)
    assert not used(run(), kind.forward)


@EVERY_KIND
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh", "jsrelu"])
def test_small_calls_have_the_same_gradients(activation: str, kind: Kind) -> None:
    """What `auto` leaves to PyTorch, within the budget of the operators' truth."""
    sample = sample_of(kind, activation=activation)
    grad = grad_of(sample)
    truth = Truth(kind, sample, grad, *stored(kind, sample, "reference")[1:])
    peers = truth.peers()
    for name, g in gradients(kind, sample, grad, "auto").items():
        assert_within_budget(g, [p[1][name] for p in peers], truth.grads[name], what=name)


@EVERY_BACKEND
@EVERY_KIND
def test_compile(kind: Kind, backend: str) -> None:
    """Forward and backward in one graph each, the operators whole in them; another size is the same graph."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    def run(leaves: dict[str, Tensor]) -> Tensor:
        return 2 * changed(sample, **{**leaves, "x": leaves["x"] + 1}).run(kind.function, backend=backend)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=keep))
    for i, tokens in enumerate((9, 10, 70)):
        sample = sample_of(kind, tokens=tokens)
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            found = []
            for function in (run, compiled):
                leaves = leaves_of(kind, sample)
                found.append(torch.autograd.grad(function(leaves).square().sum(), list(leaves.values())))
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found, strict=True))
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert kind.forward.overload in targets
    assert kind.backward.overload in targets


@EVERY_KIND
def test_compile_by_inductor(kind: Kind, nothing_is_small: None) -> None:
    """A step of `auto` whose weights are tied, which a traced `autograd.Function` gets wrong."""
    sample = sample_of(kind)
    w = getattr(sample, kind.weights[0])

    def run(x: Tensor, w: Tensor) -> Tensor:
        tied = dict.fromkeys((kind.weights[0], kind.weights[-1]), w)
        return changed(sample, x=x, **tied).run(kind.function).sum()

    found = []
    for function in (run, torch.compile(run, fullgraph=True)):
        x, tied = (t.detach().clone().requires_grad_(True) for t in (sample.x, w))
        found.append(torch.autograd.grad(function(x, tied), [x, tied]))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*found, strict=True))


def run_of(kind: Kind, sample: Any, backend: str) -> Callable[..., Tensor]:
    """The call as a function of the tensors that have gradients."""
    names = kind.leaves(sample)

    def run(*tensors: Tensor) -> Tensor:
        return changed(sample, **dict(zip(names, tensors, strict=True))).run(kind.function, backend=backend)

    return run


@EVERY_BACKEND
@EVERY_KIND
def test_the_same_bits_however_it_is_run(kind: Kind, backend: str) -> None:
    """Checkpointing of both kinds, a graph kept and run twice, accumulation, hooks that freeze nothing."""
    sample = sample_of(kind)
    run, grad = run_of(kind, sample, backend), grad_of(sample)
    expected = list(gradients(kind, sample, grad, backend).values())
    for reentrant in (True, False):
        leaves = list(leaves_of(kind, sample).values())
        checkpoint(run, *leaves, use_reentrant=reentrant).backward(grad)
        assert all(torch.equal(t.grad, e) for t, e in zip(leaves, expected, strict=True))
    leaves = list(leaves_of(kind, sample).values())
    out = run(*leaves)
    out.backward(grad, retain_graph=True)
    out.backward(grad)
    assert all(torch.equal(t.grad, e + e) for t, e in zip(leaves, expected, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward(grad)
    leaves = list(leaves_of(kind, sample).values())
    for _ in range(3):
        run(*leaves).backward(grad)
    assert all(torch.equal(t.grad, e + e + e) for t, e in zip(leaves, expected, strict=True))


@EVERY_KIND
def test_fake_tensors(kind: Kind) -> None:
    """A small call asks for the threshold's value, which a fake tensor does not have."""
    sample = sample_of(kind)
    for threshold in (0.0, 0.5):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(sample.x).requires_grad_()
            out = changed(sample, x=x).run(kind.function, threshold=threshold)
            (grad,) = torch.autograd.grad(out.sum(), [x])
        assert grad.shape == sample.x.shape


@EVERY_BACKEND
@EVERY_KIND
def test_an_input_changed_in_place_before_backward_is_noticed(kind: Kind, backend: str) -> None:
    sample = sample_of(kind)
    leaves = leaves_of(kind, sample)
    out = changed(sample, **leaves).run(kind.function, backend=backend)
    with torch.no_grad():
        leaves[kind.weights[-1]].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@EVERY_BACKEND
@EVERY_KIND
def test_tied_weights(kind: Kind, backend: str) -> None:
    sample = sample_of(kind)
    first, last = kind.weights[0], kind.weights[-1]
    w, grad = getattr(sample, first), grad_of(sample)
    apart = gradients(kind, changed(sample, **{last: w.clone()}), grad, backend)
    tied = w.detach().clone().requires_grad_(True)
    out = changed(sample, **{first: tied, last: tied}).run(kind.function, backend=backend)
    (found,) = torch.autograd.grad(out, tied, grad)
    torch.testing.assert_close(found, apart[first] + apart[last])


@EVERY_BACKEND
@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(dtype: torch.dtype, kind: Kind, backend: str) -> None:
    """x, weights and biases are converted, means and thresholds not; gradients come back in float32."""
    sample = sample_of(kind, mean="mean+out", density="neurons")
    names = ("x", *kind.weights, *kind.biases)
    given = {**vars(sample), **sample.options}
    cast = changed(sample, **{n: given[n].to(dtype) for n in names})
    grad = grad_of(cast)
    with torch.autocast("cpu", dtype):
        leaves = leaves_of(kind, sample)
        out = changed(sample, **leaves).run(kind.function, backend=backend)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    assert out.dtype == dtype
    for (name, expected), g in zip(gradients(kind, cast, grad, backend).items(), found, strict=True):
        assert g.dtype == torch.float32
        assert torch.equal(g, expected.float()), name


@EVERY_BACKEND
@EVERY_KIND
def test_many_gradients_at_once(kind: Kind, backend: str) -> None:
    """`is_grads_batched`, the older vmap, whose tensors have no memory of their own: the composition."""
    sample = sample_of(kind)
    grads = torch.stack([grad_of(sample) * k for k in (1.0, -2.0, 0.5)])
    leaves = leaves_of(kind, sample)
    out = changed(sample, **leaves).run(kind.function, backend=backend)
    together = torch.autograd.grad(out, list(leaves.values()), grads, is_grads_batched=True)
    for name, g in zip(leaves, together, strict=True):
        for one, k in zip(grads, range(3), strict=True):
            torch.testing.assert_close(
                g[k], gradients(kind, sample, one, backend)[name], rtol=1e-4, atol=1e-4
            )


@EVERY_BACKEND
@EVERY_KIND
def test_second_derivatives(kind: Kind, backend: str) -> None:
    """A gradient penalty, as float64 autograd of the dense formula has it."""
    sample = sample_of(kind, activation="silu")
    sample.options[kind.biases[0]].zero_()

    def penalty(sample: Any, backend: str) -> tuple[Tensor, ...]:
        leaves = leaves_of(kind, sample)
        out = changed(sample, **leaves).run(kind.function, backend=backend)
        first = torch.autograd.grad(
            out.square().sum(), [leaves["x"], leaves[kind.weights[0]]], create_graph=True
        )
        return torch.autograd.grad(
            sum(g.square().sum() for g in first), list(leaves.values()), allow_unused=True
        )

    names = [
        n for n, t in {**vars(sample), **sample.options}.items() if isinstance(t, Tensor) and n != "threshold"
    ]
    wide = changed(sample, **{n: {**vars(sample), **sample.options}[n].double() for n in names})
    truth = penalty(wide, "auto")
    for found, peer, expected in zip(penalty(sample, backend), penalty(sample, "auto"), truth, strict=True):
        assert_within_budget(found, peer, expected)


@EVERY_KIND
def test_function_transforms(kind: Kind, nothing_is_small: None) -> None:
    """`torch.func` sees the composition through `auto`, and an explicit backend says what to do."""
    sample = sample_of(kind)
    expected = gradients(kind, sample, torch.ones(()).expand(sample.x.shape), "reference", ["x"])["x"]

    def run(x: Tensor, backend: str = "auto") -> Tensor:
        return changed(sample, x=x).run(kind.function, backend=backend)

    torch.testing.assert_close(torch.func.grad(lambda x: run(x).sum())(sample.x), expected)
    each = torch.func.vmap(torch.func.grad(lambda x: run(x[None]).sum()))(sample.x)
    torch.testing.assert_close(each, expected)
    with pytest.raises(
        ValueError, match=r"backend is 'native', which has no derivative.*torch\.func transforms it"
    ):
        torch.func.grad(lambda x: run(x, "native").sum())(sample.x)


@EVERY_BACKEND
@EVERY_KIND
def test_unused_and_undefined_gradients(kind: Kind, backend: str) -> None:
    """An output that the loss does not see costs nothing, and what the forward stores has no gradient."""
    sample = sample_of(kind)
    out, *saved = kind.forward.overload(
        *raw(kind.forward, changed(sample, **leaves_of(kind, sample)), backend)
    )
    assert out.requires_grad
    assert not any(t.requires_grad for t in saved)
    leaves = leaves_of(kind, sample)
    out = changed(sample, **leaves).run(kind.function, backend=backend)
    (found,) = torch.autograd.grad(out[:0].sum(), [leaves["x"]])
    assert not found.any()
    with torch.no_grad():
        assert not changed(sample, **leaves).run(kind.function, backend=backend).requires_grad


@EVERY_BACKEND
@EVERY_KIND
def test_the_function_is_the_operator(kind: Kind, backend: str) -> None:
    function = GatedMLPFunction if kind.gated else MLPFunction
    assert function.__name__ == ("GatedMLPFunction" if kind.gated else "MLPFunction")
    sample = sample_of(kind, mean="mean+out", density="neurons", scale="varied")
    grad, leaves = grad_of(sample), leaves_of(kind, sample)
    out, *saved = function.apply(*raw(kind.forward, changed(sample, **leaves), backend))
    expected = gradients(kind, sample, grad, backend)
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(out.device))
    assert all(torch.equal(g, e) for g, e in zip(found, expected.values(), strict=True))
    assert all(
        torch.equal(a.cpu(), b) for a, b in zip((out, *saved), stored(kind, sample, backend), strict=True)
    )


@EVERY_KIND
def test_the_operator_does_not_drop_the_gradient_of_parameters(kind: Kind) -> None:
    sample = sample_of(kind, activation="mix")
    params = sample.options["activation_params"].clone().requires_grad_(True)
    arguments = raw(kind.forward, changed(sample, activation_params=params), "reference")
    for run in (kind.forward.overload, (GatedMLPFunction if kind.gated else MLPFunction).apply):
        with pytest.raises(
            ValueError, match=r"^activation_params requires grad, expected one that does not.*detach"
        ):
            run(*arguments)[0].sum().backward()
