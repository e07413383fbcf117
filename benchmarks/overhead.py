"""What a call costs beyond computing: `python -m benchmarks.overhead`.

One token at D 576, F 1536 in bfloat16 (SmolLM2-135M), everything in the cache. A call's time grows with the number of
neurons; what it would be with none is the fixed cost: Python, dispatch, the parallel region, the reduction over D. It
is the intercept of a straight line through sizes of F that stay in the cores' own caches, fitted in every round;
reported is the median over rounds. Other ways into the kernel, and PyTorch's `F.linear`, are timed beside it.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsemlp
from benchmarks import gate, machine, registry
from benchmarks.gated_mlp import dense_mlp
from benchmarks.report import write_atomic
from benchmarks.timing import Timed, interleave, median_interval
from sparsemlp.nn import SparseGatedMLP

__all__ = ["Fixed", "fixed_us", "intercept", "main", "measure", "table"]

RESULTS = Path(__file__).resolve().parent / "results"
SIZE = 576, 1536
"""D and F of the call that is reported."""
_FEW = (64, 128, 192, 256)
"""Neurons of the line: the weights (0.9 MB at most) fit the second-level caches of two cores."""
_CALLS = 50
MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}
_PUBLIC = "sparsemlp.gated_mlp"


@dataclass(frozen=True)
class Fixed:
    """One way to call: µs of a whole call at `SIZE`, and of one without neurons, with its 95 % bootstrap interval."""

    what: str
    mode: str
    call_us: float
    fixed_us: float
    fixed_us_low: float
    fixed_us_high: float


class _Dense(nn.Module):
    """A gated MLP as Hugging Face's models have it."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=False, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(d, f, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(f, d, bias=False, dtype=torch.bfloat16)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _ways(d: int, f: int) -> dict[str, Callable[[], object]]:
    """Every way to call, over the same numbers."""
    dense = _Dense(d, f).requires_grad_(False)
    gate_w, up = dense.gate_proj.weight, dense.up_proj.weight
    down, down_t = dense.down_proj.weight, dense.down_proj.weight.t().contiguous()
    x, t = torch.randn(1, d, dtype=torch.bfloat16), torch.zeros(())
    function, linear = dense_mlp("silu"), dense.gate_proj.weight
    operator = torch.ops.sparsemlp.gated_mlp.default
    rest = (*(None,) * 14, None, "silu", "gate")
    module = SparseGatedMLP.from_dense(_Dense(d, f).requires_grad_(False))
    ways: dict[str, Callable[[], object]] = {
        _PUBLIC: lambda: sparsemlp.gated_mlp(x, gate_w, up, down_t, threshold=t),
        f"{_PUBLIC}, backend='native'": lambda: sparsemlp.gated_mlp(
            x, gate_w, up, down_t, threshold=t, backend="native"
        ),
        "torch.ops.sparsemlp.gated_mlp": lambda: operator(x, gate_w, up, down_t, t, *rest, "auto"),
        "SparseGatedMLP": lambda: module(x),
        "PyTorch, dense MLP (5 operators)": lambda: function(x, gate_w, up, down),
        "PyTorch, F.linear D to F": lambda: F.linear(x, linear),
    }
    if machine.isa() == "none":
        del ways[f"{_PUBLIC}, backend='native'"]
    return ways


def intercept(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Where the least-squares line through the points meets x = 0."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (xs, ys))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return float(y.mean() - slope * x.mean())


def measure(threads: int, rounds: int = 40, calls: int = _CALLS) -> list[Fixed]:
    """Times every way in every mode, interleaved; the thread count is set and left set."""
    torch.set_num_threads(threads)
    d, full = SIZE
    timed, keys = [], []
    for f in (*_FEW, full):
        for what, way in _ways(d, f).items():
            for mode, context in MODES.items():

                def sweep(_: object, way: Callable[[], object] = way, context: Callable = context) -> None:
                    with context():
                        for _call in range(calls):
                            way()

                keys.append((what, mode, f))
                timed.append(Timed(str(keys[-1]), lambda: None, sweep, calls))
    samples = interleave(timed, rounds)
    rows = []
    for what, mode, f in keys:
        if f != full:
            continue
        by_size = [samples[str((what, mode, n))] for n in _FEW]
        fixed = [1e6 * intercept(_FEW, ys) for ys in zip(*by_size, strict=True)]
        spread = median_interval(fixed)
        whole = 1e6 * median_interval(samples[str((what, mode, full))]).median
        rows.append(Fixed(what, mode, whole, spread.median, spread.low, spread.high))
    return rows


def fixed_us(rows: Sequence[Fixed]) -> float:
    """The fixed cost of the public function in inference mode: what the target is about."""
    (row,) = (row for row in rows if (row.what, row.mode) == (_PUBLIC, "inference_mode"))
    return row.fixed_us


def table(rows: Sequence[Fixed]) -> str:
    """The rows for a console."""
    d, f = SIZE
    lines = [f"one token, D {d}, F {f}, bf16, all in the cache; µs (median over rounds)"]
    lines.append(f"{'':<38} {'':<15} {'call':>8} {'of it fixed':>12}  95 % interval")
    for r in rows:
        lines.append(
            f"{r.what:<38} {r.mode:<15} {r.call_us:>8.1f} {r.fixed_us:>12.1f}  "
            f"[{r.fixed_us_low:.1f}, {r.fixed_us_high:.1f}]"
        )
    return "\n".join(lines)


def _write(rows: Sequence[Fixed], facts: dict[str, str | int | float], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*facts, *(f.name for f in fields(Fixed))])
    for row in rows:
        cells = [f"{v:.4g}" if isinstance(v, float) else v for v in asdict(row).values()]
        writer.writerow([*(f"{v:.4g}" if isinstance(v, float) else v for v in facts.values()), *cells])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def _facts(threads: int, rounds: int, others: float, status: str) -> dict[str, str | int | float]:
    return {
        "op": "gated_mlp",
        "D": SIZE[0],
        "F": SIZE[1],
        "dtype": "bf16",
        "tokens": 1,
        "threads": threads,
        "rounds": rounds,
        "isa": machine.isa(),
        "others_cpu": others,
        "cpu": machine.cpu(),
        "torch": torch.__version__,
        "version": machine.commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "status": status,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0 reported, 1 the conformance tests are not green."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: PyTorch's")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument(
        "--no-gate", dest="gate", action="store_false", help="no conformance tests; written only with --out"
    )
    args = parser.parse_args(argv)
    entry = registry.get("gated_mlp")
    if args.gate:
        try:
            print(gate.check(entry.name, entry.conformance), flush=True)
        except gate.GateError as error:
            print(error, file=sys.stderr)
            return 1
    neighbours = machine.Neighbours()
    rows = measure(args.threads, args.rounds)
    others = neighbours.share()
    print(table(rows))
    if others > 0.05:
        print(f"NOTE: others used {others:.0%} of the CPUs; a parallel region waits for them: run again")
    folder = args.out or (RESULTS if args.gate else None)
    if folder is not None:
        path = folder / machine.device(args.threads) / "overhead" / "gated_mlp.csv"
        _write(
            rows, _facts(args.threads, args.rounds, others, "verified" if args.gate else "unverified"), path
        )
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
