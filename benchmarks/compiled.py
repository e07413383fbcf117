"""PyTorch's compiler as the dense peer, at the best of its standard CPU settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.timing import Timed, trial

__all__ = ["QUIET", "SETTINGS", "Compiled", "compile_dense"]

QUIET = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}

Weights = tuple[Tensor, ...]
Sweep = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Compiled:
    """Compiled dense layers.

    `sweep(xs)` calls every layer once; `setting` is the one that won; `seconds` the compilation of each that was tried.
    """

    sweep: Sweep
    setting: str
    seconds: dict[str, float]


SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    # Weights become constants, packed for oneDNN or MKL, and the matrix products are autotuned. As a compiler option
    # (`options=`) freezing has no effect, because Dynamo has lifted the weights by then: it must be set globally.
    "freezing + max-autotune": {"freezing": True, "max_autotune": True},
}


class _Walk(nn.Module):
    """All layers in one graph, as they are in a compiled model.

    A module for every layer would pay Dynamo's guards on every call, and takes five times as long to compile.
    """

    def __init__(self, dense: Callable[..., Tensor], layers: Sequence[Weights]) -> None:
        super().__init__()
        self.dense = dense
        for i, weights in enumerate(layers):
            for j, w in enumerate(weights):
                self.register_parameter(f"w{i}_{j}", nn.Parameter(w, requires_grad=False))
        self.count = len(layers[0])

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        names = range(self.count)
        return [self.dense(x, *[getattr(self, f"w{i}_{j}") for j in names]) for i, x in enumerate(xs)]


def _build(
    setting: dict[str, bool], dense: Callable[..., Tensor], layers: Sequence[Weights], xs: list[Tensor]
) -> Sweep:
    with ExitStack() as stack:
        patch: AbstractContextManager = torch._inductor.config.patch({**QUIET, **setting})
        stack.enter_context(patch)
        if setting.get("freezing"):
            walk = torch.compile(_Walk(dense, layers), dynamic=False)
            walk(xs)
            return walk
        one = torch.compile(dense, dynamic=False)
        one(xs[0], *layers[0])
        return lambda xs: [one(x, *weights) for x, weights in zip(xs, layers, strict=True)]


def compile_dense(
    dense: Callable[..., Tensor],
    layers: Sequence[Weights],
    fresh: Callable[[], list[Tensor]],
    settings: dict[str, dict[str, bool]] | None = None,
) -> Compiled:
    """Compiles the dense layers at each setting and keeps the fastest, by a short interleaved trial.

    Args:
        dense: dense(x, *weights), the function to compile.
        layers: the weights of every layer.
        fresh: an x for every layer.
        settings: Inductor settings by name, default `SETTINGS`.

    Raises:
        RuntimeError: no setting compiles (for example no C++ compiler); one sentence.
    """
    sweeps: dict[str, Sweep] = {}
    seconds: dict[str, float] = {}
    problem = ""
    for name, setting in (SETTINGS if settings is None else settings).items():
        start = time.perf_counter()
        try:
            sweeps[name] = _build(setting, dense, layers, fresh())
        except Exception as error:  # the compiler raises whatever its back end raises
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        seconds[name] = time.perf_counter() - start
    if not sweeps:
        raise RuntimeError(f"torch.compile is left out because no setting compiled here ({problem})")
    best = next(iter(sweeps))
    if len(sweeps) > 1:
        tried = trial([Timed(name, fresh, sweep, len(layers)) for name, sweep in sweeps.items()])
        best = min(tried, key=lambda name: tried[name])
    return Compiled(sweeps[best], best, seconds)
