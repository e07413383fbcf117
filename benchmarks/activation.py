"""`activation` against PyTorch: `python -m benchmarks.activation [--shape 4096x4096] [--rounds 21]`.

Elementwise, so memory is what takes the time. Every alternative is timed once a round (`benchmarks.timing`); a ratio
above 1 means that `activation` is faster. The eager peer is PyTorch's own function where it has one, else the
composition of the activation table. Numbers are reported only when `tests/test_conformance_activation.py` is green.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks.gate import Conformance, check
from benchmarks.timing import Timed, interleave, paired_ratio, quantile
from sparsemlp import activations
from sparsemlp.info import machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""PyTorch's own functions."""
PARAMS = {"weird": (1.6, 1.6, 1.6), "fatrelu": (0.25,), "mix": (0.5,)}


def _forward(function: Callable[[Tensor], Tensor], p: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        _done(function(p))


def _both(function: Callable[[Tensor], Tensor], p: Tensor, grad: Tensor) -> None:
    _done(*torch.autograd.grad(function(p), p, grad))


def _done(result: Tensor) -> None:
    if result.device.type == "cuda":
        torch.cuda.synchronize()


def peers(name: str, device: str, compiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, by name; "ours" first."""
    params = torch.tensor(PARAMS[name], device=device) if name in PARAMS else None
    own = OWN.get(name) or partial(activations.apply, name=name, params=params)
    found = {"ours": partial(sparsemlp.activation, name=name, params=params), "eager": own}
    if compiled:
        found["compiled"] = torch.compile(own)
    return found


def measure(name: str, dtype: torch.dtype, shape: tuple[int, ...], rounds: int, compiled: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = torch.randn(shape, device=device).to(dtype).requires_grad_(True)
    grad = torch.randn(shape, device=device).to(dtype)
    functions = peers(name, device, compiled)
    for what, run in (("forward", _forward), ("forward + backward", _both)):
        calls = max(1, round(2e7 / max(p.numel(), 1)))  # a sample of some milliseconds

        def sweep(f: Callable[[Tensor], Tensor], run: Callable[..., None], calls: int) -> None:
            for _ in range(calls):
                run(f, p, grad)

        timed = [
            Timed(label, lambda: None, lambda _, f=f, run=run, n=calls: sweep(f, run, n), calls)
            for label, f in functions.items()
        ]
        samples = interleave(timed, rounds)
        milliseconds = "  ".join(f"{label} {quantile(s, 0.5) * 1e3:7.3f} ms" for label, s in samples.items())
        ratios = "  ".join(
            f"{paired_ratio(s, samples['ours']).median:5.2f}x of {label}"
            for label, s in samples.items()
            if label != "ours"
        )
        print(
            f"{name:10} {str(dtype).removeprefix('torch.'):9} {what:19} {milliseconds}  {ratios}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", nargs="+", default=["jsrelu", "relu", "silu", "gelu"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(4096, 4096))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--no-gate", action="store_true", help="do not run the tests first (minutes); nothing to be quoted"
    )
    arguments = parser.parse_args()
    if not arguments.no_gate:
        timed = "triton" if torch.cuda.is_available() else "native"
        check("activation", Conformance(("tests/test_conformance_activation.py",), timed))
    print(machine())
    for name in arguments.name:
        for dtype in arguments.dtype:
            measure(name, DTYPES[dtype], arguments.shape, arguments.rounds, not arguments.no_compiled)


if __name__ == "__main__":
    main()
