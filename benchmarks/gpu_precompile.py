"""Compiles what will be timed beforehand, in several processes: a kernel takes Triton's compiler about a second.

The compiled kernels reach the process that times through Triton's cache folder.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import os
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.gpu_device import Deadline, Device
from sparsemlp.kernels import _configs

__all__ = ["Precompiler"]


def _run(function: str, op: str, key: dict[str, Any], config: dict[str, Any]) -> str:
    """In a worker: one call with this configuration; what went wrong, or ""."""
    module, name = function.split(":")
    try:
        with _configs.use(op, config), torch.inference_mode():
            getattr(importlib.import_module(module), name)(op, key)
        torch.cuda.synchronize()
    except Exception as error:  # the process that times will see it too, and leave the configuration out
        return f"{type(error).__name__}: {error}"
    return ""


class Precompiler:
    """Worker processes; none in a dry run, where nothing is compiled.

    Args:
        where: the device.
        function: `module:function`, which makes one call for an operator and a key, on memory that need not hold
            anything.
        megabytes: memory on the GPU that a worker may need, which limits their number.
    """

    def __init__(self, where: Device, function: str, megabytes: int) -> None:
        self._function = function
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        fit = where.free_bytes() // (2 * (megabytes + 700) * 10**6)
        self.workers = 0 if where.dry else min(cores // 2, 12, fit)
        self._pool = None
        if self.workers > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(self.workers, mp_context=context)

    def __call__(
        self, op: str, key: dict[str, Any], configs: Iterable[dict[str, Any]], deadline: Deadline
    ) -> None:
        """Returns when all are compiled, or at the deadline."""
        if self._pool is None:
            return
        jobs = [self._pool.submit(_run, self._function, op, dict(key), config) for config in configs]
        concurrent.futures.wait(jobs, timeout=max(0.1, deadline.left()))

    def close(self) -> None:
        """Ends the workers, also ones that are still busy."""
        if self._pool is None:
            return
        running = list((getattr(self._pool, "_processes", None) or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
