"""The operators that a GPU run covers, one entry each: what is checked and what is timed.

What is tuned is listed in `benchmarks/tune_trials.py`. Functions are named, not imported: `benchmarks.gpu_run` must
start where PyTorch does not.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["OPERATORS", "Benchmark", "Operator"]


@dataclass(frozen=True)
class Benchmark:
    """A stage that times: `python -m module *args --label default|tuned`.

    Args:
        name: of the stage.
        module, args: what is run.
        seconds: of 470, what it may take; first: what of them before tuning, so that an early end leaves numbers.
        dry: arguments of a dry run after the others.
    """

    name: str
    module: str
    args: tuple[str, ...]
    seconds: float
    first: float = 0.0
    first_args: tuple[str, ...] = ()
    dry: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One operator: `conformance` is `module:function`, (dry) -> groups of cases, each to be called."""

    name: str
    conformance: str
    benchmarks: tuple[Benchmark, ...]

    def load(self, what: str) -> Any:
        """The function that the attribute names."""
        module, _, function = getattr(self, what).partition(":")
        return getattr(importlib.import_module(module), function)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "gated_mlp",
        conformance="benchmarks.gpu_conformance:gated_mlp",
        benchmarks=(
            Benchmark(
                "decode",
                "benchmarks.gpu_skipping",
                ("--what", "decode"),
                seconds=95,
                first=40,
                first_args=("--tokens", "1,8", "--compile", "0"),
                dry=("--tokens", "1", "--shape", "llama3-8b", "--sparsity", "0,90"),
            ),
            Benchmark(
                "prefill",
                "benchmarks.gpu_skipping",
                ("--what", "prefill"),
                seconds=30,
                dry=("--tokens", "20", "--shape", "llama3-8b", "--sparsity", "0,90", "--compile", "20"),
            ),
        ),
    ),
    Operator(
        "mlp",
        conformance="benchmarks.gpu_conformance:mlp",
        benchmarks=(
            Benchmark(
                "mlp decode",
                "benchmarks.gpu_skipping",
                ("--op", "mlp", "--what", "decode", "--compile", "1"),
                seconds=25,
                dry=("--tokens", "1", "--shape", "opt-1.3b", "--sparsity", "0,90", "--compile", "0"),
            ),
        ),
    ),
    Operator(
        "sparse_linear",
        conformance="benchmarks.gpu_conformance:sparse_linear",
        benchmarks=(
            Benchmark(
                "sparse_linear decode",
                "benchmarks.gpu_skipping",
                ("--op", "sparse_linear", "--what", "decode", "--compile", "0"),
                seconds=25,
                dry=("--tokens", "1", "--shape", "llama3-8b-q", "--sparsity", "0,90"),
            ),
        ),
    ),
    Operator(
        "mlp_fwd",
        conformance="benchmarks.gpu_conformance:mlp_training",
        benchmarks=(Benchmark("training", "benchmarks.gpu_training", (), seconds=40),),
    ),
    Operator(
        "gated_mlp_fwd",
        conformance="benchmarks.gpu_conformance:gated_mlp_training",
        benchmarks=(),
    ),
    Operator(
        "activation",
        conformance="benchmarks.gpu_conformance:activation",
        benchmarks=(Benchmark("activation", "benchmarks.gpu_activation", (), seconds=30),),
    ),
)
"""In the order in which they are run."""
