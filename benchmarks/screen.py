"""The screen beside gate-first thresholds and the dense MLP: `python -m benchmarks.screen`.

For each number of tokens, interleaved in one run: a plain read of the low-bit copies' bytes, the pass over the copies
alone, this package's dense MLP, and at each sparsity the screen (4 and 3 bits; 4 bits over int8 rows) and CATS (gate).
Ratios are medians over rounds of the ratio within a round. With --no-gate nothing is written unless --out names where.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import alternatives, bandwidth, gate, machine, measure, registry, shapes
from benchmarks.gated_mlp import GatedMlp
from benchmarks.report import write_atomic
from benchmarks.timing import Timed, interleave, paired_ratio, quantile
from benchmarks.weight_bytes import copy_share
from benchmarks.workload import Call, layers_beyond_cache
from sparsemlp import _native, activations
from sparsemlp.ops._gated_mlp_native import screen_scores

__all__ = ["MUST", "Row", "main", "run", "table"]

RESULTS = Path(__file__).resolve().parent / "results"
MUST = {"screen_50": ("vs_dense", 1.3), "screen_70": ("vs_dense", 1.75), "pass": ("share_of_read", 0.8)}
"""What one token of bfloat16 at D 4096, F 14336 must reach."""
_DENSE, _PASS = "dense", "pass"


@dataclass(frozen=True)
class Row:
    """One alternative: ms a call, and ratios (above 1: faster) with 95 % bootstrap intervals; None where it has none.

    `vs_dense` against this package's dense MLP with the same weights' dtype; `share_of_read` of the bandwidth that a
    plain read of other memory had in the same round; `union` the share of neurons that some token wanted.
    """

    tokens: int
    alternative: str
    p50_ms: float
    megabytes: float
    vs_dense: float | None = None
    vs_dense_low: float | None = None
    vs_dense_high: float | None = None
    share_of_read: float | None = None
    share_of_read_low: float | None = None
    share_of_read_high: float | None = None
    union: float | None = None


@dataclass(frozen=True)
class _One:
    """What is timed: a call, its megabytes, and the dense call that it is compared with."""

    call: Call
    megabytes: float
    against: str | None = None
    union: float | None = None


def _pass(work: GatedMlp) -> Call:
    """The copies alone, with what is computed from them."""
    f, act, isa = work.shape.f, activations.IDS[work.activation], _native.isa()

    def call(i: int, x: Tensor) -> Tensor:
        (gate_codes, gate_scale), (up_codes, up_scale) = work.screens(i)
        return screen_scores(x, gate_codes, up_codes, gate_scale, up_scale, None, None, None, f, act, isa)

    return call


def _alternatives(works: dict[str, GatedMlp], sparsities: Sequence[float], backend: str) -> dict[str, _One]:
    plain, screen = works["cats"], works["screen"]
    mega = plain.bytes_dense / 1e6
    found = {
        _DENSE: _One(plain.own(0.0, backend), mega),
        f"{_DENSE}_int8": _One(plain.own(0.0, backend, "int8"), plain.bytes_read(1.0, weights="int8") / 1e6),
        _PASS: _One(_pass(screen), 2 / 3 * mega * copy_share(plain.dtype.itemsize)),
    }
    for s in sparsities:
        for name, work in works.items():
            for weights in ("float", "int8") if name in ("screen", "cats") else ("float",):
                union = work.densities({s: [work.fresh() for _ in range(8)]})[s].union
                label = f"{name}{'_int8' if weights == 'int8' else ''}_{100 * s:g}"
                found[label] = _One(
                    work.own(s, backend, weights, f"{s:g}" if backend == "auto" else ""),
                    work.bytes_read(union, weights=weights) / 1e6,
                    _DENSE if weights == "float" else f"{_DENSE}_int8",
                    union,
                )
    return found


def _timed(name: str, call: Call, work: GatedMlp) -> Timed:
    return Timed(name, work.fresh, alternatives.walk(call), len(work.layers))


def run(
    shape: shapes.Shape,
    dtype: str,
    tokens: int,
    sparsities: Sequence[float],
    rounds: int,
    *,
    layers: int | None = None,
    backend: str = "auto",
    share: GatedMlp | None = None,
) -> tuple[list[Row], GatedMlp]:
    """Times one number of tokens; returns its rows and a workload whose weights the next call may share."""
    kind = measure.DTYPES[dtype]
    few = GatedMlp.layer_bytes(shape, kind.itemsize)
    count = layers or layers_beyond_cache(few // 4, bandwidth.last_level_cache())
    plain = GatedMlp(shape, kind, tokens, shape.activation, count, share=share)
    works = {"cats": plain}
    for name, bits in (("screen", 4), ("screen3", 3)):
        works[name] = GatedMlp(
            shape, kind, tokens, shape.activation, count, indicator="screen", screen_bits=bits, share=plain,
        )  # fmt: skip
    with torch.inference_mode():
        found = _alternatives(works, sparsities, backend)
        read, _, read_bytes = bandwidth.reader()
        samples = interleave([read, *(_timed(name, one.call, plain) for name, one in found.items())], rounds)
    rows = [_row(tokens, name, one, samples, read_bytes) for name, one in found.items()]
    return rows, plain


def _row(tokens: int, name: str, one: _One, samples: dict[str, list[float]], read_bytes: int) -> Row:
    seconds, numbers = samples[name], {}
    if one.against is not None:
        found = paired_ratio(samples[one.against], seconds)
        numbers |= {"vs_dense": found.median, "vs_dense_low": found.low, "vs_dense_high": found.high}
    ideal = [r * 1e6 * one.megabytes / read_bytes for r in samples[bandwidth.NAME]]
    share = paired_ratio(ideal, seconds)
    numbers |= {
        "share_of_read": share.median, "share_of_read_low": share.low, "share_of_read_high": share.high,
    }  # fmt: skip
    return Row(tokens, name, 1e3 * quantile(seconds, 0.5), one.megabytes, union=one.union, **numbers)


def _misses(row: Row) -> bool:
    key, must = MUST.get(row.alternative, ("", 0.0))
    return row.tokens == 1 and key != "" and getattr(row, key) < must


def table(rows: Sequence[Row], musts: bool) -> str:
    """The rows for a console; `musts`: with what one token must reach."""

    def cell(value: float | None, digits: int = 2) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    lines = [
        f"{'T':>4}  {'':<16} {'ms':>8} {'MB':>7} {'× dense':>8}  {'95 %':<14} {'of read':>8} {'union':>6}"
    ]
    for r in rows:
        spread = "" if r.vs_dense is None else f"[{cell(r.vs_dense_low)}, {cell(r.vs_dense_high)}]"
        line = (
            f"{r.tokens:>4}  {r.alternative:<16} {r.p50_ms:>8.3f} {r.megabytes:>7.1f} {cell(r.vs_dense):>8}  "
            f"{spread:<14} {cell(r.share_of_read):>8} {cell(r.union):>6}"
        )
        if musts and r.tokens == 1 and r.alternative in MUST:
            line += f"  {'FAIL' if _misses(r) else 'pass'} (must be {MUST[r.alternative][1]:g})"
        lines.append(line)
    return "\n".join(lines)


def _write(rows: Sequence[Row], facts: dict[str, str | int | float], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*facts, *(f.name for f in fields(Row))])
    for row in rows:
        cells = ["" if v is None else f"{v:.5g}" if isinstance(v, float) else v for v in asdict(row).values()]
        writer.writerow([*(f"{v:.4g}" if isinstance(v, float) else v for v in facts.values()), *cells])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.screen", description=(__doc__ or "").splitlines()[0]
    )
    gated = registry.get("gated_mlp").shapes
    parser.add_argument("--shape", default="llama3-8b", choices=gated, help="default: %(default)s")
    parser.add_argument("--dtype", default="bf16", choices=tuple(measure.DTYPES), help="default: %(default)s")
    parser.add_argument("--tokens", default="1,4", help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--sparsity", default="50,70,80", help="percentages (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="default: enough to leave the last-level cache")
    parser.add_argument("--backend", default="auto", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument(
        "--no-gate", dest="gate", action="store_false", help="no conformance tests; written only with --out"
    )
    return parser


def _gate() -> bool:
    entry = registry.get("gated_mlp")
    try:
        print(gate.check(entry.name, entry.conformance), flush=True)
    except gate.GateError as error:
        print(error, file=sys.stderr)
        return False
    return True


def main(argv: list[str] | None = None, check: Callable[[], bool] = _gate) -> int:
    """Runs the command line; returns 0, or 1 where the tests are not green or a `MUST` is missed."""
    args = _parser().parse_args(argv)
    if _native.problem() is not None:
        print(f"the pass over the copies needs compiled kernels: {_native.problem()}", file=sys.stderr)
        return 1
    if args.gate and not check():
        return 1
    shape, rows, share = shapes.get(args.shape), [], None
    sparsities = [float(part) / 100 for part in args.sparsity.split(",")]
    neighbours = machine.Neighbours()
    for tokens in map(int, args.tokens.split(",")):
        found, share = run(
            shape, args.dtype, tokens, sparsities, args.rounds,
            layers=args.layers, backend=args.backend, share=share,
        )  # fmt: skip
        rows += found
    others, threads = neighbours.share(), torch.get_num_threads()
    musts = (args.shape, args.dtype) == ("llama3-8b", "bf16")
    print(table(rows, musts))
    folder = args.out or (RESULTS if args.gate else None)
    if folder is not None:
        facts = {
            "shape": shape.name, "D": shape.d, "F": shape.f, "dtype": args.dtype, "threads": threads,
            "rounds": args.rounds, "backend": args.backend, "isa": machine.isa(), "others_cpu": others,
            "cpu": machine.cpu(), "torch": torch.__version__, "version": machine.commit(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "status": "verified" if args.gate else "unverified",
        }  # fmt: skip
        path = folder / machine.device(threads) / "screen" / f"{shape.name}_{args.dtype}.csv"
        _write(rows, facts, path)
        print(f"wrote {path}")
    return 1 if musts and any(_misses(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
