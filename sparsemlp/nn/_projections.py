"""The two layers of an ungated MLP: what they are, their tensors, and how these are stored.

A layer is `nn.Linear`, `Int8Linear`, or a class that computes x @ weight + bias (`Conv1D` of GPT-2), which stores its
weight the other way round and is known by evaluating it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.nn import _weights
from sparsemlp.nn.int8_linear import Int8Linear

__all__ = [
    "is_plain",
    "is_projection",
    "kind_of",
    "obstacle",
    "own_weight",
    "sizes",
    "store",
    "stored_by_input",
]

_BY_INPUT: dict[type, bool] = {nn.Linear: False, Int8Linear: False}
"""Classes that were looked at: whether their weight is (inputs, outputs)."""


def is_projection(layer: object) -> bool:
    """Whether it looks like a layer from some number of features to another, of whatever class."""
    return isinstance(layer, nn.Module) and sizes(layer) is not None


def sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a layer, or None where it is none with such sizes."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        numbers = tuple(getattr(layer, name, None) for name in names)
        if all(type(n) is int for n in numbers):
            return numbers  # type: ignore[return-value]
    return None


def stored_by_input(layer: nn.Module) -> bool:
    """Whether the layer's class is x @ weight + bias with weight (inputs, outputs)."""
    kind = type(layer)
    if kind not in _BY_INPUT:
        _BY_INPUT[kind] = not isinstance(layer, nn.Linear) and _multiplies_by_weight(layer)
    return _BY_INPUT[kind]


def _multiplies_by_weight(layer: nn.Module) -> bool:
    """Found out on a tiny float64 twin of the layer."""
    names = {name for name, p in layer._parameters.items() if p is not None}
    if names != {"weight", "bias"} or layer._modules or layer._buffers or "nf" not in layer.__dict__:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        for shape in ((2, 3, 4), (4, 5), (5,))
    )
    twin = copy.copy(layer)
    twin.__dict__["_parameters"] = {"weight": weight, "bias": bias}
    twin.__dict__.update(nx=4, nf=5)
    try:
        with torch.no_grad():
            out = type(layer).forward(twin, x)
            return isinstance(out, Tensor) and torch.allclose(out, x @ weight + bias, rtol=1e-9, atol=1e-9)
    except Exception:  # whatever a forward that is not ours to know may raise
        return False


def kind_of(layer: nn.Module | None) -> type:
    """The layer's class where it is a plain product, else the one that is expected of it."""
    known = layer is not None and (type(layer) in (nn.Linear, Int8Linear) or stored_by_input(layer))
    return type(layer) if known else nn.Linear


def is_plain(layer: nn.Module | None, kind: type) -> bool:
    """Whether it is of the class `kind` (see `kind_of`) and its tensors may be used without calling it."""
    if type(layer) is not kind:
        return False
    return _weights.is_plain(layer) if kind is Int8Linear else dense_gated_mlp.is_untouched(layer)  # type: ignore[arg-type]


def obstacle(layer: nn.Module | None, kind: type) -> str | None:
    """`is_plain`'s reasons in words, or None."""
    if type(layer) is kind and kind is not Int8Linear:
        return dense_gated_mlp.disturbance(layer)  # type: ignore[arg-type]
    if type(layer) is not kind and kind_of(layer) is type(layer):
        return f"was replaced by {type(layer).__name__} (set_thresholds takes it over)"
    return _weights.obstacle(layer)


def own_weight(layer: nn.Module | None) -> Tensor | None:
    """The layer's weight, where it is the module's around it to store as it likes."""
    if layer is None or "forward" in layer.__dict__ or kind_of(layer) is not type(layer):
        return None
    if type(layer) is Int8Linear:
        return layer._buffers["qweight"]
    weight = layer._parameters.get("weight")
    return weight if type(weight) is nn.Parameter else None


def store(layer: nn.Module | None, *, by_column: bool) -> bool:
    """Stores the layer's weight column by column or row by row; whether it had to be moved.

    The old storage is freed unless somebody else holds it.
    """
    weight = own_weight(layer)
    if weight is None or (_weights.has_columns if by_column else _weights.has_rows)(weight):
        return False
    with torch.no_grad():
        moved = weight.data.t().contiguous().t() if by_column else weight.data.contiguous()
        if type(layer) is Int8Linear:
            layer._buffers["qweight"] = moved
        else:
            weight.data = moved
    return True
