"""Writes measured figures into README.md, from the files of the demo and of `benchmarks.run`: `make readme`.

README's figures stand between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; no number there is typed by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks import report

__all__ = ["ROOT", "main", "render"]

ROOT = Path(__file__).resolve().parent.parent
NOTHING = "*Not measured in this checkout yet: `{command}` fills this in.*"


def _demo(root: Path) -> str:
    text, plot = root / "docs" / "demo" / "demo.txt", root / "docs" / "demo" / "demo.png"
    if not text.is_file():
        return NOTHING.format(command="make demo readme")
    lines = ["```text", text.read_text(encoding="utf-8").rstrip(), "```"]
    if plot.is_file():
        lines += ["", f"![Sparsity against perplexity and speed]({plot.relative_to(root)})"]
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _table(result: report.Result) -> list[str]:
    f = result.facts
    what = "" if f.get("op", "gated_mlp") == "gated_mlp" else f"`{f['op']}`, "
    lines = [
        f"{what}{f['shape']} (D {f['D']}, F {f['F']}), {f['dtype']}, T = {f['tokens']}, {f['activation']}:",
        "",
        "| | active rows | median ms | GB/s | of the read bandwidth | × PyTorch eager | × own, threshold 0 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result.rows:
        cells = (
            row.label,
            _percent(row.union_density),
            f"{row.p50_ms:.2f}",
            f"{row.gb_per_s:.1f}",
            _percent(row.share_of_read),
            _ratio(row.vs_eager),
            _ratio(row.vs_own_0),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _bench(root: Path) -> str:
    """A folder of results is one machine; a machine's own subfolders (the targets' runs) are left out."""
    results = root / "benchmarks" / "results"
    sections = []
    for folder in sorted(p for p in results.glob("*") if p.is_dir()):
        files = sorted(folder.glob("*.csv"))
        for path in files:
            result = report.read_csv(path)
            if result.facts["status"] != "verified":
                raise ValueError(
                    f"{path} is {result.facts['status']}, expected verified figures only; remove it"
                )
            lines = _table(result)
            if path == files[0]:
                f = result.facts
                day = str(f["time"])[:10]
                where = f"{f['cpu']}, {f['threads']} threads, {f['isa']}, PyTorch {f['torch']}, {day}."
                lines = [where, "", *lines]
            plot = path.with_suffix(".png")
            if plot.is_file():
                lines += ["", f"![Latency against sparsity, {path.stem}]({plot.relative_to(root)})"]
            sections.append("\n".join(lines))
    return "\n\n".join(sections) or NOTHING.format(command="make bench readme")


def render(text: str, root: Path = ROOT) -> str:
    """README's text with its figures replaced by those of the files under `root`.

    Raises:
        ValueError: a pair of marks is missing; a result's file is no result, or not a verified one.
    """
    for name, body in (("demo", _demo(root)), ("bench", _bench(root))):
        marks = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        parts = re.compile(marks, re.DOTALL)
        if not parts.search(text):
            raise ValueError(f"README has no <!-- {name}:begin --> … <!-- {name}:end -->; put the marks back")
        text = parts.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when README is out of date")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = render(old)
    if args.check:
        if new != old:
            print("README.md's figures are not those of the files; run `make readme`", file=sys.stderr)
        return int(new != old)
    if new != old:
        report.write_atomic(readme, lambda partial: partial.write_text(new, encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
