"""One run: builds the alternatives of a case, times them interleaved, and reduces the samples to rows."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import alternatives, bandwidth, machine
from benchmarks.alternatives import Alternative, own_name
from benchmarks.registry import Entry
from benchmarks.report import INT8, OWN, Result, Row
from benchmarks.shapes import Shape
from benchmarks.timing import Interval, interleave, median_interval, paired_ratio, quantile
from benchmarks.workload import Density, Workload, layers_beyond_cache
from sparsemlp.ops._gated_mlp_native import CHUNK

__all__ = ["DTYPES", "WEIGHTS", "Case", "build", "measure", "own_name"]

WEIGHTS = ("float", "int8")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIONS: dict[str, Any] = {"indicator": "gate", "input_sparsity": 0.0}
"""The workloads' options and what they are where an operator has none."""
_SKIP = "sparse", "native"
"""The routes of `sparsemlp.explain` that skip rows; for more than CHUNK tokens hardly any."""
_NOISY = 0.10
_BUSY = 0.05


@dataclass(frozen=True)
class Case:
    """What is timed. `sparsities` are fractions; 0 is always among them.

    `options` are keyword arguments of the entry's workload; `weights` "int8" times this package with int8 weights too,
    beside the same sparsities in x's dtype; `peers` (entry, workload, sparsities, say) makes more alternatives.
    """

    entry: Entry
    shape: Shape
    dtype: str
    tokens: int
    sparsities: tuple[float, ...]
    activation: str
    rounds: int
    threads: int
    compile: bool = True
    layers: int | None = None
    status: str = "verified"
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = "float"
    backend: str = "auto"
    peers: Callable[..., dict[str, Alternative]] | None = None


def build(case: Case, share: Workload | None = None) -> Workload:
    """The case's workload, with the weights of `share` where given; by default enough layers to leave the cache."""
    layers = case.layers or _enough_layers(case)
    return case.entry.workload(
        case.shape, DTYPES[case.dtype], case.tokens, case.activation, layers, share=share, **case.options
    )


def _enough_layers(case: Case) -> int:
    itemsize = 1 if case.weights == "int8" else DTYPES[case.dtype].itemsize
    per_layer = case.entry.workload.layer_bytes(case.shape, itemsize)
    return layers_beyond_cache(per_layer, bandwidth.last_level_cache())


def _alternatives(case: Case, work: Workload, say: Callable[[str], None]) -> dict[str, Alternative]:
    found = alternatives.eager(case.entry, work)
    if case.compile:
        found |= alternatives.compiled(case.entry, work, say)
    if case.peers is not None:
        found |= case.peers(case.entry, work, case.sparsities, say)
    for weights in ("float",) if case.weights == "float" else ("float", case.weights):
        for s in case.sparsities:
            apart = f"{s:g}" if case.backend == "auto" and s > 0 else ""
            found[own_name(s, weights)] = alternatives.own(work, s, case.backend, weights, apart)
    return found


def _densities(found: dict[str, Alternative], work: Workload) -> dict[str, Density]:
    """The masks' density for every alternative that has some; one of each sparsity is evaluated."""
    first: dict[float, str] = {}
    for name, a in found.items():
        if a.sparsity is not None:
            first.setdefault(a.sparsity, name)
    made = work.densities({s: found[name].seen for s, name in first.items()})
    return {name: made[a.sparsity] for name, a in found.items() if a.sparsity is not None}


def measure(case: Case, work: Workload, say: Callable[[str], None] = lambda line: None) -> Result:
    """Times the case; `say` gets progress lines. The thread count is set and left set."""
    torch.set_num_threads(case.threads)
    with torch.inference_mode():
        found = _alternatives(case, work, say)
        read, read_name, read_bytes = bandwidth.reader()
        say(f"timing {case.rounds} rounds of {len(found) + 1} alternatives …")
        neighbours = machine.Neighbours()
        timed = [alternatives.timed(name, a, work) for name, a in found.items()]
        samples = interleave([read, *timed], case.rounds)
        others = neighbours.share()
        densities = _densities(found, work)
        routes = {name: alternatives.explained(a.call, work).route for name, a in found.items() if a.call}
    chosen, reason = case.backend, ""
    if case.backend == "auto":
        chosen, reason = machine.backend(case.entry.name, work.fresh()[0])
    dense_names = [name for name, a in found.items() if a.sparsity is None]
    best = min(dense_names, key=lambda name: quantile(samples[name], 0.5))
    rows = [_read_row(samples[bandwidth.NAME], read_bytes, read_name)]
    for name, a in found.items():
        baselines = {"eager": dense_names[0], "best_dense": best}
        if name.startswith(OWN):
            baselines["own_0"] = own_name(0)
        if name.startswith(INT8):
            baselines["own_float"] = own_name(a.sparsity or 0.0)
        size = float(work.bytes_dense)
        if name in densities and a.bytes_read is not None:
            skips = name not in routes or (routes[name] in _SKIP and case.tokens <= CHUNK)
            size = a.bytes_read(densities[name] if skips else Density(1.0, 1.0, 1.0))
        row = _row(name, a, densities.get(name), size, samples, read_bytes, baselines)
        rows.append(replace(row, route=routes.get(name, "")))
    return Result(_facts(case, work, samples, found[best].label, read_name, chosen, reason, others), rows)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{round(100 * q)}_ms": 1e3 * quantile(seconds, q) for q in (0.2, 0.5, 0.8)}


def _read_row(seconds: list[float], size: int, label: str) -> Row:
    rate = size / quantile(seconds, 0.5) / 1e9
    return Row(bandwidth.NAME, label, megabytes=size / 1e6, gb_per_s=rate, **_quantiles(seconds))


def _spread(prefix: str, interval: Interval) -> dict[str, float]:
    return {prefix: interval.median, f"{prefix}_low": interval.low, f"{prefix}_high": interval.high}


def _row(
    name: str,
    alternative: Alternative,
    density: Density | None,
    size: float,
    samples: dict[str, list[float]],
    read_bytes: int,
    baselines: dict[str, str],
) -> Row:
    seconds, read = samples[name], samples[bandwidth.NAME]
    numbers = _quantiles(seconds)
    share = [(size / t) / (read_bytes / r) for t, r in zip(seconds, read, strict=True)]
    numbers |= _spread("share_of_read", median_interval(share))
    for key, base in baselines.items():
        numbers |= _spread(f"vs_{key}", paired_ratio(samples[base], seconds))
    if density is not None:
        numbers |= {
            "density": density.density,
            "union_density": density.union,
            "mask_overlap": density.overlap,
        }
    return Row(
        name,
        alternative.label,
        sparsity=alternative.sparsity,
        compile_s=alternative.compile_s,
        megabytes=size / 1e6,
        gb_per_s=size / quantile(seconds, 0.5) / 1e9,
        **numbers,
    )


def _facts(
    case: Case,
    work: Workload,
    samples: dict[str, list[float]],
    best: str,
    read_name: str,
    chosen: str,
    reason: str,
    others: float,
) -> dict[str, str | int | float]:
    noise = {}
    for name in (bandwidth.NAME, case.entry.dense[0].name):
        low, middle, high = (quantile(samples[name], q) for q in (0.2, 0.5, 0.8))
        noise[name] = (high - low) / middle
    return {
        "op": case.entry.name,
        "shape": case.shape.name,
        "D": case.shape.d,
        "F": case.shape.f,
        "dtype": case.dtype,
        "activation": case.activation,
        "tokens": case.tokens,
        "weights": case.weights,
        **{name: case.options.get(name, value) for name, value in OPTIONS.items()},
        "threads": case.threads,
        "layers": len(work.layers),
        "leaves_cache": "yes" if len(work.layers) >= _enough_layers(case) else "no",
        "layer_megabytes": work.bytes_dense / 1e6,
        "rounds": case.rounds,
        "backend": chosen,
        "backend_reason": reason,
        "isa": machine.isa(),
        "best_dense": best,
        "read_with": read_name,
        "noise_read": noise[bandwidth.NAME],
        "noise_eager": noise[case.entry.dense[0].name],
        "others_cpu": others,
        "shared_machine": "yes" if max(noise.values()) > _NOISY or others > _BUSY else "no",
        "cpu": machine.cpu(),
        "huge_pages": bandwidth.page_mode(),
        "torch": torch.__version__,
        "version": machine.commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "status": case.status,
    }
