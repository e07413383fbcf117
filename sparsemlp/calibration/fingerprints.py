"""What identifies a model for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sparsemlp.integrations._mlps import parts_of
from sparsemlp.integrations.transformers import activation_of, find_mlps

__all__ = ["differences", "fingerprint", "layers", "mlps_of"]

_KEYS = {"hidden_size": int, "intermediate_size": int, "activation": str}


def mlps_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's MLPs, dense or sparse, by qualified name in model order.

    Raises:
        ValueError: there is none.
    """
    mlps = find_mlps(model)
    if not mlps:
        raise ValueError(
            f"model is {type(model).__name__} without an MLP of a known form, expected gate, up and down projections, "
            "or two layers with an activation between; see sparsemlp.integrations.transformers.find_mlps"
        )
    return mlps


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What identifies a model for a plan: the architecture's name, and each MLP's name, sizes and activation.

    Equal for a model and the same model made sparse, whatever its dtype, device and weights.

    Returns:
        {"architecture": str, "layers": {name: {"hidden_size": D, "intermediate_size": F, "activation": str}}}.
    """
    layers = {}
    for name, module in mlps_of(model).items():
        parts = parts_of(module)
        layers[name] = {
            "hidden_size": parts.hidden_size,
            "intermediate_size": parts.neurons,
            "activation": activation_of(module, model),
        }
    return {"architecture": type(model).__name__, "layers": layers}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], our_name: str, their_name: str) -> str:
    """What differs between two fingerprints in words, at most three things; empty where nothing does."""
    found = []
    if ours["architecture"] != theirs["architecture"]:
        found.append(
            f"architecture is {ours['architecture']} in {our_name}, {theirs['architecture']} in {their_name}"
        )
    mine, other = ours["layers"], theirs["layers"]
    if len(mine) != len(other):
        found.append(f"{len(mine)} layers in {our_name}, {len(other)} in {their_name}")
    for a, b, where in ((mine, other, their_name), (other, mine, our_name)):
        missing = [name for name in a if name not in b]
        if missing:
            found.append(f"{where} has no layer {missing[0]}")
    for name in mine:
        for key in _KEYS:
            if name in other and mine[name][key] != other[name][key]:
                found.append(
                    f"{key} of {name} is {mine[name][key]} in {our_name}, {other[name][key]} in {their_name}"
                )
    return "; ".join(found[:3])


def layers(value: object) -> dict[str, Any]:
    """The layers of a fingerprint that was read or handed in; ValueError where it is incomplete."""
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, dict) or not layers or not isinstance(value.get("architecture"), str):  # type: ignore[attr-defined]
        raise ValueError(
            "fingerprint is incomplete, expected an architecture and at least one layer; calibrate again"
        )
    for name, layer in layers.items():
        if not isinstance(layer, dict) or any(
            not isinstance(layer.get(key), kind) for key, kind in _KEYS.items()
        ):
            raise ValueError(
                f"fingerprint of layer {name} is {layer!r}, expected {', '.join(_KEYS)}; calibrate again"
            )
    return layers
