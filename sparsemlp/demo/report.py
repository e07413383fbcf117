"""The demo's results as a table, a CSV file and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsemlp import info
from sparsemlp.demo.evaluate import DecodeSpeed
from sparsemlp.demo.files import write_file
from sparsemlp.demo.stack import StackPoint

__all__ = ["STACK_LAYERS", "ModelRow", "Report", "format_table", "plot", "table_text", "write_csv"]

STACK_LAYERS = 32
"""MLPs of a Llama-3-8B: the stack's figures are scaled from one layer to these."""
STACK_SHAPE = "D 4096, F 14336"
DENSE = "PyTorch dense"


@dataclass(frozen=True)
class ModelRow:
    """One configuration of the language model."""

    method: str
    """`PyTorch dense` (the untouched model), `threshold 0`, or a calibration method."""
    target: float | None
    sparsity: float
    perplexity: float
    speeds: dict[str, DecodeSpeed]
    """By dtype, `bf16` and `fp32`."""


@dataclass(frozen=True)
class Report:
    """Everything the demo measured."""

    title: str
    layers: int
    perplexity_dtype: str
    perplexity_tokens: int
    rows: list[ModelRow]
    """The first one is dense."""
    stacks: dict[str, list[StackPoint]]
    """By dtype."""
    notes: list[str]


def format_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, groups: Mapping[int, str] | None = None
) -> list[str]:
    """Aligned lines: the first column to the left, the others to the right, two spaces between.

    Args:
        header: a name a column.
        rows: the cells.
        groups: labels in a line of their own, by the column that each begins above.
    """
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]).rstrip())
    above = ""
    for column, label in sorted((groups or {}).items()):
        start = sum(widths[:column]) + 2 * column + widths[column] - len(header[column])
        above = above.ljust(start) + label
    return [*([above] if above else []), lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def _model_table(report: Report) -> list[str]:
    dtypes = list(report.rows[0].speeds)
    header, groups = ["method", "target", "sparsity", "perplexity", "/ dense"], {}
    for dtype in dtypes:
        groups[len(header)] = f"decoding in {dtype}"
        header += ["MLP ms", "×", "tok/s", "×"]
    dense, rows = report.rows[0], []
    for row in report.rows:
        cells = [row.method, _percent(row.target), _percent(row.sparsity, 1) if row is not dense else "–"]
        cells += [f"{row.perplexity:.2f}", f"{row.perplexity / dense.perplexity:.3f}"]
        for dtype in dtypes:
            speed, base = row.speeds[dtype], dense.speeds[dtype]
            cells += [f"{speed.mlp_ms:.2f}", f"{base.mlp_ms / speed.mlp_ms:.2f}"]
            cells += [f"{speed.tokens_per_second:.1f}", f"{base.ms / speed.ms:.2f}"]
        rows.append(cells)
    return format_table(header, rows, groups=groups)


def _stack_name(point: StackPoint) -> str:
    if point.target is None:
        return f"{DENSE}, {point.activation}"
    if point.indicator == "screen":
        return f"{point.activation}, screen"
    return f"{point.activation}, {'exact zeros' if point.activation == 'relu' else 'thresholds'}"


def _stack_dense(points: list[StackPoint], point: StackPoint) -> StackPoint:
    return next(p for p in points if p.target is None and p.activation == point.activation)


def _stack_table(report: Report) -> list[str]:
    dtypes = list(report.stacks)
    header, groups = ["MLP", "target", "sparsity"], {}
    for dtype in dtypes:
        groups[len(header)] = dtype
        header += ["ms/layer", "×", "tok/s"]
    rows = []
    for i, point in enumerate(report.stacks[dtypes[0]]):
        cells = [
            _stack_name(point),
            _percent(point.target),
            _percent(point.sparsity, 1) if point.target is not None else "–",
        ]
        for dtype in dtypes:
            here = report.stacks[dtype][i]
            cells += [f"{here.ms:.2f}", f"{_stack_dense(report.stacks[dtype], here).ms / here.ms:.2f}"]
            cells += [f"{1000 / (STACK_LAYERS * here.ms):.2f}"]
        rows.append(cells)
    return format_table(header, rows, groups=groups)


def table_text(report: Report) -> str:
    """The whole report for a terminal of 110 columns."""
    where = info.machine()
    lines = [
        f"{where['date']}, sparsemlp {where['sparsemlp']}, torch {where['torch']}; {where['cpu']}, "
        f"{where['threads']} threads, kernels: {where['isa']}",
        "",
        report.title,
        *_model_table(report),
        "",
        "sparsity    neurons whose up and down rows (screen: gate rows too) were not read, per token, mean over layers",
        f"perplexity  on {report.perplexity_tokens:,} held-out tokens, computed in {report.perplexity_dtype}; "
        "/ dense: divided by the untouched model's",
        "MLP ms      time inside all MLPs per token while decoding (batch 1, KV cache), median; × faster than dense",
        "tok/s       tokens per second of greedy decoding, the whole model; × faster than dense",
    ]
    if report.stacks:
        lines += [
            "",
            f"Llama-3-8B-shaped MLPs ({STACK_SHAPE}), random weights past the last-level cache, one fresh token a call",
            *_stack_table(report),
            "",
            "ms/layer    median time of one layer's MLP; × faster than PyTorch's dense MLP (three F.linear) of the",
            f"            same activation; tok/s: what {STACK_LAYERS} such MLPs alone would allow",
            "relu        its gate bias makes 90 % of pre-activations negative: nothing is approximated"
            + _error_note(report),
        ]
    return "\n".join([*lines, "", *report.notes]).rstrip() + "\n"


def _error_note(report: Report) -> str:
    """How far the exact configurations are from PyTorch's dense output."""
    found = [
        f"{dtype} {point.error:.1e}"
        for dtype, points in report.stacks.items()
        for point in points
        if point.activation == "relu" and point.error is not None
    ]
    return (
        f";\n            largest difference from the dense output, relative to its maximum: {', '.join(found)}"
        if found
        else ""
    )


_COLUMNS = (
    "part", "method", "target", "dtype", "layers", "sparsity", "perplexity", "perplexity_dtype", "perplexity_tokens",
    "mlp_ms", "mlp_speedup", "tokens_per_s", "speedup", "date", "cpu", "threads", "torch", "isa", "sparsemlp",
)  # fmt: skip


def write_csv(report: Report, path: Path) -> None:
    """One line a configuration and dtype; `mlp_ms` is of all `layers`, the stack's rate is of its MLPs alone."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    machine, dense = info.machine(), report.rows[0]
    where = {name: machine[name] for name in ("date", "cpu", "threads", "torch", "isa", "sparsemlp")}
    for row in report.rows:
        for dtype, speed in row.speeds.items():
            base = dense.speeds[dtype]
            writer.writerow(
                {
                    "part": "smollm2-135m", "method": row.method, "target": "" if row.target is None else row.target,
                    "dtype": dtype, "layers": report.layers, "sparsity": f"{row.sparsity:.4f}",
                    "perplexity": f"{row.perplexity:.4f}", "perplexity_dtype": report.perplexity_dtype,
                    "perplexity_tokens": report.perplexity_tokens, "mlp_ms": f"{speed.mlp_ms:.4f}",
                    "mlp_speedup": f"{base.mlp_ms / speed.mlp_ms:.4f}",
                    "tokens_per_s": f"{speed.tokens_per_second:.3f}", "speedup": f"{base.ms / speed.ms:.4f}", **where,
                }
            )  # fmt: skip
    for dtype, points in report.stacks.items():
        for point in points:
            ms = STACK_LAYERS * point.ms
            ratio = f"{_stack_dense(points, point).ms / point.ms:.4f}"
            writer.writerow(
                {
                    "part": "llama3-8b-shape", "method": _stack_name(point),
                    "target": "" if point.target is None else point.target, "dtype": dtype, "layers": STACK_LAYERS,
                    "sparsity": f"{point.sparsity:.4f}", "mlp_ms": f"{ms:.4f}", "mlp_speedup": ratio,
                    "tokens_per_s": f"{1000 / ms:.3f}", **where,
                }
            )  # fmt: skip
    write_file(path, stream.getvalue().encode())


def plot(report: Report, path: Path) -> None:
    """Sparsity against perplexity, against decoding speed, and against the large stack's speed, as a PNG file.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "the plot needs matplotlib; install it with `pip install 'sparsemlp[demo]'`"
        ) from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from sparsemlp.demo import figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        drawing = Figure(figsize=(13.5, 4.6), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.15))
        FigureCanvasAgg(drawing)
        figure.draw(drawing, report)
        stream = io.BytesIO()
        drawing.savefig(stream, format="png")
    write_file(path, stream.getvalue())
