"""What the sparse MLP modules have in common: thresholds and means that stay float32, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp.nn import _weights
from sparsemlp.nn._thresholds import checked_mean, checked_threshold

__all__ = ["Thresholded", "warn_dense"]

_BUFFERS = ("threshold", "skipped_mean", "activation_params")


class Thresholded(nn.Module):
    """Buffers `threshold`, `skipped_mean` and `activation_params`: float32, not saved, moved but never rounded.

    A subclass says which layers it is over (`_linears`), how many neurons they have, how their weights are to be stored
    (`_relayout`) and why it runs dense.
    """

    threshold: Tensor
    skipped_mean: Tensor | None
    activation_params: Tensor | None
    name: str
    """What warnings call this module; `sparsify` sets the qualified name."""

    def __init__(self, activation: str, backend: str) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.backend = backend
        self._activation = activation
        self._warned = False
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self.register_load_state_dict_post_hook(_after_load)

    @property
    def activation(self) -> str:
        """The name of a row of `sparsemlp.activations.ACTIVATIONS`, also where a child has this name."""
        return self._activation

    def _linears(self) -> list[nn.Module | None]:
        raise NotImplementedError

    def _neurons(self) -> int | None:
        raise NotImplementedError

    def _relayout(self) -> None:
        raise NotImplementedError

    def _why_dense(self) -> str | None:
        raise NotImplementedError

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
        t = self.threshold
        known = t.dim() == 0 and t.device.type != "meta"
        limit = f"{t.item():.4g}" if known else f"({', '.join(map(str, t.shape))})"
        mean = "" if self.skipped_mean is None else ", skipped_mean"
        return f"activation={self.activation!r}, threshold={limit}{mean}, backend={self.backend!r}"

    def _set(self, name: str, value: Tensor | None) -> None:
        """A buffer's new value, written into the old one where it has the same shape."""
        device, old = _weights.device_of(self._linears()), self._buffers[name]
        same = old is not None and value is not None and old.shape == value.shape and old.device == device
        if same and not old.is_inference():  # type: ignore[union-attr]
            old.copy_(value)  # type: ignore[union-attr, arg-type]
        else:
            with torch.inference_mode(False):  # plain tensors, which `skipped_out` can watch for changes
                self._buffers[name] = None if value is None else value.clone().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Thresholded:
        """`.to()`, `.half()` …: the thresholds move but stay float32, the weights stay stored as they were."""
        before = {name: self._buffers[name] for name in _BUFFERS}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None:
                # The old values: `fn` may round, drop or (to_empty) invent them.
                self._buffers[name] = old.to(new.device)
        self._relayout()
        return self


def _after_load(module: nn.Module, incompatible: Any) -> None:
    """`load_state_dict(assign=True)` brings weights in the dense layout."""
    assert isinstance(module, Thresholded)
    module._relayout()


def warn_dense(module: Thresholded) -> None:
    """Says once that the module runs dense."""
    module._warned = True
    warnings.warn(
        f"{module.name} runs dense and no neuron of it is thresholded or skipped: {module._why_dense()}",
        stacklevel=3,
    )


# torch.compile then runs it while tracing and leaves it out of the graph. This is what
# `torch.compiler.assume_constant_result` sets; calling that would import all of the compiler with this package.
warn_dense._dynamo_marked_constant = True  # type: ignore[attr-defined]
