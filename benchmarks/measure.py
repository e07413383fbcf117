"""One run: builds the alternatives of a case, times them interleaved, and reduces the samples to rows."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import bandwidth, machine
from benchmarks.compiled import compile_dense
from benchmarks.gated_mlp import Call, Density, GatedMlp, layers_beyond_cache
from benchmarks.registry import Entry
from benchmarks.report import Result, Row
from benchmarks.shapes import Shape
from benchmarks.timing import Interval, Timed, interleave, median_interval, paired_ratio, quantile
from sparsemlp.ops._gated_mlp_native import CHUNK

__all__ = ["DTYPES", "Case", "build", "measure", "own_name"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NOISY = 0.10
_BUSY = 0.05


@dataclass(frozen=True)
class Case:
    """What is timed. `sparsities` are fractions; 0 is always among them."""

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


@dataclass
class _Peer:
    label: str
    call: Call
    sparsity: float | None = None
    compile_s: float | None = None
    seen: list[list[Tensor]] = field(default_factory=list)


def own_name(sparsity: float) -> str:
    """The name of this package's kernel at a sparsity: `own_90`."""
    return f"own_{100 * sparsity:g}"


def build(case: Case, share: GatedMlp | None = None) -> GatedMlp:
    """The case's workload, with the weights of `share` where given; by default enough layers to leave the cache."""
    layers = case.layers or _enough_layers(case)
    return case.entry.workload(
        case.shape, DTYPES[case.dtype], case.tokens, case.activation, layers, share=share
    )


def _enough_layers(case: Case) -> int:
    per_layer = 3 * case.shape.d * case.shape.f * DTYPES[case.dtype].itemsize
    return layers_beyond_cache(per_layer, bandwidth.last_level_cache())


def _peers(case: Case, work: GatedMlp, say: Callable[[str], None]) -> dict[str, _Peer]:
    peers = {dense.name: _Peer(dense.label, dense.build(work)) for dense in case.entry.dense}
    if case.compile:
        say("compiling the dense peer …")
        function, weights = case.entry.compiled(work)
        try:
            best = compile_dense(function, weights, work.fresh)
        except RuntimeError as error:
            say(str(error))
        else:
            label = f"torch.compile ({best.setting})"
            peers["compile"] = _Peer(label, best.call, compile_s=best.seconds[best.setting])
            say("compiled in " + ", ".join(f"{s:.1f} s ({name})" for name, s in best.seconds.items()))
    for s in case.sparsities:
        label = "sparsemlp, threshold 0" if s == 0 else f"sparsemlp, {100 * s:g} % sparse"
        peers[own_name(s)] = _Peer(label, work.own(s), sparsity=s)
    return peers


def _timed(name: str, peer: _Peer, work: GatedMlp) -> Timed:
    def prepare() -> list[Tensor]:
        xs = work.fresh()
        if peer.sparsity is not None:
            peer.seen.append(xs)
        return xs

    def sweep(xs: list[Tensor]) -> None:
        call = peer.call
        for i, x in enumerate(xs):
            call(i, x)

    return Timed(name, prepare, sweep, len(work.layers))


def measure(case: Case, work: GatedMlp, say: Callable[[str], None] = lambda line: None) -> Result:
    """Times the case; `say` gets progress lines. The thread count is set and left set."""
    torch.set_num_threads(case.threads)
    with torch.inference_mode():
        peers = _peers(case, work, say)
        read, read_name, read_bytes = bandwidth.reader()
        say(f"timing {case.rounds} rounds of {len(peers) + 1} alternatives …")
        neighbours = machine.Neighbours()
        samples = interleave([read, *(_timed(name, peer, work) for name, peer in peers.items())], case.rounds)
        others = neighbours.share()
        densities = work.densities({p.sparsity: p.seen for p in peers.values() if p.sparsity is not None})
    chosen, reason = machine.backend(case.entry.name, work.fresh()[0])
    skips = chosen == "native" and case.tokens <= CHUNK
    dense_names = [name for name, peer in peers.items() if peer.sparsity is None]
    best = min(dense_names, key=lambda name: quantile(samples[name], 0.5))
    baselines = {"eager": dense_names[0], "best_dense": best, "own_0": own_name(0)}
    rows = [_read_row(samples[bandwidth.NAME], read_bytes, read_name)]
    for name, peer in peers.items():
        density = None if peer.sparsity is None else densities[peer.sparsity]
        read_all = density is None or not skips
        size = float(work.bytes_dense) if read_all else work.bytes_read(density.union)  # type: ignore[union-attr]
        rows.append(_row(name, peer, density, size, samples, read_bytes, baselines))
    return Result(_facts(case, work, samples, peers[best].label, read_name, chosen, reason, others), rows)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{round(100 * q)}_ms": 1e3 * quantile(seconds, q) for q in (0.2, 0.5, 0.8)}


def _read_row(seconds: list[float], size: int, label: str) -> Row:
    rate = size / quantile(seconds, 0.5) / 1e9
    return Row(bandwidth.NAME, label, megabytes=size / 1e6, gb_per_s=rate, **_quantiles(seconds))


def _spread(prefix: str, interval: Interval) -> dict[str, float]:
    return {prefix: interval.median, f"{prefix}_low": interval.low, f"{prefix}_high": interval.high}


def _row(
    name: str,
    peer: _Peer,
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
        if key != "own_0" or peer.sparsity is not None:
            numbers |= _spread(f"vs_{key}", paired_ratio(samples[base], seconds))
    if density is not None:
        numbers |= {
            "density": density.density,
            "union_density": density.union,
            "mask_overlap": density.overlap,
        }
    return Row(
        name,
        peer.label,
        sparsity=peer.sparsity,
        compile_s=peer.compile_s,
        megabytes=size / 1e6,
        gb_per_s=size / quantile(seconds, 0.5) / 1e9,
        **numbers,
    )


def _facts(
    case: Case,
    work: GatedMlp,
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
