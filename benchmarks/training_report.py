"""Results of forward and backward passes: rows, the console's table, the CSV file and the plot."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.plot import blank_figure
from benchmarks.report import write_atomic

__all__ = ["Result", "Row", "draw", "read_csv", "stem", "table", "write_csv"]

Facts = dict[str, str | int | float]


@dataclass(frozen=True)
class Row:
    """One alternative; `own_S` is this package at S % density. None where a number has no meaning for it.

    `density` is that of the calls that were timed. `vs_X` is X's time over this one's (above 1: faster than X): the
    median over rounds of the ratio within a round; `_low` and `_high` bound it (95 % bootstrap). `peak_mb` is
    `benchmarks.training_memory`'s, in 10⁶ bytes.
    """

    alternative: str
    label: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    density: float | None = None
    vs_eager: float | None = None
    vs_eager_low: float | None = None
    vs_eager_high: float | None = None
    vs_best_dense: float | None = None
    vs_best_dense_low: float | None = None
    vs_best_dense_high: float | None = None
    peak_mb: float | None = None
    compile_s: float | None = None


@dataclass(frozen=True)
class Result:
    """A run: `facts` that hold for all rows, and the rows."""

    facts: Facts
    rows: list[Row]

    def row(self, alternative: str) -> Row:
        """The row of an alternative; KeyError without it."""
        for row in self.rows:
            if row.alternative == alternative:
                return row
        raise KeyError(alternative)


def stem(facts: Facts) -> str:
    """A result's file name without its ending: `mlp_train-mlp_fwdbwd_fp32_t2048`."""
    return f"{facts['op']}_{facts['shape']}_fwdbwd_{facts['dtype']}_t{facts['tokens']}"


def write_csv(result: Result, path: Path) -> None:
    """One line an alternative; the facts are repeated on every line, so files can be joined."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*result.facts, *(f.name for f in fields(Row))])
    for row in result.rows:
        values = [*result.facts.values(), *asdict(row).values()]
        writer.writerow(["" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in values])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def read_csv(path: Path) -> Result:
    """The result that `write_csv` wrote, to its precision; facts stay strings."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    names = [f.name for f in fields(Row)]
    if not lines or any(name not in lines[0] for name in names):
        raise ValueError(
            f"{path} is no result of forward and backward passes, expected what --mode fwdbwd writes"
        )
    rows = []
    for line in lines:
        numbers = {name: float(line[name]) if line[name] else None for name in names[2:]}
        rows.append(Row(line["alternative"], line["label"], **numbers))  # type: ignore[arg-type] # the first three are there
    return Result({k: v for k, v in lines[0].items() if k not in names}, rows)


def _times(row: Row, key: str) -> str:
    value, low, high = (getattr(row, f"{key}{tail}") for tail in ("", "_low", "_high"))
    return "–" if value is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _notes(f: Facts) -> list[str]:
    lines = []
    if f["backend"] == "reference":
        lines.append(f"NOTE: no fast kernel was timed, the reference computed ({f['backend_reason']})")
    if f["shared_machine"] == "yes":
        others = float(f["others_cpu"])
        lines.append(
            f"NOTE: a shared or unsteady machine (p20–p80 spread {float(f['noise_eager']):.0%} of PyTorch; others used "
            f"{others:.0%} of the CPUs): "
            + (
                "not even the ratios are fair, run again"
                if others > 0.10
                else "trust ratios, not single times"
            )
        )
    if f["status"] == "unverified":
        lines.append("NOTE: unverified, neither tests nor gradients were checked")
    return lines


def table(result: Result) -> str:
    """The result for a console."""
    f = result.facts
    lines = [
        f"{f['op']}, forward and backward  {f['shape']}: D {f['D']}, F {f['F']}, relu, {f['dtype']}, T = {f['tokens']}",
        f"{f['cpu']}, {f['threads']} threads, {f['rounds']} interleaved rounds; backend {f['backend']}, "
        f"ISA {f['isa']}; {f['status']}",
        f"lists of entries below density {float(f['break_even']):.3f}",
        *_notes(f),
    ]
    head = "", "density", "p20", "p50", "p80 ms", "× eager", "× best dense", "peak MB"
    body = [
        (
            row.label,
            "–" if row.density is None else f"{row.density:.3f}",
            *(f"{v:.1f}" for v in (row.p20_ms, row.p50_ms, row.p80_ms)),
            *(_times(row, key) for key in ("vs_eager", "vs_best_dense")),
            "–" if row.peak_mb is None else f"{row.peak_mb:.0f}",
        )
        for row in result.rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    for line in (head, *body):
        first, *rest = line
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.append(
        f"best dense: {f['best_dense']}; × is the median ratio within a round [95 % bootstrap interval]"
    )
    return "\n".join(lines)


def draw(result: Result, path: Path) -> None:
    """The plot: times and ratios against density."""
    figure = blank_figure(10, 4)
    left, right = figure.subplots(1, 2)
    own = sorted((r for r in result.rows if r.density is not None), key=lambda r: r.density or 0)
    x = [100 * (row.density or 0) for row in own]
    left.plot(x, [row.p50_ms for row in own], "o-", color="#0b6e4f", label="sparsemlp")
    for row, color in zip(
        (r for r in result.rows if r.density is None), ("#c1121f", "#3a5a9b"), strict=False
    ):
        left.axhline(row.p50_ms, color=color, linestyle="--", label=row.label)
    ratios = [row.vs_best_dense or 0 for row in own]
    below = [ratio - (row.vs_best_dense_low or 0) for ratio, row in zip(ratios, own, strict=True)]
    above = [(row.vs_best_dense_high or 0) - ratio for ratio, row in zip(ratios, own, strict=True)]
    right.errorbar(x, ratios, [below, above], fmt="o-", color="#0b6e4f", capsize=3)
    right.axhline(1, color="#8a8a8a", linestyle="--")
    left.set_ylabel("forward and backward [ms]")
    right.set_ylabel(f"× {result.facts['best_dense']}")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(x, [f"{v:.3g}" for v in x], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("density of activations and derivatives [%]")
        axes.grid(alpha=0.25)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend()
    f = result.facts
    figure.suptitle(
        f"{f['op']} forward and backward, D {f['D']}, F {f['F']}, {f['dtype']}, T = {f['tokens']}; {f['cpu']}, "
        f"{f['threads']} threads",
        fontsize=10,
    )
    write_atomic(
        path, lambda partial: figure.savefig(partial, format="png", dpi=110, metadata={"Software": None})
    )
