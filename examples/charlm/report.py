"""What is written of a run: steps, densities and the comparison as CSV files, a plot, and the table for a page."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "MARKS",
    "Density",
    "Step",
    "Summary",
    "draw",
    "read",
    "render",
    "summarize",
    "table",
    "write",
]

MARKS = "<!-- charlm: begin -->", "<!-- charlm: end -->"
WARM_UP = 5
"""Steps whose times do not count."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Step:
    """One step of one run, by both kernels; None for kernels that did not run. Losses without the L1 term."""

    run: str
    step: int
    loss_dense: float | None = None
    loss_sparse: float | None = None
    l1_dense: float | None = None
    l1_sparse: float | None = None
    seconds_dense: float | None = None
    seconds_sparse: float | None = None


@dataclass(frozen=True)
class Density:
    """One layer's densities on a step's batch, after that step."""

    run: str
    step: int
    layer: str
    activation_density: float
    derivative_density: float


@dataclass(frozen=True)
class Summary:
    """One run. `ratio` is dense over sparse of the same step: its median and the 20 % and 80 % quantiles; `ratio_end`
    the median of the last quarter of the steps. `difference` is |dense − sparse| of the training loss."""

    run: str
    activation: str
    l1: float
    steps: int
    held_out_dense: float | None
    held_out_sparse: float | None
    density_start: float
    density_end: float
    difference_mean: float | None = None
    difference_max: float | None = None
    seconds_dense: float | None = None
    seconds_sparse: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_end: float | None = None
    facts: str = ""


def summarize(
    run: str,
    activation: str,
    l1: float,
    steps: Sequence[Step],
    densities: Sequence[Density],
    held_out: dict[str, float],
    facts: str,
) -> Summary:
    """A run's figures from its rows."""
    marks = sorted({d.step for d in densities})
    mean = {
        m: statistics.fmean(d.derivative_density for d in densities if d.step == m)
        for m in (marks[0], marks[-1])
    }
    timed = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
    numbers: dict[str, float] = {}
    for kernels in held_out:
        numbers[f"seconds_{kernels}"] = statistics.median(getattr(s, f"seconds_{kernels}") for s in timed)
    if len(held_out) == 2:
        apart = [abs(s.loss_dense - s.loss_sparse) for s in steps]  # type: ignore[operator] # both ran
        numbers |= {"difference_mean": statistics.fmean(apart), "difference_max": max(apart)}
        ratios = [s.seconds_dense / s.seconds_sparse for s in timed]  # type: ignore[operator] # both ran
        numbers["ratio"] = statistics.median(ratios)
        numbers["ratio_end"] = statistics.median(ratios[-max(1, len(ratios) // 4) :])
        if len(ratios) > 1:
            fifths = statistics.quantiles(ratios, n=5, method="inclusive")
            numbers |= {"ratio_low": fifths[0], "ratio_high": fifths[-1]}
    return Summary(
        run,
        activation,
        l1,
        len(steps),
        held_out.get("dense"),
        held_out.get("sparse"),
        mean[marks[0]],
        mean[marks[-1]],
        facts=facts,
        **numbers,
    )


def write(path: Path, rows: Sequence[Any]) -> None:
    """The rows, of one dataclass, as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(rows[0])])
        for row in rows:
            values = asdict(row).values()
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def read(path: Path, kind: type[Row]) -> list[Row]:
    """The rows that `write` wrote."""
    made = []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            values: dict[str, Any] = {}
            for f in fields(kind):  # type: ignore[arg-type] # one of the dataclasses above
                text = line[f.name]
                if f.type == "str":
                    values[f.name] = text
                else:
                    values[f.name] = None if not text else int(text) if f.type == "int" else float(text)
            made.append(kind(**values))
    return made


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def table(rows: Iterable[Summary]) -> str:
    """The comparison, in Markdown."""
    rows = list(rows)
    plain = {r.activation: r for r in rows if r.l1 == 0}
    lines = [
        "| activation | L1 factor | held-out loss, dense / sparse kernels | L1 costs | "
        "training loss apart, mean / max | density, first → last | ms a step, dense / sparse | "
        "× dense [20–80 %] | × dense, last quarter |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        base, costs = plain.get(r.activation), "–"
        mine = r.held_out_dense if r.held_out_sparse is None else r.held_out_sparse
        if base is not None and r.l1 and mine is not None:
            other = base.held_out_dense if base.held_out_sparse is None else base.held_out_sparse
            costs = "–" if other is None else f"{mine - other:+.4f}"
        spread = "" if r.ratio_low is None else f" [{r.ratio_low:.2f}, {r.ratio_high:.2f}]"
        dense, sparse = (
            _number(None if s is None else 1e3 * s, ".0f") for s in (r.seconds_dense, r.seconds_sparse)
        )
        cells = (
            f"`{r.activation}`",
            f"{r.l1:g}",
            f"{_number(r.held_out_dense, '.4f')} / {_number(r.held_out_sparse, '.4f')}",
            costs,
            f"{_number(r.difference_mean, '.1e')} / {_number(r.difference_max, '.1e')}",
            f"{r.density_start:.1%} → {r.density_end:.1%}",
            f"{dense} / {sparse}",
            f"{_number(r.ratio, '.2f')}{spread}",
            _number(r.ratio_end, ".2f"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render(page: str, rows: Sequence[Summary], picture: str) -> str:
    """The page with the table, the run's facts and the plot between its marks."""
    begin, end = MARKS
    if begin not in page or end not in page:
        raise ValueError(f"the page lacks {begin} or {end}, expected both; put the marks back")
    head, tail = page.split(begin)[0], page.split(end)[1]
    shown = f"\n\n![losses and densities]({picture})" if picture else ""
    return f"{head}{begin}\n{rows[0].facts}.\n\n{table(rows)}{shown}\n{end}{tail}"


def draw(path: Path, steps: Sequence[Step], densities: Sequence[Density]) -> bool:
    """Losses, their difference, densities by layer and times; False where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    runs = list(dict.fromkeys(s.run for s in steps))
    figure = Figure(figsize=(16, 3.4 * len(runs)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(runs), 4, squeeze=False)
    for axes, run in zip(grid, runs, strict=True):
        own = [s for s in steps if s.run == run]
        x = [s.step for s in own]
        for kernels, style in (("dense", "-"), ("sparse", "--")):
            for axis, name, scale in ((axes[0], "loss", 1.0), (axes[3], "seconds", 1e3)):
                y = [getattr(s, f"{name}_{kernels}") for s in own]
                if y[0] is not None:
                    axis.plot(x, [scale * v for v in y], style, linewidth=1, label=kernels)
        if own[0].loss_dense is not None and own[0].loss_sparse is not None:
            axes[1].plot(x, [abs(s.loss_dense - s.loss_sparse) for s in own], linewidth=1)  # type: ignore[operator] # both ran
            axes[1].set_yscale("symlog", linthresh=1e-7)
        for layer in dict.fromkeys(d.layer for d in densities if d.run == run):
            points = [d for d in densities if d.run == run and d.layer == layer]
            axes[2].plot([d.step for d in points], [100 * d.derivative_density for d in points], label=layer)
        labels = ("training loss, nats a byte", "|dense − sparse| of it", "density, %", "ms a step")
        for axis, label in zip(axes, labels, strict=True):
            axis.set_ylabel(label)
            axis.set_xlabel("step")
            axis.grid(alpha=0.25)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
        axes[2].set_ylim(bottom=0)
        axes[0].set_title(run, loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return True
