"""The GPU that is measured, and its stand-in without one: `device(dry=True)` computes on the CPU by the same code.

Everything that differs between the two is here: what a graph, a time stamp, a stream and a wait is. Numbers of a dry
run say that the code runs, nothing else, and every file marks them so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpus import GPUS
from benchmarks.timing import order, quantile
from sparsemlp.kernels import _configs

__all__ = [
    "DRY",
    "Deadline",
    "Device",
    "Replay",
    "device",
    "median",
    "options",
    "read_bytes_per_second",
    "start",
    "timed",
]

DRY = "dry run, not a measurement"
MEASURED = "measured"
_WARM_UP = 2
_QUEUED = 200_000
"""Cycles that the GPU is kept busy while the host queues what is timed: launching is then not part of the time."""


class Deadline:
    """How long a stage may still go on; it stops by itself, so that what it has is written."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def over(self) -> bool:
        return self.left() <= 0


@dataclass(frozen=True)
class Replay:
    """Something to be timed: `run` after `prepare` (not timed); a run is `calls` calls."""

    name: str
    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    calls: int = 1


@dataclass(frozen=True)
class Device:
    """An NVIDIA or AMD GPU, or the CPU with Triton's interpreter in its place."""

    dry: bool
    torch_device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        where = torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())
        object.__setattr__(self, "torch_device", where)

    @property
    def status(self) -> str:
        return DRY if self.dry else MEASURED

    @property
    def name(self) -> str:
        return "interpreter" if self.dry else torch.cuda.get_device_name()

    def l2_bytes(self) -> int:
        return 2**20 if self.dry else int(torch.cuda.get_device_properties(self.torch_device).L2_cache_size)

    def free_bytes(self) -> int:
        return 2**30 if self.dry else torch.cuda.mem_get_info()[0]

    def datasheet_bytes_per_second(self) -> float | None:
        """The table's figure where its chip is meant, else memory clock × bus width × 2 as the driver reports them."""
        if self.dry:
            return None
        found = torch.cuda.get_device_properties(self.torch_device)
        clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
        reported = 2e3 * clock * width / 8
        for gpu in GPUS:  # "h100" is several products, of which the table has one
            if gpu.name in self.name.lower() and (
                not reported or 0.9 < reported / gpu.memory_bandwidth < 1.1
            ):
                return gpu.memory_bandwidth
        return reported or None

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def graph(self, body: Callable[[], Any]) -> Callable[[], None]:
        """body as a captured graph, warmed up (which also compiles); body's tensors must stay where they are."""
        if self.dry:
            body()
            return lambda: (body(), None)[1]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph.replay

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """A stream of its own, which starts after what is queued and is waited for by what follows."""
        if self.dry:
            yield
            return
        own, outer = torch.cuda.Stream(), torch.cuda.current_stream()
        own.wait_stream(outer)
        with torch.cuda.stream(own):
            yield
        outer.wait_stream(own)

    def streams(self, count: int) -> list[contextlib.AbstractContextManager[Any]]:
        """Streams to use side by side."""
        if self.dry:
            return [contextlib.nullcontext() for _ in range(count)]
        return [torch.cuda.stream(torch.cuda.Stream()) for _ in range(count)]

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """An error where the host waits for the GPU."""
        if self.dry:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def keep_busy(self) -> None:
        if not self.dry:
            torch.cuda._sleep(_QUEUED)

    def stamp(self) -> Any:
        """Now, in the order of the current stream."""
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two stamps; after `synchronize`."""
        return end - begin if self.dry else begin.elapsed_time(end) / 1e3

    def free(self) -> None:
        """Gives memory that nobody holds any more back, a finished case's graphs for example."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()


def device(dry: bool) -> Device:
    """The device; RuntimeError in one sentence where there is no GPU and this is no dry run."""
    if not dry and not torch.cuda.is_available():
        raise RuntimeError(
            "no GPU is visible to PyTorch, expected one; run on a machine with one, or with --dry"
        )
    if (
        not dry
        and shutil.which("gcc") is None
        and shutil.which("cc") is None
        and shutil.which("clang") is None
    ):
        print(
            "NOTE: no C compiler (gcc, cc, clang) was found; Triton needs one to launch kernels: install gcc"
        )
    return Device(dry)


def timed(
    where: Device, replays: Sequence[Replay], rounds: int, deadline: Deadline | None = None
) -> dict[str, list[float]]:
    """Seconds per call of every alternative, one value a round, all of them once a round in changing order.

    At least two rounds, and no more of them after the deadline.
    """
    samples: dict[str, list[float]] = {replay.name: [] for replay in replays}
    for r in range(-1, rounds):
        if deadline is not None and deadline.over() and r >= 2:
            break
        stamps = []
        for i in order(len(replays), r + 1):
            replay = replays[i]
            replay.prepare()
            where.keep_busy()
            begin = where.stamp()
            replay.run()
            stamps.append((replay, begin, where.stamp()))
        where.synchronize()
        if r >= 0:
            for replay, begin, end in stamps:
                samples[replay.name].append(where.seconds(begin, end) / replay.calls)
    return samples


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def read_bytes_per_second(where: Device) -> float:
    """The fastest of a few plain reads and copies of memory well beyond the cache, in bytes read and written."""
    size = max(4 * where.l2_bytes(), 2**30 if not where.dry else 2**20)
    size = min(size, where.free_bytes() // 4) // 4
    source = torch.ones(size, dtype=torch.float32, device=where.torch_device)
    target = torch.empty_like(source)
    works: dict[str, tuple[Callable[[], Tensor], int]] = {
        "sum": (lambda: source.sum(), 4 * size),
        "amax": (lambda: source.amax(), 4 * size),
        "copy": (lambda: target.copy_(source), 8 * size),
    }
    replays = [Replay(name, where.graph(work)) for name, (work, _) in works.items()]
    samples = timed(where, replays, 3 if where.dry else 15)
    return max(works[name][1] / median(s) for name, s in samples.items())


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that every stage has."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after this time with what there is")
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes on the CPU in Triton's interpreter: no measurement"
    )
    parser.add_argument("--configs", type=Path, help="folder of configurations instead of the package's own")
    return parser


def start(arguments: argparse.Namespace) -> tuple[Device, Deadline]:
    """What every stage does first."""
    deadline = Deadline(arguments.seconds)
    try:
        where = device(arguments.dry)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    if arguments.dry:
        torch.set_num_threads(1)  # tiny sizes; threads would wait for one another
    if arguments.configs is not None:
        _configs.read_from(arguments.configs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    return where, deadline
