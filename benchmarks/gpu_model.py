"""Predicts decode times on GPUs that are not here from the compiled kernels: `python -m benchmarks.gpu_model`.

Nothing is measured, and nothing here is written among measured results. A launch takes the largest of

* its bytes from memory / the bandwidth a streaming read reaches (`Gpu.read_share` of the peak),
* its bytes from memory and from the L2 / the L2's bandwidth: x and the list of active neurons are read by many
  programs, but come from memory once; partial sums never leave the L2,
* and the pace of loads in flight: programs run in waves of as many as fit by the compiled registers and shared memory;
  a wave has a tile of weights a program in flight, and each tile takes the memory's latency,

plus one latency before the first byte; a call takes its launches one after another, `Gpu.launch_gap` before each.
Assumed: tokens are independent, so that a fraction 1 − (1 − density)^T of the neurons is wanted by some token; work is
spread evenly over programs; arithmetic hides behind loads (it may not, in float32 with many tokens); weights are not in
the L2. The byte bound is what no implementation of this operator can avoid reading, at the peak bandwidth.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import gpus, shapes
from benchmarks.gpu_cases import DTYPES, Case
from benchmarks.gpu_proof import ROOT, streams
from benchmarks.gpus import Gpu
from benchmarks.report import write_atomic

if TYPE_CHECKING:
    from sparsemlp.kernels._launch import Launch

__all__ = [
    "SPARSITIES",
    "TOKENS",
    "Prediction",
    "Traffic",
    "minimum_bytes",
    "predict",
    "table",
    "traffic",
    "union",
]

MARK = "predicted"
TOKENS = (1, 2, 4, 8, 16)
SPARSITIES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99)
SHAPES = ("llama3-8b", "llama3-70b")


@dataclass(frozen=True)
class Traffic:
    """Bytes of a launch: `weights` and `memory` (weights and all else that comes from or goes to memory) and `l2`
    (what the L2 serves again, or keeps)."""

    weights: float
    memory: float
    l2: float


@dataclass(frozen=True)
class Prediction:
    """A line of the table. `share_of_bound`: the byte bound's time over the predicted one; `vs_dense` over the time of
    three dense products at `read_share` of the peak bandwidth. All predicted."""

    gpu: str
    shape: str
    dtype: str
    tokens: int
    sparsity: float
    union: float
    memory_megabytes: float
    l2_megabytes: float
    launches: int
    microseconds: float
    bound_microseconds: float
    share_of_bound: float
    vs_dense: float
    kind: str = MARK


def union(density: float, tokens: int) -> float:
    """The fraction of neurons that some token wants."""
    return 1 - (1 - density) ** tokens


def minimum_bytes(d: int, f: int, size: int, tokens: int, wanted: float) -> float:
    """Gate, the wanted up and down rows, x and the output, once each; `wanted` neurons of f."""
    return size * (d * f + 2 * wanted * d + 2 * tokens * d)


def traffic(case: Case, select: Launch, down: Launch, wanted: float) -> tuple[Traffic, Traffic]:
    """What the two launches of a decode move when `wanted` of its neurons are wanted by some token."""
    size = DTYPES[case.dtype].itemsize
    d, row = case.d, case.d * size
    block_t, block_f = select.constants["BLOCK_T"], select.constants["BLOCK_F"]
    (segments,), (chunks, splits) = select.grid, down.grid
    x, out = case.tokens * row, case.tokens * row
    # every segment reads x for its gate rows, and again for its up rows where it has any
    with_any = segments * (1 - (1 - wanted / case.f) ** block_f)
    listed = wanted * (4 + 4 + 4 * block_t) + segments * 4
    weights = case.f * row + wanted * row
    first = Traffic(weights, weights + x + listed, (segments + with_any) * x)
    partial = 2 * splits * case.tokens * d * 4 if splits > 1 else 0
    second = Traffic(wanted * row, wanted * row + out + listed, chunks * listed + partial)
    return first, second


def _seconds(gpu: Gpu, work: Traffic, programs: int, resident: int, in_flight: float) -> float:
    """One launch, without the gap before it."""
    slots = max(1, resident * gpu.multiprocessors)
    left, paced = programs, 0.0
    while left > 0:
        wave = min(left, slots)
        pace = min(gpu.memory_bandwidth * gpu.read_share, wave * in_flight / gpu.latency)
        paced += work.weights * wave / programs / pace
        left -= wave
    streamed = work.memory / (gpu.memory_bandwidth * gpu.read_share)
    return gpu.latency + max(streamed, (work.memory + work.l2) / gpu.l2_bandwidth, paced)


def _tile_bytes(launch: Launch, size: int) -> int:
    """Weight bytes of a program's tile."""
    c = launch.constants
    return (c["BLOCK_I"] if "BLOCK_I" in c else c["BLOCK_F"]) * c["BLOCK_D"] * size


Residency = Callable[["Launch", "Gpu", int], tuple[int, int]]
"""(programs a multiprocessor holds, tiles of so many bytes that each has in flight) of a compiled launch."""


def compiled() -> Residency:
    """By compiling, once a kernel and architecture."""
    cache: dict[tuple[object, ...], tuple[int, int]] = {}

    def residency(launch: Launch, gpu: Gpu, tile: int) -> tuple[int, int]:
        from benchmarks.gpu_compile import machine_code

        constants = tuple((k, getattr(v, "__name__", v)) for k, v in launch.constants.items())
        dtypes = tuple(getattr(a, "dtype", None) for a in launch.args)
        key = launch.name, constants, dtypes, launch.num_warps, launch.num_stages, gpu.arch
        if key not in cache:
            machine = machine_code(launch, gpu.arch, streams(launch))
            resident = gpu.resident(machine.registers, machine.shared, launch.num_warps)
            ahead = min(launch.num_stages - 1, machine.shared // tile) if machine.asynchronous else 1
            cache[key] = resident, max(1, ahead)
        return cache[key]

    return residency


def predict(
    gpu: Gpu, shape: shapes.Shape, dtype: str, tokens: int, sparsity: float, residency: Residency
) -> Prediction:
    """One line."""
    config = (("last_sums", False),) if gpu.backend == "hip" else ()
    case = Case("gated_mlp decode", dtype, shape.activation, tokens, shape.d, shape.f, config=config)
    select, down, *add = case.launches()
    share = union(1 - sparsity, tokens)
    wanted = share * shape.f
    size = DTYPES[dtype].itemsize
    work = traffic(case, select, down, wanted)
    seconds = 0.0
    for launch, moved in zip((select, down), work, strict=True):
        tile = _tile_bytes(launch, size)
        resident, ahead = residency(launch, gpu, tile)
        seconds += gpu.launch_gap + _seconds(gpu, moved, math.prod(launch.grid), resident, ahead * tile)
    if add:  # reads partial sums from the L2; counted as traffic of the down launch
        seconds += gpu.launch_gap + gpu.latency
    bound = minimum_bytes(shape.d, shape.f, size, tokens, wanted) / gpu.memory_bandwidth
    dense = minimum_bytes(shape.d, shape.f, size, tokens, shape.f)
    dense_seconds = dense / (gpu.memory_bandwidth * gpu.read_share) + 3 * (gpu.launch_gap + gpu.latency)
    return Prediction(
        gpu.name, shape.name, dtype, tokens, sparsity, share,
        sum(w.memory for w in work) / 1e6, sum(w.l2 for w in work) / 1e6, len(work) + len(add),
        seconds * 1e6, bound * 1e6, bound / seconds, dense_seconds / seconds,
    )  # fmt: skip


def predictions(names: list[str], dtype: str, residency: Residency) -> Iterator[Prediction]:
    for name in names:
        for shape in map(shapes.get, SHAPES):
            for tokens in TOKENS:
                for sparsity in SPARSITIES:
                    yield predict(gpus.get(name), shape, dtype, tokens, sparsity, residency)


def table(lines: list[Prediction]) -> str:
    """For a console: a row per GPU, shape and number of tokens, a column per sparsity."""
    sparsities = sorted({p.sparsity for p in lines})
    text = [
        f"{MARK.upper()}, not measured: µs a call (share of the byte bound, × dense)",
        f"{'':28}" + "".join(f"{f'{s:.0%} sparse':>24}" for s in sparsities),
    ]
    groups: dict[tuple[str, str, str, int], list[Prediction]] = {}
    for p in lines:
        groups.setdefault((p.gpu, p.shape, p.dtype, p.tokens), []).append(p)
    for (gpu, shape, dtype, tokens), found in groups.items():
        cells = [f"{p.microseconds:8.1f} ({p.share_of_bound:4.0%}, {p.vs_dense:4.2f}×)" for p in found]
        text.append(f"{gpu:7} {shape:11} {dtype} T{tokens:<3}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(text)


def as_csv(lines: list[Prediction]) -> str:
    """All columns; every line says that it is predicted."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Prediction)], lineterminator="\n")
    writer.writeheader()
    for p in lines:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(p).items()})
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(": `")[0])
    parser.add_argument("--gpu", action="append", choices=[g.name for g in gpus.GPUS], help="default: all")
    parser.add_argument("--dtype", default="bf16", choices=[*DTYPES])
    parser.add_argument("--out", type=Path, help="a CSV file; default: only the table is printed")
    arguments = parser.parse_args()
    if arguments.out and arguments.out.resolve().is_relative_to(ROOT / "benchmarks" / "results"):
        parser.error(
            f"--out is {arguments.out}, expected a file elsewhere: that folder holds what was measured"
        )
    if "TRITON_INTERPRET" in os.environ:
        parser.error(
            "TRITON_INTERPRET is set, expected it unset: kernels of the interpreter cannot be compiled"
        )
    names = arguments.gpu or [g.name for g in gpus.GPUS]
    lines = [*predictions(names, arguments.dtype, compiled())]
    print(table(lines))
    if arguments.out:
        write_atomic(arguments.out, lambda partial: partial.write_text(as_csv(lines), encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
