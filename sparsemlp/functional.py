"""Operators as `torch.autograd.Function`: the eager spelling of their derivative, without the dispatcher's layers.

`ActivationFunction.apply(p, params, name, backend)` computes what `sparsemlp.activation` does. Of its arguments, only
what could make a kernel read beyond its tensors is checked, and it has no derivative in params: a backward pass where
they require grad raises. Prefer that function, which also works in compiled graphs, under autocast, in `torch.func`.
"""

from __future__ import annotations

from sparsemlp.ops.activation import OP

__all__ = ["ActivationFunction"]

ActivationFunction = OP.function()
