"""A small set of timings for pytest-benchmark; it times and asserts nothing about time.

    python -m pytest tests/test_regression_benchmark.py --benchmark-only --benchmark-autosave
    python -m pytest tests/test_regression_benchmark.py --benchmark-only --benchmark-compare

Without --benchmark-only the module is skipped, so a busy machine cannot fail the test suite. On a shared machine
compare within a group (the dense peer is in each), not one day's milliseconds with another's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import measure, registry, shapes
from benchmarks.gated_mlp import GatedMlp

ENTRY = registry.get("gated_mlp")
CASES = [
    ("smollm2-135m", "bf16", 1),
    ("smollm2-135m", "fp32", 1),
    ("qwen3-0.6b", "bf16", 1),
    ("qwen3-0.6b", "bf16", 4),
]
ALTERNATIVES = ["eager", "own_0", "own_50", "own_90"]


@pytest.fixture(autouse=True)
def _only_when_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--benchmark-only", default=False):
        pytest.skip(
            "times the kernels, which says nothing on a busy machine; ask for it with --benchmark-only"
        )
    # The suite's poisoned memory costs a write of every output, which the timing must not see.
    poisoned = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        yield
    torch.use_deterministic_algorithms(poisoned, warn_only=True)


@functools.lru_cache(maxsize=1)
def _work(shape: str, dtype: str, tokens: int) -> GatedMlp:
    row = shapes.get(shape)
    return measure.build(
        measure.Case(
            ENTRY, row, dtype, tokens, (0.0,), row.activation, rounds=1, threads=torch.get_num_threads()
        )
    )


@pytest.mark.parametrize("alternative", ALTERNATIVES)
@pytest.mark.parametrize(("shape", "dtype", "tokens"), CASES)
def test_gated_mlp(benchmark: Any, shape: str, dtype: str, tokens: int, alternative: str) -> None:
    """One round is one call for every layer, each with an x never seen before."""
    work = _work(shape, dtype, tokens)
    benchmark.group = f"gated_mlp {shape} {dtype} T={tokens} ({len(work.layers)} layers a round)"
    if alternative == "eager":
        call = ENTRY.dense[0].build(work)
    else:
        call = work.own(float(alternative.removeprefix("own_")) / 100)

    def sweep(xs: list[Tensor]) -> None:
        for i, x in enumerate(xs):
            call(i, x)

    benchmark.pedantic(sweep, setup=lambda: ((work.fresh(),), {}), rounds=20, warmup_rounds=2)
