"""No speed is reported for a kernel whose conformance tests fail."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Conformance", "GateError", "check"]

ROOT = Path(__file__).resolve().parent.parent


class GateError(RuntimeError):
    """The conformance tests of an operator are not green."""


@dataclass(frozen=True)
class Conformance:
    """Which tests an operator must pass: files (relative to the repository root) and a `-k` expression."""

    paths: tuple[str, ...]
    select: str


def check(operator: str, tests: Conformance, timeout_s: float = 1800) -> str:
    """Runs the operator's conformance tests in a process of their own.

    The environment is passed on, so the instruction set that is timed is the one that is tested.

    Returns:
        The last line of pytest's output.
    Raises:
        GateError: a test failed, none was found, or they did not end; one sentence.
    """
    command = [sys.executable, "-m", "pytest", *tests.paths, "-k", tests.select]
    spelled = f"python -m pytest {' '.join(tests.paths)} -k {tests.select!r}"
    try:
        done = subprocess.run(
            [*command, "-q", "-x", "--no-header", "-p", "no:cacheprovider"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise GateError(
            f"{operator}: no result is reported because its conformance tests did not end in {timeout_s:.0f} s; "
            f"run `{spelled}`"
        ) from None
    lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
    if done.returncode != 0:
        raise GateError(
            f"{operator}: no result is reported because its conformance tests are not green ({lines[-1].strip('= ')}); "
            f"run `{spelled}`"
        )
    return lines[-1]
