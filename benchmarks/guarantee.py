"""Is `backend="auto"` anywhere slower than the best dense alternative? `python -m benchmarks.guarantee`.

    python -m benchmarks.guarantee --shape llama3-8b,vit-b --dtype bf16 --tokens 1,16 --sparsity 0,50,90
    python -m benchmarks.guarantee --resume          # goes on where it was stopped

Over tokens, sparsities, dtypes and shapes: PyTorch eager, `torch.compile` at its best setting and this package's dense
kernel, each in turn with `auto`. The best of them is chosen on half of the rounds and compared on the other half; a
cell fails when the upper end of the ratio's 95 % interval is below 0.97 in two runs. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import bandwidth, gate, guarantee_report, machine, shapes
from benchmarks.guarantee_cells import Bench, Budget, Group, Outcome, again, build, groups
from benchmarks.measure import DTYPES
from benchmarks.run import RESULTS, percentages
from benchmarks.shapes import Shape
from benchmarks.workload import Workload

__all__ = ["main", "measure"]

SHAPES = "llama3-8b,qwen3-0.6b,smollm2-135m,vit-b"
TOKENS = "1,2,4,8,16,64,512"
SPARSITIES = "0,25,50,75,90,95,99"
QUICK = {"tokens": "1,16", "sparsity": "0,50,90", "seconds": 1.0, "compile": "default"}

Key = tuple[str, str, int, float]


def measure(
    wanted: list[Group],
    sparsities: tuple[float, ...],
    budget: Budget,
    done: dict[Key, Outcome],
    save: Callable[[dict[Key, Outcome]], None],
    say: Callable[[str], None],
) -> None:
    """Times every cell that `done` lacks, then those that were slower once more; `done` is filled and saved on the way.

    Args:
        wanted: the grid without its sparsities. sparsities: fractions.
        save: called after each cell.
        say: gets progress lines.
    """
    for run in ("first", "second"):
        work: Workload | None = None
        for group in wanted:
            keys = {(group.shape.name, group.dtype, group.tokens, 100 * s): s for s in sparsities}
            todo = {
                key: s
                for key, s in keys.items()
                if (key not in done if run == "first" else done.get(key) and done[key].verdict == "again")
            }
            if not todo:
                continue
            if work is not None and (work.shape, work.dtype) != (group.shape, DTYPES[group.dtype]):
                work = None  # frees these weights before new ones are made
            say(f"{group.shape.name} {group.dtype}, T = {group.tokens}, {run} run")
            work = build(group, budget, work)
            bench = Bench(group, work, budget, say)
            for key, s in todo.items():
                new = bench.cell(s)
                done[key] = new if run == "first" else again(done[key], new)
                save(done)
                say(_line(done[key], new))
            del bench
            torch._dynamo.reset()
            gc.collect()


def _line(o: Outcome, latest: Outcome) -> str:
    ratio = f"{latest.ratio:.3f} [{latest.ratio_low:.3f}, {latest.ratio_high:.3f}]"
    return f"  {o.sparsity:>4g} %  {ratio} of {latest.best_dense}, {latest.route}, {latest.rounds} rounds: {o.verdict}"


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _tokens(text: str) -> tuple[int, ...]:
    if not all(part.isdigit() and int(part) for part in _list(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0 such as {TOKENS}")
    return tuple(int(part) for part in _list(text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guarantee",
        description="Compare backend='auto' with the best dense alternative over a grid.",
        epilog="Exit codes: 0 no cell fails; 1 one does, or conformance tests are not green; 2 bad arguments.",
    )
    parser.add_argument("--shape", type=_list, default=_list(SHAPES), help=f"default: {SHAPES}")
    parser.add_argument("--dtype", type=_list, default=("bf16", "fp32"), help="default: bf16,fp32")
    parser.add_argument("--tokens", type=_tokens, metavar="T,…", help=f"default: {TOKENS}")
    parser.add_argument("--sparsity", metavar="PERCENT,…", help=f"default: {SPARSITIES}")
    parser.add_argument("--seconds", type=float, help="of timing a cell (default: 4)")
    parser.add_argument(
        "--rounds", type=int, help="interleaved rounds a cell, instead of --seconds; at least 4"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: PyTorch's")
    parser.add_argument("--layers", type=int, help="default: enough to leave the last-level cache")
    parser.add_argument(
        "--compile",
        choices=("best", "default", "no"),
        help="torch.compile: the better of its default and of frozen, autotuned weights (the default), its default "
        "alone, or none",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="for what is not given: " + ", ".join(f"--{name} {value}" for name, value in QUICK.items()),
    )
    parser.add_argument("--resume", action="store_true", help="keep the cells of an earlier run's file")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument(
        "--no-gate", dest="gate", action="store_false", help="no conformance tests; needs another --out"
    )
    return parser


def _grid(args: argparse.Namespace) -> tuple[list[Group], tuple[float, ...], Budget]:
    quick = QUICK if args.quick else {}
    chosen: list[Shape] = [shapes.get(name) for name in args.shape]
    for dtype in args.dtype:
        if dtype not in DTYPES:
            raise ValueError(f"--dtype has {dtype!r}, expected some of: {', '.join(DTYPES)}")
    if args.rounds is not None and args.rounds < 4:
        raise ValueError(f"--rounds is {args.rounds}, expected at least 4; half of them choose, half compare")
    tokens = args.tokens or _tokens(str(quick.get("tokens", TOKENS)))
    try:
        sparsities = percentages(args.sparsity or str(quick.get("sparsity", SPARSITIES)))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--sparsity: {error}") from None
    budget = Budget(
        seconds=args.seconds or float(quick.get("seconds", Budget.seconds)),  # type: ignore[arg-type]
        rounds=args.rounds,
        compile=args.compile or str(quick.get("compile", Budget.compile)),
        layers=args.layers,
    )
    return groups(chosen, args.dtype, tokens), sparsities, budget


def _folder(args: argparse.Namespace) -> Path:
    root = args.out or RESULTS
    if not args.gate and (args.out is None or RESULTS in (root.resolve(), *root.resolve().parents)):
        raise ValueError(
            f"--out is {args.out}, expected a folder outside the repository's results with --no-gate: unverified "
            "numbers do not belong there"
        )
    return root / machine.device(args.threads) / "guarantee"


def _facts(args: argparse.Namespace) -> dict[str, str | int]:
    return {
        "threads": args.threads,
        "isa": machine.isa(),
        "cpu": machine.cpu(),
        "huge_pages": bandwidth.page_mode(),
        "torch": torch.__version__,
        "version": machine.commit(),
        "status": "verified" if args.gate else "unverified",
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    facts = _facts(args)
    try:
        wanted, sparsities, budget = _grid(args)
        folder = _folder(args)
        path = folder / "guarantee.csv"
        if path.exists() and not args.resume:
            raise ValueError(
                f"{path} exists, expected no earlier result; add --resume to go on, or remove it"
            )
        done = {o.key: o for o in guarantee_report.read(path, facts)} if path.exists() else {}
    except ValueError as error:
        parser.error(str(error))
    if args.gate:
        for entry in {group.entry.name: group.entry for group in wanted}.values():
            _say(f"running the conformance tests of {entry.name} …")
            try:
                print(gate.check(entry.name, entry.conformance), flush=True)
            except gate.GateError as error:
                _say(str(error))
                return 1
    torch.set_num_threads(args.threads)

    def save(outcomes: dict[Key, Outcome]) -> None:
        guarantee_report.write(list(outcomes.values()), facts, path)

    with torch.inference_mode():
        measure(wanted, sparsities, budget, done, save, _say)
    print(guarantee_report.summary(list(done.values())))
    print(f"wrote {path}")
    try:
        guarantee_report.draw(list(done.values()), facts, folder)
    except ImportError as error:
        _say(str(error))
    return int(any(o.verdict == "fail" for o in done.values()))


if __name__ == "__main__":
    sys.exit(main())
