"""This package beside other ways to compute the same, in one run: `python -m benchmarks.peers`.

    python -m benchmarks.peers --op gated_mlp --shape llama3-8b --dtype bf16 --tokens 1

takes the options of `benchmarks.run`. Beside its dense peers: `index_select` of the wanted rows, `torch.sparse` CSR of
the thresholded activations, and, where installed (`pip install 'sparsemlp[peers]'`), OpenVINO and ggml, dense. Each at
its best setting; none is timed before it has computed the same as PyTorch. See docs/benchmarks.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import peer_ggml, peer_torch
from benchmarks.alternatives import Alternative, Say, walk
from benchmarks.peer_graph import ACTIVATIONS
from benchmarks.registry import Entry
from benchmarks.timing import Timed, trial
from benchmarks.workload import Density, Workload

__all__ = ["build", "main"]

_CLOSE = 0.05
"""‖peer − PyTorch‖ / ‖PyTorch‖ at most: half precision stays far below, another function or layout far above."""


def _check(name: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        distance = ((one.float() - other.float()).norm() / other.float().norm()).item()
        if not distance <= _CLOSE:
            raise ValueError(
                f"{name} is off by {distance:.0%}, expected PyTorch's result; mend the peer, or leave --peers out"
            )


def _dense(entry: Entry, work: Workload, say: Say) -> dict[str, Alternative]:
    """OpenVINO and ggml where they are installed, each at the fastest of its settings."""
    found: dict[str, Alternative] = {}
    if work.activation not in ACTIVATIONS:
        return found
    weights, xs = entry.weights(work), work.fresh()
    function = entry.function(work)
    wanted = [function(x, *w) for x, w in zip(xs, weights, strict=True)]
    half = work.dtype != torch.float32
    settings: dict[str, tuple[str, Callable[..., Any], torch.dtype]] = {
        "openvino": ("OpenVINO", _openvino, work.dtype),
        "ggml": ("ggml", peer_ggml.sweep, work.dtype),
    }
    if half:
        other = torch.float16 if work.dtype == torch.bfloat16 else torch.bfloat16
        settings["ggml other"] = "ggml", peer_ggml.sweep, other
    for name, (label, make, dtype) in settings.items():
        precision = str(dtype).removeprefix("torch.")
        try:
            sweep = make(work.op, work.activation, weights, work.tokens, work.shape.d, dtype)
            _check(f"{label} ({precision})", sweep(xs), wanted)
        except ImportError as error:
            say(f"{label} is left out: {error}; pip install 'sparsemlp[peers]'")
            continue
        except RuntimeError as error:
            say(f"{label} ({precision}) is left out: {str(error).splitlines()[0]}")
            continue
        found[name] = Alternative(f"{label} ({precision})", sweep)
    if "ggml other" in found:
        second = found.pop("ggml other")
        both = {"ggml": found.get("ggml", second), "other": second}
        timed = [Timed(name, work.fresh, a.sweep, len(work.layers)) for name, a in both.items()]
        tried = trial(timed)
        found["ggml"] = both[min(tried, key=lambda name: tried[name])]
    return found


def _openvino(*args: Any) -> Callable[[list[Tensor]], list[Tensor]]:
    from benchmarks import peer_openvino  # imports numpy

    return peer_openvino.sweep(*args)


def _sparse(work: Workload, sparsities: Sequence[float], say: Say) -> dict[str, Alternative]:
    """`index_select` and CSR at every sparsity; CSR of nearly dense activations would only be slow."""
    half = work.dtype != torch.float32
    wide = ", W_down in float32" if half else ""

    def all_but_the_last(density: Density) -> float:
        """CSR's peers compute all of the hidden layer; the last matrix is float32."""
        last = work.bytes_dense / work.matrices
        return (work.matrices - 1) * last + last * (4 / work.dtype.itemsize) * density.union

    makers: dict[str, tuple[str, Callable[[Workload, float], Any], Callable[[Density], float]]] = {
        "index_select": (
            "PyTorch index_select",
            peer_torch.index_select,
            lambda density: work.bytes_read(density.union),
        ),
        "csr": (f"PyTorch CSR{wide}", peer_torch.csr, all_but_the_last),
    }
    found: dict[str, Alternative] = {}
    xs = work.fresh()
    for name, (label, make, bytes_read) in makers.items():
        for s in sparsities:
            call, wanted = make(work, s), peer_torch.masked(work, s)
            full = f"{label}, {100 * s:g} % sparse"
            try:
                _check(full, [call(i, x) for i, x in enumerate(xs)], [wanted(i, x) for i, x in enumerate(xs)])
            except (
                RuntimeError
            ) as error:  # PyTorch lacks the product for this dtype, or the matrix is too large
                say(f"{full} is left out: {str(error).splitlines()[0]}")
                continue
            found[f"{name}_{100 * s:g}"] = Alternative(full, walk(call), s, bytes_read)
    return found


def build(entry: Entry, work: Workload, sparsities: Sequence[float], say: Say) -> dict[str, Alternative]:
    """The peers of a workload by name; the sparsities above 0 for the sparse ones."""
    return _dense(entry, work, say) | _sparse(work, [s for s in sparsities if s > 0], say)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    from benchmarks import run

    return run.main([*(sys.argv[1:] if argv is None else argv), "--peers"])


if __name__ == "__main__":
    sys.exit(main())
