"""Operators that skip weights, against cuBLAS and `torch.compile`; `python -m benchmarks.gpu_skipping --what decode`

An alternative is a CUDA graph of several walks over layers of distinct weights, so many that they pass the L2 cache
between two uses, each call with an x of its own that is drawn anew before every replay: masks never repeat (see
`benchmarks.workload`). All alternatives of a case are replayed in turn. A result is checked against float64 before it
is timed; one that is wrong gets no time.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import sparsemlp
from benchmarks import gpu_rows, registry
from benchmarks.gpu_device import (
    Deadline,
    Device,
    Replay,
    median,
    options,
    read_bytes_per_second,
    start,
    timed,
)
from benchmarks.gpu_rows import Row
from benchmarks.shapes import Shape, get
from benchmarks.timing import quantile
from benchmarks.tune_spaces import SPACES
from benchmarks.workload import Call, Workload, layers_beyond_cache
from sparsemlp.kernels import _configs
from sparsemlp.testing import assert_within_budget
from tests import cases, mlp_cases, sparse_linear_cases
from tests.backends import decided_from

__all__ = ["SHAPES", "Checked", "Walk", "dry_shape", "key", "layers_for", "measure"]

SHAPES = {
    "gated_mlp": "llama3-8b,llama3-70b",
    "mlp": "opt-1.3b,vit-b",
    "sparse_linear": "llama3-8b-up,llama3-8b-down,llama3-8b-q",
}
"""What is timed of an operator by default."""

_DTYPE = torch.bfloat16
_CHECKED_TOKENS = 512
_FEW = 16
"""Tokens up to which the kernels skip weights."""
_CALLS = 24
"""Calls in a graph, about: a replay takes a millisecond or more, which times well."""


def dry_shape(shape: Shape) -> Shape:
    """The same row with sizes that the interpreter can do, under a name that says so."""
    return replace(shape, name="tiny", d=64, f=48)


def key(work: Workload) -> dict[str, int | str]:
    """What the kernels look a configuration up by."""
    names = ("k", "n") if work.op == "sparse_linear" else ("d", "f")
    return {
        "tokens": work.tokens,
        **dict(zip(names, (work.shape.d, work.shape.f), strict=True)),
        "dtype": "bf16",
    }


def layers_for(where: Device, op: str, shape: Shape) -> int:
    """Layers of distinct weights, so that a third of one has left the L2 cache when its turn comes again."""
    if where.dry:
        return 2
    size = registry.get(op).workload.layer_bytes(shape, _DTYPE.itemsize)
    return layers_beyond_cache(size, where.l2_bytes())


class Walk:
    """Walks over a workload's layers as one replayable piece; every call reads an x of its own.

    Attributes: `x` (walks, layers, T, D), what the last replay computed from.
    """

    def __init__(self, where: Device, work: Workload, call: Call, name: str) -> None:
        layers = len(work.layers)
        walks = 1 if where.dry else max(2, _CALLS // layers) if work.tokens <= 16 else 1
        size = (walks, layers, work.tokens, work.shape.d)
        self.x = torch.empty(size, dtype=work.dtype, device=where.torch_device)
        self._generator = work.generator
        self.refill()
        inputs = [list(walk.unbind()) for walk in self.x.unbind()]

        def body() -> None:
            for walk in inputs:
                for i, x in enumerate(walk):
                    call(i, x)

        self.replay = Replay(name, where.graph(body), self.refill, walks * layers)

    def refill(self) -> None:
        """A new x for every call."""
        self.x.normal_(generator=self._generator)


def _sample(work: Workload, sparsity: float) -> tuple[Any, Any]:
    """A layer's call at a sparsity as the test suite has calls, and what it should give."""
    layer, x, threshold = work.layers[0], work.fresh()[0][:_CHECKED_TOKENS], work.threshold(0, sparsity)
    if work.op == "sparse_linear":
        linear = sparse_linear_cases.Sample(x, layer.weight_t, threshold)
        return linear, sparse_linear_cases.Truth(linear)
    if work.op == "mlp":
        biases = {"b_in": layer.b_in, "b_out": layer.b_out}
        mlp = mlp_cases.Sample(x, layer.w_in, layer.w_out_t, work.activation, threshold, biases)
        return mlp, mlp_cases.Truth(mlp)
    gated = cases.Sample(x, layer.w_gate, layer.w_up, layer.w_down_t, work.activation, threshold)
    return gated, cases.Truth(gated)


class Checked:
    """A layer's true output at a sparsity, and how far from it a result may be."""

    def __init__(self, work: Workload, sparsity: float) -> None:
        self._function = getattr(sparsemlp, work.op)
        self.sample, truth = _sample(work, sparsity)
        self._truth, self._peers, self._flips = truth.out, truth.peers(), None
        if work.op != "sparse_linear":  # which decides on x as it is
            self._flips = truth.flips(decided_from("triton", self.sample.x.shape[0], work.dtype))

    def problem(self) -> str:
        """What is wrong with the kernels' result for the sample, or ""."""
        out = self.sample.run(self._function, backend="triton")
        try:
            assert_within_budget(out, self._peers, self._truth, flips=self._flips)
        except AssertionError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class _Case:
    shape: Shape
    tokens: int
    sparsities: tuple[float, ...]
    what: str
    configs: str
    compile_mode: str | None
    rounds: int


@dataclass(frozen=True)
class _Rates:
    """Bytes per second of the memory: nominal, and measured by plain reads and copies."""

    datasheet: float | None
    read: float


def _eager(work: Workload) -> Call:
    return registry.get(work.op).dense[0].build(work)


def _compiled(where: Device, work: Workload, mode: str) -> Call:
    torch._dynamo.reset()  # a limit on compilations counts by code, and every case compiles the same function
    dense, layers = registry.get(work.op).compiled(work)
    if where.dry:
        compiled = torch.compile(dense, dynamic=False, backend="eager")
    else:
        compiled = torch.compile(dense, dynamic=False, mode=None if mode == "default" else mode)
    return lambda i, x: compiled(x, *layers[i])


def _walks(where: Device, case: _Case, work: Workload) -> tuple[dict[str, Walk], dict[str, str]]:
    """What can be timed, by name, and for what cannot be: why not."""
    made: dict[str, Callable[[], Call]] = {"eager": lambda: _eager(work)}
    notes: dict[str, str] = {}
    if case.compile_mode is not None:
        made["compiled"] = functools.partial(_compiled, where, work, case.compile_mode)
        notes["compiled"] = f"torch.compile, {case.compile_mode}"
    for s in case.sparsities:
        made[_own(s)] = functools.partial(work.own, s, "triton")
    walks: dict[str, Walk] = {}
    for name, make in made.items():
        try:
            problem = _wrong(work, name, case.sparsities)
            if problem.startswith("WRONG"):
                notes[name] = problem
                continue
            walks[name] = Walk(where, work, make(), name)
            if problem:
                notes[name] = problem
        except Exception as error:  # whatever it is, the other alternatives are still worth their time
            notes[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return walks, notes


def _own(sparsity: float) -> str:
    return f"own_{100 * sparsity:g}"


def _wrong(work: Workload, name: str, sparsities: tuple[float, ...]) -> str:
    chosen = [s for s in sparsities if _own(s) == name]
    if not chosen:
        return ""
    try:
        problem = Checked(work, chosen[0]).problem()
    except torch.OutOfMemoryError:
        return "not checked: the truth does not fit into memory"
    return f"WRONG: {problem}" if problem else ""


def measure(where: Device, case: _Case, work: Workload, rates: _Rates, deadline: Deadline) -> list[Row]:
    """The case's rows, the failed ones without times."""
    walks, notes = _walks(where, case, work)
    samples = timed(where, [walk.replay for walk in walks.values()], case.rounds, deadline)
    seen = {s: list(walks[_own(s)].x.unbind()) for s in case.sparsities if _own(s) in walks}
    densities = work.densities({s: [list(walk.unbind()) for walk in x] for s, x in seen.items()})
    skipping = case.tokens <= _FEW
    op = work.op if skipping else f"{work.op}_prefill"
    config = _configs.find(op, where.torch_device, key(work), SPACES[op].default(key(work)))
    rows = []
    for name in ("eager", "compiled", *map(_own, case.sparsities)):
        if name not in walks and name not in notes:
            continue
        sparsity = next((s for s in case.sparsities if _own(s) == name), None)
        row = Row(
            where.status, work.op, case.what, case.configs, case.shape.name, case.shape.d, case.shape.f, "bf16",
            case.tokens, name, sparsity, note=notes.get(name, ""),
            config="" if sparsity is None else json.dumps(config),
        )  # fmt: skip
        if name in walks:
            row = _filled(row, samples, walks[name].replay.calls, work, rates)
            if sparsity is not None:
                found = densities[sparsity]
                row = replace(row, density=found.density, union_density=found.union)
                row = _with_bytes(
                    row, work.bytes_read(found.union) if skipping else work.bytes_dense, work, rates
                )
        rows.append(row)
    return rows


def _filled(row: Row, samples: dict[str, list[float]], calls: int, work: Workload, rates: _Rates) -> Row:
    seconds = samples[row.alternative]

    def over(other: str) -> float | None:
        pairs = zip(samples.get(other, ()), seconds, strict=False)
        ratios = [a / b for a, b in pairs]
        return median(ratios) if ratios else None

    low, middle, high = (1e6 * quantile(seconds, q) for q in (0.2, 0.5, 0.8))
    row = replace(
        row, calls=calls, rounds=len(seconds), us_p20=low, us=middle, us_p80=high,
        vs_eager=over("eager"), vs_compiled=over("compiled"),
        vs_own_0=over(_own(0)) if row.sparsity is not None else None,
    )  # fmt: skip
    return _with_bytes(row, work.bytes_dense, work, rates)


def _with_bytes(row: Row, weights: float, work: Workload, rates: _Rates) -> Row:
    assert row.us is not None
    size = weights + 2 * work.tokens * work.shape.d * work.dtype.itemsize
    rate = size / row.us * 1e6
    nominal = None if rates.datasheet is None else rate / rates.datasheet
    return replace(
        row, bytes=size, gb_per_s=rate / 1e9, share_datasheet=nominal, share_read=rate / rates.read
    )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--op", choices=[*SHAPES], default="gated_mlp")
    parser.add_argument("--what", choices=("decode", "prefill"), required=True)
    parser.add_argument(
        "--label", default="default", help="which configurations: default or tuned, for the file"
    )
    parser.add_argument("--shape", help=f"rows of benchmarks/shapes.py; default: {SHAPES}")
    parser.add_argument("--tokens", help="default: 1,8,4,16,2 for decode, 512,2048,64 for prefill")
    parser.add_argument("--sparsity", type=_numbers, default=[0, 50, 70, 80, 90, 95, 99], help="percentages")
    parser.add_argument(
        "--compile", type=_numbers, default=[1, 8, 512], help="token counts with torch.compile; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args(argv)
    arguments.shape = arguments.shape or SHAPES[arguments.op]
    arguments.tokens = arguments.tokens or ("1,8,4,16,2" if arguments.what == "decode" else "512,2048,64")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measures the cases in order of worth until the time is over."""
    args = _arguments(argv)
    where, deadline = start(args)
    rates = _Rates(where.datasheet_bytes_per_second(), read_bytes_per_second(where))
    nominal = "unknown" if rates.datasheet is None else f"{rates.datasheet / 1e9:.0f} GB/s"
    print(f"memory: nominal {nominal}, plain reads {rates.read / 1e9:.0f} GB/s", flush=True)
    path = args.out / f"{_what(args).replace(' ', '_')}_{args.label}.csv"
    works: dict[str, Workload] = {}
    left_out = 0
    cases = [(int(t), name) for t in args.tokens.split(",") for name in args.shape.split(",")]
    with torch.inference_mode():
        for tokens, name in cases:
            if deadline.over():
                left_out += 1
                continue
            shape = dry_shape(get(name)) if where.dry else get(name)
            try:
                _one(where, args, shape, tokens, works, rates, deadline, path)
            except torch.OutOfMemoryError as error:
                print(
                    f"{name}, T = {tokens}: out of memory, left out ({str(error).splitlines()[0]})",
                    flush=True,
                )
                works.clear()
            where.free()
    if left_out:
        print(f"{left_out} of {len(cases)} cases are left out: the time was over")
    rows = gpu_rows.read(path)
    return 0 if rows and not any(row.note.startswith(("WRONG", "failed")) for row in rows) else 1


def _what(args: argparse.Namespace) -> str:
    """The rows' name of what was timed."""
    return args.what if args.op == "gated_mlp" else f"{args.op} {args.what}"


def _one(
    where: Device, args: argparse.Namespace, shape: Shape, tokens: int, works: dict[str, Workload], rates: _Rates,
    deadline: Deadline, path: object,
) -> None:  # fmt: skip
    mode = None
    if tokens in args.compile and (where.dry or deadline.left() > 25):
        best = tokens == 1 and args.label == "tuned" and deadline.left() > 75
        mode = "max-autotune-no-cudagraphs" if best else "default"
    work = registry.get(args.op).workload(
        shape, _DTYPE, tokens, shape.activation, layers_for(where, args.op, shape),
        share=works.get(shape.name), device=where.torch_device,
    )  # fmt: skip
    works[shape.name] = work
    sparsities = tuple(s / 100 for s in args.sparsity)
    if args.what == "prefill":
        sparsities = tuple(s for s in sparsities if s in (0, 0.5, 0.9))
    rounds = 1 if where.dry else args.rounds
    case = _Case(shape, tokens, sparsities, _what(args), args.label, mode, rounds)
    rows = measure(where, case, work, rates, deadline)
    gpu_rows.append(path, rows)
    print(gpu_rows.table(rows), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
