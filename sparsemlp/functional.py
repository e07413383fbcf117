"""Operators as `torch.autograd.Function`: the eager spelling of their derivative, without the dispatcher's layers.

`ActivationFunction.apply(p, params, name, backend)` computes what `sparsemlp.activation` does, from arguments that
nothing checks; prefer that function, which also works in compiled graphs, under autocast and in `torch.func`.
"""

from __future__ import annotations

from sparsemlp.ops.activation import OP

__all__ = ["ActivationFunction"]

ActivationFunction = OP.function()
