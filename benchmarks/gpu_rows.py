"""Rows of a GPU run: written to a CSV file one case at a time, read back for the table that is printed last."""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["Row", "append", "read", "summary"]


@dataclass(frozen=True)
class Row:
    """One alternative's time in one case; None where a number has no meaning for it.

    `bytes` is what a call must read and write; `share_datasheet` and `share_read` are the time that these bytes take
    at the memory's nominal and at its measured rate, divided by the time. `vs_X` is X's time over this one's.
    """

    status: str
    """"measured" or the dry run's mark."""
    op: str
    what: str
    """Which stage: "decode", "prefill", "forward" …"""
    configs: str
    """"default" or "tuned"."""
    shape: str
    d: int
    f: int
    dtype: str
    tokens: int
    alternative: str
    sparsity: float | None = None
    density: float | None = None
    union_density: float | None = None
    calls: int = 0
    rounds: int = 0
    us_p20: float | None = None
    us: float | None = None
    us_p80: float | None = None
    bytes: float | None = None
    gb_per_s: float | None = None
    share_datasheet: float | None = None
    share_read: float | None = None
    vs_eager: float | None = None
    vs_compiled: float | None = None
    vs_own_0: float | None = None
    config: str = ""
    """The launch configuration, JSON."""
    note: str = ""


_NAMES = [f.name for f in fields(Row)]
_TEXT = ("status", "op", "what", "configs", "shape", "dtype", "alternative", "config", "note")


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds lines to the file, safely on the disk before this returns: a run that is killed keeps them."""
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(_NAMES)
        writer.writerows([_cell(v) for v in asdict(row).values()] for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is none."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    whole = ("d", "f", "tokens", "calls", "rounds")
    return [
        Row(**{
            k: v if k in _TEXT else int(v) if k in whole else float(v) if v else None for k, v in line.items()
        })
        for line in lines
    ]  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, digits: int, tail: str = "") -> str:
        return "–" if value is None else f"{value:.{digits}f}{tail}"

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    return (
        row.what,
        row.configs,
        f"{row.shape} {row.dtype} T={row.tokens}",
        row.alternative,
        percent(row.union_density),
        number(row.us, 1),
        percent(row.share_datasheet),
        percent(row.share_read),
        number(row.vs_eager, 2, "×"),
        number(row.vs_compiled, 2, "×"),
        row.note,
    )


_HEAD = (
    "what",
    "configs",
    "case",
    "alternative",
    "union",
    "µs",
    "of peak",
    "of read",
    "vs eager",
    "vs compiled",
    "",
)


def table(rows: list[Row]) -> str:
    """The rows for a console."""
    lines = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _final(rows: list[Row]) -> list[Row]:
    """The last row of every case and alternative, tuned before default."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        case = (row.op, row.what, row.shape, row.dtype, row.tokens, row.alternative)
        if case not in best or row.configs == "tuned" or best[case].configs != "tuned":
            best[case] = row
    return list(best.values())


def _short(rows: list[Row]) -> list[str]:
    """A line a case: the eager peer's time, then how many times faster the others are (share of measured bandwidth)."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.what, row.shape, row.dtype, row.tokens), []).append(row)
    lines = []
    for (what, shape, dtype, tokens), found in cases.items():
        cells = []
        for row in sorted(found, key=lambda row: {"eager": 0, "compiled": 1}.get(row.alternative, 2)):
            label = row.alternative if row.sparsity is None else f"{row.sparsity:.0%}"
            if row.us is None:
                cells.append(f"{label}: {row.note.partition(':')[0] or 'no time'}")
            elif row.alternative == "eager":
                cells.append(f"eager {row.us:.1f} µs")
            else:
                share = (
                    ""
                    if row.share_read is None or row.alternative == "compiled"
                    else f" ({row.share_read:.0%})"
                )
                cells.append(f"{label} {row.vs_eager or 0:.2f}×{share}")
        configs = next((row.configs for row in found if row.config), "")
        lines.append(f"{what:<17} {shape:<10} {dtype} T={tokens:<5} {configs:<8} {'  '.join(cells)}")
    return lines


def _aims(rows: list[Row]) -> list[str]:
    """The aims of the project against what was measured."""
    own = [r for r in rows if r.what == "decode" and r.sparsity is not None and r.us is not None]
    lines = []

    def aim(text: str, chosen: list[Row], key: str, least: float) -> None:
        values = [getattr(r, key) for r in chosen if getattr(r, key) is not None]
        if values:
            worst = min(values)
            lines.append(
                f"{'reached' if worst >= least else 'MISSED '}  {text}: worst {worst:.2f} of {len(values)} rows"
            )

    one = [r for r in own if r.tokens == 1]
    aim("T = 1, share of the byte bound at nominal bandwidth ≥ 0.85", one, "share_datasheet", 0.85)
    aim("T = 1, share of the byte bound at measured bandwidth ≥ 0.85", one, "share_read", 0.85)
    for sparsity, least in ((0.5, 1.28), (0.9, 2.1)):
        chosen = [r for r in one if r.sparsity == sparsity]
        aim(f"T = 1, {sparsity:.0%} sparse, × eager ≥ {least}", chosen, "vs_eager", least)
    aim("never below 0.97 × eager", [r for r in rows if r.sparsity is not None], "vs_eager", 0.97)
    aim(
        "T = 8, 95 % sparse, × eager ≥ 1.5",
        [r for r in own if (r.tokens, r.sparsity) == (8, 0.95)],
        "vs_eager",
        1.5,
    )
    return lines


def summary(folder: Path) -> str:
    """What a run found, for its end: machine, table, aims, stages."""
    rows = _final([row for path in sorted(folder.glob("*.csv")) for row in read(path)])
    lines = []
    machine = folder / "machine.json"
    if machine.exists():
        facts = json.loads(machine.read_text())
        lines.append(
            f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}, {facts['date']}: {facts['status']}"
        )
    lines += _short(rows) or ["no times were measured"]
    lines += _aims([row for row in rows if row.status == "measured"])
    stages = folder / "stages.json"
    if stages.exists():
        for s in json.loads(stages.read_text()):
            sentence = f"ok ({s['sentence']})" if s["outcome"] == "ok" and s["sentence"] else s["sentence"]
            lines.append(f"{s['outcome']:<8} {s['name']:<19} {s['seconds']:6.1f} s  {sentence}")
    if any(row.status != "measured" for row in rows):
        lines.append(f"NOTE: {next(row.status for row in rows if row.status != 'measured')}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the summary of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    print(summary(parser.parse_args(argv).out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
