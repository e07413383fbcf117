"""What can be benchmarked: one declarative entry per operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from benchmarks.gate import Conformance
from benchmarks.gated_mlp import Call, GatedMlp, dense_mlp
from benchmarks.shapes import SHAPES

__all__ = ["ENTRIES", "Dense", "Entry", "get"]


@dataclass(frozen=True)
class Dense:
    """A dense peer: its name in the results, its label in tables and plots, and its call from the workload."""

    name: str
    label: str
    build: Callable[[GatedMlp], Call]


@dataclass(frozen=True)
class Entry:
    """One operator.

    Args:
        name: the operator, as in `torch.ops.sparsemlp`.
        shapes: rows of `benchmarks.shapes.SHAPES` that fit it.
        conformance: the tests that must be green before a result is reported.
        workload: builds weights and inputs: (shape, dtype, tokens, activation, layers, *, seed, share).
        dense: the peers, the baseline first.
        compiled: (function, weights of every layer) that `torch.compile` gets.
    """

    name: str
    shapes: tuple[str, ...]
    conformance: Conformance
    workload: Callable[..., GatedMlp]
    dense: tuple[Dense, ...]
    compiled: Callable[[GatedMlp], tuple[Callable[..., Tensor], list[tuple[Tensor, ...]]]]


def _linear_weights(work: GatedMlp) -> list[tuple[Tensor, ...]]:
    return [(w.w_gate, w.w_up, w.w_down) for w in work.layers]


def _neuron_major_weights(work: GatedMlp) -> list[tuple[Tensor, ...]]:
    return [(w.w_gate, w.w_up, w.w_down_t.t()) for w in work.layers]


def _eager(weights: Callable[[GatedMlp], list[tuple[Tensor, ...]]], work: GatedMlp) -> Call:
    dense, layers = dense_mlp(work.activation), weights(work)
    return lambda i, x: dense(x, *layers[i])


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="gated_mlp",
            shapes=tuple(name for name, shape in SHAPES.items() if shape.gated),
            # What is timed here is a CPU; the interpreted GPU kernels would take ten minutes to test.
            conformance=Conformance("tests/test_conformance_gated_mlp.py", "not triton"),
            workload=GatedMlp,
            dense=(
                Dense("eager", "PyTorch eager", partial(_eager, _linear_weights)),
                Dense(
                    "eager_neuron_major",
                    "PyTorch eager, W_down neuron-major",
                    partial(_eager, _neuron_major_weights),
                ),
            ),
            compiled=lambda work: (dense_mlp(work.activation), _linear_weights(work)),
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
