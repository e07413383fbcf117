"""The stages of a GPU run, one after another, each in a process of its own with a limit: see `benchmarks/gpu_run.sh`.

A stage that fails or hangs costs its own results and nothing else; the table of what there is comes last, also when
the run is ended from outside. Needs the standard library only, so that it can say what is wrong with the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu_operators import OPERATORS

__all__ = ["Stage", "main", "stages"]

ROOT = Path(__file__).resolve().parent.parent
CONFORMANCE = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_conformance_*.py")}
_KEPT = 12.0
"""Seconds kept for the table at the end."""
_GRACE = 12.0
"""What a stage may take beyond its own deadline: it finishes the case it is in."""


@dataclass(frozen=True)
class Stage:
    """A command; `must`: the run fails with it. `seconds` is its deadline, known to it unless `timed` is False."""

    name: str
    command: tuple[str, ...]
    seconds: float
    must: bool = False
    timed: bool = True
    dry_seconds: float = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of a stage: "ok", "FAILED", "stopped" (its time was over) or "skipped", and why."""

    name: str
    outcome: str
    seconds: float
    sentence: str


def _sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return found if Path(found).exists() else None


def stages(out: Path, dry: bool) -> list[Stage]:
    """All of them, by worth: an early end costs the least."""
    tuned = out / "configs"
    check = ("benchmarks.gpu_check",)
    mode = ("--dry",) if dry else ()
    few = ("--limit", "18") if dry else ()
    found = [
        Stage("machine", ("benchmarks.gpu_info", *mode), 30, must=True),
        Stage("conformance", (*check, "conformance", *few, *mode), 75, must=True, dry_seconds=100),
        Stage("checks", (*check, "checks", *mode), 45, must=True, dry_seconds=100),
    ]
    every = [b for operator in OPERATORS for b in operator.benchmarks]
    for b in every:
        if b.first:
            command = (b.module, *b.args, *b.first_args, "--label", "default", *(b.dry if dry else ()), *mode)
            found.append(Stage(f"{b.name}, default", command, b.first))
    tune = ("benchmarks.tune", *mode)
    found.append(Stage("tune", tune, 95, dry_seconds=8))
    for b in every:
        command = (
            b.module,
            *b.args,
            "--label",
            "tuned",
            *(b.dry if dry else ()),
            *mode,
            "--configs",
            str(tuned),
        )
        found.append(Stage(f"{b.name}, tuned", command, b.seconds))
    sanitizer = _sanitizer()
    if sanitizer is not None and not dry:
        memory = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
        small = ("conformance", "--parts", "1", "--limit", "6", "--out", str(out / "sanitizer"))
        command = (
            "/usr/bin/env",
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
            *memory,
            sys.executable,
            "-m",
            *check,
            *small,
        )
        found.append(Stage("sanitizer", command, 60, timed=False))
    files = ["tests/test_triton_cuda.py", *([] if dry else sorted(CONFORMANCE))]
    tests = ("pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *files)
    found.append(Stage("pytest", (*tests, "-k", "triton"), 400, timed=False, dry_seconds=30))
    return found


def _link(folder: Path) -> None:
    """The source tree as an installed package looks: `kernels` inside of `sparsemlp`."""
    package = folder / "sparsemlp"
    package.mkdir(parents=True)
    for entry in (ROOT / "sparsemlp").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    if not (package / "kernels").exists():
        (package / "kernels").symlink_to(ROOT / "kernels")
    for name in ("benchmarks", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)


def _environment(work: Path, dry: bool) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment |= {
        "PYTHONPATH": str(work / "tree"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(work / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis"),
    }
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


class Run:
    """One run: where it writes, and what is left of its time."""

    def __init__(self, out: Path, work: Path, budget: float, dry: bool) -> None:
        self.out, self.work, self.dry = out, work, dry
        self.end = time.monotonic() + budget
        self.log: IO[str] = open(out / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
        self.outcomes: list[Outcome] = []
        self.child: subprocess.Popen[str] | None = None

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def left(self) -> float:
        return self.end - time.monotonic()

    def _record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        partial = self.out / ".stages.json.partial"
        partial.write_text(json.dumps([asdict(o) for o in self.outcomes], indent=1) + "\n", encoding="utf-8")
        partial.replace(self.out / "stages.json")

    def _full(self, stage: Stage, seconds: float) -> list[str]:
        if "/" in stage.command[0]:
            return list(stage.command)
        command = [sys.executable, "-m", *stage.command]
        if stage.timed:
            command += ["--seconds", f"{seconds:.0f}"]
            folder = self.out / "configs" if stage.name == "tune" else self.out
            command += ["--out", str(folder)]
        return command

    def stop(self) -> None:
        """Ends the stage that is running, with everything that it started."""
        child = self.child
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def stage(self, stage: Stage) -> None:
        """Runs it, or says why not."""
        seconds = min(stage.dry_seconds if self.dry else stage.seconds, self.left() - _KEPT)
        if seconds < 5:
            self._record(Outcome(stage.name, "skipped", 0.0, "no time was left"))
            return
        self.say(f"\n=== {stage.name} ({seconds:.0f} s)")
        begin = time.monotonic()
        limit = min(seconds + (60 if self.dry else _GRACE), self.left() - _KEPT / 2)
        self.child = subprocess.Popen(
            self._full(stage, seconds), cwd=self.work / "tree", env=_environment(self.work, self.dry), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, errors="replace",
        )  # fmt: skip
        timer = threading.Timer(limit, self.stop)
        timer.daemon = True  # an end from outside does not wait for it
        timer.start()
        lines = []
        assert self.child.stdout is not None
        for line in self.child.stdout:
            lines.append(line.rstrip())
            self.say(lines[-1])
        code = self.child.wait()
        in_time = timer.is_alive()
        timer.cancel()
        last = next((line for line in reversed(lines) if line), "")[:160]
        outcome = "ok" if code == 0 else "FAILED" if in_time else "stopped"
        sentence = "" if code == 0 else f"exit code {code}: {last}" if in_time else f"after {limit:.0f} s"
        self._record(Outcome(stage.name, outcome, round(time.monotonic() - begin, 1), sentence))

    def skip(self, stage: Stage, why: str) -> None:
        self._record(Outcome(stage.name, "skipped", 0.0, why))

    def table(self) -> None:
        """What there is, last."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_rows", "--out", str(self.out)], cwd=self.work / "tree",
            env=_environment(self.work, self.dry), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        self.say("\n=== results\n" + (done.stdout or done.stderr).rstrip())


def _missing() -> str:
    """Why nothing can run here, or ""."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed for {sys.executable}; set PYTHON to an interpreter that has it"
    return ""


def _why_not(stage: Stage) -> str:
    if stage.name == "pytest":
        absent = [n for n in ("pytest", "hypothesis") if importlib.util.find_spec(n) is None]
        return (
            f"{' and '.join(absent)} not installed here; the stages above ran the same checks"
            if absent
            else ""
        )
    return ""


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sparsemlp-gpu-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        _link(work / "tree")
        yield work


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def main(argv: list[str] | None = None) -> int:
    """Runs all stages; 0: all is well, 1: a stage that must be right failed, 3: another one did."""
    parser = argparse.ArgumentParser(prog="gpu_run.sh", description="See the head of benchmarks/gpu_run.sh.")
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, in Triton's interpreter: no measurement"
    )
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for everything")
    parser.add_argument("--only", help="stages to run, separated by commas, by their first words")
    args = parser.parse_args(argv)
    problem = _missing()
    if problem:
        parser.exit(1, problem + "\n")
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _terminated)
    with _work_folder() as work:
        run = Run(out, work, args.budget, args.dry)
        planned = stages(out, args.dry)
        try:
            for stage in planned:
                reason = _why_not(stage)
                if args.only and not any(stage.name.startswith(name) for name in args.only.split(",")):
                    continue
                if reason:
                    run.skip(stage, reason)
                    continue
                run.stage(stage)
                if stage.name == "machine" and run.outcomes[-1].outcome != "ok":
                    break  # no kernel can be launched: machine.json and the log say why
        except KeyboardInterrupt:
            run.say("\nended from outside")
            run.stop()
        finally:
            run.stop()
            run.table()
        musts = {stage.name for stage in planned if stage.must}
        own_end = {stage.name for stage in planned if stage.timed}  # the others end when the time does
        bad = [
            o for o in run.outcomes if o.outcome == "FAILED" or (o.outcome == "stopped" and o.name in own_end)
        ]
        return 1 if any(o.name in musts for o in bad) else 3 if bad or len(run.outcomes) == 0 else 0


if __name__ == "__main__":
    raise SystemExit(main())
