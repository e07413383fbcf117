"""What forward and backward of one MLP must reach, and whether a run on this machine reached it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.training_report import Result

__all__ = ["DTYPES", "OP", "TARGETS", "Target", "evaluate"]

OP = "mlp"
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Target:
    """A ratio to reach at a density (in percent): over the best of PyTorch eager and compiled, same dtype."""

    dtype: str
    density: float
    must: float
    aim: float | None = None


TARGETS = (
    Target("fp32", 2, 3.2, 4.0),
    Target("fp32", 5, 2.4, 3.4),
    Target("fp32", 10, 1.8, 2.5),
    Target("fp32", 50, 0.97),
    Target("fp32", 100, 0.97),
    Target("bf16", 2, 2.4, 3.0),
    Target("bf16", 5, 1.7, 2.2),
    Target("bf16", 10, 1.25, 1.5),
    Target("bf16", 50, 0.97),
    Target("bf16", 100, 0.97),
)


def evaluate(results: Mapping[str, Result]) -> tuple[str, bool]:
    """The table of targets for a console, and whether every `must` was reached (by the median).

    The peak of forward and backward must nowhere be above the dense step's (the smaller of those that were measured),
    in whole megabytes.

    Args:
        results: of every dtype of `DTYPES`.
    """
    lines = [f"{'':<44} {'measured':>8}  {'95 % interval':>14}  {'must':>7}  {'aim':>5}"]
    all_reached = True
    for t in TARGETS:
        row = results[t.dtype].row(f"own_{t.density:g}")
        value = row.vs_best_dense or 0.0
        reached = value >= t.must
        all_reached &= reached
        verdict = "FAIL" if not reached else "pass, aim reached" if t.aim and value >= t.aim else "pass"
        what = f"{t.dtype}, density {t.density:g} %, × best dense"
        interval = f"[{row.vs_best_dense_low or 0:.2f}, {row.vs_best_dense_high or 0:.2f}]"
        aim = "" if t.aim is None else f"{t.aim:g}"
        lines.append(f"{what:<44} {value:>8.2f}  {interval:>14}  ≥{t.must:>6.4g}  {aim:>5}  {verdict}")
    for dtype, result in results.items():
        dense = [r.peak_mb for r in result.rows if r.density is None and r.peak_mb is not None]
        own = [r.peak_mb for r in result.rows if r.density is not None and r.peak_mb is not None]
        if dense and own:
            reached = round(max(own)) <= round(min(dense))  # pages of stacks and the interpreter are in it
            all_reached &= reached
            what = f"{dtype}, largest peak of all densities, MB"
            lines.append(
                f"{what:<44} {max(own):>8.0f}  {'':>14}  ≤{min(dense):>6.0f}  {'':>5}  {'pass' if reached else 'FAIL'}"
            )
    return "\n".join(lines), all_reached
