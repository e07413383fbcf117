"""What the package must reach, and whether a run on this machine reached it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import Result, Row

__all__ = ["CASES", "TARGETS", "Target", "evaluate"]

CASES: tuple[tuple[str, int, tuple[float, ...]], ...] = (
    ("bf16", 1, (0.0, 0.5, 0.75, 0.9, 0.95, 0.99)),
    ("bf16", 4, (0.0, 0.9)),
    ("fp32", 1, (0.0,)),
    ("fp32", 4, (0.0,)),
)
"""(dtype, tokens, sparsities) that the targets need."""


@dataclass(frozen=True)
class Target:
    """A number to reach: `key` of the row `alternative` in the result of (dtype, tokens).

    `alternative` "own" stands for the worst row of this package's kernel. `below`: smaller is better.
    """

    what: str
    dtype: str
    tokens: int
    alternative: str
    key: str
    must: float
    aim: float | None = None
    below: bool = False


TARGETS = (
    Target("bf16, T = 1, threshold 0, × PyTorch eager", "bf16", 1, "own_0", "vs_eager", 1.25, 1.4),
    Target("bf16, T = 1, 50 % sparse, × PyTorch eager", "bf16", 1, "own_50", "vs_eager", 1.7, 2.1),
    Target("bf16, T = 1, 50 % sparse, × own threshold 0", "bf16", 1, "own_50", "vs_own_0", 1.3, 1.5),
    Target("bf16, T = 1, 90 % sparse, × PyTorch eager", "bf16", 1, "own_90", "vs_eager", 2.9, 3.5),
    Target("bf16, T = 1, 90 % sparse, × own threshold 0", "bf16", 1, "own_90", "vs_own_0", 2.2, 2.5),
    Target("bf16, T = 1, worst share of the read bandwidth", "bf16", 1, "own", "share_of_read", 0.88, 0.97),
    Target("bf16, T = 4, 90 % sparse, × own threshold 0", "bf16", 4, "own_90", "vs_own_0", 1.4, 1.78),
    Target("fp32, T = 1, threshold 0, × PyTorch eager", "fp32", 1, "own_0", "vs_eager", 1.15),
    Target("fp32, T = 4, threshold 0, × PyTorch eager", "fp32", 4, "own_0", "vs_eager", 2.5),
    # PowerInfer's ggml operators (f16, oracle masks, gate dense), measured on a machine of this kind on another day.
    Target(
        "bf16, T = 1, threshold 0, ms (PowerInfer's ggml)", "bf16", 1, "own_0", "p50_ms", 11.8, below=True
    ),
    Target(
        "bf16, T = 1, 50 % sparse, ms (PowerInfer's ggml)", "bf16", 1, "own_50", "p50_ms", 9.7, below=True
    ),
    Target(
        "bf16, T = 1, 90 % sparse, ms (PowerInfer's ggml)", "bf16", 1, "own_90", "p50_ms", 5.5, below=True
    ),
)


def _row(result: Result, target: Target) -> Row:
    if target.alternative != "own":
        return result.row(target.alternative)
    own = [row for row in result.rows if row.alternative.startswith("own_")]
    pick = max if target.below else min
    return pick(own, key=lambda row: getattr(row, target.key))


def evaluate(results: dict[tuple[str, int], Result]) -> tuple[str, bool]:
    """The table of targets for a console, and whether every `must` was reached (by the median).

    Args:
        results: of (dtype, tokens), as listed in `CASES`.
    """
    lines = [f"{'':<50} {'measured':>8}  {'95 % interval':>14}  {'must':>6}  {'aim':>5}"]
    all_reached = True
    for target in TARGETS:
        row = _row(results[target.dtype, target.tokens], target)
        value = getattr(row, target.key)
        low, high = (getattr(row, f"{target.key}_{end}", None) for end in ("low", "high"))
        interval = "" if low is None else f"[{low:.2f}, {high:.2f}]"
        reached = value <= target.must if target.below else value >= target.must
        all_reached &= reached
        verdict = "pass" if reached else "FAIL"
        if reached and target.aim is not None and value >= target.aim:
            verdict = "pass, aim reached"
        sign = "≤" if target.below else "≥"
        aim = "" if target.aim is None else f"{target.aim:g}"
        worst = f"  ({row.alternative})" if target.alternative == "own" else ""
        lines.append(
            f"{target.what:<50} {value:>8.2f}  {interval:>14}  {sign}{target.must:>5g}  {aim:>5}  {verdict}{worst}"
        )
    return "\n".join(lines), all_reached
