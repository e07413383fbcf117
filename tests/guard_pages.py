"""Calls of every native operator whose tensors end, or begin, at a page that may not be read: `python -m` this module.

Reading past one kills the process, whatever instruction does it; what was printed last says in which call. Prints "read
nothing else" at the end.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import sparsemlp
from sparsemlp import _native
from sparsemlp.ops import _training_native as training_native
from sparsemlp.screen import PackedWeight
from tests import cases, mlp_cases, sparse_linear_cases
from tests.samples import DTYPES
from tests.training_cases import KINDS, grad_of, raw

SIZES = (
    (1, 1, 1), (1, 33, 7), (3, 65, 9), (5, 31, 33), (9, 17, 40), (32, 100, 40), (2, 577, 70), (36, 19, 5), (70, 47, 33),
)  # fmt: skip
"""Tokens, width, neurons: tails of every vector width, one token, a few, and more than one kernel takes at once."""
GATED = (
    dict(mean="mean+out"), dict(indicator="up"), dict(indicator="product"), dict(inputs=0.5), dict(int8=True),
    dict(int8=True, inputs="channels", indicator="up"),
    *(dict(indicator="screen", screen=screen) for screen in ("4x32", "3x64", "8x128")),
)  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(t: Tensor, at_end: bool) -> Tensor:
    """t, which has no gaps, in memory that touches a page that may not be read, behind it or before it."""
    size, page = max(t.numel() * t.element_size(), 1), mmap.PAGESIZE
    pages = -(-size // page)
    area = mmap.mmap(-1, (pages + 2) * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for at in (0, pages + 1):
        if _libc.mprotect(ctypes.c_void_p(base + at * page), page, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    if t.numel() == 0:
        return t
    start = page + (pages * page - size if at_end else 0)
    flat = torch.frombuffer(area, dtype=t.dtype, count=t.numel(), offset=start)
    return flat.as_strided(t.shape, t.stride()).copy_(t)


def at_guards(sample: Any, at_end: bool) -> Any:
    """The sample with all its tensors `guarded`."""
    fields = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
    made = {name: guarded(t, at_end) for name, t in fields.items() if isinstance(t, Tensor)}
    if getattr(sample, "screens", None) is not None:
        made["screens"] = tuple(
            PackedWeight(*(guarded(t, at_end) for t in packed)) for packed in sample.screens
        )
    return dataclasses.replace(
        sample, **made, options={name: guarded(t, at_end) for name, t in sample.options.items()}
    )


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Any, Any]]:
    """A description, the operator and the sample of every call."""
    for tokens, d, f in SIZES:
        some: dict[str, Any] = dict(name="guarded", tokens=tokens, weights="plain", scale="varied")
        at = f"T {tokens}, D {d}, F {f}, {dtype}"
        for more in GATED:
            case = cases.Case(**some, d=d, f=f, density="neurons", biases="gud", **more)
            yield f"gated_mlp {more} {at}", sparsemlp.gated_mlp, cases.build(case, dtype)
        for int8 in (False, True):
            mlp = mlp_cases.Case(**some, d=d, f=f, density="neurons", biases="io", mean="mean+out", int8=int8)
            yield f"mlp int8={int8} {at}", sparsemlp.mlp, mlp_cases.build(mlp, dtype)
            linear = sparse_linear_cases.Case(**some, k=f, n=d, density="channels", bias=True, int8=int8)
            built = sparse_linear_cases.build(linear, dtype)
            yield f"sparse_linear int8={int8} {at}", sparsemlp.sparse_linear, built


def activations(p: Tensor, isas: int) -> None:
    """Forward, counts and backward."""
    for number in range(isas):
        _native.isa = lambda number=number: number  # type: ignore[assignment] # in place of a cached function
        leaf = p.detach().requires_grad_(True)
        out, _ = sparsemlp.activation(leaf, "gelu", counts=True, backend="native")
        torch.autograd.grad(out, leaf, p)


def training(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """Forward and backward of both MLPs, by lists and by dense products of living neurons."""
    for (tokens, d, f), kind, at_end in itertools.product(SIZES, KINDS, (True, False)):
        case = kind.case(
            "guarded",
            tokens=tokens,
            d=d,
            f=f,
            weights="plain",
            density="some_inf",
            scale="varied",
            mean="mean+out",
        )
        sample = at_guards(kind.cases.build(case, dtype), at_end)
        grad = guarded(grad_of(sample), at_end)
        for (number, name), limit in itertools.product(enumerate(names), (torch.inf, 0.0)):
            _native.isa = lambda number=number: number  # type: ignore[assignment] # in place of a cached function
            print(
                f"{kind} forward and backward, {case}, T {tokens}, D {d}, F {f}, {dtype}, {name}", flush=True
            )
            with training_native.forced(limit):
                saved = kind.forward.overload(*raw(kind.forward, sample, "native"))[1:]
                more = {n: guarded(t, at_end) for n, t in zip(("pre", "up"), saved, strict=False)}
                wanted = ",".join(["x", *kind.weights, *kind.biases[:-1], "skipped_mean"])
                kind.backward.overload(
                    *raw(kind.backward, sample, "native", grad=grad, wanted=wanted, **more)
                )


def main() -> None:
    if _native.problem() is not None:
        raise SystemExit(f"no compiled kernels: {_native.problem()}")
    names = _native.isa_names()
    for dtype in DTYPES:
        for what, function, sample in samples(dtype):
            for at_end in (True, False):
                there = at_guards(sample, at_end)
                for number, name in enumerate(names):
                    _native.isa = lambda number=number: number  # type: ignore[assignment] # likewise
                    print(f"{what}, {name}, {'end' if at_end else 'beginning'}", flush=True)
                    there.run(function, backend="native")
                activations(guarded(sample.x, at_end), len(names))
        training(dtype, names)
    print("read nothing else")


if __name__ == "__main__":
    main()
