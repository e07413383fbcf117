"""What is timed for `mlp`; see `benchmarks.workload` for how masks are made new on every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks.workload import Call, Workload, phi
from sparsemlp import activations
from sparsemlp.quantization import quantize_columns, quantize_rows

__all__ = ["Layer", "Mlp", "dense_ungated"]

_BIAS = 0.1


@dataclass(frozen=True)
class Layer:
    """One layer's weights and biases; the output projection in both layouts."""

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    w_out_t: Tensor
    b_out: Tensor


def dense_ungated(activation: str) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(x, w_in, b_in, w_out, b_out) -> y: the dense MLP as ViT and OPT write it, biases included."""
    act = phi(activation)

    def dense(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        return F.linear(act(F.linear(x, w_in, b_in)), w_out, b_out)

    return dense


class Mlp(Workload):
    """The workload of one shape without a gate, dtype and token count."""

    op = "mlp"
    kind = "mlp"
    matrices = 2

    def _layer(self, generator: torch.Generator) -> Layer:
        d, f = self.shape.d, self.shape.f
        w_in, w_out_t = (self._matrix(f, d, inputs, generator) for inputs in (d, f))
        b_in, b_out = (
            (_BIAS * torch.randn(size, generator=generator, device=self.device)).to(self.dtype)
            for size in (f, d)
        )
        return Layer(w_in, b_in, w_out_t.t().contiguous(), w_out_t, b_out)

    def own(self, sparsity: float, backend: str = "auto", weights: str = "float", apart: str = "") -> Call:
        """This package's kernel with every layer's threshold set for `sparsity` (0: threshold 0)."""
        thresholds = [self.threshold(i, sparsity) for i in range(len(self.layers))]
        activation, made = (
            self.activation,
            [self._weights(i, weights, apart) for i in range(len(self.layers))],
        )

        def call(i: int, x: Tensor) -> Tensor:
            matrices, rest = made[i]
            return sparsemlp.mlp(
                x, *matrices, threshold=thresholds[i], activation=activation, backend=backend, **rest
            )

        return call

    def _weights(self, i: int, weights: str, apart: str) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        """w_in and w_out_t as the operator takes them, the biases, and the scales of int8 weights."""
        w = self.layers[i]
        biases = {"b_in": w.b_in, "b_out": w.b_out}
        if weights == "float":
            return (w.w_in, self.apart(apart, i, w.w_out_t)), biases
        made = self.derived("int8", i, lambda: [quantize_rows(w.w_in), quantize_columns(w.w_out_t)])
        (w_in, scale_in), (w_out_t, scale_out) = made
        return (w_in, self.apart(apart, i, w_out_t)), {**biases, "scale_in": scale_in, "scale_out": scale_out}

    def compared(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """|φ(p)| of layer i in float32, and where it is not 0."""
        w = self.layers[i]
        a = activations.apply(self._product(x, w.w_in) + w.b_in.float(), self.activation)
        return a.abs(), a != 0
