"""`mlp` as PyTorch sees it: schema, fakes, autocast, compile, export, and the missing derivative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsemlp
from sparsemlp.ops.mlp import OP
from tests.backends import backends
from tests.mlp_cases import Case, Sample, build
from tests.test_registration import _Halved

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))

CALLS = {
    "plain": Case("plain"),
    "many-tokens": Case("many-tokens", tokens=40),
    "neurons": Case("neurons", density="neurons"),
    "scale": Case("scale", scale="varied"),
    "mean": Case("mean", mean="mean+out"),
    "biases": Case("biases", biases="io"),
    "params": Case("params", activation="weird"),
    "everything": Case(
        "everything", density="neurons", scale="one_zero", mean="mean+out", biases="io", activation="mix"
    ),
    "interleaved": Case("interleaved", weights="interleaved"),
    "strided-x": Case("strided-x", x="strided"),
    "expanded-x": Case("expanded-x", x="repeated"),
    "empty": Case("empty", tokens=0),
    "int8": Case("int8", density="neurons", biases="io", int8=True),
    "int8-many": Case("int8-many", tokens=140, mean="mean+out", int8=True),
}
EVERY_CALL = pytest.mark.parametrize(("case", "backend"), [
    pytest.param(case, p.values[0], marks=p.marks, id=f"{case}-{p.values[0]}")
    for p in backends(OP)
    for case in CALLS.values()
    if not (case.int8 and p.values[0] == "triton")  # which has no int8 weights: the conformance suite tests that
])  # fmt: skip


def raw(sample: Sample, backend: str) -> tuple[Any, ...]:
    """The registered operator's arguments."""
    o = sample.options
    return (
        sample.x, *sample.weights, sample.threshold, None, o.get("token_scale"), o.get("skipped_mean"),
        o.get("skipped_out"), o.get("b_in"), o.get("b_out"), o.get("scale_in"), o.get("scale_out"), None, None,
        o.get("activation_params"), sample.activation, backend,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@EVERY_CALL
def test_opcheck(case: Case, backend: str) -> None:
    torch.library.opcheck(OP.overload, raw(build(case, torch.float32), backend))


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["plain", "everything", "many-tokens"])
def test_opcheck_with_requires_grad(name: str, backend: str) -> None:
    """The operator has no derivative, so what runs backward cannot be part of the check."""
    sample = build(CALLS[name], torch.float32)
    sample.x = sample.x.detach().requires_grad_(True)
    sample.w_in = sample.w_in.detach().requires_grad_(True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OP.overload, raw(sample, backend), test_utils=checks)


@EVERY_BACKEND
def test_backward_of_the_raw_operator_raises(backend: str) -> None:
    sample = build(Case("raw"), torch.float32)
    sample.x.requires_grad_(True)
    out = OP.overload(*raw(sample, backend))
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=r"sparsemlp::mlp has no derivative; call sparsemlp\.mlp with"):
        out.sum().backward()


@EVERY_CALL
def test_fake_strides_are_the_real_ones(case: Case, backend: str) -> None:
    sample = build(case, torch.bfloat16)
    real = OP.overload(*raw(sample, backend))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in raw(sample, backend)]
    with mode:
        fake = OP.overload(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_meta_tensors_give_meta_tensors() -> None:
    args = [torch.empty(s, device="meta") for s in ((2, 3, 8), (5, 8), (5, 8))]
    out = sparsemlp.mlp(*args, threshold=0.5)
    assert out.device.type == "meta"
    assert out.shape == (2, 3, 8)


def test_the_schema_is_whole() -> None:
    """Adding an argument later breaks exported graphs: this is the schema of the first release."""
    assert " ".join(a.name for a in OP.overload._schema.arguments) == (
        "x w_in w_out_t threshold input_threshold token_scale skipped_mean skipped_out b_in b_out scale_in scale_out "
        "screen_in screen_scale_in activation_params activation backend"
    )
    assert torch.Tag.needs_exact_strides in OP.overload.tags
    assert not OP.overload._schema.is_mutable


class Layer(torch.nn.Module):
    def __init__(self, sample: Sample, backend: str) -> None:
        super().__init__()
        self.sample, self.backend = sample, backend

    def forward(self, x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        s = self.sample
        return 2 * sparsemlp.mlp(
            x + 1, *s.weights, threshold=threshold, activation=s.activation, backend=self.backend, **s.options
        )


@EVERY_BACKEND
@pytest.mark.parametrize("mean", ["", "mean", "mean+out"])
def test_compile_static(mean: str, backend: str) -> None:
    case = Case("compiled", tokens=4, d=16, f=24, biases="io", mean=mean, activation="mix")
    sample = build(case, torch.float32)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(sample.x, sample.threshold), layer(sample.x, sample.threshold))


@EVERY_BACKEND
def test_compile_dynamic_does_not_recompile(backend: str) -> None:
    """One graph serves every number of tokens, below and above the fused kernel's limit, and every threshold tensor."""
    sample = build(Case("dynamic", tokens=4, d=16, f=24), torch.float32)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(sample.x, sample.threshold)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (2, 3, 31, 32, 33, 64):
            x, threshold = torch.randn(tokens, 16), torch.rand(())
            assert torch.equal(compiled(x, threshold), layer(x, threshold))


def test_compile_keeps_the_explicit_backend() -> None:
    """The choice is part of the graph: a compiled call of an unavailable backend raises like an eager one."""
    sample = build(Case("explicit", d=16, f=24), torch.float64)
    compiled = torch.compile(Layer(sample, "native"), fullgraph=True, backend="aot_eager")
    with pytest.raises(sparsemlp.BackendUnavailableError, match=r"x is float64|native: "):
        compiled(sample.x, sample.threshold)


def test_compile_with_gradients() -> None:
    """Under grad the differentiable composition is traced, and its gradients are eager's."""
    sample = build(Case("trained", d=16, f=24), torch.float32)
    layer = Layer(sample, "auto")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, compiled):
        x = sample.x.clone().requires_grad_(True)
        run(x, sample.threshold).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_compiled_errors_are_the_eager_ones() -> None:
    """Validation is not skipped while compiling."""
    sample = build(Case("bad", d=16, f=24), torch.float32)
    compiled = torch.compile(Layer(sample, "auto"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"w_in is shape \(24, 16\), expected \(F, D\) with x's D = 15"):
        compiled(sample.x[:, :15], sample.threshold)


@EVERY_BACKEND
def test_export(backend: str) -> None:
    sample = build(Case("exported", tokens=4, d=16, f=24, biases="io"), torch.float32)
    layer = Layer(sample, backend)
    tokens = torch.export.Dim("tokens", min=2, max=256)
    program = torch.export.export(layer, (sample.x, sample.threshold), dynamic_shapes=({0: tokens}, None))
    assert any(node.target is OP.overload for node in program.graph.nodes)
    for count in (2, 7, 40):
        x = torch.randn(count, 16)
        assert torch.equal(program.module()(x, sample.threshold), layer(x, sample.threshold))


@EVERY_CALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_weights_and_biases_only(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Thresholds, scales and means keep their float32, integers stay integers."""
    sample = build(case, torch.float32)
    sample.threshold = sample.threshold + 1e-4
    with torch.autocast("cpu", dtype):
        out = sample.run(sparsemlp.mlp, backend=backend)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    options = {k: cast(v) if k.startswith("b_") else v for k, v in sample.options.items()}
    changed = replace(
        sample, x=cast(sample.x), w_in=cast(sample.w_in), w_out_t=cast(sample.w_out_t), options=options
    )
    assert out.dtype == dtype
    assert torch.equal(out, changed.run(sparsemlp.mlp, backend=backend))


def test_autocast_allows_mixed_inputs_and_leaves_float64() -> None:
    sample = build(Case("mixed"), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert sparsemlp.mlp(sample.x.bfloat16(), *sample.weights).dtype == torch.bfloat16
        double = sparsemlp.mlp(sample.x.double(), *(w.double() for w in sample.weights))
        assert double.dtype == torch.float64


@EVERY_BACKEND
def test_inference_mode_gives_the_same_bits(backend: str) -> None:
    sample = build(Case("inference", tokens=5), torch.float32)
    out = sample.run(sparsemlp.mlp, backend=backend)
    with torch.inference_mode():
        assert torch.equal(sample.run(sparsemlp.mlp, backend=backend), out)


@EVERY_BACKEND
def test_lazily_negated_tensors(backend: str) -> None:
    """PyTorch may hand over a tensor whose sign is a flag, not yet applied to memory."""
    sample = build(Case("negated", tokens=5), torch.float32)
    expected = replace(sample, x=-sample.x).run(sparsemlp.mlp, backend=backend)
    lazy = replace(sample, x=torch._neg_view(sample.x))
    assert torch.equal(lazy.run(sparsemlp.mlp, backend=backend), expected)


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [4, 40])
def test_side_arguments_may_be_views(tokens: int, backend: str) -> None:
    """Biases, thresholds, scales, means and parameters of any stride give what contiguous ones give."""
    case = Case("views", tokens=tokens, density="neurons", scale="varied", mean="mean+out", biases="io",
                activation="weird")  # fmt: skip
    sample = build(case, torch.float32)
    expected = sample.run(sparsemlp.mlp, backend=backend)

    def spread(t: torch.Tensor) -> torch.Tensor:
        return torch.full((t.numel(), 2), torch.nan)[:, 1].copy_(t)

    sample.options = {name: spread(t) for name, t in sample.options.items()}
    sample.threshold = spread(sample.threshold)
    assert torch.equal(sample.run(sparsemlp.mlp, backend=backend), expected)
    one = torch.full((1,), 0.5)
    for name, size in (("b_in", case.f), ("b_out", case.d), ("skipped_mean", case.f)):
        sample.options[name] = one.expand(size)
    narrow = sample.run(sparsemlp.mlp, backend=backend)
    sample.options = {name: t.contiguous() for name, t in sample.options.items()}
    assert torch.equal(narrow, sample.run(sparsemlp.mlp, backend=backend))


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_tensor_subclass_is_not_read_as_plain_memory(tokens: int, backend: str) -> None:
    """Quantised and distributed tensors compute by their own rules."""
    sample = build(Case("subclass", tokens=tokens, weights="plain"), torch.float32)
    expected = sample.run(sparsemlp.mlp, backend=backend)
    for name in ("w_in", "w_out_t"):
        changed = replace(sample, **{name: _Halved(getattr(sample, name) * 2)})
        assert torch.equal(changed.run(sparsemlp.mlp, backend=backend), expected)
