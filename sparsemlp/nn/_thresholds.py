"""Checks of thresholds, means and activation parameters, which are done once, before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsemlp import activations
from sparsemlp.ops._checks import number_text

__all__ = [
    "checked_activation",
    "checked_input",
    "checked_mean",
    "checked_params",
    "checked_threshold",
    "limit_text",
]


def checked_threshold(
    threshold: float | Tensor, neurons: int | None, name: str = "threshold", letter: str = "F"
) -> Tensor:
    expected = (
        f"a number ≥ 0 or a tensor of shape () or ({letter},){'' if neurons is None else f' = ({neurons},)'}"
    )
    if isinstance(threshold, Tensor):
        if threshold.layout != torch.strided or threshold.is_meta:
            raise ValueError(
                f"{name} is {threshold.layout} on {threshold.device}, expected torch.strided with values"
            )
        if not threshold.is_floating_point():
            raise ValueError(
                f"{name} is {str(threshold.dtype).removeprefix('torch.')}, expected float32; convert it"
            )
        if threshold.dim() != 0 and (threshold.dim() != 1 or neurons not in (None, threshold.shape[0])):
            raise ValueError(f"{name} has shape {tuple(threshold.shape)}, expected {expected}")
        value = threshold.detach().to("cpu", torch.float32)
    elif isinstance(threshold, (int, float)) and not isinstance(threshold, bool):
        try:
            number = float(threshold)
        except OverflowError:
            raise ValueError(f"{name} is {number_text(threshold)}, expected {expected}") from None
        value = torch.tensor(number, dtype=torch.float32, device="cpu")
    else:
        raise ValueError(f"{name} is {type(threshold).__name__}, expected {expected}")
    if not bool((value >= 0).all()):
        worst = "NaN" if bool(value.isnan().any()) else f"{value.min().item():g}"
        raise ValueError(f"{name} is or contains {worst}, expected {expected} without negative values or NaN")
    return value


def checked_input(threshold: float | Tensor | None, gate: nn.Module | None, merged: bool) -> Tensor | None:
    """The threshold of the gate layer's inputs; `merged` where gate and up are one layer."""
    if threshold is None:
        return None
    if merged:
        raise ValueError(
            "input_threshold is given for a module with gate and up in one layer, expected a gate layer of its own, "
            "whose weight can be stored column by column; leave it None"
        )
    return checked_threshold(threshold, getattr(gate, "in_features", None), "input_threshold", "D")


def checked_mean(mean: Tensor | None, neurons: int | None) -> Tensor | None:
    if mean is None:
        return None
    expected = f"a tensor of shape (F,){'' if neurons is None else f' = ({neurons},)'} or None"
    if not isinstance(mean, Tensor) or not mean.is_floating_point():
        what = f"a tensor of {mean.dtype}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ValueError(f"skipped_mean is {what}, expected {expected}, float32")
    if mean.dim() != 1 or neurons not in (None, mean.shape[0]):
        raise ValueError(f"skipped_mean has shape {tuple(mean.shape)}, expected {expected}")
    value = mean.detach().to("cpu", torch.float32)
    if not bool(value.isfinite().all()):
        raise ValueError(f"skipped_mean contains NaN or inf, expected {expected} of finite values")
    return value


def checked_activation(module: nn.Module, member: str | None, name: str | None) -> str:
    """The name of the dense module's activation, its `member`, where there is one."""
    if name is None:
        what, known = type(getattr(module, str(member))).__name__, ", ".join(activations.ACTIVATIONS)
        raise ValueError(
            f"activation of {type(module).__name__} is {what}, expected one of: {known}; name it in activation="
        )
    return name


def checked_params(activation: str, params: Tensor | None) -> Tensor | None:
    names = activations.get(activation).params
    if not names and params is None:
        return None
    if not isinstance(params, Tensor) or tuple(params.shape) != (len(names),) or not names:
        what = f"shape {tuple(params.shape)}" if isinstance(params, Tensor) else type(params).__name__
        wanted = f"a tensor of shape ({len(names)},): ({', '.join(names)})" if names else "None"
        raise ValueError(f"activation_params is {what}, expected {wanted} for activation {activation!r}")
    return params.detach().float()


def limit_text(threshold: Tensor) -> str:
    """A threshold as a module's repr shows it: the number, where it is one, or the shape."""
    if threshold.dim() == 0 and threshold.device.type != "meta":
        return f"{threshold.item():.4g}"
    return f"({', '.join(map(str, threshold.shape))})"
