"""The guarantee's cells as a CSV file, a console summary and heat maps."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.guarantee_cells import Outcome
from benchmarks.plot import blank_figure
from benchmarks.report import write_atomic
from benchmarks.verdict import FLOOR

__all__ = ["draw", "read", "summary", "write"]

_BUSY = 0.05
_MARKS = {"pass": " ", "pass, second run": "+", "again": "?", "fail": "!"}
_KINDS = {f.name: str(f.type) for f in fields(Outcome)}


def _cell(value: object) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def write(outcomes: Sequence[Outcome], facts: dict[str, str | int], path: Path) -> None:
    """One line a cell; the facts are repeated on every line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(f.name for f in fields(Outcome)), *facts])
    for outcome in outcomes:
        writer.writerow([*map(_cell, asdict(outcome).values()), *facts.values()])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def read(path: Path, facts: dict[str, str | int]) -> list[Outcome]:
    """The cells of a file that was measured under the same facts.

    Raises:
        ValueError: another kind of file, or other facts; one sentence.
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    names = [f.name for f in fields(Outcome)]
    if not lines or any(name not in lines[0] for name in names):
        raise ValueError(f"{path} is no result of benchmarks.guarantee, expected one to resume; remove it")
    for name, value in facts.items():
        if lines[0].get(name) != str(value):
            raise ValueError(
                f"{path} was measured with {name} {lines[0].get(name)}, expected {value} as now; remove it to start "
                "anew"
            )
    return [Outcome(**{name: _value(name, line[name]) for name in names}) for line in lines]


def _value(name: str, text: str) -> Any:
    kind = _KINDS[name]
    if kind == "str":
        return text
    if not text:
        return None
    return int(text) if kind == "int" else float(text)


def _tables(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], dict[tuple[int, float], Outcome]]:
    """The cells by (tokens, sparsity) for every (shape, dtype)."""
    found: dict[tuple[str, str], dict[tuple[int, float], Outcome]] = {}
    for o in outcomes:
        found.setdefault((o.shape, o.dtype), {})[o.tokens, o.sparsity] = o
    return found


def _decided(o: Outcome) -> float:
    """The ratio that counts: of the second run where there was one."""
    return o.ratio if o.ratio_2 is None else o.ratio_2


def summary(outcomes: Sequence[Outcome]) -> str:
    """The ratios for a console, the cells that failed, and the worst."""
    lines = []
    for (shape, dtype), cells in _tables(outcomes).items():
        columns = sorted({s for _, s in cells})
        lines.append(
            f"{shape} {dtype}: time of the best dense alternative over auto's (above 1: auto is faster)"
        )
        lines.append("     T " + "".join(f"{s:>7g} %" for s in columns))
        for t in sorted({t for t, _ in cells}):
            row = [cells.get((t, s)) for s in columns]
            text = ["        –" if o is None else f"{_decided(o):>8.2f}{_MARKS[o.verdict]}" for o in row]
            lines.append(f"{t:>6} " + "".join(text))
        lines.append("")
    failed = [o for o in outcomes if o.verdict == "fail"]
    for o in failed:
        assert o.ratio_2_high is not None
        assert o.ratio_2 is not None
        lines.append(
            f"FAIL {o.shape} {o.dtype}, T = {o.tokens}, {o.sparsity:g} %: {o.ratio:.3f} (at most {o.ratio_high:.3f}), "
            f"then {o.ratio_2:.3f} (at most {o.ratio_2_high:.3f}) of {o.best_dense_2}"
        )
    waiting = sum(o.verdict == "again" for o in outcomes)
    lucky = sum(o.verdict == "pass, second run" for o in outcomes)
    lines.append(
        f"{len(outcomes)} cells, {len(failed)} slower than {FLOOR} of the best dense alternative in both runs (!), "
        f"{lucky} in the first only (+), {waiting} not yet run again (?)"
    )
    unsure = [o for o in outcomes if _decided(o) < FLOOR and o.verdict.startswith("pass")]
    if unsure:
        lines.append(
            f"{len(unsure)} of those that pass have a median below {FLOOR}, but intervals that reach it: "
            "time them longer (--seconds) on a quieter machine"
        )
    if outcomes:
        worst = min(outcomes, key=_decided)
        lines.append(
            f"worst: {_decided(worst):.3f}, {worst.shape} {worst.dtype}, T = {worst.tokens}, {worst.sparsity:g} %"
        )
        busy = max(o.others_cpu for o in outcomes)
        if busy > _BUSY:
            lines.append(
                f"NOTE: others used up to {busy:.0%} of the CPUs in a cell; above {_BUSY:.0%} not even ratios are fair"
            )
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], facts: dict[str, str | int], folder: Path) -> list[Path]:
    """A heat map for every shape and dtype; ImportError naming the extra without matplotlib."""
    paths = []
    for (shape, dtype), cells in _tables(outcomes).items():
        path = folder / f"{shape}_{dtype}.png"
        _heat_map(f"{shape} {dtype}", cells, facts, path)
        paths.append(path)
    return paths


def _heat_map(
    title: str, cells: dict[tuple[int, float], Outcome], facts: dict[str, str | int], path: Path
) -> None:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle

    tokens, sparsities = sorted({t for t, _ in cells}), sorted({s for _, s in cells})
    values = [
        [_decided(cells[t, s]) if (t, s) in cells else float("nan") for s in sparsities] for t in tokens
    ]
    figure = blank_figure(1.6 + 1.15 * len(sparsities), 1.9 + 0.75 * len(tokens))
    axes = figure.subplots()
    norm = TwoSlopeNorm(vmin=0.8, vcenter=1.0, vmax=max(1.5, *(_decided(o) for o in cells.values())))
    image = axes.imshow(values, cmap="RdYlGn", norm=norm, aspect="auto")
    for (t, s), o in cells.items():
        x, y = sparsities.index(s), tokens.index(t)
        text = f"{_decided(o):.2f}\n{o.best_dense_2 or o.best_dense}\n→ {o.route}"
        color = "white" if abs(norm(_decided(o)) - 0.5) > 0.4 else "black"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
        if o.verdict in ("fail", "again"):
            style = "-" if o.verdict == "fail" else ":"
            edge = Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, ec="black", lw=2, ls=style)
            axes.add_patch(edge)
    axes.set_xticks(range(len(sparsities)), [f"{s:g} %" for s in sparsities])
    axes.set_yticks(range(len(tokens)), [str(t) for t in tokens])
    axes.set(xlabel="inactive neurons per token", ylabel="tokens in a call")
    axes.set_title(
        f"{title}: best dense time / auto's\n(framed: slower than {FLOOR} beyond doubt)", fontsize=10
    )
    figure.colorbar(image, ax=axes)
    figure.supxlabel(
        f"{facts['cpu']}, {facts['threads']} threads, {facts['isa']}; torch {facts['torch']}; {facts['status']}",
        fontsize=8,
        color="#666666",
    )
    write_atomic(path, lambda partial: figure.savefig(partial, format="png", dpi=130))
