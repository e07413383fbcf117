"""Times an operator against sparsity beside its dense peers, and writes a CSV file and a plot.

    python -m benchmarks.run --op gated_mlp --shape llama3-8b --dtype bf16 --tokens 1
    python -m benchmarks.run --op mlp --mode fwdbwd
    python -m benchmarks.run --targets

See docs/benchmarks.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from benchmarks import (
    gate,
    machine,
    measure,
    overhead,
    peers,
    plot,
    registry,
    report,
    shapes,
    targets,
    training_run,
)
from benchmarks.gated_mlp import INDICATORS
from benchmarks.workload import Workload
from sparsemlp import activations

__all__ = ["RESULTS", "main", "percentages"]

RESULTS = Path(__file__).resolve().parent / "results"
_SPARSITIES = "0,50,75,90,95,99"


def percentages(text: str) -> tuple[float, ...]:
    """Fractions from a list of percentages such as "0,50,90", in order."""
    try:
        values = sorted({float(part) / 100 for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of percentages such as {_SPARSITIES}"
        ) from None
    if not all(0 <= v < 1 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value outside 0 ≤ percent < 100")
    return tuple(values)


def _densities(text: str) -> tuple[float, ...]:
    """Fractions above 0, 100 % among them, from a list of percentages."""
    try:
        values = sorted({float(part) / 100 for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 < v <= 1 for v in values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of percentages 0 < percent ≤ 100 such as 2,10,100"
        )
    return tuple(values)


def _with_zero(text: str) -> tuple[float, ...]:
    return tuple(sorted({0.0, *percentages(text)}))


def _percentage(text: str) -> float:
    return max(percentages(text))


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
    parser.add_argument("--shape", help="default: the operator's first; " + ", ".join(shapes.SHAPES))
    parser.add_argument(
        "--mode",
        default="forward",
        choices=("forward", "fwdbwd"),
        help="fwdbwd: forward and backward of one MLP against density (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=tuple(measure.DTYPES), help="default: bf16; with --mode fwdbwd fp32, then bf16"
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        metavar="T",
        help=f"tokens in a call (default: 1; with --mode fwdbwd {training_run.TOKENS})",
    )
    parser.add_argument(
        "--density",
        type=_densities,
        default=training_run.DENSITIES,
        metavar="PERCENT,…",
        help="fwdbwd: percentages of entries that are not 0 (default: 2,5,10,20,50,100)",
    )
    parser.add_argument(
        "--sparsity",
        type=_with_zero,
        default=_with_zero(_SPARSITIES),
        metavar="PERCENT,…",
        help="percentages of inactive neurons (sparse_linear: input channels) per token, 0 is always added "
        f"(default: {_SPARSITIES})",
    )
    parser.add_argument(
        "--indicator", choices=INDICATORS, help="gated_mlp: whose magnitude is thresholded (default: gate)"
    )
    parser.add_argument(
        "--input-sparsity",
        type=_percentage,
        metavar="PERCENT",
        help="gated_mlp: of x's channels that the gate does not read (default: 0)",
    )
    parser.add_argument(
        "--weights",
        default="float",
        choices=measure.WEIGHTS,
        help="int8: this package with int8 weights too, beside x's dtype (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", default="auto", help="of this package's calls (default: %(default)s); never falls back"
    )
    parser.add_argument(
        "--activation", help="default: the shape's own; " + ", ".join(activations.ACTIVATIONS)
    )
    _how_to_time(parser)
    return parser


def _how_to_time(parser: argparse.ArgumentParser) -> None:
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
        "--peers", action="store_true", help="other ways to compute the same too (see benchmarks/peers.py)"
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="measure what the project must reach (its own dtypes, tokens and sparsities; torch.compile left out) and "
        "print the table",
    )


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
    entry = registry.get(args.op)
    shape = shapes.get(args.shape or entry.shapes[0])
    if shape.name not in entry.shapes:
        raise ValueError(
            f"--shape is {shape.name!r}, which does not fit {entry.name}; use: {', '.join(entry.shapes)}"
        )
    activation = args.activation or shape.activation
    if activations.get(activation).params:
        raise ValueError(f"--activation is {activation!r}, which has parameters, expected one without")
    given = {"indicator": args.indicator, "input_sparsity": args.input_sparsity}
    options = {name: value for name, value in given.items() if value}
    if args.peers and options:
        raise ValueError(
            "--peers is given with --indicator or --input-sparsity, which peers lack; leave them out"
        )
    for name in options:
        if name not in entry.options:
            raise ValueError(
                f"--{name.replace('_', '-')} is given, which is not for {entry.name}; leave it out"
            )
    choices = machine.backends(entry.name)
    if args.backend not in choices:
        raise ValueError(f"--backend is {args.backend!r}, expected one of: {', '.join(choices)}")
    return measure.Case(
        entry=entry,
        shape=shape,
        dtype=args.dtype or "bf16",
        tokens=args.tokens or 1,
        sparsities=args.sparsity,
        activation=activation,
        rounds=args.rounds or (12 if args.quick else 60),
        threads=args.threads or torch.get_num_threads(),
        compile=args.compile,
        layers=args.layers,
        status="verified" if args.gate else "unverified",
        options=options,
        weights=args.weights,
        backend=args.backend,
        peers=peers.build if args.peers else None,
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
    results: dict[targets.Key, report.Result] = {}
    work: Workload | None = None
    for key, sparsities in targets.CASES.items():
        dtype, tokens, weights = key
        if work is not None and work.dtype != measure.DTYPES[dtype]:
            work = None  # frees the other dtype's weights before new ones are made
        one = dataclasses.replace(
            case, dtype=dtype, tokens=tokens, weights=weights, sparsities=sparsities, compile=False
        )
        work = measure.build(one, share=work)
        results[key] = measure.measure(one, work, _say)
        _report(results[key], one, folder, "targets")
        print()
    fixed = overhead.measure(case.threads, rounds=max(4, case.rounds // 2))
    print(overhead.table(fixed) + "\n")
    text, reached = targets.evaluate(results, overhead.fixed_us(fixed))
    print(text)
    return reached


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        folder = _folder(args)
        if args.mode == "fwdbwd":
            return training_run.main(args, folder)
        case = _case(args)
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
    result = measure.measure(case, measure.build(case), _say)
    _report(result, case, folder, "peers" if args.peers else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
