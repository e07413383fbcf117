"""Finds launch configurations for this GPU: `python -m benchmarks.tune [--op gated_mlp] [--seconds 90]`.

For every key (sizes, dtype), in order of worth: the default and everything that differs from it in one value are
timed; then the changes that helped are put together one after another, each kept only if it is faster again. A
configuration is checked against float64 before it is timed. The file is written after every key and every improvement,
merged with the entries it has, and whole or not at all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from benchmarks.gpu_device import Deadline, Device, Replay, device, median, timed
from benchmarks.gpu_precompile import Precompiler
from benchmarks.report import write_atomic
from benchmarks.shapes import get
from benchmarks.tune_spaces import SPACES, candidates, fits, neighbors
from benchmarks.tune_trials import TRIALS
from sparsemlp.kernels import _configs

__all__ = ["candidates", "main", "save", "search"]

_BETTER = 0.99
"""What is not 1 % faster is not better: a change of configuration should have a reason."""

Config = dict[str, Any]


class Trial(Protocol):
    """One key's workload."""

    key: dict[str, Any]

    def problem(self, config: Config) -> str:
        """Why a configuration may not be used: what is wrong with its result, or ""."""

    def replays(self, config: Config) -> list[Replay]:
        """What is timed: their geometric mean counts. The configuration is in use while they are made."""

    def finish(self, config: Config) -> Config:
        """Values that are not searched but measured at the end."""


def _geometric(samples: dict[str, list[float]]) -> float:
    return math.exp(sum(math.log(median(s)) for s in samples.values()) / len(samples))


class Search:
    """One key's search: the best configuration so far and its time."""

    def __init__(self, where: Device, op: str, trial: Trial, deadline: Deadline) -> None:
        self.where, self.op, self.trial, self.deadline = where, op, trial, deadline
        self.tried: dict[str, float] = {}
        self.rounds = 1 if where.dry else 7
        self.left_out: list[str] = []

    def seconds(self, config: Config) -> float:
        """A call's time; inf for what cannot be launched or is wrong."""
        name = json.dumps(config, sort_keys=True)
        if name not in self.tried:
            self.tried[name] = self._time(config)
        return self.tried[name]

    def _time(self, config: Config) -> float:
        try:
            with _configs.use(self.op, config):
                problem = self.trial.problem(config)
                if problem:
                    print(f"  WRONG with {json.dumps(config)}: {problem}", flush=True)
                    self.left_out.append(problem)
                    return math.inf
                samples = timed(self.where, self.trial.replays(config), self.rounds)
            return _geometric(samples)
        except Exception as error:  # too much shared memory, a compiler's error: another one will do
            self.left_out.append(f"{type(error).__name__}: {error}")
            return math.inf

    def duel(self, old: Config, new: Config) -> tuple[float, float]:
        """Both timed again, in turn."""
        replays: list[Replay] = []
        for mark, config in (("old", old), ("new", new)):
            with _configs.use(self.op, config):
                made = self.trial.replays(config)
                replays += [Replay(f"{mark} {r.name}", r.run, r.prepare, r.calls) for r in made]
        samples = timed(self.where, replays, 2 * self.rounds)
        before, after = (
            _geometric({name: s for name, s in samples.items() if name.startswith(mark)})
            for mark in ("old", "new")
        )
        return before, after


def search(
    run: Search, compile_all: Precompiler, improved: Callable[[Config, float, float], None]
) -> tuple[Config, float, float]:
    """The best configuration found before the deadline, its time and the default's, timed in turn.

    `improved` is called with each configuration that was found to be faster than the one before it.
    """
    op, key = run.op, run.trial.key
    default = best = SPACES[op].default(key)
    if math.isinf(run.seconds(default)):
        raise RuntimeError(f"{op}: the default fails for {key} ({run.left_out[-1]}); correct it first")
    improved(default, run.seconds(default), run.seconds(default))
    for _ in range(2):
        before, around = best, neighbors(op, key, best)
        compile_all(op, key, around, run.deadline)
        gains = []
        for config in around:
            if run.deadline.over():
                break
            gains.append((run.seconds(config), config))
        gains.sort(key=lambda pair: pair[0])
        for seconds, config in gains:
            if run.deadline.over() or seconds >= _BETTER * run.seconds(before):
                break
            together = {**best, **{name: v for name, v in config.items() if v != before[name]}}
            if not fits(op, key, together) or run.seconds(together) >= _BETTER * run.seconds(best):
                continue
            old, new = run.duel(best, together)
            if new < _BETTER * old:
                best = together
                improved(best, run.seconds(best), run.seconds(default))
        if best == before or run.deadline.over():
            break
    if best == default:
        return default, run.seconds(default), run.seconds(default)
    old, new = run.duel(default, best)
    return (best, new, old) if new < _BETTER * old else (default, old, old)


def save(folder: Path, op: str, gpu: str, entry: dict[str, Any], status: str) -> Path:
    """Puts an entry into the file of an operator and GPU in place of one with its key; returns the file."""
    path = folder / op / f"{gpu}.json"
    entries: list[dict[str, Any]] = []
    if path.exists():
        try:
            entries = [e for e in json.loads(path.read_text())["entries"] if e["key"] != entry["key"]]
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path} cannot be used ({error}) and is written anew", stacklevel=2)
    facts = {
        "gpu": gpu,
        "status": status,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "entries": [*entries, entry],
    }
    write_atomic(
        path, lambda partial: partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    )
    return path


def _tune(where: Device, args: argparse.Namespace, op: str, key: dict[str, Any], deadline: Deadline) -> None:
    made = TRIALS[op]
    print(f"{op} {key}", flush=True)
    trial = made.build(where, key)
    run = Search(where, op, trial, deadline)
    gpu = _configs.gpu_name(where.torch_device)

    def write(config: Config, seconds: float, default: float) -> None:
        us = {"this": round(1e6 * seconds, 2), "default": round(1e6 * default, 2)}
        save(args.out, op, gpu, {"key": key, "config": config, "us": us}, where.status)
        print(f"  {us['this']:.1f} µs (default {us['default']:.1f} µs) {json.dumps(config)}", flush=True)

    best, seconds, default = search(run, args.precompilers(), write)
    write(trial.finish(best), seconds, default)
    print(f"  {len(run.tried)} tried, {len(run.left_out)} left out", flush=True)


def _keys(where: Device, args: argparse.Namespace, op: str) -> list[dict[str, Any]]:
    shapes = [get(name) for name in args.shape.split(",")]
    return TRIALS[op].keys(where, shapes, [int(t) for t in args.tokens.split(",")] if args.tokens else None)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", default=",".join(TRIALS), help="operators, separated by commas")
    parser.add_argument("--shape", default="llama3-8b,llama3-70b", help="rows of benchmarks/shapes.py")
    parser.add_argument("--tokens", help="default: the operator's own list")
    parser.add_argument("--seconds", type=float, default=90.0, help="for all operators together")
    parser.add_argument("--out", type=Path, default=_configs.FOLDER, help="folder of configurations")
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes in Triton's interpreter: no measurement"
    )
    args = parser.parse_args(argv)
    for op in args.op.split(","):
        if op not in TRIALS:
            parser.error(f"--op is {op!r}, expected some of: {', '.join(TRIALS)}")
    if args.dry and args.out == _configs.FOLDER:
        parser.error("--dry writes no measurement, expected --out with another folder than the package's own")
    return args


def main(argv: list[str] | None = None) -> int:
    """Tunes every operator asked for; operators share the time by their weights."""
    args = _arguments(argv)
    try:
        where, deadline = device(args.dry), Deadline(args.seconds)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    if where.dry:
        torch.set_num_threads(1)
    pools: list[Precompiler] = []

    def precompilers() -> Precompiler:
        if not pools:
            pools.append(Precompiler(where, "benchmarks.tune_trials:call", 2500))
        return pools[0]

    args.precompilers = precompilers
    ops, failed = args.op.split(","), 0
    with torch.inference_mode():
        for i, op in enumerate(ops):
            rest = sum(TRIALS[name].weight for name in ops[i:])
            share = Deadline(deadline.left() * TRIALS[op].weight / rest)
            keys = _keys(where, args, op)
            for j, key in enumerate(keys):
                if share.left() <= 1 and j:
                    print(
                        f"{op}: {len(keys) - j} of {len(keys)} keys are left out, the time was over",
                        flush=True,
                    )
                    break
                own = Deadline(share.left() / min(len(keys) - j, 3))
                try:
                    _tune(where, args, op, key, own)
                except Exception as error:  # the next key may do
                    failed += 1
                    print(f"{op} {key}: failed: {type(error).__name__}: {error}", flush=True)
                where.free()
    for pool in pools:
        pool.close()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
