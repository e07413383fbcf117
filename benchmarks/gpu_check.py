"""The conformance cases and the GPU checks without pytest: `python -m benchmarks.gpu_check conformance --out DIR`.

`conformance` holds every operator's Triton kernels against float64 by the budget rule of `sparsemlp.testing`, on the
cases of the test suite, in several processes (compiling takes longer than computing), in an order that brings
something of everything early. `checks` runs `benchmarks.gpu_checks`. Exit code 1: something is wrong, or nothing ran.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu_checks import CHECKS, Skip
from benchmarks.gpu_device import Deadline, Device, options, start
from benchmarks.gpu_operators import OPERATORS
from benchmarks.report import write_atomic

__all__ = ["main"]

_SHOWN = 10


def _in_turn(groups: Iterable[Iterable[Callable[[], None]]]) -> Iterator[Callable[[], None]]:
    """One of each group after another."""
    for row in itertools.zip_longest(*groups):
        yield from (case for case in row if case is not None)


def _write(path: Path, facts: dict[str, object]) -> None:
    write_atomic(
        path, lambda partial: partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    )


def _part(where: Device, args: argparse.Namespace, deadline: Deadline) -> dict[str, object]:
    """Every `parts`-th case from `part` on, until the time is over."""
    torch.set_num_threads(1)
    cases = list(_in_turn([_in_turn(operator.load("conformance")(where.dry)) for operator in OPERATORS]))
    mine = cases[args.part :: args.parts][: args.limit or None]
    passed, failures = 0, []
    for case in mine:
        if deadline.over():
            break
        try:
            case()
        except Exception as error:  # whatever a kernel did, the other cases are to be tried
            name = getattr(case, "name", repr(case))
            failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if not isinstance(error, AssertionError) and "CUDA error" in str(error):
                break  # nothing more can run in this process
        else:
            passed += 1
    return {"status": where.status, "passed": passed, "cases": len(cases), "failures": failures}


def _conformance(where: Device, args: argparse.Namespace, deadline: Deadline) -> int:
    if args.parts:
        _write(args.out / f"conformance-{args.part}.json", _part(where, args, deadline))
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = max(1, min(8, cores // 2, where.free_bytes() // 10**9))
    seconds = max(5.0, deadline.left() - (5 if where.dry else 15))  # the workers import first
    command = [sys.executable, "-m", "benchmarks.gpu_check", "conformance", "--out", str(args.out)]
    command += ["--seconds", f"{seconds:.0f}", "--parts", str(parts), "--limit", str(args.limit)]
    command += ["--dry"] if where.dry else []
    workers = [subprocess.Popen([*command, "--part", str(i)]) for i in range(parts)]
    codes = []
    for worker in workers:
        try:
            codes.append(worker.wait(timeout=max(1.0, deadline.left() + 20)))
        except subprocess.TimeoutExpired:
            worker.kill()
            codes.append(-9)
    files = [args.out / f"conformance-{i}.json" for i in range(parts)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    failures = [line for part in found for line in part["failures"]]
    failures += [f"worker {i} ended with code {code}" for i, code in enumerate(codes) if code]
    passed = sum(part["passed"] for part in found)
    cases = max([part["cases"] for part in found] or [0])
    facts = {"status": where.status, "passed": passed, "failures": failures, "cases": cases}
    _write(args.out / "conformance.json", facts)
    for file in files:
        file.unlink(missing_ok=True)
    for line in failures[:_SHOWN]:
        print(f"FAILED {line}")
    left = cases - passed - len(failures)
    print(
        f"conformance: {passed} passed, {len(failures)} failed, {left} not run (of {cases}), in {parts} processes"
    )
    return 1 if failures or not passed else 0


def _checks(where: Device, args: argparse.Namespace, deadline: Deadline) -> int:
    results: dict[str, str] = {}
    for name, check in CHECKS.items():
        if deadline.over():
            results[name] = "left out: the time was over"
            continue
        try:
            check(where)
            results[name] = "passed"
        except Skip as reason:
            results[name] = f"skipped: {reason}"
        except Exception as error:  # likewise the other checks
            results[name] = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            traceback.print_exc()
        where.free()
        print(f"{name}: {results[name]}", flush=True)
        _write(args.out / "checks.json", {"status": where.status, **results})
    _write(args.out / "checks.json", {"status": where.status, **results})
    kinds = collections.Counter(text.partition(":")[0] for text in results.values())
    print("checks: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    return 1 if kinds["FAILED"] or not kinds["passed"] else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = options(__doc__)
    parser.add_argument("what", choices=("conformance", "checks"))
    parser.add_argument("--parts", type=int, default=0, help="of how many processes this is one")
    parser.add_argument("--part", type=int, default=0, help="which of them")
    parser.add_argument("--limit", type=int, default=0, help="cases a process; 0: all")
    args = parser.parse_args(argv)
    where, deadline = start(args)
    return (_conformance if args.what == "conformance" else _checks)(where, args, deadline)


if __name__ == "__main__":
    raise SystemExit(main())
