"""`gated_mlp` with int8 weights and input thresholds as PyTorch sees it: opcheck, compile, export."""

from __future__ import annotations

import pytest
import torch

import sparsemlp
from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends
from tests.cases import Case, Sample, build
from tests.test_conformance_gated_mlp import not_built
from tests.test_registration import raw

CALLS = {
    "int8": Case("int8", d=16, f=24, biases="gud", density="neurons", int8=True),
    "int8-mean": Case("int8-mean", d=16, f=24, mean="mean+out", scale="varied", int8=True),
    "inputs": Case("inputs", d=16, f=24, inputs=0.5),
    "channels": Case("channels", d=16, f=24, inputs="channels", indicator="product", biases="gud"),
    "int8-inputs": Case("int8-inputs", d=16, f=24, inputs="channels", indicator="up", int8=True),
}


def runs(backend: str) -> list[Case]:
    return [c for c in CALLS.values() if not_built(build(c, torch.float32), backend) is None]


EVERY_CALL = pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, p.values[0], marks=p.marks, id=f"{case}-{p.values[0]}")
        for p in backends(OP)
        for case in runs(p.values[0])
    ],
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    def __init__(self, sample: Sample, backend: str) -> None:
        super().__init__()
        self.sample, self.backend = sample, backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.sample
        return 2 * sparsemlp.gated_mlp(
            x + 1, *s.weights, threshold=s.threshold, activation=s.activation, indicator=s.indicator,
            backend=self.backend, **s.options,
        )  # fmt: skip


@EVERY_CALL
@pytest.mark.parametrize("tokens", [3, 40])
def test_opcheck(case: Case, tokens: int, backend: str) -> None:
    sample = build(case, torch.float32)
    sample.x = torch.randn(tokens, case.d)
    if "token_scale" in sample.options:
        sample.options["token_scale"] = torch.rand(tokens)
    torch.library.opcheck(OP.overload, raw(OP, sample, backend))


@EVERY_CALL
def test_compile_static(case: Case, backend: str) -> None:
    sample = build(case, torch.float32)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(sample.x), layer(sample.x))


@EVERY_CALL
def test_compile_dynamic_does_not_recompile(case: Case, backend: str) -> None:
    sample = build(case, torch.float32)
    sample.options.pop("token_scale", None)
    layer = Layer(sample, backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(torch.randn(4, case.d))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (2, 31, 33, 130):
            x = torch.randn(tokens, case.d)
            assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("case", CALLS.values(), ids=str)
def test_compile_with_gradients(case: Case) -> None:
    sample = build(case, torch.float32)
    layer = Layer(sample, "auto")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, compiled):
        x = sample.x.clone().requires_grad_(True)
        run(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6)


@EVERY_CALL
def test_export(case: Case, backend: str) -> None:
    sample = build(case, torch.float32)
    sample.options.pop("token_scale", None)
    layer = Layer(sample, backend)
    tokens = torch.export.Dim("tokens", min=2, max=256)
    program = torch.export.export(layer, (sample.x,), dynamic_shapes=({0: tokens},))
    assert any(node.target is OP.overload for node in program.graph.nodes)
    for count in (2, 7, 40):
        x = torch.randn(count, case.d)
        assert torch.equal(program.module()(x), layer(x))
