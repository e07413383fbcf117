"""What a low-bit screen needs of calibration: its copies of a model's layers, its scores, and its thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp.calibration.histogram import Cumulative, LayerStatistics, float32_at_least
from sparsemlp.integrations._mlps import parts_of
from sparsemlp.nn import _projections
from sparsemlp.ops import screen as operator
from sparsemlp.quantization import dequantize_rows
from sparsemlp.screen import PackedWeight, check_sizes, pack

__all__ = ["BITS", "GROUP", "LayerScreen", "check_screen", "layer_screens", "thresholds"]

BITS, GROUP = 4, 32
"""Where nothing else is asked for."""


@dataclass(frozen=True, eq=False)
class LayerScreen:
    """One gated MLP's screen: low-bit copies of its gate and up weights.

    Args:
        gate, up: copies of the (F, D) weights.
        neurons: F.
        b_gate, b_up: the layers' own biases (F,), or None.
        activation, params: the MLP's.
    """

    gate: PackedWeight
    up: PackedWeight
    neurons: int
    b_gate: Tensor | None
    b_up: Tensor | None
    activation: str
    params: Tensor | None

    def scores(self, x: Tensor) -> Tensor:
        """m, (T, F) float32 (float64 of a float64 x), of an x (T, D)."""
        b_gate, b_up = (None if b is None else b.to(x.dtype) for b in (self.b_gate, self.b_up))
        return operator.scores(
            x, self.gate, self.up, self.neurons, b_gate, b_up, self.activation, self.params
        )


def layer_screens(
    mlps: Mapping[str, nn.Module], fingerprint: Mapping[str, Any], bits: int, group: int
) -> dict[str, LayerScreen]:
    """Copies of the MLPs' gate and up weights, made as `sparsify` makes them: `sparsemlp.screen.pack` of the weights.

    int8 layers are copied from what their integers stand for, in float32.

    Args:
        mlps, fingerprint: a model's `mlps_of` and its `fingerprint`.
        bits, group: of the copies.

    Returns:
        By the MLP's name; together bits + 16 / group bits a gate or up weight.
    Raises:
        ValueError: an MLP without a gate, or one whose layers are more than their weight and bias.
    """
    check_sizes(bits, group)
    for name, module in mlps.items():  # all are looked at before any is copied
        parts = parts_of(module)
        if not parts.gated:
            raise ValueError(
                f"screen is ({bits}, {group}) and layer {name} has no gate, expected gated MLPs only; use method "
                "'cats' or 'upaware'"
            )
        for layer in parts.inputs:
            reason = _projections.obstacle(layer)
            if reason is not None:
                raise ValueError(
                    f"screen is ({bits}, {group}) and a gate or up layer of {name} {reason}, expected plain nn.Linear "
                    "layers; merge or remove what changes it first"
                )
    return {
        name: _layer_screen(module, fingerprint["layers"][name]["activation"], bits, group)
        for name, module in mlps.items()
    }


def _layer_screen(module: nn.Module, activation: str, bits: int, group: int) -> LayerScreen:
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    for layer in parts_of(module).inputs:
        weight, bias, scale = _projections.tensors(layer)
        weight = weight.detach() if scale is None else dequantize_rows(weight, scale)
        weights.append(weight)
        biases.append(None if bias is None else bias.detach())
    if len(weights) == 1:  # rows [gate; up]
        n = weights[0].shape[0] // 2
        weights = [weights[0][:n], weights[0][n:]]
        biases = [None, None] if biases[0] is None else [biases[0][:n], biases[0][n:]]
    gate, up = (pack(weight, bits, group) for weight in weights)
    params = getattr(module, "activation_params", None)
    return LayerScreen(gate, up, weights[0].shape[0], biases[0], biases[1], activation, params)


def check_screen(screen: object) -> tuple[int, int]:
    """ValueError unless it is (bits, group) of copies that are offered."""
    if not isinstance(screen, tuple) or len(screen) != 2:
        raise ValueError(f"screen is {screen!r}, expected (bits, group), such as ({BITS}, {GROUP}), or None")
    check_sizes(*screen)
    return screen


def thresholds(layer: LayerStatistics, target: float) -> Tensor:
    """The smallest t at which the empirical CDF of the score's |m|, over tokens and neurons, reaches the target.

    Args:
        layer: the layer's statistics by |m|.
        target: share of neurons to skip, in (0, 1).

    Returns:
        t, 0-d float32 > 0: a neuron whose score is exactly 0 is skipped only by a threshold above 0, so where exact
        zeros alone reach the target t is the smallest normal number. Inside a bin the CDF is taken as linear.
    """
    value = Cumulative(layer, pooled=True).quantile(target)
    return float32_at_least(torch.tensor(max(value, torch.finfo(torch.float32).tiny), dtype=torch.float64))
