"""Times an operator against sparsity beside its dense peers, and writes a CSV file and a plot.

    python -m benchmarks.run --op gated_mlp --shape llama3-8b --dtype bf16 --tokens 1
    python -m benchmarks.run --targets

See docs/benchmarks.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from benchmarks import gate, machine, measure, plot, registry, report, shapes, targets
from benchmarks.gated_mlp import GatedMlp
from sparsemlp import activations

__all__ = ["main"]

RESULTS = Path(__file__).resolve().parent / "results"
_SPARSITIES = "0,50,75,90,95,99"


def _percentages(text: str) -> tuple[float, ...]:
    try:
        values = sorted({float(part) / 100 for part in text.split(",")} | {0.0})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of percentages such as {_SPARSITIES}"
        ) from None
    if not all(0 <= v < 1 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value outside 0 ≤ percent < 100")
    return tuple(values)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Time an operator against sparsity, fresh masks on every call, beside its dense peers.",
        epilog="Exit codes: 0 reported; 1 conformance tests not green, or --targets missed one; 2 bad arguments.",
    )
    parser.add_argument(
        "--op", default="gated_mlp", choices=tuple(registry.ENTRIES), help="default: %(default)s"
    )
    parser.add_argument(
        "--shape", default="llama3-8b", help="default: %(default)s; " + ", ".join(shapes.SHAPES)
    )
    parser.add_argument("--dtype", default="bf16", choices=tuple(measure.DTYPES), help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=_positive, default=1, metavar="T", help="tokens in a call (default: 1)"
    )
    parser.add_argument(
        "--sparsity",
        type=_percentages,
        default=_percentages(_SPARSITIES),
        metavar="PERCENT,…",
        help=f"percentages of inactive neurons per token, 0 is always added (default: {_SPARSITIES})",
    )
    parser.add_argument(
        "--activation", help="default: the shape's own; " + ", ".join(activations.ACTIVATIONS)
    )
    parser.add_argument("--rounds", type=_positive, help="interleaved rounds (default: 60; with --quick 12)")
    parser.add_argument(
        "--layers",
        type=_positive,
        help="layers to cycle through (default: enough to leave the last-level cache)",
    )
    parser.add_argument("--threads", type=_positive, help="default: PyTorch's")
    parser.add_argument(
        "--out", type=Path, help=f"folder of the results (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument(
        "--no-gate",
        dest="gate",
        action="store_false",
        help="do not run the conformance tests; the result is marked unverified and is never written into the "
        "repository's results (only into another folder named by --out)",
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="measure what the project must reach (its own dtypes, tokens and sparsities; torch.compile left out) and "
        "print the table",
    )
    return parser


def _folder(args: argparse.Namespace) -> Path | None:
    """Where files go, or None: print only."""
    if args.gate:
        return args.out or RESULTS
    if args.out is not None and RESULTS in (args.out.resolve(), *args.out.resolve().parents):
        raise ValueError(
            f"--out is {args.out}, inside the repository's results, expected another folder with --no-gate: "
            "unverified numbers do not belong there"
        )
    return args.out


def _case(args: argparse.Namespace) -> measure.Case:
    entry, shape = registry.get(args.op), shapes.get(args.shape)
    if shape.name not in entry.shapes:
        raise ValueError(
            f"--shape is {shape.name!r}, which does not fit {entry.name}; use: {', '.join(entry.shapes)}"
        )
    activation = args.activation or shape.activation
    if activations.get(activation).params:
        raise ValueError(f"--activation is {activation!r}, which has parameters, expected one without")
    return measure.Case(
        entry=entry,
        shape=shape,
        dtype=args.dtype,
        tokens=args.tokens,
        sparsities=args.sparsity,
        activation=activation,
        rounds=args.rounds or (12 if args.quick else 60),
        threads=args.threads or torch.get_num_threads(),
        compile=args.compile,
        layers=args.layers,
        status="verified" if args.gate else "unverified",
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report(result: report.Result, case: measure.Case, folder: Path | None, group: str = "") -> None:
    print(report.table(result), flush=True)
    if folder is None:
        return
    path = folder / machine.device(case.threads) / group / report.stem(result.facts, case.shape.activation)
    csv_path, png_path = path.with_name(f"{path.name}.csv"), path.with_name(f"{path.name}.png")
    report.write_csv(result, csv_path)
    try:
        plot.draw(result, png_path)
    except ImportError as error:
        _say(str(error))
        print(f"wrote {csv_path}")
    else:
        print(f"wrote {csv_path} and {png_path}")


def _targets(case: measure.Case, folder: Path | None) -> bool:
    results: dict[tuple[str, int], report.Result] = {}
    work: GatedMlp | None = None
    for dtype, tokens, sparsities in targets.CASES:
        if work is not None and work.dtype != measure.DTYPES[dtype]:
            work = None  # frees the other dtype's weights before new ones are made
        one = dataclasses.replace(case, dtype=dtype, tokens=tokens, sparsities=sparsities, compile=False)
        work = measure.build(one, share=work)
        results[dtype, tokens] = measure.measure(one, work, _say)
        _report(results[dtype, tokens], one, folder, "targets")
        print()
    text, reached = targets.evaluate(results)
    print(text)
    return reached


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        case, folder = _case(args), _folder(args)
    except ValueError as error:
        parser.error(str(error))
    if args.gate:
        _say(f"running the conformance tests of {case.entry.name} …")
        try:
            print(gate.check(case.entry.name, case.entry.conformance), flush=True)
        except gate.GateError as error:
            _say(str(error))
            return 1
    if args.targets:
        return 0 if _targets(case, folder) else 1
    _report(measure.measure(case, measure.build(case), _say), case, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
