"""Both MLPs as PyTorch sees them: schema, fakes, autocast, compile, export, and the missing derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsemlp
from sparsemlp._op import Op
from sparsemlp.ops.gated_mlp import OP as GATED_MLP
from sparsemlp.ops.mlp import OP as MLP
from tests import cases, mlp_cases
from tests.backends import backends


@dataclass(frozen=True)
class Mlp:
    """An operator and where its samples come from: a module with `Case` and `build`. Both have x, weights, options."""

    function: Callable[..., torch.Tensor]
    op: Op
    cases: ModuleType
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    more: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.op.name

    def case(self, name: str, *, biases: bool = False, **options: Any) -> Any:
        """With all biases or none."""
        letters = "".join(b.removeprefix("b_")[0] for b in self.biases) if biases else ""
        return self.cases.Case(name, biases=letters, **options)

    def sample(self, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return self.cases.build(self.case(name, **options), dtype)


INT8 = (dict(name="int8", density="neurons", biases=True, int8=True),
        dict(name="int8-many", tokens=140, mean="mean+out", int8=True))  # fmt: skip
GATED = Mlp(
    sparsemlp.gated_mlp, GATED_MLP, cases, ("w_gate", "w_up", "w_down_t"), ("b_gate", "b_up", "b_down")
)
UNGATED = Mlp(sparsemlp.mlp, MLP, mlp_cases, ("w_in", "w_out_t"), ("b_in", "b_out"), INT8)
CALLS: tuple[dict[str, Any], ...] = (
    dict(name="plain"),
    dict(name="many-tokens", tokens=40),
    dict(name="neurons", density="neurons"),
    dict(name="scale", scale="varied"),
    dict(name="mean", mean="mean+out"),
    dict(name="biases", biases=True),
    dict(name="params", activation="weird"),
    dict(
        name="everything", density="neurons", scale="one_zero", mean="mean+out", biases=True, activation="mix"
    ),
    dict(name="interleaved", weights="interleaved"),
    dict(name="strided-x", x="strided"),
    dict(name="columns-x", x="columns"),
    dict(name="expanded-x", x="repeated"),
    dict(name="empty", tokens=0),
)
"""The gated one's int8 weights are in test_registration_gated_mlp.py."""
EVERY_MLP = pytest.mark.parametrize("op", [GATED, UNGATED], ids=str)
EVERY_BACKEND = pytest.mark.parametrize(("op", "backend"), [
    pytest.param(op, p.values[0], marks=p.marks, id=f"{op}-{p.values[0]}")
    for op in (GATED, UNGATED)
    for p in backends(op.op)
])  # fmt: skip
EVERY_CALL = pytest.mark.parametrize(("op", "case", "backend"), [
    pytest.param(op, op.case(**call), p.values[0], marks=p.marks, id=f"{op}-{call['name']}-{p.values[0]}")
    for op in (GATED, UNGATED)
    for p in backends(op.op)
    for call in (*CALLS, *op.more)
    if not ("int8" in call and p.values[0] == "triton")  # which has no int8 weights: the conformance suite tests that
])  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def raw(op: Op, sample: Any, backend: str) -> tuple[Any, ...]:
    """The registered operator's arguments."""
    given = {**vars(sample), **sample.options, "backend": backend}
    return tuple(given.get(a.name) for a in op.overload._schema.arguments)


@EVERY_CALL
def test_opcheck(op: Mlp, case: Any, backend: str) -> None:
    sample = op.cases.build(case, torch.float32)
    torch.library.opcheck(op.op.overload, raw(op.op, sample, backend))


@EVERY_CALL
def test_opcheck_with_requires_grad(op: Mlp, case: Any, backend: str) -> None:
    """The operator has no derivative, so what runs backward cannot be part of the check."""
    sample = op.cases.build(case, torch.float32)
    wanted = ("x",) if case.int8 else ("x", op.weights[0])
    sample = replace(sample, **{n: getattr(sample, n).detach().requires_grad_(True) for n in wanted})
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.op.overload, raw(op.op, sample, backend), test_utils=checks)


@EVERY_BACKEND
def test_backward_of_the_raw_operator_raises(op: Mlp, backend: str) -> None:
    sample = op.sample("raw")
    sample.x.requires_grad_(True)
    out = op.op.overload(*raw(op.op, sample, backend))
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=rf"sparsemlp::{op} has no derivative; call sparsemlp\.{op} to"):
        out.sum().backward()


@EVERY_CALL
def test_fake_strides_are_the_real_ones(op: Mlp, case: Any, backend: str) -> None:
    arguments = raw(op.op, op.cases.build(case, torch.bfloat16), backend)
    real = op.op.overload(*arguments)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with mode:
        fake = op.op.overload(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@EVERY_MLP
def test_meta_tensors_give_meta_tensors(op: Mlp) -> None:
    weights = [torch.empty(5, 8, device="meta") for _ in op.weights]
    out = op.function(torch.empty(2, 3, 8, device="meta"), *weights, threshold=0.5)
    assert out.device.type == "meta"
    assert out.shape == (2, 3, 8)


@pytest.mark.parametrize(("op", "names"), [
    (GATED,
     "x w_gate w_up w_down_t threshold input_threshold token_scale skipped_mean skipped_out b_gate b_up b_down "
     "scale_gate scale_up scale_down screen_gate screen_up screen_scale_gate screen_scale_up activation_params "
     "activation indicator backend"),
    (UNGATED,
     "x w_in w_out_t threshold input_threshold token_scale skipped_mean skipped_out b_in b_out scale_in scale_out "
     "screen_in screen_scale_in activation_params activation backend"),
], ids=["gated_mlp", "mlp"])  # fmt: skip
def test_the_schema_is_whole(op: Mlp, names: str) -> None:
    """Adding an argument later breaks exported graphs: this is the schema of the first release."""
    assert " ".join(a.name for a in op.op.overload._schema.arguments) == names
    assert torch.Tag.needs_exact_strides in op.op.overload.tags
    assert not op.op.overload._schema.is_mutable


class Layer(torch.nn.Module):
    def __init__(self, op: Mlp, sample: Any, backend: str) -> None:
        super().__init__()
        self.function, self.sample, self.backend = op.function, sample, backend

    def forward(self, x: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
        s = self.sample
        return 2 * self.function(
            x + 1, *s.weights, threshold=threshold, activation=s.activation, backend=self.backend, **s.options
        )


@EVERY_BACKEND
@pytest.mark.parametrize("mean", ["", "mean", "mean+out"])
def test_compile_static(op: Mlp, mean: str, backend: str) -> None:
    sample = op.sample("compiled", tokens=4, d=16, f=24, biases=True, mean=mean, activation="mix")
    layer = Layer(op, sample, backend)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(sample.x, sample.threshold), layer(sample.x, sample.threshold))


@EVERY_BACKEND
def test_compile_dynamic_does_not_recompile(op: Mlp, backend: str) -> None:
    """One graph serves every number of tokens, below and above the fused kernel's limit, and every threshold tensor."""
    sample = op.sample("dynamic", tokens=4, d=16, f=24)
    layer = Layer(op, sample, backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(sample.x, sample.threshold)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (2, 3, 31, 32, 33, 64):
            x, threshold = torch.randn(tokens, 16), torch.rand(())
            assert torch.equal(compiled(x, threshold), layer(x, threshold))


@EVERY_MLP
def test_compile_keeps_the_explicit_backend(op: Mlp) -> None:
    """The choice is part of the graph: a compiled call of an unavailable backend raises like an eager one."""
    sample = op.sample("explicit", torch.float64, d=16, f=24)
    compiled = torch.compile(Layer(op, sample, "native"), fullgraph=True, backend="aot_eager")
    with pytest.raises(sparsemlp.BackendUnavailableError, match=r"x is float64|native: "):
        compiled(sample.x, sample.threshold)


@EVERY_MLP
def test_compile_with_gradients(op: Mlp) -> None:
    """Small calls under grad: the differentiable composition is traced, and its gradients are eager's."""
    sample = op.sample("trained", d=16, f=24)
    layer = Layer(op, sample, "auto")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, compiled):
        x = sample.x.clone().requires_grad_(True)
        run(x, sample.threshold).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6)


@EVERY_BACKEND
def test_compile_a_number_as_threshold(op: Mlp, backend: str) -> None:
    sample = op.sample("number", d=16, f=24)
    layer = Layer(op, sample, backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for threshold in (0.0, 0.1, 0.25, 3):
        assert torch.equal(compiled(sample.x, threshold), layer(sample.x, threshold))


@EVERY_MLP
def test_compiled_errors_are_the_eager_ones(op: Mlp) -> None:
    """Validation is not skipped while compiling."""
    sample = op.sample("bad", d=16, f=24)
    compiled = torch.compile(Layer(op, sample, "auto"), fullgraph=True, backend="aot_eager")
    said = rf"{op.weights[0]} is shape \(24, 16\), expected \(F, D\) with x's D = 15"
    with pytest.raises(Exception, match=said):
        compiled(sample.x[:, :15], sample.threshold)


@EVERY_BACKEND
def test_export(op: Mlp, backend: str) -> None:
    sample = op.sample("exported", tokens=4, d=16, f=24, biases=True)
    layer = Layer(op, sample, backend)
    tokens = torch.export.Dim("tokens", min=2, max=256)
    program = torch.export.export(layer, (sample.x, sample.threshold), dynamic_shapes=({0: tokens}, None))
    assert any(node.target is op.op.overload for node in program.graph.nodes)
    for count in (2, 7, 40):
        x = torch.randn(count, 16)
        assert torch.equal(program.module()(x, sample.threshold), layer(x, sample.threshold))


@EVERY_CALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_weights_and_biases_only(
    op: Mlp, case: Any, dtype: torch.dtype, backend: str
) -> None:
    """Thresholds, scales and means keep their float32, integers stay integers."""
    sample = op.cases.build(case, torch.float32)
    sample.threshold = sample.threshold + 1e-4
    with torch.autocast("cpu", dtype):
        out = sample.run(op.function, backend=backend)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    options = {k: cast(v) if k.startswith("b_") else v for k, v in sample.options.items()}
    changed = replace(sample, options=options, **{n: cast(getattr(sample, n)) for n in ("x", *op.weights)})
    assert out.dtype == dtype
    assert torch.equal(out, changed.run(op.function, backend=backend))


@EVERY_MLP
def test_autocast_allows_mixed_inputs_and_leaves_float64(op: Mlp) -> None:
    sample = op.sample("mixed")
    with torch.autocast("cpu", torch.bfloat16):
        assert op.function(sample.x.bfloat16(), *sample.weights).dtype == torch.bfloat16
        double = op.function(sample.x.double(), *(w.double() for w in sample.weights))
        assert double.dtype == torch.float64


@EVERY_BACKEND
def test_inference_mode_gives_the_same_bits(op: Mlp, backend: str) -> None:
    sample = op.sample("inference", tokens=5)
    out = sample.run(op.function, backend=backend)
    with torch.inference_mode():
        assert torch.equal(sample.run(op.function, backend=backend), out)


@EVERY_BACKEND
def test_lazily_negated_tensors(op: Mlp, backend: str) -> None:
    """PyTorch may hand over a tensor whose sign is a flag, not yet applied to memory."""
    sample = op.sample("negated", tokens=5)
    expected = replace(sample, x=-sample.x).run(op.function, backend=backend)
    lazy = replace(sample, x=torch._neg_view(sample.x))
    assert torch.equal(lazy.run(op.function, backend=backend), expected)


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [4, 40])
def test_side_arguments_may_be_views(op: Mlp, tokens: int, backend: str) -> None:
    """Biases, thresholds, scales, means and parameters of any stride give what contiguous ones give."""
    options = dict(density="neurons", scale="varied", mean="mean+out", biases=True, activation="weird")
    sample = op.sample("views", tokens=tokens, **options)
    expected = sample.run(op.function, backend=backend)

    def spread(t: torch.Tensor) -> torch.Tensor:
        return torch.full((t.numel(), 2), torch.nan)[:, 1].copy_(t)

    sample.options = {name: spread(t) for name, t in sample.options.items()}
    sample.threshold = spread(sample.threshold)
    assert torch.equal(sample.run(op.function, backend=backend), expected)
    one = torch.full((1,), 0.5)
    for name in (*op.biases, "skipped_mean"):
        sample.options[name] = one.expand(sample.options[name].shape)
    narrow = sample.run(op.function, backend=backend)
    sample.options = {name: t.contiguous() for name, t in sample.options.items()}
    assert torch.equal(narrow, sample.run(op.function, backend=backend))


class _Halved(torch.Tensor):
    """A tensor that stores twice its values: read as plain memory it is wrong, through its dispatch it is right."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> _Halved:
        made = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=stored.dtype
        )
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.stored / 2 if isinstance(a, _Halved) else a for a in args]
        return func(*plain, **(kwargs or {}))


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_tensor_subclass_is_not_read_as_plain_memory(op: Mlp, tokens: int, backend: str) -> None:
    """Quantised and distributed tensors compute by their own rules."""
    sample = op.sample("subclass", tokens=tokens, weights="plain")
    expected = sample.run(op.function, backend=backend)
    for name in op.weights:
        changed = replace(sample, **{name: _Halved(getattr(sample, name) * 2)})
        assert torch.equal(changed.run(op.function, backend=backend), expected)
