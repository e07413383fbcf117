"""What is timed for `sparse_linear`; see `benchmarks.workload` for how masks are made new on every call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import sparsemlp
from benchmarks.workload import Call, Workload
from sparsemlp.quantization import quantize_columns

__all__ = ["Layer", "SparseLinear"]


@dataclass(frozen=True)
class Layer:
    """One layer's weight (N, K) as `nn.Linear` stores it, and transposed, which is what skipping channels needs."""

    weight: Tensor
    weight_t: Tensor


class SparseLinear(Workload):
    """The workload of one linear layer from K = shape.d channels to N = shape.f, dtype and token count."""

    op = "sparse_linear"
    kind = "linear"
    matrices = 1

    def _layer(self, generator: torch.Generator) -> Layer:
        weight_t = self._matrix(self.shape.d, self.shape.f, self.shape.d, generator)
        return Layer(weight_t.t().contiguous(), weight_t)

    def own(self, sparsity: float, backend: str = "auto", weights: str = "float", apart: str = "") -> Call:
        """This package's kernel with every layer's threshold set for `sparsity` (0: threshold 0)."""
        # Nothing is kept apart: no router remembers linear layers.
        thresholds = [self.threshold(i, sparsity) for i in range(len(self.layers))]
        if weights == "float":
            made = [(w.weight_t, None) for w in self.layers]
        else:
            made = [
                self.derived("int8", i, lambda w=w: quantize_columns(w.weight_t))
                for i, w in enumerate(self.layers)
            ]

        def call(i: int, x: Tensor) -> Tensor:
            weight_t, scale = made[i]
            return sparsemlp.sparse_linear(x, weight_t, threshold=thresholds[i], scale=scale, backend=backend)

        return call

    def compared(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """|x|, which is thresholded itself, and where it is not 0."""
        return x.float().abs(), x != 0
