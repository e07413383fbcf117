"""The machine's read bandwidth, measured in the rounds of the run that it judges.

A plain multi-threaded read of a buffer larger than the last-level cache: the compiled read loop where the library is
built, else the fastest of PyTorch's own reductions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import Timed
from sparsemlp import _native

__all__ = ["NAME", "candidates", "last_level_cache", "page_mode", "reader"]

NAME = "read"
"""The name under which the read appears among a run's alternatives."""

_MIN_BUFFER = 256 * 2**20
_PASSES = 2
_TRIES = 5
_ASSUMED_CACHE = 64 * 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of last-level cache in the whole machine (all instances); 64 MiB where the system does not say."""
    levels: dict[int, dict[str, int]] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
            shared = (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if size[:-1].isdigit() and size[-1] in _UNITS:
            levels.setdefault(level, {})[shared] = int(size[:-1]) * _UNITS[size[-1]]
    return sum(levels[max(levels)].values()) if levels else _ASSUMED_CACHE


def _native_read() -> Callable[[Tensor], object] | None:
    if _native.problem() is not None:
        return None
    try:
        read = torch.ops.sparsemlp._read_native.default
        read(torch.zeros(64, dtype=torch.int64))
    except (AttributeError, RuntimeError):
        return None
    return read


def candidates() -> dict[str, Callable[[Tensor], object]]:
    """Every read of an int64 buffer that could reach the bandwidth, by name."""
    found: dict[str, Callable[[Tensor], object]] = {
        "torch.amax(int64)": lambda b: b.amax(),
        "torch.amax(float32)": lambda b: b.view(torch.float32).amax(),
        "torch.sum(int64)": lambda b: b.sum(),
        "torch.sum(float64)": lambda b: b.view(torch.float64).sum(),
    }
    native = _native_read()
    if native is not None:
        found["compiled read loop"] = native
    return found


def reader(minimum: int | None = None) -> tuple[Timed, str, int]:
    """The best read found here, ready to take part in the rounds.

    Args:
        minimum: bytes of the buffer; default the larger of 256 MiB and four times the last-level cache.

    Returns:
        The alternative (a call is one pass over the buffer), the name of the read, and the bytes of a pass.
    """
    size = minimum or max(_MIN_BUFFER, 4 * last_level_cache())
    # Written, not zeros: untouched zero pages are one physical page, read from the cache at twice the speed of memory.
    buffer = torch.empty(size // 8, dtype=torch.int64).fill_(0x3FF0_0000_3F80_0000)
    found = candidates()
    seconds = dict.fromkeys(found, float("inf"))
    for _ in range(_TRIES):  # in turn, so that a disturbance does not choose for us
        for name, read in found.items():
            start = time.perf_counter()
            read(buffer)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    best = min(seconds, key=lambda name: seconds[name])
    chosen = found[best]

    def sweep(_: object) -> None:
        for _pass in range(_PASSES):
            chosen(buffer)

    return Timed(NAME, lambda: None, sweep, _PASSES), best, buffer.numel() * 8


def page_mode() -> str:
    """Linux's transparent huge page mode, or "unknown"; a read over small pages is slower."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if os.access(path, os.R_OK):
        text = path.read_text()
        return text[text.find("[") + 1 : text.find("]")]
    return "unknown"
