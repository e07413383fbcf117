"""`sparse_linear` as PyTorch sees it: definition, gradients, registration, compile, export, autocast, subclasses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import sparsemlp
from sparsemlp import sparse_linear
from sparsemlp.ops.sparse_linear import OP
from sparsemlp.reference import sparse_linear as reference
from tests.backends import backends
from tests.sparse_linear_cases import CASES, Case, Sample, Truth, build
from tests.test_registration import _Halved

EVERY_BACKEND = pytest.mark.parametrize("backend", backends(OP))

CALLS = {
    "plain": Case("plain"),
    "many-tokens": Case("many-tokens", tokens=140),
    "channels": Case("channels", density="channels", bias=True),
    "scale": Case("scale", scale="varied"),
    "int8": Case("int8", int8=True, bias=True),
    "strided-x": Case("strided-x", x="strided"),
    "columns-x": Case("columns-x", x="columns"),
    "expanded-x": Case("expanded-x", x="repeated"),
    "empty": Case("empty", tokens=0),
    "no-channels": Case("no-channels", k=0, bias=True),
}
FLOAT = [case for case in CALLS.values() if not case.int8]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def raw(sample: Sample, backend: str) -> tuple[Any, ...]:
    """The registered operator's arguments."""
    options = (sample.options.get(name) for name in ("token_scale", "bias", "scale"))
    return (sample.x, sample.weight_t, sample.threshold, *options, backend)


def calls(backend: str) -> list[Case]:
    return FLOAT if backend == "triton" else list(CALLS.values())


def every_call(names: Iterable[str] = CALLS) -> Any:
    """Backend × call, without int8 weights where the backend has none."""
    return pytest.mark.parametrize(("backend", "name"), [
        pytest.param(backend.values[0], name, marks=backend.marks)
        for backend in backends(OP) for name in names if CALLS[name] in calls(backend.values[0])
    ])  # fmt: skip


def spelled_out(sample: Sample) -> torch.Tensor:
    """The definition entry by entry, in Python floats: nothing of the package or of PyTorch's kernels in it."""
    x, weight = sample.x.double().tolist(), sample.weight_t.double().tolist()
    o = {name: value.double().tolist() for name, value in sample.options.items()}
    k, n = sample.weight_t.shape
    threshold = sample.threshold.double().expand(k).tolist()
    out = []
    for i, token in enumerate(x):
        s = o["token_scale"][i] if "token_scale" in o else 1.0
        kept = [j for j in range(k) if s == 0 or not abs(token[j]) < s * threshold[j]]
        scale = o.get("scale", [1.0] * n)
        sums = (math.fsum(token[j] * scale[c] * weight[j][c] for j in kept) for c in range(n))
        out.append([y + o.get("bias", [0.0] * n)[c] for c, y in enumerate(sums)])
    return torch.tensor(out, dtype=torch.float64).reshape(len(x), n)


@pytest.mark.parametrize("case", [
    Case("small", k=7, n=11),
    Case("small-channels", k=5, n=13, density="some_inf", scale="varied", bias=True),
    Case("small-route", tokens=4, k=5, n=9, density=0, scale="alternate"),
    Case("small-int8", k=6, n=10, scale="one_zero", bias=True, int8=True),
    Case("small-dense", k=6, n=10, density=1),
    Case("small-no-channels", k=0, bias=True),
    Case("small-no-tokens", tokens=0),
], ids=str)  # fmt: skip
def test_the_definition(case: Case) -> None:
    """The reference, and the truth that the conformance tests use, are the definition to float64 rounding."""
    sample = build(case, torch.float64)
    expected = spelled_out(sample)
    size = expected.abs().max().item() if expected.numel() else 0.0
    allowed = 64 * torch.finfo(torch.float64).eps * max(size, 1.0)
    actual = sample.run(sparse_linear, backend="reference")
    assert actual.shape == expected.shape
    for found in (Truth(sample).out, actual):
        assert torch.allclose(found, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.startswith(("scale", "density", "int8"))], ids=str
)
def test_the_differentiable_form_has_the_same_values(case: Case) -> None:
    sample = build(case, torch.float32)
    plain = sample.run(sparse_linear, backend="reference")
    sample.x.requires_grad_(True)
    assert torch.equal(sample.run(sparse_linear, backend="reference"), plain)


def test_mask() -> None:
    """`masked` returns the mask itself: |x| = t is active, a NaN is active, an exact zero is not."""
    x = torch.tensor([[2.0, -2.0, 1.999, torch.nan, 0.0, -0.0]])
    h, active = reference.masked(x, torch.tensor(2.0), None)
    assert active.tolist() == [[True, True, False, True, False, False]]
    assert h.nan_to_num(99).tolist() == [[2.0, -2.0, 0.0, 99.0, 0.0, 0.0]]
    h, active = reference.masked(x, torch.tensor(torch.inf), torch.tensor([0.0]))
    assert active.tolist() == [[True, True, True, True, False, False]]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("case", [
    Case("grad", k=9, n=5, bias=True),
    Case("grad-channels", k=9, n=5, density="some_inf", scale="varied"),
    Case("grad-dense", k=9, n=5, density=1),
], ids=str)  # fmt: skip
def test_gradients(case: Case, int8: bool) -> None:
    """Of every tensor that has one, against those of the masked formula, and of a kept 0 as the dense layer's."""
    sample = build(replace(case, int8=int8), torch.float64)
    if case.density == 1:
        assert bool((sample.x == 0).any()), "no kept zero in the sample"
    names = ["x", *([] if int8 else ["weight_t"]), *(n for n in ("bias", "scale") if n in sample.options)]
    values = {"x": sample.x, "weight_t": sample.weight_t, **sample.options}
    leaves = {name: values[name].double().clone().requires_grad_(True) for name in names}
    call = {**values, **leaves}
    scale = call.get("scale")
    weight = call["weight_t"].double() if scale is None else call["weight_t"].double() * scale
    wanted = torch.where(Truth(sample).kept, call["x"], 0) @ weight
    wanted = wanted + call["bias"] if "bias" in call else wanted
    x, weight_t = call.pop("x"), call.pop("weight_t")
    out = sparse_linear(x, weight_t, threshold=sample.threshold, **call)
    torch.testing.assert_close(out, wanted)
    g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.autograd.grad(y, list(leaves.values()), g) for y in (out, wanted))
    for name, mine, truth in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, truth, msg=name)
    skipped = ~Truth(sample).kept
    assert bool((ours[0][skipped] == 0).all())


def test_gradcheck_and_second_derivatives() -> None:
    sample = build(Case("gradcheck", k=6, n=4, density=0.5, bias=True), torch.float64)
    magnitude = sample.x.abs().flatten().sort().values
    sample.threshold = magnitude[8:10].mean().float()  # between two values
    leaves = [t.clone().requires_grad_(True) for t in (sample.x, sample.weight_t, sample.options["bias"])]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return sparse_linear(*tensors, threshold=sample.threshold)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_threshold_and_scale_have_no_gradient() -> None:
    sample = build(Case("no-grad", scale="varied"), torch.float32)
    sample.x.requires_grad_(True)
    threshold = sample.threshold.clone().requires_grad_(True)
    scale = sample.options["token_scale"].requires_grad_(True)
    sample.run(sparse_linear, threshold=threshold).sum().backward()
    for t in (threshold, scale):
        assert t.grad is None or bool((t.grad == 0).all())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_forward_mode_and_vmap(backend: str) -> None:
    """A directional derivative is the masked layer's, never silently zero; a batch is what its members are."""
    sample = build(Case("transforms", tokens=6, density="channels"), torch.float64)
    direction = torch.randn(sample.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        return sparse_linear(x, sample.weight_t, threshold=sample.threshold, backend=backend)

    _, tangent = torch.func.jvp(run, (sample.x,), (direction,))
    expected = torch.where(Truth(sample).kept, direction, 0) @ sample.weight_t
    torch.testing.assert_close(tangent, expected)
    batched = torch.func.vmap(run)(sample.x.reshape(3, 2, -1)).reshape(6, -1)
    torch.testing.assert_close(batched, run(sample.x))


@every_call()
def test_opcheck(name: str, backend: str) -> None:
    sample = build(CALLS[name], torch.float32)
    torch.library.opcheck(OP.overload, raw(sample, backend))
    sample.x = sample.x.detach().requires_grad_(
        True
    )  # no derivative: what runs backward cannot be part of it
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OP.overload, raw(sample, backend), test_utils=checks)


@EVERY_BACKEND
def test_backward_of_the_raw_operator_raises(backend: str) -> None:
    sample = build(Case("raw"), torch.float32)
    sample.x.requires_grad_(True)
    out = OP.overload(*raw(sample, backend))
    with pytest.raises(
        RuntimeError, match=r"sparsemlp::sparse_linear has no derivative; call sparsemlp\.sparse_linear with"
    ):
        out.sum().backward()


@EVERY_BACKEND
def test_fake_strides_are_the_real_ones(backend: str) -> None:
    for case in calls(backend):
        sample = build(case, torch.bfloat16)
        real = OP.overload(*raw(sample, backend))
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in raw(sample, backend)]
        with mode:
            fake = OP.overload(*fakes)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), case.name


def test_meta_tensors_give_meta_tensors() -> None:
    x, weight_t = torch.empty(2, 3, 8, device="meta"), torch.empty(8, 5, device="meta")
    out = sparse_linear(x, weight_t, threshold=0.5)
    assert (out.device.type, out.shape) == ("meta", (2, 3, 5))


def test_the_schema_is_whole() -> None:
    """Adding an argument later breaks exported graphs: this is the schema of the first release."""
    names = " ".join(a.name for a in OP.overload._schema.arguments)
    assert names == "x weight_t threshold token_scale bias scale backend"
    assert torch.Tag.needs_exact_strides in OP.overload.tags
    assert not OP.overload._schema.is_mutable


class Layer(torch.nn.Module):
    def __init__(self, sample: Sample, backend: str) -> None:
        super().__init__()
        self.sample, self.backend = sample, backend

    def forward(self, x: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
        s = self.sample
        return 2 * sparse_linear(x + 1, s.weight_t, threshold=threshold, backend=self.backend, **s.options)


@every_call(("channels", "int8"))
def test_compile_static(name: str, backend: str) -> None:
    sample = build(CALLS[name], torch.float32)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(sample.x, sample.threshold), layer(sample.x, sample.threshold))


@EVERY_BACKEND
def test_compile_dynamic_does_not_recompile(backend: str) -> None:
    """One graph serves every number of tokens, below and above the kernel's limit, and every threshold tensor."""
    sample = build(Case("dynamic", k=16, n=24), torch.float32)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(sample.x, sample.threshold)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (2, 3, 31, 32, 33, 64):
            x, threshold = torch.randn(tokens, 16), torch.rand(())
            assert torch.equal(compiled(x, threshold), layer(x, threshold))


def test_compile_keeps_the_explicit_backend() -> None:
    sample = build(Case("explicit", k=16, n=24), torch.float64)
    compiled = torch.compile(Layer(sample, "native"), fullgraph=True, backend="aot_eager")
    with pytest.raises(sparsemlp.BackendUnavailableError, match=r"x is float64|native: "):
        compiled(sample.x, sample.threshold)


@pytest.mark.parametrize("int8", [False, True])
def test_compile_with_gradients(int8: bool) -> None:
    """Under grad the differentiable composition is traced, and its gradients are eager's."""
    sample = build(Case("trained", k=16, n=24, int8=int8), torch.float32)
    layer = Layer(sample, "auto")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, compiled):
        x = sample.x.clone().requires_grad_(True)
        run(x, sample.threshold).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6)


@EVERY_BACKEND
def test_compile_a_number_as_threshold(backend: str) -> None:
    sample = build(Case("number", k=16, n=24), torch.float32)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for threshold in (0.0, 0.1, 0.25, 3):
        assert torch.equal(compiled(sample.x, threshold), layer(sample.x, threshold))


def test_compiled_errors_are_the_eager_ones() -> None:
    sample = build(Case("bad", k=16, n=24), torch.float32)
    compiled = torch.compile(Layer(sample, "auto"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"weight_t is shape \(16, 24\), expected \(K, N\) with x's K = 15"):
        compiled(sample.x[:, :15], sample.threshold)


@EVERY_BACKEND
def test_export(backend: str) -> None:
    sample = build(Case("exported", k=16, n=24, bias=True), torch.float32)
    layer = Layer(sample, backend)
    tokens = torch.export.Dim("tokens", min=2, max=256)
    program = torch.export.export(layer, (sample.x, sample.threshold), dynamic_shapes=({0: tokens}, None))
    assert any(node.target is OP.overload for node in program.graph.nodes)
    for count in (2, 7, 40):
        x = torch.randn(count, 16)
        assert torch.equal(program.module()(x, sample.threshold), layer(x, sample.threshold))


@every_call(("plain", "many-tokens", "channels", "scale", "int8"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_weights_and_bias_only(name: str, dtype: torch.dtype, backend: str) -> None:
    """Thresholds and scales keep their float32, int8 weights their integers."""
    sample = build(CALLS[name], torch.float32)
    sample.threshold = sample.threshold + 1e-4
    with torch.autocast("cpu", dtype):
        out = sample.run(sparse_linear, backend=backend)
    options = {k: v.to(dtype) if k == "bias" else v for k, v in sample.options.items()}
    weight_t = sample.weight_t if CALLS[name].int8 else sample.weight_t.to(dtype)
    by_hand = replace(sample, x=sample.x.to(dtype), weight_t=weight_t, options=options)
    assert out.dtype == dtype
    assert torch.equal(out, by_hand.run(sparse_linear, backend=backend))


def test_autocast_allows_mixed_inputs_and_leaves_float64() -> None:
    sample = build(Case("mixed"), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse_linear(sample.x.bfloat16(), sample.weight_t).dtype == torch.bfloat16
        assert sparse_linear(sample.x.double(), sample.weight_t.double()).dtype == torch.float64


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [4, 140])
def test_side_arguments_may_be_views(tokens: int, backend: str) -> None:
    """Biases, thresholds and scales of any stride give what contiguous ones give; so do lazily negated tensors."""
    int8 = backend != "triton"
    case = Case("views", tokens=tokens, density="channels", scale="varied", bias=True, int8=int8)
    sample = build(case, torch.float32)
    expected = sample.run(sparse_linear, backend=backend)

    def spread(t: torch.Tensor) -> torch.Tensor:
        return torch.full((t.numel(), 2), torch.nan)[:, 1].copy_(t)

    views = replace(
        sample,
        threshold=spread(sample.threshold),
        options={name: spread(t) for name, t in sample.options.items()},
    )
    assert torch.equal(views.run(sparse_linear, backend=backend), expected)

    def lazily(t: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-t)

    options = {name: lazily(t) for name, t in sample.options.items()}
    negated = Sample(lazily(sample.x), lazily(sample.weight_t), lazily(sample.threshold), options)
    assert torch.equal(negated.run(sparse_linear, backend=backend), expected)


@EVERY_BACKEND
def test_inference_mode_gives_the_same_bits(backend: str) -> None:
    sample = build(Case("inference", tokens=5), torch.float32)
    out = sample.run(sparse_linear, backend=backend)
    with torch.inference_mode():
        assert torch.equal(sample.run(sparse_linear, backend=backend), out)


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [3, 140])
def test_a_tensor_subclass_is_not_read_as_plain_memory(tokens: int, backend: str) -> None:
    """Quantised and distributed tensors compute by their own rules."""
    sample = build(Case("subclass", tokens=tokens, weights="plain"), torch.float32)
    expected = sample.run(sparse_linear, backend=backend)
    halved = sample.with_weights(_Halved(sample.weight_t * 2))
    assert torch.equal(halved.run(sparse_linear, backend=backend), expected)


def test_at_threshold_zero_it_is_the_dense_layer() -> None:
    """With gradients even bit for bit: the very same product."""
    layer = torch.nn.Linear(33, 20, dtype=torch.bfloat16)
    layer.weight.data = layer.weight.data.t().contiguous().t()
    x = torch.randn(7, 33, dtype=torch.bfloat16)
    assert torch.equal(sparse_linear(x, layer.weight.t(), layer.bias), F.linear(x, layer.weight, layer.bias))
