"""The peak memory of one forward and backward pass, in a process of its own.

    python -m benchmarks.training_memory OP SHAPE DTYPE TOKENS DENSITY NAME BACKEND

The process makes weights and inputs, runs one step, lets the kernel forget the highest resident size so far (Linux:
/proc/self/clear_refs), runs another step, and prints how far the resident size rose above what it was before: every
buffer of forward and backward and all gradients, whoever allocates them. glibc is told to give freed blocks back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import shapes, training
from benchmarks.gate import ROOT

__all__ = ["peak_mb"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def _measured(work: training.Training, step: training.Step) -> float:
    step(work.fresh())
    inputs = work.fresh()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    kept = step(inputs)
    peak = _status("VmHWM") - before
    del kept
    return peak / 1e6


def peak_mb(
    op: str, shape: str, dtype: str, tokens: int, density: float, name: str, backend: str = "auto"
) -> float | None:
    """10⁶ bytes of a step's peak; None where the system does not tell.

    Args:
        name: "eager", "compile", or "own". The process gets as many threads as PyTorch has here.
    """
    arguments = [op, shape, dtype, str(tokens), str(density), name, backend, str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training_memory", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    return float(done.stdout) if done.returncode == 0 and done.stdout.strip() else None


def main(
    op: str, shape: str, dtype: str, tokens: str, density: str, name: str, backend: str, threads: str
) -> None:
    """Prints the figure."""
    torch.set_num_threads(int(threads))
    work = training.Training(op, shapes.get(shape), _DTYPES[dtype], int(tokens))
    if name == "own":
        step = training.step_of(work.own(backend), work.own_leaves(float(density)))
    elif name == "eager":
        step = training.step_of(work.dense, work.dense_leaves())
    else:
        step = training.compiled(work, {"default": {}})[1]
    print(_measured(work, step))


if __name__ == "__main__":
    main(*sys.argv[1:])
