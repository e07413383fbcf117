"""ggml, the operators of llama.cpp, as a dense peer: all layers in one graph, a thread pool that stays.

Through the package `ggml-python`: `llama-cpp-python` evaluates whole models only. Weights stay where PyTorch has them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_graph import layer

__all__ = ["sweep"]

_NODES = 64
"""Graph nodes and leaves of a layer, at most."""


class _Graph:
    """`benchmarks.peer_graph.Builder` in ggml's operators; keeps alive what ggml only points to."""

    def __init__(self, ggml: Any, context: Any) -> None:
        self.ggml, self.context = ggml, context
        self.kept: list[Tensor] = []
        self.types = {
            torch.float32: ggml.GGML_TYPE_F32,
            torch.bfloat16: ggml.GGML_TYPE_BF16,
            torch.float16: ggml.GGML_TYPE_F16,
        }

    def tensor(self, t: Tensor) -> Any:
        """A leaf over the tensor's own memory."""
        t = t.contiguous()
        self.kept.append(t)
        made = self.ggml.ggml_new_tensor_2d(
            self.context, self.types[t.dtype], t.shape[-1], t.numel() // t.shape[-1]
        )
        made.contents.data = t.data_ptr()
        return made

    def result(self, node: Any) -> Any:
        """The node with memory for its values, which are float32."""
        shape = node.contents.ne[1], node.contents.ne[0]
        self.kept.append(torch.empty(shape))
        node.contents.data = self.kept[-1].data_ptr()
        return node

    def linear(self, x: Any, weight: Tensor, bias: Tensor | None) -> Any:
        out = self.result(self.ggml.ggml_mul_mat(self.context, self.tensor(weight), x))
        if bias is None:
            return out
        return self.result(self.ggml.ggml_add(self.context, out, self.tensor(bias.float())))

    def act(self, name: str, x: Any) -> Any:
        if name == "identity":
            return x
        functions = {"silu": "ggml_silu", "relu": "ggml_relu", "gelu": "ggml_gelu_erf"}
        return self.result(getattr(self.ggml, functions[name])(self.context, x))

    def mul(self, a: Any, b: Any) -> Any:
        return self.result(self.ggml.ggml_mul(self.context, a, b))


def sweep(
    op: str,
    activation: str,
    layers: Sequence[tuple[Tensor, ...]],
    tokens: int,
    width: int,
    dtype: torch.dtype,
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Every layer once on its x, the weights in `dtype`, activations in float32 (ggml rounds them for its products).

    Raises:
        ImportError: ggml-python is not installed.
    """
    import ggml

    ggml.ggml_cpu_init()
    count = _NODES * len(layers)
    size = count * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(count, False)
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
    graph = _Graph(ggml, context)
    inputs = [torch.empty(tokens, width) for _ in layers]
    outputs, cgraph = [], ggml.ggml_new_graph_custom(context, count, False)
    for x, weights in zip(inputs, layers, strict=True):
        typed = tuple(w.to(dtype) for w in weights)
        node = layer(graph, op, activation, graph.tensor(x), typed)
        ggml.ggml_build_forward_expand(cgraph, node)
        outputs.append(graph.kept[-1])
    threads = torch.get_num_threads()
    pool = ggml.ggml_threadpool_new(ctypes.byref(ggml.ggml_threadpool_params_default(threads)))
    plan = ggml.ggml_graph_plan(cgraph, threads, pool)
    work = (ctypes.c_uint8 * max(1, plan.work_size))()
    plan.work_data = ctypes.cast(work, ctypes.POINTER(ctypes.c_uint8))

    def run(xs: list[Tensor]) -> list[Tensor]:
        for mine, x in zip(inputs, xs, strict=True):
            mine.copy_(x)
        if ggml.ggml_graph_compute(cgraph, ctypes.byref(plan)) != 0:
            raise RuntimeError("ggml did not compute its graph")
        return outputs

    run.kept = graph, work  # type: ignore[attr-defined]  # alive as long as the function
    return run
