"""What is timed for `gated_mlp`; see `benchmarks.workload` for how masks are made new on every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks.weight_bytes import copy_share, share_read
from benchmarks.workload import Call, Density, Workload, layers_beyond_cache, phi, threshold_at
from sparsemlp import activations
from sparsemlp.quantization import quantize_columns, quantize_rows
from sparsemlp.reference.screen import scores
from sparsemlp.screen import PackedWeight, pack

__all__ = ["INDICATORS", "Call", "Density", "GatedMlp", "Layer", "dense_mlp", "layers_beyond_cache"]

INDICATORS = ("gate", "up", "product", "screen")


@dataclass(frozen=True)
class Layer:
    """One layer's weights; the down projection in both layouts, because the dense peers want the other one."""

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    w_down_t: Tensor


def dense_mlp(activation: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(x, w_gate, w_up, w_down) -> y: the dense MLP as a model writes it in PyTorch, W_down as nn.Linear has it."""
    act = phi(activation)

    def dense(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(act(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    return dense


class GatedMlp(Workload):
    """The workload of one gated shape, dtype and token count.

    Args:
        indicator: "gate", "up" or "product": whose magnitude is thresholded; "screen": that of a·u as low-bit copies
            have it. At sparsity 0 nothing is screened: it is the dense MLP.
        screen_bits: of the copies, in groups of 32.
        input_sparsity: fraction of x's channels that the gate does not read; 0: no input threshold.
        others: `benchmarks.workload.Workload`'s.
    """

    op = "gated_mlp"
    kind = "gated"
    matrices = 3

    def __init__(
        self,
        *args: Any,
        indicator: str = "gate",
        input_sparsity: float = 0.0,
        screen_bits: int = 4,
        **others: Any,
    ) -> None:
        if indicator not in INDICATORS:
            raise ValueError(f"indicator is {indicator!r}, expected one of: {', '.join(INDICATORS)}")
        if indicator == "screen" and input_sparsity:
            raise ValueError("input_sparsity is given with indicator 'screen', expected 0; leave it out")
        self.indicator, self.input_sparsity, self.screen_bits = indicator, input_sparsity, screen_bits
        self.compares = f"{indicator} {screen_bits} {input_sparsity}"
        super().__init__(*args, **others)

    def _layer(self, generator: torch.Generator) -> Layer:
        d, f = self.shape.d, self.shape.f
        gate, up, down_t = (self._matrix(f, d, inputs, generator) for inputs in (d, d, f))
        return Layer(gate, up, down_t.t().contiguous(), down_t)

    def bytes_read(self, union: float, channels: float = 1.0, weights: str = "float") -> float:
        """Weight bytes of a call that wants the fractions `union` of the neurons and `channels` of the gate's input."""
        itemsize = self.itemsize(weights)
        copies = copy_share(itemsize, self.screen_bits)
        share = share_read(self.op, union, channels, self.indicator, copies)
        return self.layer_bytes(self.shape, itemsize) * share

    def screens(self, i: int) -> tuple[PackedWeight, PackedWeight]:
        """Low-bit copies of layer i's gate and up weights."""
        layer, bits = self.layers[i], self.screen_bits
        return self.derived(f"screen{bits}", i, lambda: (pack(layer.w_gate, bits), pack(layer.w_up, bits)))

    def _weights(
        self, i: int, weights: str, apart: str
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """w_gate, w_up, w_down_t as the operator takes them, and the scales of int8 ones."""
        layer = self.layers[i]
        if weights == "float":
            gate = layer.w_gate
            if self.input_sparsity:
                gate = self.derived("input-major gate", i, lambda: gate.t().contiguous().t())
            return (gate, layer.w_up, self.apart(apart, i, layer.w_down_t)), {}
        made = self.derived(
            "int8",
            i,
            lambda: [
                quantize_rows(layer.w_gate),
                quantize_rows(layer.w_up),
                quantize_columns(layer.w_down_t),
            ],
        )
        (gate, up, down), scales = zip(*made, strict=True)
        if self.input_sparsity:
            gate = self.derived("input-major int8 gate", i, lambda: gate.t().contiguous().t())
        names = "scale_gate", "scale_up", "scale_down"
        return (gate, up, self.apart(apart, i, down)), dict(zip(names, scales, strict=True))

    def own(self, sparsity: float, backend: str = "auto", weights: str = "float", apart: str = "") -> Call:
        """This package's kernel with every layer's threshold set for `sparsity` (0: threshold 0)."""
        count, activation = len(self.layers), self.activation
        thresholds = [self.threshold(i, sparsity) for i in range(count)]
        inputs = [self.input_threshold(i) for i in range(count)]
        made = [self._weights(i, weights, apart) for i in range(count)]
        if (
            (self.indicator == "gate" or (self.indicator == "screen" and sparsity == 0))
            and not self.input_sparsity
            and weights == "float"
        ):  # nothing more to pass

            def plain(i: int, x: Tensor) -> Tensor:
                return sparsemlp.gated_mlp(
                    x, *made[i][0], threshold=thresholds[i], activation=activation, backend=backend
                )

            return plain

        screens = [{} for _ in range(count)]
        if self.indicator == "screen" and sparsity > 0:
            names = "screen_gate", "screen_up"
            screens = [dict(zip(names, self.screens(i), strict=True)) for i in range(count)]
        indicator = "gate" if self.indicator == "screen" and sparsity == 0 else self.indicator

        def call(i: int, x: Tensor) -> Tensor:
            matrices, scales = made[i]
            return sparsemlp.gated_mlp(
                x,
                *matrices,
                threshold=thresholds[i],
                activation=activation,
                indicator=indicator,
                input_threshold=inputs[i],
                backend=backend,
                **scales,
                **screens[i],
            )

        return call

    def input_threshold(self, i: int) -> Tensor | None:
        """The gate's input threshold, the exact quantile of |x| over the calibration x's; None without one."""
        if not self.input_sparsity:
            return None
        ordered = self._calibration_input(i).float().abs().flatten().sort().values
        return threshold_at(ordered, self.input_sparsity)

    def channels(self, i: int, x: Tensor) -> Tensor | None:
        """The channels of x that the gate reads; None without input sparsity."""
        limit = self.input_threshold(i)
        return None if limit is None else ~(x.float().abs() < limit) & (x != 0)

    def compared(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """|a|, |u|, |a·u| or the screen's scores of layer i in float32, and a ≠ 0."""
        read = self.channels(i, x)
        layer = self.layers[i]
        a = activations.apply(
            self._product(x if read is None else torch.where(read, x, 0), layer.w_gate), self.activation
        )
        if self.indicator == "gate":
            return a.abs(), a != 0
        if self.indicator == "screen":
            found = scores(x, *self.screens(i), self.shape.f, None, None, None, self.activation)
            return found.abs(), a != 0
        u = self._product(x, layer.w_up)
        return (u if self.indicator == "up" else a * u).abs(), a != 0
