"""Interleaved timing and the statistics of paired samples.

A neighbour on a shared machine can halve any single figure, so alternatives are never timed one after another: every
round times each of them once, in an order that changes from round to round, and a speed-up is the median over rounds of
the ratio *within* a round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Interval", "Timed", "interleave", "median_interval", "order", "paired_ratio", "quantile", "trial"]


@dataclass(frozen=True)
class Timed:
    """One alternative.

    Args:
        name: unique among the alternatives of a run.
        prepare: makes the fresh inputs of one sweep; not timed.
        sweep: what is timed: one call for every layer, in layer order, on those inputs.
        calls: calls in a sweep; a sample is the sweep's time divided by it.
    """

    name: str
    prepare: Callable[[], Any]
    sweep: Callable[[Any], object]
    calls: int


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def order(count: int, round_index: int) -> list[int]:
    """The order of a round: rotated by one every second round, and reversed in every other one.

    Rotation alone would keep every alternative behind the same predecessor, and inherit the same caches, for ever; and
    two alternatives, rotated and reversed at once, would never change places.
    """
    start = (round_index // 2) % count
    turned = [*range(start, count), *range(start)]
    return turned if round_index % 2 == 0 else turned[::-1]


def interleave(alternatives: Sequence[Timed], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Times every alternative once a round.

    Returns:
        For each name, seconds per call, one value a round: the i-th values of all names belong together.
    """
    samples: dict[str, list[float]] = {a.name: [] for a in alternatives}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for r in range(-warmup, rounds):
            for i in order(len(alternatives), r):
                alternative = alternatives[i]
                inputs = alternative.prepare()
                start = time.perf_counter()
                alternative.sweep(inputs)
                seconds = time.perf_counter() - start
                if r >= 0:
                    samples[alternative.name].append(seconds / alternative.calls)
    finally:
        if was_enabled:
            gc.enable()
    return samples


def trial(alternatives: Sequence[Timed], seconds: float = 2.0) -> dict[str, float]:
    """Median seconds per call of a few interleaved rounds, two to five as `seconds` allow, after a warm-up."""
    start = time.perf_counter()
    interleave(alternatives, rounds=0, warmup=1)
    a_round = time.perf_counter() - start
    samples = interleave(alternatives, max(2, min(5, int(seconds / max(a_round, 1e-9)))), warmup=0)
    return {name: quantile(values, 0.5) for name, values in samples.items()}


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between neighbours."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def median_interval(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> Interval:
    """The median of `values` with its 95 % percentile bootstrap interval over resampled rounds."""
    v = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(v), (resamples, len(v)), generator=generator)
    medians = v[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(v.quantile(0.5)), low, high)


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The median over rounds of numerator/denominator of the same round, with its interval."""
    return median_interval([a / b for a, b in zip(numerator, denominator, strict=True)])
