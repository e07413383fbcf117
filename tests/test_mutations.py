"""Broken kernels must not pass: every row of `mutants.py` makes a conformance test fail, and no row does by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsemlp import _triton

if _triton.problem() is not None or not _triton.interpreting():
    pytest.skip("changes kernels that run in Triton's interpreter", allow_module_level=True)

from tests.mutants import MUTANTS, Check


@pytest.fixture(scope="module")
def results() -> dict[int, str]:
    """By number, how a mutant was noticed. A mutant that ends the process was, and the next process goes on."""
    found: dict[int, str] = {}
    first = 0
    while first < len(MUTANTS):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.mutants", str(first)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        rows = [line.split("\t", 1) for line in run.stdout.splitlines() if "\t" in line]
        assert rows, run.stderr
        found |= {int(number): how for number, how in rows if how != "trying"}
        last = int(rows[-1][0])
        if run.returncode < 0:
            found.setdefault(last, f"killed by signal {-run.returncode}")
        else:
            assert run.returncode == 0, run.stderr
        first = last + 1
    return found


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[m.name for m in MUTANTS])
def test_a_broken_kernel_fails(number: int, results: dict[int, str]) -> None:
    assert results[number], f"nobody notices {MUTANTS[number].name}"


@pytest.mark.parametrize("check", {id(m.check): m.check for m in MUTANTS}.values())
def test_the_real_kernels_pass(check: Check) -> None:
    check()
