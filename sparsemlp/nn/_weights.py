"""The layers of an MLP that are read past: float or int8 ones, their tensors, and how these are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp.nn import _dense_gated_mlp as dense
from sparsemlp.nn.int8_linear import Int8Linear

__all__ = [
    "device_of",
    "has_columns",
    "has_rows",
    "is_plain",
    "misplaced",
    "obstacle",
    "store",
    "tensors",
    "weight_of",
]


def tensors(layer: nn.Module | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A plain layer's weight, bias and scale, without the cost of attribute look-up in `nn.Module`."""
    parameters: dict[str, Any] = layer._parameters  # type: ignore[union-attr]
    if type(layer) is Int8Linear:
        buffers: dict[str, Any] = layer._buffers
        return buffers["qweight"], parameters["bias"], buffers["scale"]
    return parameters["weight"], parameters["bias"], None


def is_watched(layer: nn.Module | None) -> bool:
    """Whether a call of the layer would call hooks."""
    return layer is not None and bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


def is_plain(layer: nn.Module | None) -> bool:
    """Whether the layer is exactly its product, so that its tensors may be used without calling it."""
    if type(layer) is not Int8Linear:
        return dense.is_plain(layer)
    bias, is_plain_tensor = layer._parameters["bias"], dense._is_plain_tensor
    return (
        not is_watched(layer)
        and "forward" not in layer.__dict__
        and is_plain_tensor(layer._buffers["qweight"])
        and is_plain_tensor(layer._buffers["scale"])
        and (bias is None or is_plain_tensor(bias))
    )


def obstacle(layer: nn.Module | None) -> str | None:
    """`is_plain`'s reasons in words, or None."""
    if type(layer) is not Int8Linear:
        return dense.obstacle(layer)
    if any(getattr(layer, hooks) for hooks in dense._HOOKS):
        return "has forward or backward hooks"
    if "forward" in layer.__dict__:
        return "has a replaced forward (a device hook, or another library's patch)"
    for name, tensor in zip(("qweight", "bias", "scale"), tensors(layer), strict=True):
        if tensor is not None and not dense._is_plain_tensor(tensor):
            return f"has a {name} of type {type(tensor).__name__}, not a plain tensor"
    if dense._has_any_global_hook():
        return "is called with global module hooks"
    return None


def weight_of(layer: nn.Module | None) -> Tensor | None:
    """The layer's weight, where it is the module's around it to store as it likes."""
    if layer is None or "forward" in layer.__dict__:
        return None
    if type(layer) is Int8Linear:
        return layer._buffers["qweight"]
    weight = layer._parameters.get("weight") if type(layer) is nn.Linear else None
    return weight if type(weight) is nn.Parameter else None


def store(layer: nn.Module | None, *, by_column: bool) -> bool:
    """Stores the layer's weight column by column or row by row; whether it had to be moved.

    The old storage is freed unless somebody else holds it.
    """
    weight = weight_of(layer)
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


def has_rows(weight: Tensor) -> bool:
    """Whether a row of the weight lies in consecutive memory."""
    return weight.stride(1) == 1 or weight.shape[1] <= 1 or weight.shape[0] == 0


def has_columns(weight: Tensor) -> bool:
    """Whether a column of the weight lies in consecutive memory."""
    return weight.stride(0) == 1 or weight.shape[0] <= 1 or weight.shape[1] == 0


def device_of(layers: list[nn.Module | None]) -> torch.device:
    """Where what belongs to the layers lives: with their weights, but never on meta, which would lose its values."""
    for layer in layers:
        if layer is None:
            continue
        for tensor in (*layer.parameters(), *layer.buffers()):
            return tensor.device if tensor.device.type != "meta" else torch.device("cpu")
    return torch.device("cpu")
