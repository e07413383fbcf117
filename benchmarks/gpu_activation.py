"""`activation` on a GPU against PyTorch eager and compiled, forward and backward: one pass over memory each.

Tensors well beyond the L2 cache, in CUDA graphs, alternatives in turn. The peer is PyTorch's own function where it has
one, else the composition of the activation table. Backward is timed with its forward, because autograd replays it on
the stream of the forward, which must be the one that is captured.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import sparsemlp
from benchmarks import gpu_rows
from benchmarks.activation import OWN, PARAMS
from benchmarks.gpu_device import Device, Replay, median, options, read_bytes_per_second, start, timed
from benchmarks.gpu_rows import Row
from benchmarks.timing import quantile
from sparsemlp import activations
from sparsemlp.kernels import _configs
from sparsemlp.kernels import activation as kernels
from sparsemlp.testing import assert_within_budget

__all__ = ["main"]

_NAMES = ("jsrelu", "silu", "gelu_tanh", "weird")
_SHAPE = (8192, 14336)


@dataclass(frozen=True)
class _Case:
    name: str
    p: Tensor
    grad: Tensor
    params: Tensor | None


def _peer(case: _Case) -> Callable[[Tensor], Tensor]:
    return OWN.get(case.name) or functools.partial(activations.apply, name=case.name, params=case.params)


def _gradient(function: Callable[[Tensor], Tensor], case: _Case) -> Callable[[], object]:
    p = case.p.detach().requires_grad_(True)
    return lambda: torch.autograd.grad(function(p), p, case.grad)


def _compiled(where: Device, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, **({"backend": "eager"} if where.dry else {}))


def _forward(where: Device, case: _Case) -> dict[str, Callable[[], Callable[[], object]]]:
    def ours(**options: bool) -> Callable[[], object]:
        return lambda: sparsemlp.activation(
            case.p, case.name, params=case.params, backend="triton", **options
        )

    def peer(compiled: bool) -> Callable[[], object]:
        function = _compiled(where, _peer(case)) if compiled else _peer(case)
        return lambda: function(case.p)

    return {
        "eager": lambda: peer(False),
        "compiled": lambda: peer(True),
        "own": ours,
        "own_counts": lambda: ours(counts=True),
    }


def _backward(where: Device, case: _Case) -> dict[str, Callable[[], Callable[[], object]]]:
    own = functools.partial(sparsemlp.activation, name=case.name, params=case.params, backend="triton")
    return {
        "eager": lambda: _gradient(_peer(case), case),
        "compiled": lambda: _gradient(_compiled(where, _peer(case)), case),
        "own": lambda: _gradient(own, case),
    }


def _wrong(case: _Case) -> str:
    """What is wrong with the result for a piece of the tensor, forward and backward, or ""."""
    p, grad = case.p[:4].clone().requires_grad_(True), case.grad[:4]
    own = functools.partial(sparsemlp.activation, name=case.name, params=case.params, backend="triton")
    composed = functools.partial(activations.apply, name=case.name, params=case.params)
    wide = p.detach().double()
    slope = activations.apply(wide, case.name, case.params, derivative=True)
    peers = [composed, _peer(case)]
    try:
        assert_within_budget(own(p).detach(), [f(p).detach() for f in peers], composed(wide), what="forward")
        gradients = [torch.autograd.grad(f(p), p, grad)[0] for f in (own, *peers)]
        assert_within_budget(gradients[0], gradients[1:], grad.double() * slope, what="backward")
    except AssertionError as error:
        return f"WRONG: {error}"
    return ""


def _measure(
    where: Device, case: _Case, what: str, label: str, rates: tuple[float | None, float]
) -> list[Row]:
    makers = (_forward if what == "forward" else _backward)(where, case)
    wrong, notes, replays = _wrong(case), {}, []
    for name, make in makers.items():
        if wrong and name.startswith("own"):
            notes[name] = wrong
            continue
        try:
            replays.append(Replay(name, where.graph(make())))
        except Exception as error:  # the others are still worth their time
            notes[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    samples = timed(where, replays, 1 if where.dry else 25)
    size = case.p.numel() * case.p.element_size() * (2 if what == "forward" else 5)
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[case.p.dtype]
    config = _configs.find(
        "activation", where.torch_device, {"n": case.p.numel(), "dtype": dtype}, kernels.DEFAULT
    )
    rows = []
    for name in makers:
        row = Row(
            where.status, "activation", what, label, case.name, case.p.shape[1], 0, dtype, case.p.shape[0], name,
            config=json.dumps(config) if name.startswith("own") else "", note=notes.get(name, ""),
        )  # fmt: skip
        rows.append(_filled(row, samples, size, rates) if name in samples else row)
    return rows


def _filled(row: Row, samples: dict[str, list[float]], size: int, rates: tuple[float | None, float]) -> Row:
    seconds = samples[row.alternative]

    def over(other: str) -> float | None:
        return (
            median([a / b for a, b in zip(samples[other], seconds, strict=True)])
            if other in samples
            else None
        )

    low, middle, high = (quantile(seconds, q) for q in (0.2, 0.5, 0.8))
    return replace(
        row, calls=1, rounds=len(seconds), us_p20=1e6 * low, us=1e6 * middle, us_p80=1e6 * high, bytes=size,
        gb_per_s=size / middle / 1e9, share_read=size / middle / rates[1],
        share_datasheet=None if rates[0] is None else size / middle / rates[0],
        vs_eager=over("eager"), vs_compiled=over("compiled"),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measures every activation until the time is over."""
    parser = options(__doc__)
    parser.add_argument("--label", default="default")
    args = parser.parse_args(argv)
    where, deadline = start(args)
    rates = where.datasheet_bytes_per_second(), read_bytes_per_second(where)
    path = args.out / f"activation_{args.label}.csv"
    for dtype in (torch.bfloat16, torch.float32)[: 1 if where.dry else 2]:
        for name in _NAMES[-1:] if where.dry else _NAMES:
            shape = (8, 48) if where.dry else _SHAPE
            p, grad = (torch.randn(shape, device=where.torch_device).to(dtype) for _ in range(2))
            params = torch.tensor(PARAMS[name], device=where.torch_device) if name in PARAMS else None
            for what in ("forward", "forward+backward"):
                if deadline.over():
                    print(f"{name}, {what}: left out, the time was over")
                    continue
                rows = _measure(where, _Case(name, p, grad, params), what, args.label, rates)
                gpu_rows.append(path, rows)
                print(gpu_rows.table(rows), flush=True)
                where.free()
    rows = gpu_rows.read(path)
    return 0 if rows and not any(row.note.startswith(("WRONG", "failed")) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
