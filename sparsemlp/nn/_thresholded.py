"""What the sparse modules have in common: thresholds and means that stay float32, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsemlp.nn import _projections
from sparsemlp.nn._skipped_out import forget
from sparsemlp.nn._thresholds import checked_mean, checked_threshold, limit_text

__all__ = ["Thresholded", "absent_last", "put", "put_back", "relayout_after_load", "warn"]

_Self = TypeVar("_Self", bound="Thresholded")


class Thresholded(nn.Module):
    """A sparse MLP; the buffers `_kept` are not saved, and moved but never cast: they are float32 (a screen's are not).

    A subclass says which layers it is over (`_linears`), which of them is the last and how many neurons it has, how
    their weights are to be stored (`_relayout`) and why it runs dense.
    """

    threshold: Tensor
    skipped_mean: Tensor | None
    activation_params: Tensor | None
    name: str
    """What warnings call this module; `sparsify` sets the qualified name."""
    _kept: tuple[str, ...] = ("threshold", "skipped_mean", "activation_params")

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.backend = backend
        self._warned = False
        for name in self._kept:
            self.register_buffer(name, None, persistent=False)
        self.register_load_state_dict_post_hook(relayout_after_load)

    def _linears(self) -> list[nn.Module | None]:
        raise NotImplementedError

    def _last(self) -> nn.Module | None:
        raise NotImplementedError

    def _relayout(self) -> None:
        raise NotImplementedError

    def _why_dense(self) -> str | None:
        raise NotImplementedError

    def _neurons(self) -> int | None:
        last = self._last()
        return None if last is None else (_projections.sizes(last) or (None,))[0]

    def _shown(self) -> str:
        """What the repr says beside the activation, threshold, mean and backend."""
        return ""

    def train(self: _Self, mode: bool = True) -> _Self:
        forget(_projections.own_weight(self._last()))
        return super().train(mode)

    def __setattr__(self, name: str, value: Any) -> None:
        """A child put in or back, such as a layer that an adapter was merged into, may have another weight inside."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            forget(_projections.own_weight(self._last()))

    def set_thresholds(self, threshold: float | Tensor, skipped_mean: Tensor | None = None) -> None:
        """New thresholds and means; a compiled graph sees them without compiling again where the shapes stay.

        Args:
            threshold: t ≥ 0, a number or a tensor of shape () or (F,); inf: never active.
            skipped_mean: μ (F,), finite, or None for none.
        Raises:
            ValueError: a negative or NaN threshold, a mean that is not finite, or a wrong shape.
        """
        neurons = self._neurons()
        mean = checked_mean(skipped_mean, neurons)
        self._set("threshold", checked_threshold(threshold, neurons))
        self._set("skipped_mean", mean)
        self._relayout()

    def extra_repr(self) -> str:
        mean = "" if self.skipped_mean is None else ", skipped_mean"
        what = f"threshold={limit_text(self.threshold)}{mean}{self._shown()}"
        return f"activation={self.activation!r}, {what}, backend={self.backend!r}"

    def _set(self, name: str, value: Tensor | None) -> None:
        put(self, name, value, _projections.device_of(self._linears()))

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        """`.to()`, `.half()` …: the thresholds move but keep their dtypes, the weights stay stored as they were."""
        before = {name: self._buffers[name] for name in self._kept}
        super()._apply(fn, recurse)
        put_back(self, before)
        self._relayout()
        return self

    def _warning(self) -> str:
        return f"runs dense and no neuron of it is thresholded or skipped: {self._why_dense()}"


def put(module: nn.Module, name: str, value: Tensor | None, device: torch.device) -> None:
    """A buffer's new value, written into the old one where it has the same shape."""
    old = module._buffers[name]
    if old is None or value is None or old.shape != value.shape or old.device != device or old.is_inference():
        with torch.inference_mode(False):  # plain tensors, which `skipped_out` can watch for changes
            module._buffers[name] = None if value is None else value.clone().to(device)
            absent_last(module)
    else:
        old.copy_(value)


def absent_last(module: nn.Module) -> None:
    """Puts the buffers that are None behind the others: `torch.export` (not strict) counts them as inputs."""
    for name in [name for name, value in module._buffers.items() if value is None]:
        module._buffers[name] = module._buffers.pop(name)


def put_back(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """After `_apply`, puts the old values of buffers back: the function may round, drop or (to_empty) invent them."""
    for name, old in before.items():
        new = module._buffers[name]
        if old is not None and new is not None:
            module._buffers[name] = old.to(new.device)


def relayout_after_load(module: Any, incompatible: Any) -> None:
    """`load_state_dict(assign=True)` brings weights in the dense layout."""
    module._relayout()


def warn(module: Any) -> None:
    """Says once that the module saves nothing."""
    module._warned = True
    warnings.warn(f"{module.name} {module._warning()}", stacklevel=3)


# torch.compile then runs it while tracing and leaves it out of the graph. This is what
# `torch.compiler.assume_constant_result` sets; calling that would import all of the compiler with this package.
warn._dynamo_marked_constant = True  # type: ignore[attr-defined] # functions have no such attribute for mypy
