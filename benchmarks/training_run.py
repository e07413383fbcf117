"""`benchmarks.run --mode fwdbwd`: times forward and backward of one MLP against density."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import (
    gate,
    machine,
    measure,
    shapes,
    training,
    training_gate,
    training_memory,
    training_targets,
)
from benchmarks import training_report as report
from benchmarks.timing import Interval, interleave, paired_ratio, quantile
from sparsemlp.router import training as router

__all__ = ["DENSITIES", "TOKENS", "Case", "conformance", "main", "run"]

DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKENS = 2048
_SHAPES = {"mlp": ("train-mlp", "mlp"), "gated_mlp": ("train-gated", "gated")}
"""The default shape and the kind that fits."""
_NOISY, _BUSY = 0.10, 0.05

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """What is timed. `densities` are fractions of entries."""

    op: str
    shape: shapes.Shape
    dtype: str
    tokens: int
    densities: tuple[float, ...]
    rounds: int
    threads: int
    compile: bool = True
    memory: bool = True
    backend: str = "auto"
    status: str = "verified"


def conformance() -> gate.Conformance:
    """The tests of the training operators, all that there are."""
    others = ("router", "benchmarks", "examples")
    found = sorted(p.name for p in (gate.ROOT / "tests").glob("test_*train*.py"))
    names = [name for name in found if not any(word in name for word in others)]
    return gate.Conformance(tuple(f"tests/{name}" for name in names), "not triton")


def run(case: Case, say: Say = lambda line: None) -> report.Result:
    """Checks the gradients, unless the case is unverified, and times it. The thread count is set and left set.

    Raises:
        GateError: a gradient is wrong.
    """
    torch.set_num_threads(case.threads)
    work = training.Training(case.op, case.shape, measure.DTYPES[case.dtype], case.tokens)
    if case.status == "verified":
        say("comparing every gradient with float64 …")
        training_gate.check(work, case.densities, case.backend)
    steps, labels, seconds = _dense(case, work, say)
    dense = list(steps)
    leaves = {f"own_{100 * d:g}": work.own_leaves(d) for d in case.densities}
    seen: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for (name, own), density in zip(leaves.items(), case.densities, strict=True):
        steps[name] = training.step_of(work.own(case.backend), own)
        labels[name] = f"sparsemlp, density {100 * density:g} %"
    say(f"timing {case.rounds} rounds of {len(steps)} alternatives …")
    neighbours = machine.Neighbours()
    samples = interleave(
        [work.timed(name, step, seen.get(name)) for name, step in steps.items()], case.rounds
    )
    others = neighbours.share()
    best = min(dense, key=lambda name: quantile(samples[name], 0.5))
    say("measuring memory, a process each …")
    rows = [
        report.Row(
            name,
            labels[name],
            *(1e3 * quantile(samples[name], q) for q in (0.2, 0.5, 0.8)),
            density=work.density(seen[name][-1], leaves[name]) if name in leaves else None,
            peak_mb=_peak(case, name),
            compile_s=seconds.get(name),
            **_spread("vs_eager", paired_ratio(samples["eager"], samples[name])),
            **_spread("vs_best_dense", paired_ratio(samples[best], samples[name])),
        )
        for name in steps
    ]
    return report.Result(_facts(case, work, samples, labels[best], others), rows)


def _dense(
    case: Case, work: training.Training, say: Say
) -> tuple[dict[str, training.Step], dict[str, str], dict[str, float]]:
    """PyTorch's steps, their labels and the seconds of compilation."""
    steps = {"eager": training.step_of(work.dense, work.dense_leaves())}
    labels, seconds = {"eager": "PyTorch eager"}, {}
    if case.compile:
        say("compiling the dense peer …")
        try:
            setting, steps["compile"], spent = training.compiled(work)
        except RuntimeError as error:
            say(str(error))
        else:
            say("compiled in " + ", ".join(f"{s:.1f} s ({name})" for name, s in spent.items()))
            labels["compile"], seconds["compile"] = f"torch.compile ({setting})", spent[setting]
    return steps, labels, seconds


def _peak(case: Case, name: str) -> float | None:
    if not case.memory:
        return None
    density = float(name.removeprefix("own_")) / 100 if name.startswith("own_") else 0.5
    kind = "own" if name.startswith("own_") else name
    return training_memory.peak_mb(
        case.op, case.shape.name, case.dtype, case.tokens, density, kind, case.backend
    )


def _spread(prefix: str, interval: Interval) -> dict[str, float]:
    return {prefix: interval.median, f"{prefix}_low": interval.low, f"{prefix}_high": interval.high}


def _facts(
    case: Case, work: training.Training, samples: dict[str, list[float]], best: str, others: float
) -> report.Facts:
    low, middle, high = (quantile(samples["eager"], q) for q in (0.2, 0.5, 0.8))
    noise = (high - low) / middle
    chosen, reason = case.backend, ""
    if case.backend == "auto":
        chosen, reason = machine.backend(f"{case.op}_training", work.fresh()[0], name="FORWARD")
    return {
        "op": case.op,
        "mode": "fwdbwd",
        "shape": case.shape.name,
        "D": case.shape.d,
        "F": case.shape.f,
        "dtype": case.dtype,
        "tokens": case.tokens,
        "threads": case.threads,
        "rounds": case.rounds,
        "backend": chosen,
        "backend_reason": reason,
        "isa": machine.isa(),
        "break_even": router.break_even(work.dtype),
        "best_dense": best,
        "noise_eager": noise,
        "others_cpu": others,
        "shared_machine": "yes" if noise > _NOISY or others > _BUSY else "no",
        "cpu": machine.cpu(),
        "torch": torch.__version__,
        "version": machine.commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "status": case.status,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(result: report.Result, case: Case, folder: Path) -> None:
    path = folder / machine.device(case.threads) / "training" / report.stem(result.facts)
    csv_path, png_path = path.with_name(f"{path.name}.csv"), path.with_name(f"{path.name}.png")
    report.write_csv(result, csv_path)
    try:
        report.draw(result, png_path)
    except ImportError as error:
        _say(str(error))
        print(f"wrote {csv_path}")
    else:
        print(f"wrote {csv_path} and {png_path}")


def _case(args: Any, dtype: str) -> Case:
    if args.op not in _SHAPES:
        raise ValueError(f"--op is {args.op!r}, expected one of {', '.join(_SHAPES)} with --mode fwdbwd")
    default, kind = _SHAPES[args.op]
    shape = shapes.get(args.shape or default)
    if shape.kind != kind:
        raise ValueError(
            f"--shape is {shape.name!r}, {shape.what}, expected {shapes.KINDS[kind]} for {args.op}"
        )
    given = {"indicator": args.indicator, "input-sparsity": args.input_sparsity, "peers": args.peers}
    given |= {"layers": args.layers, "activation": args.activation}
    wrong = [name for name, value in given.items() if value]
    if args.weights != "float":
        wrong.append("weights")
    if wrong:
        raise ValueError(f"--{wrong[0]} is given, which is not for --mode fwdbwd; leave it out")
    choices = machine.backends(args.op)
    if args.backend not in choices:
        raise ValueError(f"--backend is {args.backend!r}, expected one of: {', '.join(choices)}")
    return Case(
        op=args.op,
        shape=shape,
        dtype=dtype,
        tokens=args.tokens or TOKENS,
        densities=args.density,
        rounds=args.rounds or (12 if args.quick else 30),
        threads=args.threads or torch.get_num_threads(),
        compile=args.compile,
        backend=args.backend,
        status="verified" if args.gate else "unverified",
    )


def main(args: Any, folder: Path | None) -> int:
    """Runs the command line that `benchmarks.run` parsed; returns the exit code.

    Raises:
        ValueError: an option that does not fit.
    """
    dtypes = training_targets.DTYPES if args.targets or not args.dtype else (args.dtype,)
    cases = [_case(args, dtype) for dtype in dtypes]
    if args.targets:
        needed = {t.density / 100 for t in training_targets.TARGETS}
        if args.op != training_targets.OP or not needed <= set(args.density) or not args.compile:
            raise ValueError(
                f"--targets is given with another --op than {training_targets.OP}, without one of the densities 2, 5, "
                "10, 50, 100 or without torch.compile, expected all of them; leave these options out"
            )
    results: dict[str, report.Result] = {}
    try:
        if args.gate:
            _say(f"running the conformance tests of training with {args.op} …")
            print(gate.check(f"{args.op} training", conformance()), flush=True)
        for case in cases:
            result = results[case.dtype] = run(case, _say)
            print(report.table(result), flush=True)
            if folder is not None:
                _write(result, case, folder)
            print()
    except gate.GateError as error:
        _say(str(error))
        return 1
    if not args.targets:
        return 0
    text, reached = training_targets.evaluate(results)
    print(text)
    return 0 if reached else 1
