"""What can be benchmarked: one declarative entry per operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from benchmarks.gate import Conformance
from benchmarks.gated_mlp import GatedMlp, dense_mlp
from benchmarks.mlp import Mlp, dense_ungated
from benchmarks.shapes import SHAPES
from benchmarks.sparse_linear import SparseLinear
from benchmarks.workload import Call, Workload

__all__ = ["ENTRIES", "Dense", "Entry", "get"]

Weights = Callable[[Any], list[tuple[Tensor, ...]]]
"""From a workload, the weights of every layer as a dense function takes them."""


@dataclass(frozen=True)
class Dense:
    """A dense peer: its name in the results, its label in tables and plots, and its call from the workload."""

    name: str
    label: str
    build: Callable[[Any], Call]


@dataclass(frozen=True)
class Entry:
    """One operator.

    Args:
        name: the operator, as in `torch.ops.sparsemlp`.
        conformance: the tests that must be green before a result is reported.
        workload: builds weights and inputs.
        function: from a workload, the dense function (x, *weights) -> y in plain PyTorch.
        weights: from a workload, the weights of every layer for it, as `nn.Linear` stores them.
        packed: likewise, with the matrix that is stored for skipping as this package stores it.
        packed_label: what that matrix is called in tables.
        options: keyword arguments of `workload` that the command line offers.
    """

    name: str
    conformance: Conformance
    workload: type[Workload]
    function: Callable[[Any], Callable[..., Tensor]]
    weights: Weights
    packed: Weights
    packed_label: str
    options: tuple[str, ...] = ()

    @property
    def shapes(self) -> tuple[str, ...]:
        """The rows of `benchmarks.shapes.SHAPES` that fit."""
        return tuple(name for name, shape in SHAPES.items() if shape.kind == self.workload.kind)

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The eager peers, the baseline first."""
        return (
            Dense("eager", "PyTorch eager", partial(self._eager, self.weights)),
            Dense(
                "eager_neuron_major",
                f"PyTorch eager, {self.packed_label}",
                partial(self._eager, self.packed),
            ),
        )

    def _eager(self, weights: Weights, work: Any) -> Call:
        function, layers = self.function(work), weights(work)
        return lambda i, x: function(x, *layers[i])

    def compiled(self, work: Any) -> tuple[Callable[..., Tensor], list[tuple[Tensor, ...]]]:
        """(function, weights of every layer) that `torch.compile` gets."""
        return self.function(work), self.weights(work)


# What is timed here is a CPU; the interpreted GPU kernels would take ten minutes to test.
_NATIVE = "not triton"

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "gated_mlp",
            Conformance(
                tuple(
                    f"tests/test_conformance_gated_mlp{part}.py"
                    for part in ("", "_inputs", "_int8", "_screen")
                ),
                _NATIVE,
            ),
            GatedMlp,
            lambda work: dense_mlp(work.activation),
            lambda work: [(w.w_gate, w.w_up, w.w_down) for w in work.layers],
            lambda work: [(w.w_gate, w.w_up, w.w_down_t.t()) for w in work.layers],
            "W_down neuron-major",
            ("indicator", "input_sparsity"),
        ),
        Entry(
            "mlp",
            Conformance(("tests/test_conformance_mlp.py",), _NATIVE),
            Mlp,
            lambda work: dense_ungated(work.activation),
            lambda work: [(w.w_in, w.b_in, w.w_out, w.b_out) for w in work.layers],
            lambda work: [(w.w_in, w.b_in, w.w_out_t.t(), w.b_out) for w in work.layers],
            "W_out neuron-major",
        ),
        Entry(
            "sparse_linear",
            Conformance(("tests/test_conformance_sparse_linear.py",), _NATIVE),
            SparseLinear,
            lambda work: F.linear,
            lambda work: [(w.weight,) for w in work.layers],
            lambda work: [(w.weight_t.t(),) for w in work.layers],
            "W input-major",
        ),
    )
}
"""Every benchmark by its operator's name."""


def get(name: str) -> Entry:
    """The entry called `name`; ValueError naming the known ones otherwise."""
    try:
        return ENTRIES[name]
    except KeyError:
        raise ValueError(f"op is {name!r}, expected one of: {', '.join(ENTRIES)}") from None
