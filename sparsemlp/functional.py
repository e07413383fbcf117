"""Operators as `torch.autograd.Function`: the eager spelling of their derivative, without the dispatcher's layers.

`ActivationFunction.apply(p, params, name, backend)` computes what `sparsemlp.activation` does. Of its arguments, only
what could make a kernel read beyond its tensors is checked, and it has no derivative in params: a backward pass where
they require grad raises. Prefer that function, which also works in compiled graphs, under autocast, in `torch.func`.

`MLPFunction.apply(x, w_in, w_out_t, threshold, token_scale, skipped_mean, skipped_out, b_in, b_out, activation_params,
activation, backend)` returns y of `sparsemlp.mlp` and the p that its backward decides from; `GatedMLPFunction.apply(x,
w_gate, w_up, w_down_t, threshold, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down, activation_params,
activation, indicator, backend)` y of `sparsemlp.gated_mlp`, p and u. x is (T, D), threshold a tensor, and with
skipped_mean comes skipped_out. Every call runs the training operators, small ones too; the same is checked, and prefer
those functions for the same reasons. p and u have no derivative, and there is none in activation_params (as above).
"""

from __future__ import annotations

from sparsemlp.ops.activation import OP
from sparsemlp.ops.gated_mlp_training import FORWARD as GATED_MLP
from sparsemlp.ops.mlp_training import FORWARD as MLP

__all__ = ["ActivationFunction", "GatedMLPFunction", "MLPFunction"]

ActivationFunction = OP.function("ActivationFunction")
GatedMLPFunction = GATED_MLP.function("GatedMLPFunction")
MLPFunction = MLP.function("MLPFunction")
