"""The layers of an MLP that are read past: what they are, their tensors, and how these are stored.

A layer is `nn.Linear`, `Int8Linear`, or, in an ungated MLP, of a class that computes x @ weight + bias (`Conv1D` of
GPT-2), which stores its weight the other way round and is known by evaluating it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp._layout import has_columns, has_rows
from sparsemlp.nn import _dense_gated_mlp as dense
from sparsemlp.nn.int8_linear import Int8Linear

__all__ = [
    "Tensors",
    "change",
    "device_of",
    "is_plain",
    "is_projection",
    "is_watched",
    "kind_of",
    "misplaced",
    "obstacle",
    "own_weight",
    "rows",
    "sizes",
    "store",
    "stored_by_input",
    "tensors",
]

Tensors = tuple[Tensor, Tensor | None, Tensor | None]
"""A layer's weight, bias and scale."""

_KNOWN = (nn.Linear, Int8Linear)

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
    known = layer is not None and (type(layer) in _KNOWN or stored_by_input(layer))
    return type(layer) if known else nn.Linear


def tensors(layer: nn.Module | None) -> Tensors:
    """A plain layer's weight, bias and scale, without the cost of attribute look-up in `nn.Module`."""
    # None never comes here, `is_plain` has been asked; asking again would be paid three times a forward.
    parameters: dict[str, Any] = layer._parameters  # type: ignore[union-attr]
    if type(layer) is Int8Linear:
        buffers: dict[str, Any] = layer._buffers
        return buffers["qweight"], parameters["bias"], buffers["scale"]
    return parameters["weight"], parameters["bias"], None


def rows(layer: Tensors, part: slice) -> Tensors:
    """Some outputs of a layer: views."""
    weight, bias, scale = layer
    return weight[part], None if bias is None else bias[part], None if scale is None else scale[part]


def is_watched(layer: nn.Module | None) -> bool:
    """Whether a call of the layer would call hooks."""
    return layer is not None and bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


def change(name: str, child: nn.Module | None, *kinds: type) -> str | None:
    """Why the child, which is to be of one of `kinds` and without hooks, may not be left out, in words, or None."""
    if type(child) not in kinds:
        return f"{name} was replaced by {type(child).__name__}"
    return f"{name} has forward or backward hooks" if is_watched(child) else None


def is_plain(layer: nn.Module | None, kind: type | None = None) -> bool:
    """Whether the layer is exactly its product, so that its tensors may be used without calling it.

    It must be of the class `kind` (see `kind_of`), or, without one, `nn.Linear` or `Int8Linear`.
    """
    own = type(layer)
    if layer is None or (own is not kind and (kind is not None or own not in _KNOWN)):
        return False
    if own is not Int8Linear:
        return dense.is_untouched(layer)
    bias, is_plain_tensor = layer._parameters["bias"], dense.is_plain_tensor
    return (
        not is_watched(layer)
        and "forward" not in layer.__dict__
        and is_plain_tensor(layer._buffers["qweight"])
        and is_plain_tensor(layer._buffers["scale"])
        and (bias is None or is_plain_tensor(bias))
    )


def obstacle(layer: nn.Module | None, kind: type | None = None) -> str | None:
    """`is_plain`'s reasons in words, or None."""
    if kind is not None and type(layer) is not kind and kind_of(layer) is type(layer):
        return f"was replaced by {type(layer).__name__} (set_thresholds takes it over)"
    if type(layer) is Int8Linear:
        return dense.disturbance(layer, ("qweight", "bias", "scale"))
    return dense.disturbance(layer) if layer is not None and type(layer) is kind else dense.obstacle(layer)


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
    if weight is None or (has_columns if by_column else has_rows)(weight):
        return False
    with torch.no_grad():
        moved = weight.data.t().contiguous().t() if by_column else weight.data.contiguous()
        if type(layer) is Int8Linear:
            layer._buffers["qweight"] = moved
        else:
            weight.data = moved
    return True


def misplaced(layer: nn.Module | None, *, by_column: bool) -> str | None:
    """What is wrong with how the layer's weight is stored, in words, or None."""
    weight = tensors(layer)[0]
    if (has_columns if by_column else has_rows)(weight):
        return None
    if not by_column:
        return "weight is not stored row by row (make it contiguous)"
    return (
        f"weight was exchanged for one with strides {tuple(weight.stride())} (set_thresholds stores it anew)"
    )


def device_of(layers: list[nn.Module | None]) -> torch.device:
    """Where what belongs to the layers lives: with their weights, but never on meta, which would lose its values."""
    for layer in layers:
        if layer is None:
            continue
        for tensor in (*layer.parameters(), *layer.buffers()):
            return tensor.device if tensor.device.type != "meta" else torch.device("cpu")
    return torch.device("cpu")
