"""Is `auto` slower than the best dense alternative? The decision, from interleaved samples.

Whichever of several noisy alternatives happens to look fastest is partly lucky, and comparing with the luckiest
samples would blame `auto` for noise. So the best is chosen on half of the rounds and compared on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.timing import Interval, paired_ratio, quantile

__all__ = ["FLOOR", "LEAST_ROUNDS", "Comparison", "compare", "halves", "verdict"]

FLOOR = 0.97
"""A cell fails when even the upper end of the ratio's 95 % interval is below this, in two runs."""

LEAST_ROUNDS = 12
"""Fewer give no interval worth the name."""


@dataclass(frozen=True)
class Comparison:
    """The dense alternative that was chosen, and its time over auto's in the rounds that did not choose it."""

    best: str
    ratio: Interval

    @property
    def slower(self) -> bool:
        """Whether auto is beyond doubt slower than the guarantee allows."""
        return self.ratio.high < FLOOR


def halves(rounds: int) -> tuple[list[int], list[int]]:
    """The rounds that choose and those that compare: two by two, since an order and its reverse follow each other."""
    choosing = [r for r in range(rounds) if r // 2 % 2 == 0]
    return choosing, [r for r in range(rounds) if r // 2 % 2 == 1]


def compare(samples: Mapping[str, Sequence[float]], own: str = "auto") -> Comparison:
    """Chooses the best dense alternative and compares.

    Args:
        samples: seconds per call, one value a round, of `own` and of every dense alternative.
        own: whose guarantee it is.
    Raises:
        ValueError: nothing to compare with, or too few rounds.
    """
    dense = [name for name in samples if name != own]
    rounds = len(samples[own])
    if not dense or rounds < 4:
        raise ValueError(
            f"samples hold {len(dense)} dense alternatives in {rounds} rounds, expected one or more in at least 4; "
            "time more"
        )
    choosing, comparing = halves(rounds)
    best = min(dense, key=lambda name: quantile([samples[name][r] for r in choosing], 0.5))
    there, here = ([samples[name][r] for r in comparing] for name in (best, own))
    return Comparison(best, paired_ratio(there, here))


def verdict(runs: Sequence[Comparison]) -> str:
    """ "pass", "again" (slower in its only run), "fail" (in both), or "pass, second run"."""
    if not runs[0].slower:
        return "pass"
    if len(runs) == 1:
        return "again"
    return "fail" if runs[1].slower else "pass, second run"
