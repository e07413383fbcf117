"""Nothing outside their tensors is read by compiled kernels: tests/guard_pages.py, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends

ROOT = Path(__file__).resolve().parent.parent
PAST_THE_END = """
import numpy, torch
from tests.guard_pages import guarded
print("before", flush=True)
five = guarded(torch.ones(5), at_end=True)
print(five.sum(), flush=True)
numpy.lib.stride_tricks.as_strided(five.numpy(), (6,)).sum()
print("after")
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "SPARSEMLP_ISA"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("backend", backends(OP, only="native"))
def test_nothing_outside_the_tensors_is_read(backend: str) -> None:
    done = run("-m", "tests.guard_pages")
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, f"{last}: {done.stderr or f'killed by signal {-done.returncode}'}"
    assert last == ["read nothing else"]


def test_a_number_past_the_end_kills() -> None:
    """The pages are where they should be."""
    done = run("-c", PAST_THE_END)
    assert done.stdout.split() == ["before", "tensor(5.)"]
    assert done.returncode < 0
