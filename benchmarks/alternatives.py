"""What is timed side by side: PyTorch's dense peers and this package's operator, each as a walk over all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

import sparsemlp
from benchmarks.compiled import SETTINGS, compile_dense
from benchmarks.registry import Entry
from benchmarks.timing import Timed
from benchmarks.workload import Call, Density, Workload
from sparsemlp.router import Explanation

__all__ = ["Alternative", "compiled", "eager", "explained", "own", "own_name", "timed", "walk"]

Say = Callable[[str], None]


@dataclass
class Alternative:
    """One of a run's alternatives.

    Args:
        label: in tables and plots.
        sweep: one call for every layer, in layer order, on an x for each.
        sparsity: the thresholds' fraction; None: dense.
        bytes_read: weight bytes of a call from the masks' density; None: all of the dense ones.
        compile_s: seconds of compilation, where it is compiled.
        call: this package's operator itself.
        seen: the inputs of its sweeps, where it has a sparsity.
    """

    label: str
    sweep: Callable[[list[Tensor]], object]
    sparsity: float | None = None
    bytes_read: Callable[[Density], float] | None = None
    compile_s: float | None = None
    call: Call | None = None
    seen: list[list[Tensor]] = field(default_factory=list)


def walk(call: Call) -> Callable[[list[Tensor]], None]:
    """One call for every layer, in layer order."""

    def sweep(xs: list[Tensor]) -> None:
        for i, x in enumerate(xs):
            call(i, x)

    return sweep


def own_name(sparsity: float, weights: str = "float") -> str:
    """The name of this package's operator at a sparsity: `own_90`, or `int8_90` with int8 weights."""
    return f"{'own' if weights == 'float' else weights}_{100 * sparsity:g}"


def eager(entry: Entry, work: Workload) -> dict[str, Alternative]:
    """PyTorch's own, the baseline first."""
    return {dense.name: Alternative(dense.label, walk(dense.build(work))) for dense in entry.dense}


def compiled(entry: Entry, work: Workload, say: Say, *, tuned: bool = True) -> dict[str, Alternative]:
    """`torch.compile` at the better of its settings (not `tuned`: only at its default); none where nothing compiles."""
    say("compiling the dense peer …")
    settings = SETTINGS if tuned else {"default": SETTINGS["default"]}
    try:
        best = compile_dense(*entry.compiled(work), work.fresh, settings)
    except RuntimeError as error:
        say(str(error))
        return {}
    say("compiled in " + ", ".join(f"{s:.1f} s ({name})" for name, s in best.seconds.items()))
    label = f"torch.compile ({best.setting})"
    return {"compile": Alternative(label, best.sweep, compile_s=best.seconds[best.setting])}


def own(
    work: Workload, sparsity: float, backend: str = "auto", weights: str = "float", apart: str = ""
) -> Alternative:
    """This package's operator at a sparsity (`Workload.own`); its bytes are those of a kernel that skips."""
    label = "sparsemlp, threshold 0" if sparsity == 0 else f"sparsemlp, {100 * sparsity:g} % sparse"
    if weights != "float":
        label = f"{label}, {weights}"
    call = work.own(sparsity, backend, weights, apart)
    return Alternative(
        label,
        walk(call),
        sparsity,
        bytes_read=lambda density: work.bytes_read(density.union, density.channels, weights),
        call=call,
    )


def explained(call: Call, work: Workload) -> Explanation:
    """What computes a call of this package's operator with the first layer: `sparsemlp.explain`."""
    x = work.fresh()[0]
    return sparsemlp.explain(lambda x: call(0, x), x)


def timed(name: str, alternative: Alternative, work: Workload) -> Timed:
    """The alternative for `benchmarks.timing.interleave`, with an x never seen before for every call."""

    def prepare() -> list[Tensor]:
        xs = work.fresh()
        if alternative.sparsity is not None:
            alternative.seen.append(xs)
        return xs

    return Timed(name, prepare, alternative.sweep, len(work.layers))
