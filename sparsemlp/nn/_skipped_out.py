"""`skipped_out` = W_down μ, computed once and kept while neither the weight nor the mean changes.

Keeping it matters: it reads all of W_down, which is a third of the bytes that skipping neurons saves. The memory of
what was computed is keyed by the weight tensor itself, and `sparsemlp::_skipped_out` makes it reachable from a compiled
graph, where a tensor's version cannot be looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsemlp.reference import gated_mlp as reference

__all__ = ["forget", "skipped_out"]

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""weight -> (mean, key, W_down μ)."""
_Scale = Tensor | None
"""Of int8 weights: one float32 factor an output."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define("_skipped_out(Tensor skipped_mean, Tensor w_down, Tensor? scale, bool by_neuron) -> Tensor")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _key(*tensors: Tensor) -> tuple[int, ...] | None:
    """What changes when a tensor's values do, or None where that cannot be known: no caching then."""
    try:
        return tuple(number for t in tensors for number in (t.data_ptr(), t._version))
    except RuntimeError:  # inference tensors keep no version, torch.func's wrappers have no memory
        return None


def _computed(mean: Tensor, weight: Tensor, scale: _Scale, by_neuron: bool) -> Tensor:
    return reference.skipped_out(mean, weight if by_neuron else weight.t(), scale)


def _cached(mean: Tensor, weight: Tensor, scale: _Scale, by_neuron: bool) -> Tensor:
    key = _key(weight, mean) if scale is None else _key(weight, mean, scale)
    if key is None:
        with torch.no_grad():
            return _computed(mean, weight, scale, by_neuron)
    known = _known.get(weight)
    if known is not None and known[0] is mean and known[1] == key:
        return known[2]
    # A plain tensor even when first asked for in inference mode: it will serve calls outside as well.
    with torch.inference_mode(False), torch.no_grad():
        value = _computed(mean, weight, scale, by_neuron)
    _known[weight] = (mean, key, value)
    return value


# The compiled graph owns what an operator returns and may write into it: it gets a copy of the D numbers.
_lib.impl("_skipped_out", lambda *args: _cached(*args).clone(), "CompositeExplicitAutograd")
torch.library.register_fake(
    "sparsemlp::_skipped_out",
    lambda mean, weight, scale, by_neuron: mean.new_empty(
        (weight.shape[1 if by_neuron else 0],), dtype=_wide(weight.dtype)
    ),
    lib=_lib,
)


def forget(weight: Tensor | None) -> None:
    """Drops what was computed from a weight: for changes that leave no trace in its version (`weight.data` written to,
    fused optimizers)."""
    if weight is not None:
        _known.pop(weight, None)


def skipped_out(mean: Tensor, weight: Tensor, scale: _Scale = None, *, by_neuron: bool = False) -> Tensor:
    """W_down μ in float32 (float64 for a float64 weight), with gradients where they are wanted.

    Args:
        mean: μ (F,) float32.
        weight: `down_proj.weight`, (D, F), any layout; the parameter itself, not a view of it.
        scale: (D,) float32 beside an int8 weight.
        by_neuron: the weight is (F, D), as a `Conv1D` has it.

    Returns:
        (D,). Not to be written into: outside of gradients and compiled graphs it is the cached tensor.
    """
    if torch.is_grad_enabled() and (weight.requires_grad or mean.requires_grad):
        if not torch.compiler.is_compiling():
            forget(weight)  # a training step: the optimizer may change the weight without a trace
        return _computed(mean, weight, scale, by_neuron)
    if torch.compiler.is_compiling():
        return torch.ops.sparsemlp._skipped_out.default(mean, weight, scale, by_neuron)
    return _cached(mean, weight, scale, by_neuron)
