"""What the package must reach, and whether a run on this machine reached it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import INT8, OWN, Result, Row

__all__ = ["CASES", "OVERHEAD_US", "TARGETS", "Key", "Target", "evaluate"]

Key = tuple[str, int, str]
"""(dtype, tokens, weights) of a result."""

CASES: dict[Key, tuple[float, ...]] = {
    ("bf16", 1, "float"): (0.0, 0.5, 0.75, 0.9, 0.95, 0.99),
    ("bf16", 4, "float"): (0.0, 0.9),
    ("bf16", 1, "int8"): (0.0, 0.5, 0.75, 0.9),
    ("fp32", 1, "float"): (0.0,),
    ("fp32", 4, "float"): (0.0,),
    ("fp32", 16, "float"): (0.0,),
}
"""What the targets need, with its sparsities."""

OVERHEAD_US = 12.0
"""What a call may cost beyond computing, at most (`benchmarks.overhead`)."""


@dataclass(frozen=True)
class Target:
    """A number to reach: `key` of the row `alternative` in the result of (dtype, tokens, weights).

    `alternative` "own" stands for the worst row of this package's kernel, "int8" for the worst one with int8 weights.
    """

    what: str
    dtype: str
    tokens: int
    alternative: str
    key: str
    must: float
    aim: float | None = None
    weights: str = "float"


_GGML = 17.5
"""ms that PyTorch eager took in bf16 when PowerInfer's ggml operators (f16, oracle masks, gate dense) took 11.8, 9.7
and 5.5 at 0, 50 and 90 %: the ratio is to be beaten, not the milliseconds of another day."""

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
    Target("fp32, T = 16, threshold 0, × PyTorch eager", "fp32", 16, "own_0", "vs_eager", 1.5),
    Target(
        "bf16, T = 1, int8 weights, worst × own bf16", "bf16", 1, "int8", "vs_own_float", 1.7, weights="int8"
    ),
    Target("bf16, T = 1, threshold 0, × eager, as PowerInfer", "bf16", 1, "own_0", "vs_eager", _GGML / 11.8),
    Target("bf16, T = 1, 50 % sparse, × eager, as PowerInfer", "bf16", 1, "own_50", "vs_eager", _GGML / 9.7),
    Target("bf16, T = 1, 90 % sparse, × eager, as PowerInfer", "bf16", 1, "own_90", "vs_eager", _GGML / 5.5),
)


def _row(result: Result, target: Target) -> Row:
    prefix = {"own": OWN, "int8": INT8}.get(target.alternative)
    if prefix is None:
        return result.row(target.alternative)
    rows = [row for row in result.rows if row.alternative.startswith(prefix)]
    return min(rows, key=lambda row: getattr(row, target.key))


def evaluate(results: dict[Key, Result], overhead_us: float) -> tuple[str, bool]:
    """The table of targets for a console, and whether every `must` was reached (by the median).

    Args:
        results: of (dtype, tokens, weights), as listed in `CASES`.
        overhead_us: the fixed cost of a call, in µs.
    """
    lines = [f"{'':<50} {'measured':>8}  {'95 % interval':>14}  {'must':>6}  {'aim':>5}"]
    all_reached = True
    for target in TARGETS:
        row = _row(results[target.dtype, target.tokens, target.weights], target)
        value = getattr(row, target.key)
        low, high = (getattr(row, f"{target.key}_{end}", None) for end in ("low", "high"))
        interval = "" if low is None else f"[{low:.2f}, {high:.2f}]"
        reached = value >= target.must
        all_reached &= reached
        verdict = "pass" if reached else "FAIL"
        if reached and target.aim is not None and value >= target.aim:
            verdict = "pass, aim reached"
        aim = "" if target.aim is None else f"{target.aim:g}"
        worst = f"  ({row.alternative})" if target.alternative in ("own", "int8") else ""
        lines.append(
            f"{target.what:<50} {value:>8.2f}  {interval:>14}  ≥{target.must:>5.3g}  {aim:>5}  {verdict}{worst}"
        )
    reached = overhead_us <= OVERHEAD_US
    lines.append(
        f"{'a call beyond computing, µs':<50} {overhead_us:>8.2f}  {'':>14}  ≤{OVERHEAD_US:>5g}  {'':>5}  "
        + ("pass" if reached else "FAIL")
    )
    return "\n".join(lines), all_reached and reached
