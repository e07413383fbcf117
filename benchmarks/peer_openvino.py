"""OpenVINO's CPU plugin as a dense peer: all layers in one compiled model, tuned for latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_graph import layer

__all__ = ["sweep"]


class _Graph:
    """`benchmarks.peer_graph.Builder` in OpenVINO's operators."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def _constant(self, t: Tensor) -> Any:
        return self.ops.constant(t.float().numpy())

    def linear(self, x: Any, weight: Tensor, bias: Tensor | None) -> Any:
        out = self.ops.matmul(x, self._constant(weight), False, True)
        return out if bias is None else self.ops.add(out, self._constant(bias[None]))

    def act(self, name: str, x: Any) -> Any:
        if name == "identity":
            return x
        if name == "silu":
            return self.ops.swish(x)
        return self.ops.relu(x) if name == "relu" else self.ops.gelu(x, "erf")

    def mul(self, a: Any, b: Any) -> Any:
        return self.ops.multiply(a, b)


def sweep(
    op: str,
    activation: str,
    layers: Sequence[tuple[Tensor, ...]],
    tokens: int,
    width: int,
    dtype: torch.dtype,
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Every layer once on its x; weights are packed by OpenVINO, in bfloat16 or float16 where `dtype` is that.

    Raises:
        ImportError: openvino is not installed.
    """
    import openvino as ov
    from openvino import opset13 as ops

    graph = _Graph(ops)
    inputs = [ops.parameter([tokens, width], np.float32) for _ in layers]
    outputs = [layer(graph, op, activation, x, w) for x, w in zip(inputs, layers, strict=True)]
    precision = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    model = ov.Core().compile_model(
        ov.Model(outputs, inputs),
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": precision,
        },
    )
    request = model.create_infer_request()

    def run(xs: list[Tensor]) -> list[Tensor]:
        found = request.infer([x.float().numpy() for x in xs], share_inputs=True, share_outputs=True)
        return [torch.from_numpy(found[i]) for i in range(len(xs))]

    return run
