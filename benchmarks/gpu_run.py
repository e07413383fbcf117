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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu_operators import OPERATORS

__all__ = ["Stage", "main", "stages"]

ROOT = Path(__file__).resolve().parent.parent
CONFORMANCE = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_conformance_*.py")}
_KEPT = 12.0
"""Seconds kept for the table at the end."""
_RESULTS = ("log.txt", "stages.json", "machine.json", "conformance.json", "checks.json", "configs", "*.csv")
"""What a run leaves in its folder: another one must not be mixed with it."""
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
        self.log: IO[str] = open(out / "log.txt", "a", encoding="utf-8")  # noqa: SIM115  # open as long as the run
        self.outcomes: list[Outcome] = []
        self.child: subprocess.Popen[str] | None = None

    def say(self, line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:  # who read it is gone; the log is not
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
        sentence = f"exit code {code}: {last}" if in_time else f"after {limit:.0f} s"
        if code == 0:
            sentence = "".join(re.findall(r"\d+ skipped", last)) if stage.name == "pytest" else ""
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


def _on_signals(do: Callable[[int, object], None] | signal.Handlers) -> None:
    """Where a signal is ignored, as under nohup, it stays so."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, do)


def _problem(out: Path) -> str:
    """Why results cannot be written there, or ""; makes the folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(found for name in _RESULTS for found in out.glob(name)):
            return (
                f"OUT is {out}, which has results of another run, expected a new folder; choose another one"
            )
        (out / "log.txt").touch()
    except OSError as error:
        return f"OUT is {out}, expected a folder that can be written ({error.strerror}); choose another one"
    return ""


def _chosen(planned: list[Stage], only: str | None) -> tuple[list[Stage], str]:
    """The stages asked for, and what is wrong with the request."""
    if only is None:
        return planned, ""
    names = only.split(",")
    unknown = [n for n in names if not n or not any(stage.name.startswith(n) for stage in planned)]
    if unknown:
        known = ", ".join(repr(stage.name) for stage in planned)
        return [], f"--only has {', '.join(map(repr, unknown))}, expected the first words of some of: {known}"
    return [stage for stage in planned if any(stage.name.startswith(n) for n in names)], ""


def _run(run: Run, chosen: list[Stage]) -> int:
    """Runs the stages, prints the table, and returns the exit code."""
    ended = False
    try:
        for stage in chosen:
            reason = _why_not(stage)
            if reason:
                run.skip(stage, reason)
                continue
            run.stage(stage)
            if stage.name == "machine" and run.outcomes[-1].outcome != "ok":
                break  # no kernel can be launched: machine.json and the log say why
    except KeyboardInterrupt:
        ended = True
        _on_signals(signal.SIG_IGN)  # the table comes in any case
        run.stop()
        run.say("\nended from outside")
        for stage in chosen[len(run.outcomes) :]:
            run.skip(stage, "ended from outside")
    finally:
        run.stop()
        run.table()
    fine = {o.name for o in run.outcomes if o.outcome == "ok"}
    if any(stage.must and stage.name not in fine for stage in chosen):
        return 1
    own_end = {stage.name for stage in chosen if stage.timed}  # the others end when the time does
    bad = [o for o in run.outcomes if o.outcome == "FAILED" or (o.outcome == "stopped" and o.name in own_end)]
    return 3 if bad or ended or not run.outcomes else 0


def main(argv: list[str] | None = None) -> int:
    """Runs all stages.

    Returns:
        0: all is well, 1: a stage that must be right failed or did not run, 2: an argument is wrong, 3: another stage
        failed, or the run was ended from outside.
    """
    parser = argparse.ArgumentParser(prog="gpu_run.sh", description="See the head of benchmarks/gpu_run.sh.")
    parser.add_argument("out", type=Path, help="folder of the results, new or without any")
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, in Triton's interpreter: no measurement"
    )
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for everything")
    parser.add_argument("--only", help="stages to run, separated by commas, by their first words")
    args = parser.parse_args(argv)
    if not 0 < args.budget < 1e6:
        parser.exit(2, f"--budget is {args.budget:g}, expected seconds above 0; BUDGET=470 is the default\n")
    problem = _missing()
    if problem:
        parser.exit(1, problem + "\n")
    out: Path = args.out.absolute()
    chosen, problem = _chosen(stages(out, args.dry), args.only)
    problem = problem or _problem(out)
    if problem:
        parser.exit(2, problem + "\n")
    _on_signals(_terminated)
    with _work_folder() as work:
        return _run(Run(out, work, args.budget, args.dry), chosen)


if __name__ == "__main__":
    raise SystemExit(main())
