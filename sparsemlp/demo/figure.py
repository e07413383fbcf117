"""Draws the demo's figure: quality and speed against sparsity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsemlp.demo.report import ModelRow, Report
    from sparsemlp.demo.stack import StackPoint

__all__ = ["draw"]

_COLORS = {"cats": "#d95f02", "upaware": "#1b6ca8", "screen": "#1b7837"}
_GREY = "#666666"
_STYLES = {"bf16": "-", "fp32": "--"}


def draw(figure: Any, report: Report) -> None:
    """Fills a matplotlib figure with the panels that the report has data for."""
    axes = figure.subplots(1, 3 if report.stacks else 2)
    _perplexity(axes[0], report)
    _decoding(axes[1], report)
    if report.stacks:
        _stack(axes[2], report.stacks)
    for axis in axes:
        axis.set_xlabel("MLP neurons skipped per token (%)")
        axis.grid(alpha=0.25)


def _curves(report: Report) -> dict[str, list[ModelRow]]:
    """The rows of each method by sparsity, each starting at threshold 0."""
    methods = [m for m in dict.fromkeys(row.method for row in report.rows) if m in _COLORS]
    zero = [row for row in report.rows if row.target == 0]
    return {
        m: zero + sorted((r for r in report.rows if r.method == m), key=lambda r: r.sparsity) for m in methods
    }


def _perplexity(axis: Any, report: Report) -> None:
    from matplotlib.ticker import MaxNLocator

    dense = report.rows[0].perplexity
    axis.axhline(dense, color=_GREY, linewidth=1, linestyle=":")
    axis.annotate("dense", (0, dense), textcoords="offset points", xytext=(0, -12), color=_GREY, fontsize=9)
    for method, rows in _curves(report).items():
        axis.plot(
            [100 * r.sparsity for r in rows],
            [r.perplexity for r in rows],
            "o-",
            color=_COLORS[method],
            label=method,
        )
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.93 * axis.get_ylim()[0])
    # round numbers: a logarithmic axis's own, the powers of ten, would be too few
    axis.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_ylabel(f"held-out perplexity ({report.perplexity_tokens:,} tokens)")
    axis.set_title("Quality", fontsize=11)
    axis.legend(frameon=False)


def _decoding(axis: Any, report: Report) -> None:
    for dtype, speed in report.rows[0].speeds.items():
        rate = speed.tokens_per_second
        axis.axhline(rate, color=_GREY, linewidth=1, linestyle=":")
        axis.annotate(
            f"PyTorch dense, {dtype}",
            (0, rate),
            textcoords="offset points",
            xytext=(0, -12),
            color=_GREY,
            fontsize=9,
        )
        for method, rows in _curves(report).items():
            axis.plot(
                [100 * r.sparsity for r in rows],
                [r.speeds[dtype].tokens_per_second for r in rows],
                "o",
                linestyle=_STYLES[dtype],
                color=_COLORS[method],
                label=f"{method}, {dtype}",
            )
    axis.set_ylim(bottom=0)
    axis.set_ylabel("greedy decoding, tokens per second")
    axis.set_title("Speed of the whole model, batch 1", fontsize=11)
    axis.legend(frameon=False, loc="lower right")


def _stack(axis: Any, stacks: dict[str, list[StackPoint]]) -> None:
    axis.axhline(1, color=_GREY, linewidth=1, linestyle=":")
    axis.annotate(
        "PyTorch dense", (0, 1), textcoords="offset points", xytext=(0, -12), color=_GREY, fontsize=9
    )
    for dtype, points in stacks.items():
        dense = {p.activation: p.ms for p in points if p.target is None}
        sparse = [p for p in points if p.target is not None]
        for what, name, indicator, marker, color in (
            ("SiLU, gate thresholds", "silu", "gate", "o", _COLORS["cats"]),
            ("SiLU, screen", "silu", "screen", "o", _COLORS["screen"]),
            ("ReLU, exact zeros", "relu", "gate", "*", "#762a83"),
        ):
            found = [p for p in sparse if (p.activation, p.indicator) == (name, indicator)]
            axis.plot(
                [100 * p.sparsity for p in found],
                [dense[name] / p.ms for p in found],
                marker,
                linestyle=_STYLES[dtype] if name == "silu" else "none",
                markersize=6 if name == "silu" else 13,
                color=color,
                markerfacecolor=None if dtype == "bf16" else "white",
                label=f"{what}, {dtype}",
            )
    axis.set_ylim(bottom=0)
    axis.set_ylabel("one MLP, times faster than PyTorch dense")
    axis.set_title("Llama-3-8B-shaped MLP, one token", fontsize=11)
    axis.legend(frameon=False, loc="upper left")
