"""The demo's table, CSV file and plot, from figures made up here."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from sparsemlp.demo import report, run
from sparsemlp.demo.evaluate import DecodeSpeed
from sparsemlp.demo.stack import StackPoint

# The report


def sample_report() -> report.Report:
    def speeds(factor: float) -> dict[str, DecodeSpeed]:
        return {
            "bf16": DecodeSpeed(40 / factor, 20 / factor, 9),
            "fp32": DecodeSpeed(60 / factor, 30 / factor, 9),
        }

    rows = [report.ModelRow(report.DENSE, None, 0.0, 20.0, speeds(1))]
    rows += [report.ModelRow("threshold 0", 0.0, 0.0, 20.0, speeds(1.25))]
    rows += [
        report.ModelRow(m, t, t - 0.01, 20 + 100 * t**3, speeds(1 + t))
        for m in run.METHODS
        for t in (0.3, 0.5, 0.7)
    ]
    points = [StackPoint("silu", None, 0.0, 10.0), StackPoint("silu", 0.0, 0.0, 8.0, 0.001)]
    points += [
        StackPoint("silu", 0.9, 0.9, 2.5),
        StackPoint("silu", 0.9, 0.9, 2.0, indicator="screen"),
        StackPoint("relu", None, 0.0, 12.0),
        StackPoint("relu", 0.9, 0.9, 3.0, 0.002),
    ]
    return report.Report("A title", 30, "fp32", 8184, rows, {"bf16": points, "fp32": points}, ["A note."])


def test_table_fits_a_terminal_and_says_what_it_shows():
    text = report.table_text(sample_report())
    assert max(map(len, text.splitlines())) <= 110
    for part in (
        "A title",
        "A note.",
        "torch",
        "kernels:",
        "8,184 held-out tokens",
        "in fp32",
        "upaware",
        "bf16 2.0e-03",
    ):
        assert part in text
    line = next(line for line in text.splitlines() if line.startswith("upaware") and "50 %" in line)
    figures = "50 % 49.0 % 32.50 1.625 13.33 1.50 37.5 1.50 20.00 1.50 25.0 1.50"
    assert " ".join(line.split()) == f"upaware {figures}"
    line = next(line for line in text.splitlines() if line.startswith("relu, exact zeros"))
    assert line.split()[-6:] == ["3.00", "4.00", "10.42", "3.00", "4.00", "10.42"]


def test_csv_has_a_line_a_configuration_and_dtype(tmp_path: Path):
    report.write_csv(sample_report(), tmp_path / "d.csv")
    with (tmp_path / "d.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * 11 + 2 * 6
    row = next(r for r in rows if (r["method"], r["target"], r["dtype"]) == ("cats", "0.7", "bf16"))
    assert float(row["perplexity"]) == pytest.approx(54.3)
    assert float(row["speedup"]) == pytest.approx(1.7, abs=1e-3)
    assert float(row["tokens_per_s"]) == pytest.approx(1.7 * 25, abs=1e-3)
    stacked = [r for r in rows if r["part"] == "llama3-8b-shape"]
    assert {r["perplexity"] for r in stacked} == {""}
    assert float(stacked[2]["mlp_ms"]) == 32 * 2.5
    assert (stacked[3]["method"], float(stacked[3]["mlp_ms"])) == ("silu, screen", 32 * 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["d.csv"]


def test_plot_is_a_png_with_every_curve(tmp_path: Path):
    from matplotlib.figure import Figure

    from sparsemlp.demo import figure

    report.plot(sample_report(), tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG\r\n")
    drawing = Figure()
    figure.draw(drawing, sample_report())
    quality, speed, stacked = drawing.axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in quality.get_lines()}
    assert curves["upaware"][0] == [0.0, 20.0]
    assert curves["upaware"][2] == pytest.approx([49.0, 32.5])
    assert {"cats, bf16", "upaware, fp32"} <= {line.get_label() for line in speed.get_lines()}
    assert stacked.get_lines()[-1].get_xydata().tolist() == [[90.0, 4.0]]


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"sparsemlp\[demo\]"):
        report.plot(sample_report(), tmp_path / "d.png")
