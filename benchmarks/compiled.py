"""PyTorch's compiler as the dense peer, at the best of its standard CPU settings."""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.timing import Timed, interleave

__all__ = ["SETTINGS", "Compiled", "compile_dense"]

_MAX_FROZEN = 64
_QUIET = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}

Weights = tuple[Tensor, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled dense MLP: `call(layer, x)`, the setting that won, seconds of compilation of each setting tried."""

    call: Callable[[int, Tensor], Tensor]
    setting: str
    seconds: dict[str, float]


SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    # Weights become constants, packed for oneDNN or MKL, and the matrix products are autotuned. As a compiler option
    # (`options=`) freezing has no effect, because Dynamo has lifted the weights by then: it must be set globally.
    "freezing + max-autotune": {"freezing": True, "max_autotune": True},
}


def _frozen_module(index: int, dense: Callable[..., Tensor], weights: Weights) -> nn.Module:
    """A module of its own class and code object: Dynamo counts recompilations by code object and stops at eight."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return dense(x, self.w0, self.w1, self.w2)

    code = forward.__code__.replace(co_name=f"dense_{index}")
    own = types.FunctionType(code, globals(), f"dense_{index}", None, forward.__closure__)
    module: nn.Module = type(f"Dense{index}", (nn.Module,), {"forward": own})()
    for i, w in enumerate(weights):
        module.register_parameter(f"w{i}", nn.Parameter(w, requires_grad=False))
    return module


def _build(
    setting: dict[str, bool], dense: Callable[..., Tensor], layers: Sequence[Weights], xs: list[Tensor]
) -> Callable[[int, Tensor], Tensor]:
    with ExitStack() as stack:
        patch: AbstractContextManager = torch._inductor.config.patch({**_QUIET, **setting})
        stack.enter_context(patch)
        if not setting.get("freezing"):
            one = torch.compile(dense, dynamic=False)
            one(xs[0], *layers[0])
            return lambda i, x: one(x, *layers[i])
        many = [torch.compile(_frozen_module(i, dense, w), dynamic=False) for i, w in enumerate(layers)]
        for module, x in zip(many, xs, strict=True):
            module(x)
        return lambda i, x: many[i](x)


def compile_dense(
    dense: Callable[..., Tensor],
    layers: Sequence[Weights],
    fresh: Callable[[], list[Tensor]],
    settings: dict[str, dict[str, bool]] | None = None,
) -> Compiled:
    """Compiles the dense MLP at each setting and keeps the fastest, by a short interleaved trial.

    Args:
        dense: dense(x, *weights), the function to compile.
        layers: the weights of every layer.
        fresh: an x for every layer.
        settings: Inductor settings by name, default `SETTINGS`.

    Raises:
        RuntimeError: no setting compiles (for example no C++ compiler); one sentence.
    """
    calls: dict[str, Callable[[int, Tensor], Tensor]] = {}
    seconds: dict[str, float] = {}
    problem = ""
    for name, setting in (SETTINGS if settings is None else settings).items():
        if setting.get("freezing") and len(layers) > _MAX_FROZEN:  # one compilation a layer
            continue
        start = time.perf_counter()
        try:
            calls[name] = _build(setting, dense, layers, fresh())
        except Exception as error:  # the compiler raises whatever its back end raises
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        seconds[name] = time.perf_counter() - start
    if not calls:
        raise RuntimeError(f"torch.compile is left out because no setting compiled here ({problem})")

    def timed(name: str) -> Timed:
        def sweep(xs: list[Tensor]) -> None:
            for i, x in enumerate(xs):
                calls[name](i, x)

        return Timed(name, fresh, sweep, len(layers))

    best = next(iter(calls))
    if len(calls) > 1:
        trial = interleave([timed(name) for name in calls], rounds=5)
        best = min(trial, key=lambda name: statistics.median(trial[name]))
    return Compiled(calls[best], best, seconds)
