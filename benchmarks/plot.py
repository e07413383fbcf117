"""The plot of a result: latency and speed-up against sparsity, with the dense peers and the byte bound.

    python -m benchmarks.plot benchmarks/results/DEVICE/RESULT.csv

draws a stored result again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import INT8, OWN, Result, Row, read_csv, write_atomic
from benchmarks.weight_bytes import copy_share, share_read

__all__ = ["blank_figure", "break_even", "draw"]

_OWN = "#0b6e4f"
_BOUND = "#8a8a8a"
_NARROW = "#7b2d8b"
_OTHERS = ("#b5651d", "#5f9ea0", "#808000")
_DENSE = {
    "eager": "#c1121f",
    "eager_neuron_major": "#e09f3e",
    "compile": "#3a5a9b",
    "openvino": "#6f4e9c",
    "ggml": "#2a9d8f",
}


def blank_figure(width: float, height: float) -> Any:
    """An empty figure; ImportError naming the extra without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "no plot is drawn because matplotlib is missing; pip install 'sparsemlp[bench]'"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def break_even(own: list[Row], dense_ms: float) -> float | None:
    """The sparsity in percent from which on this package's kernel is faster than `dense_ms`; None if never."""
    points = [(100 * (1 - (row.density or 0.0)), row.p50_ms) for row in own]
    slower = [i for i, (_, ms) in enumerate(points) if ms > dense_ms]
    if not slower:
        return points[0][0]
    last = slower[-1]
    if last == len(points) - 1:
        return None
    (s0, t0), (s1, t1) = points[last], points[last + 1]
    return s0 + (s1 - s0) * (t0 - dense_ms) / (t0 - t1)


def _axis(result: Result) -> str:
    entries = "input channels" if result.facts["op"] == "sparse_linear" else "neurons"
    return f"inactive {entries} per token [%]"


def _bound(facts: dict[str, Any], dense_mb: float, start: float) -> tuple[list[float], list[float]]:
    """(sparsity in percent, megabytes) of a kernel that reads no more than the masks of independent tokens want."""
    tokens, cut = int(facts["tokens"]), float(facts.get("input_sparsity") or 0)
    channels = 1 - cut**tokens if cut else 1.0
    copies = copy_share(4 if facts["dtype"] == "fp32" else 2)
    sparsities = [start + (100 - start) * i / 200 for i in range(201)]
    shares = [
        share_read(
            str(facts["op"]), 1 - (s / 100) ** tokens, channels, str(facts.get("indicator", "gate")), copies
        )
        for s in sparsities
    ]
    return sparsities, [dense_mb * share for share in shares]


def _values(axes: Any, xs: list[float], ys: list[float], form: str, color: str, *, above: bool) -> None:
    """Writes the values beside their points, leaving out one that its right neighbour would cover."""
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if i + 1 < len(xs) and xs[i + 1] - x < 4.5:
            continue
        place = (0, 7) if above else (7, -13)
        axes.annotate(
            form.format(y), (x, y), place, textcoords="offset points", ha="center", fontsize=8, color=color
        )


def _legend(axes: Any) -> None:
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)


def _others(axes: Any, result: Result, value: Callable[[Row], float | None]) -> None:
    """Curves of what else has a sparsity: this package with int8 weights, sparse peers."""
    groups: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.sparsity is not None and not row.alternative.startswith(OWN):
            groups.setdefault(row.alternative.rpartition("_")[0], []).append(row)
    for i, (name, rows) in enumerate(groups.items()):
        color, label = _OTHERS[i % len(_OTHERS)], rows[0].label.partition(",")[0]
        if f"{name}_" == INT8:
            color, label = _NARROW, f"{label}, int8 weights"
        points = [(100 * (1 - (row.density or 0.0)), value(row)) for row in rows]
        xs, ys = zip(*[(x, y) for x, y in points if y is not None], strict=True)
        axes.plot(xs, ys, "^:", color=color, linewidth=1.3, markersize=4, label=label)


def _latency(axes: Any, result: Result, own: list[Row], dense: list[Row]) -> None:
    xs = [100 * (1 - (row.density or 0.0)) for row in own]
    for row in dense:
        color = _DENSE.get(row.alternative, "#555555")
        axes.axhspan(row.p20_ms, row.p80_ms, color=color, alpha=0.12, linewidth=0)
        axes.axhline(row.p50_ms, color=color, linewidth=1.5, label=f"{row.label}: {row.p50_ms:.3g} ms")
    axes.fill_between(
        xs, [r.p20_ms for r in own], [r.p80_ms for r in own], color=_OWN, alpha=0.2, linewidth=0
    )
    axes.plot(
        xs,
        [r.p50_ms for r in own],
        "o-",
        color=_OWN,
        linewidth=2,
        markersize=5,
        label="sparsemlp, median and p20–p80",
    )
    _values(axes, xs, [r.p50_ms for r in own], "{:.3g}", _OWN, above=True)
    read = result.row("read")
    sparsities, megabytes = _bound(result.facts, dense[0].megabytes, xs[0])
    bound = [mb / read.gb_per_s for mb in megabytes]  # MB / (GB/s) = ms
    label = f"byte bound at {read.gb_per_s:.1f} GB/s (read, same run)"
    axes.plot(sparsities, bound, "--", color=_BOUND, linewidth=1.3, label=label)
    best = min(dense, key=lambda row: row.p50_ms)
    where = break_even(own, best.p50_ms)
    if where is not None and where > xs[0]:
        axes.plot([where], [best.p50_ms], "D", color="black", markersize=6, zorder=5)
        axes.annotate(
            f"break-even {where:.0f} %",
            (where, best.p50_ms),
            (10, 14),
            textcoords="offset points",
            fontsize=9,
        )
    verdict = {None: "the best dense peer is faster throughout", xs[0]: "faster than every dense peer"}
    found = verdict.get(where, f"faster than every dense peer from {where or 0:.0f} % on")
    _others(axes, result, lambda row: row.p50_ms)
    top = max(r.p50_ms for r in (*own, *dense))  # not the bands: a disturbed run would squeeze the curves
    axes.set(xlim=(-2, 102), ylim=(0, 1.15 * top))
    axes.set(xlabel=_axis(result), ylabel="ms per call")
    axes.set_title(f"Latency: {found}", fontsize=10)
    _legend(axes)


def _speedup(axes: Any, result: Result, own: list[Row], dense: list[Row]) -> None:
    xs = [100 * (1 - (row.density or 0.0)) for row in own]
    curves = (
        ("vs_best_dense", f"over the best dense: {result.facts['best_dense']}", "#222222", "s-"),
        ("vs_own_0", "over sparsemlp at threshold 0", _OWN, "o-"),
    )
    top = max(row.vs_best_dense or 0.0 for row in result.rows)
    top = max(top, max(row.vs_own_0 or 0.0 for row in own))
    upper = max((key for key, *_ in curves), key=lambda key: getattr(own[0], key) or 0.0)
    for key, label, color, style in curves:
        values, lows, highs = (
            [getattr(row, key + end) or 0.0 for row in own] for end in ("", "_low", "_high")
        )
        errors = [[v - low for v, low in zip(values, lows, strict=True)]]
        errors += [[high - v for v, high in zip(values, highs, strict=True)]]
        axes.errorbar(xs, values, errors, fmt=style, color=color, capsize=3, markersize=5, label=label)
        _values(axes, xs, values, "{:.2f}", color, above=key == upper)
    _others(axes, result, lambda row: row.vs_best_dense)
    sparsities, megabytes = _bound(result.facts, dense[0].megabytes, xs[0])
    ratio = [own[0].megabytes / max(mb, 1e-9) for mb in megabytes]
    top = max(top, min(max(ratio), 1.5 * top))  # a linear layer's bound has no upper end
    axes.plot(sparsities, ratio, "--", color=_BOUND, linewidth=1.3, label="byte bound over threshold 0")
    axes.axhline(1, color="#bbbbbb", linewidth=1, zorder=0)
    axes.set(xlim=(-2, 102), ylim=(0, 1.15 * top), xlabel=_axis(result))
    axes.set_ylabel("times faster")
    axes.set_title("Speed-up: median ratio within a round, 95 % interval", fontsize=10)
    _legend(axes)


def draw(result: Result, path: Path) -> None:
    """Draws a result into a PNG file; ImportError naming the extra without matplotlib."""
    figure = blank_figure(11, 6)
    own = [row for row in result.rows if row.alternative.startswith(OWN)]
    dense = [row for row in result.rows if row.alternative != "read" and row.sparsity is None]
    f = result.facts
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    _latency(left, result, own, dense)
    _speedup(right, result, own, dense)
    unverified = "" if f["status"] == "verified" else f", {str(f['status']).upper()}"
    figure.suptitle(
        f"{f['op']}  {f['shape']} (D {f['D']}, F {f['F']}, {f['activation']}), {f['dtype']}, T = {f['tokens']}, "
        f"fresh masks every call{unverified}",
        fontsize=11,
    )
    noisy = ", shared machine" if f["shared_machine"] == "yes" else ""
    figure.supxlabel(
        f"{f['cpu']}, {f['threads']} threads{noisy}; backend {f['backend']}, {f['isa']}; torch {f['torch']}; "
        f"{f['rounds']} interleaved rounds, {f['layers']} layers",
        fontsize=8,
        color="#666666",
    )
    write_atomic(path, lambda partial: figure.savefig(partial, format="png", dpi=130))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(read_csv(Path(name)), Path(name).with_suffix(".png"))
