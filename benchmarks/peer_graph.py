"""A dense layer described once, for peers that build graphs of their own."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

__all__ = ["ACTIVATIONS", "Builder", "layer"]

ACTIVATIONS = ("silu", "relu", "gelu", "identity")
"""What the builders know."""


class Builder(Protocol):
    """The operations of a library's graph; nodes are whatever the library calls them."""

    def linear(self, x: Any, weight: Tensor, bias: Tensor | None) -> Any:
        """x @ weight.T + bias, weight (outputs, inputs)."""

    def act(self, name: str, x: Any) -> Any:
        """An elementwise activation of `ACTIVATIONS`."""

    def mul(self, a: Any, b: Any) -> Any:
        """a · b, elementwise."""


def layer(builder: Builder, op: str, activation: str, x: Any, weights: tuple[Tensor, ...]) -> Any:
    """The node of a dense layer's output; `weights` as `benchmarks.registry.Entry.weights` has them."""
    if op == "gated_mlp":
        gate, up, down = weights
        a = builder.act(activation, builder.linear(x, gate, None))
        return builder.linear(builder.mul(a, builder.linear(x, up, None)), down, None)
    if op == "mlp":
        w_in, b_in, w_out, b_out = weights
        return builder.linear(builder.act(activation, builder.linear(x, w_in, b_in)), w_out, b_out)
    (weight,) = weights
    return builder.linear(x, weight, None)
