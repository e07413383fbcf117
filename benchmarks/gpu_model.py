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

`--op mlp` and `--op sparse_linear` predict those; for the latter sparsity is that of x, every token wants its own
channels, and shapes are of single layers. `--input-sparsity 0.5` gives `gated_mlp` half of its gate's bytes, for two
launches more.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
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
OPERATORS = ("gated_mlp", "mlp", "sparse_linear")
_MLPS = tuple(map(shapes.get, ("llama3-8b", "llama3-70b")))
SHAPES = {
    "gated_mlp": _MLPS,
    "mlp": (replace(_MLPS[0], activation="relu"), shapes.get("opt-1.3b")),
    "sparse_linear": (
        shapes.Shape("8b-gate", 4096, 14336, "identity"),
        shapes.Shape("8b-down", 14336, 4096, "identity"),
        shapes.Shape("8b-query", 4096, 4096, "identity"),
    ),
}
"""What is predicted by default; for `sparse_linear` d are its channels K and f its columns N."""


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
    the dense products (three, two, one) at `read_share` of the peak bandwidth. All predicted."""

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


def minimum_bytes(
    d: int, f: int, size: int, tokens: int, wanted: float, *, op: str = "gated_mlp", channels: float | None = None
) -> float:  # fmt: skip
    """The gate, the rows that are wanted, x and the output, once each; `wanted` neurons of f (channels of d).

    `channels`: of d, those of the gate that are read; None: all.
    """
    if op == "sparse_linear":
        return size * (wanted * f + tokens * (d + f))
    gate = f * (d if channels is None else channels)
    return size * (gate + (2 if op == "gated_mlp" else 1) * wanted * d + 2 * tokens * d)


def _listed(select: Launch, wanted: float) -> float:
    """Bytes of the list that a select launch makes and the other reads."""
    return wanted * (4 + 4 + 4 * select.constants["BLOCK_T"]) + select.grid[0] * 4


def rows_traffic(rows: Launch, listed: float, wanted: float, tokens: int, width: int, size: int) -> Traffic:
    """What the launch moves that adds `wanted` rows of a weight of `width` columns; out is of 16 or 32 bits."""
    chunks, splits = rows.grid
    written = tokens * width * rows.arguments["out"].element_size()
    partial = 2 * splits * tokens * width * 4 if splits > 1 else 0
    weights = wanted * width * size
    return Traffic(weights, weights + written + listed, chunks * listed + partial)


def traffic(
    case: Case, select: Launch, rows: Launch, wanted: float, *, given: bool = False
) -> tuple[Traffic, Traffic]:
    """What two launches of a decode move when `wanted` of its neurons (channels) are wanted by some token.

    `given`: the gate's pre-activations are, in float32, by input sparsity.
    """
    op, size = case.plan.split()[0], DTYPES[case.dtype].itemsize
    d, f, listed, x = case.d, case.f, _listed(select, wanted), case.tokens * case.d * size
    if op == "sparse_linear":
        return Traffic(0, x + listed, 0), rows_traffic(rows, listed, wanted, case.tokens, f, size)
    (segments,), gated = select.grid, op == "gated_mlp"
    # every segment reads x for its gate rows, and again for its up rows where it has any
    with_any = segments * (1 - (1 - wanted / f) ** select.constants["BLOCK_F"]) if gated else 0
    weights = d * size * ((0 if given else f) + (wanted if gated else 0))
    first = Traffic(
        weights,
        weights + (case.tokens * f * 4 if given else 0) + x + listed,
        ((0 if given else segments) + with_any) * x,
    )
    return first, rows_traffic(rows, listed, wanted, case.tokens, d, size)


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


def _moves(
    case: Case, launches: list[Launch], wanted: float, channels: float | None
) -> list[tuple[Launch, Traffic]]:
    """Every launch that is not a sum, with what it moves."""
    pairs = [launch for launch in launches if "sum" not in launch.name]
    moved: list[Traffic] = []
    if channels is not None:
        select, rows, *pairs = pairs
        size = DTYPES[case.dtype].itemsize
        listed = _listed(select, channels)
        first = Traffic(0, case.tokens * case.d * size + listed, 0)
        moved = [first, rows_traffic(rows, listed, channels, case.tokens, case.f, size)]
        found = [select, rows, *pairs]
    else:
        found = pairs
    moved += traffic(case, *pairs, wanted, given=channels is not None)
    return [*zip(found, moved, strict=True)]


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
    gpu: Gpu, shape: shapes.Shape, dtype: str, tokens: int, sparsity: float, residency: Residency,
    op: str = "gated_mlp", input_sparsity: float | None = None,
) -> Prediction:  # fmt: skip
    """One line."""
    from sparsemlp.kernels import _configs

    config = (("last_sums", False),) if gpu.backend == "hip" else ()
    options = () if input_sparsity is None else ("input",)
    case = Case(f"{op} decode", dtype, shape.activation, tokens, shape.d, shape.f, options, config)
    with _configs.use("sparse_linear", dict(config)) if config else contextlib.nullcontext():
        launches = case.launches()
    size, linear = DTYPES[dtype].itemsize, op == "sparse_linear"
    share, neurons = union(1 - sparsity, tokens), shape.d if linear else shape.f
    wanted = share * neurons
    channels = None if input_sparsity is None else union(1 - input_sparsity, tokens) * shape.d
    work, seconds = _moves(case, launches, wanted, channels), 0.0
    for launch, moved in work:
        tile = _tile_bytes(launch, size)
        resident, ahead = residency(launch, gpu, tile)
        seconds += gpu.launch_gap + _seconds(gpu, moved, math.prod(launch.grid), resident, ahead * tile)
    # sums read partial sums from the L2; counted as traffic of the launch before
    seconds += (len(launches) - len(work)) * (gpu.launch_gap + gpu.latency)
    bound = minimum_bytes(shape.d, shape.f, size, tokens, wanted, op=op, channels=channels)
    bound_seconds = bound / gpu.memory_bandwidth
    dense = minimum_bytes(shape.d, shape.f, size, tokens, neurons, op=op)
    products = {"gated_mlp": 3, "mlp": 2, "sparse_linear": 1}[op]
    dense_seconds = dense / (gpu.memory_bandwidth * gpu.read_share) + products * (
        gpu.launch_gap + gpu.latency
    )
    return Prediction(
        gpu.name, shape.name, dtype, tokens, sparsity, share,
        sum(m.memory for _, m in work) / 1e6, sum(m.l2 for _, m in work) / 1e6, len(launches),
        seconds * 1e6, bound_seconds * 1e6, bound_seconds / seconds, dense_seconds / seconds,
    )  # fmt: skip


def predictions(
    names: list[str], dtype: str, residency: Residency, op: str = "gated_mlp", input_sparsity: float | None = None
) -> Iterator[Prediction]:  # fmt: skip
    for name in names:
        for shape in SHAPES[op]:
            for tokens in TOKENS:
                for sparsity in SPARSITIES:
                    yield predict(
                        gpus.get(name), shape, dtype, tokens, sparsity, residency, op, input_sparsity
                    )


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
    parser.add_argument("--op", default="gated_mlp", choices=OPERATORS)
    parser.add_argument("--input-sparsity", type=float, help="of gated_mlp's gate; default: none")
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
    if arguments.input_sparsity is not None and arguments.op != "gated_mlp":
        parser.error(f"--input-sparsity is given with --op {arguments.op}, expected it with gated_mlp alone")
    names = arguments.gpu or [g.name for g in gpus.GPUS]
    lines = [*predictions(names, arguments.dtype, compiled(), arguments.op, arguments.input_sparsity)]
    print(table(lines))
    if arguments.out:
        write_atomic(arguments.out, lambda partial: partial.write_text(as_csv(lines), encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
