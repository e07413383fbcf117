"""Results as rows: the console table, the CSV file, and writing files whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

__all__ = ["INT8", "OWN", "Result", "Row", "read_csv", "stem", "table", "write_atomic", "write_csv"]

OWN, INT8 = "own_", "int8_"
"""What the names of this package's rows begin with; the second with int8 weights."""


@dataclass(frozen=True)
class Row:
    """One alternative's numbers; None where a number has no meaning for it.

    `own_S` is this package at S % sparsity, `int8_S` the same with int8 weights.
    `vs_X` is X's time divided by this one's (above 1: faster than X): the median over rounds of the ratio within a
    round; `_low` and `_high` bound it (95 % bootstrap); `vs_own_float` is for int8 weights, against x's dtype at the
    same sparsity. `share_of_read` likewise, of the bandwidth read in the round.
    `megabytes` are the weight bytes read by a call, in 10⁶ bytes. `route` is what `sparsemlp.explain` says of this
    package's calls after the timing.
    """

    alternative: str
    label: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    megabytes: float
    gb_per_s: float
    sparsity: float | None = None
    density: float | None = None
    union_density: float | None = None
    mask_overlap: float | None = None
    share_of_read: float | None = None
    share_of_read_low: float | None = None
    share_of_read_high: float | None = None
    vs_eager: float | None = None
    vs_eager_low: float | None = None
    vs_eager_high: float | None = None
    vs_best_dense: float | None = None
    vs_best_dense_low: float | None = None
    vs_best_dense_high: float | None = None
    vs_own_0: float | None = None
    vs_own_0_low: float | None = None
    vs_own_0_high: float | None = None
    vs_own_float: float | None = None
    vs_own_float_low: float | None = None
    vs_own_float_high: float | None = None
    compile_s: float | None = None
    route: str = ""

    @property
    def ours(self) -> bool:
        """Whether this package was timed, with whatever weights."""
        return self.alternative.startswith((OWN, INT8))


@dataclass(frozen=True)
class Result:
    """A run: `facts` that hold for all rows (shape, machine, versions, status), and the rows."""

    facts: dict[str, str | int | float]
    rows: list[Row]

    def row(self, alternative: str) -> Row:
        """The row of an alternative; KeyError without it."""
        for row in self.rows:
            if row.alternative == alternative:
                return row
        raise KeyError(alternative)


def stem(facts: dict[str, str | int | float], default_activation: str) -> str:
    """A result's file name without its ending, with what is not default: `gated_mlp_llama3-8b-int8_bf16_t1`."""
    changed = "" if facts["activation"] == default_activation else f"-{facts['activation']}"
    if facts.get("indicator", "gate") != "gate":
        changed += f"-{facts['indicator']}"
    if facts.get("input_sparsity"):
        changed += f"-input{100 * float(facts['input_sparsity']):g}"
    if facts.get("weights", "float") != "float":
        changed += f"-{facts['weights']}"
    return f"{facts['op']}_{facts['shape']}{changed}_{facts['dtype']}_t{facts['tokens']}"


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, then puts it in place; on an error `path` is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # mkstemp's files are private
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _cell(value: object) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def write_csv(result: Result, path: Path) -> None:
    """One line an alternative; the facts are repeated on every line, so files can be joined."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*result.facts, *(f.name for f in fields(Row))])
    for row in result.rows:
        writer.writerow([*map(_cell, result.facts.values()), *map(_cell, asdict(row).values())])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def read_csv(path: Path) -> Result:
    """The result that `write_csv` wrote, to its precision; facts stay strings, a later version's columns are None."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    names = [f.name for f in fields(Row)]
    needed = [f.name for f in fields(Row) if f.default is MISSING]
    if not lines or any(name not in lines[0] for name in needed):
        raise ValueError(f"{path} is no benchmark result, expected the columns that benchmarks.run writes")
    rows = []
    for line in lines:
        text = {name: line.get(name) or "" for name in ("alternative", "label", "route")}
        numbers = {name: float(line[name]) if line.get(name) else None for name in names if name not in text}
        rows.append(Row(**text, **numbers))  # type: ignore[arg-type]
    return Result({k: v for k, v in lines[0].items() if k not in names}, rows)


def _number(value: float | None, digits: int, scale: float = 1) -> str:
    return "–" if value is None else f"{scale * value:.{digits}f}"


def _times(row: Row, key: str) -> str:
    value, low, high = (getattr(row, f"{key}{tail}") for tail in ("", "_low", "_high"))
    return "–" if value is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _options(facts: dict[str, str | int | float]) -> str:
    """What the workload's options are, where they are not the default."""
    parts = [] if facts.get("indicator", "gate") == "gate" else [f", indicator {facts['indicator']}"]
    if float(facts.get("input_sparsity") or 0):
        parts.append(f", {float(facts['input_sparsity']):.0%} of the gate's input skipped")
    return "".join(parts)


def _notes(f: dict[str, str | int | float]) -> list[str]:
    """What a reader must know before he believes the figures."""
    lines = []
    if f["backend"] == "reference":
        lines.append(f"NOTE: no fast kernel was timed, the reference computed ({f['backend_reason']})")
    if f["shared_machine"] == "yes":
        others = float(f["others_cpu"])
        lines.append(
            f"NOTE: a shared or unsteady machine (p20–p80 spread {float(f['noise_read']):.0%} of the read, "
            f"{float(f['noise_eager']):.0%} of PyTorch; others used {others:.0%} of the CPUs): "
            + (
                "not even the ratios are fair, run again"
                if others > 0.10
                else "trust ratios, not single times"
            )
        )
    if f["leaves_cache"] == "no":
        lines.append(
            "NOTE: so few layers may stay in the cache, which flatters everything; leave --layers out"
        )
    if f["status"] == "unverified":
        lines.append("NOTE: unverified, the conformance tests were not run")
    return lines


def table(result: Result) -> str:
    """The result for a console."""
    f = result.facts
    read = result.rows[0]
    lines = [
        f"{f['op']}  {f['shape']}: D {f['D']}, F {f['F']}, {f['activation']}, {f['dtype']}, T = {f['tokens']}"
        + _options(f),
        f"{f['cpu']}, {f['threads']} threads, {f['layers']} layers of {float(f['layer_megabytes']):.1f} MB in turn, "
        f"{f['rounds']} interleaved rounds; backend {f['backend']}, ISA {f['isa']}; {f['status']}",
        f"read bandwidth {read.gb_per_s:.1f} GB/s by {f['read_with']}",
    ]
    lines += _notes(f)
    head = (
        "",
        "density",
        "union",
        "p20",
        "p50",
        "p80 ms",
        "MB",
        "GB/s",
        "of read",
        "× eager",
        "× best dense",
        "× own t=0",
        "× own float",
    )
    body = [
        (
            f"{row.label} ({row.route})" if row.route else row.label,
            _number(row.density, 3),
            _number(row.union_density, 3),
            *(_number(v, 3) for v in (row.p20_ms, row.p50_ms, row.p80_ms)),
            _number(row.megabytes, 1),
            _number(row.gb_per_s, 1),
            "–" if row.share_of_read is None else f"{row.share_of_read:.0%}",
            *(_times(row, key) for key in ("vs_eager", "vs_best_dense", "vs_own_0", "vs_own_float")),
        )
        for row in result.rows
    ]
    if all(row.vs_own_float is None for row in result.rows):
        head, body = head[:-1], [line[:-1] for line in body]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    for line in (head, *body):
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.append(
        f"best dense: {f['best_dense']}; × is the median ratio within a round [95 % bootstrap interval]"
    )
    return "\n".join(lines)
