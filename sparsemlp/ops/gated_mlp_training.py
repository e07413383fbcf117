"""`gated_mlp_fwd` and `gated_mlp_bwd`: the gated MLP with a derivative that leaves out what has derivative 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparsemlp._op import Op, differentiates
from sparsemlp.ops._backends import compiled_and_triton
from sparsemlp.ops.mlp_training import batched, check_params, composed, empty_gradient, summed
from sparsemlp.reference import gated_mlp
from sparsemlp.reference import training as reference
from sparsemlp.reference.training import GATED_WANTED, names_of

__all__ = ["BACKWARD", "FORWARD"]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    *tensors, ctx.activation, ctx.indicator, ctx.backend = inputs
    ctx.save_for_backward(*output[1:], *tensors)


def _derive(ctx: Any, grad: Tensor | None, *unused: object) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 15
    pre, up, *tensors = ctx.saved_tensors
    needs, names = ctx.needs_input_grad, (ctx.activation, ctx.indicator)
    check_params(needs[11], "gated_mlp")
    if differentiates(grad, *tensors) or batched(grad):
        return *composed(_composition, tensors, needs, grad, *names), None, None, None
    (
        x, w_gate, w_up, w_down_t, threshold, token_scale, mean, skipped_out, _, _, b_down, params,
    ) = tensors  # fmt: skip
    asked = dict(zip(GATED_WANTED, (*needs[:4], needs[8], needs[9], needs[6]), strict=True))
    wanted = ",".join(name for name in GATED_WANTED if asked[name])
    found = (None,) * len(GATED_WANTED) if not wanted else BACKWARD(
        grad, x, w_gate, w_up, w_down_t, pre, up, threshold, token_scale, mean, params, *names, wanted,
        backend=ctx.backend,
    )  # fmt: skip
    *weights, grad_b_gate, grad_b_up, grad_mean = (
        g if asked[name] else None for name, g in zip(GATED_WANTED, found, strict=True)
    )
    return (
        *weights, None, None, grad_mean, summed(grad, skipped_out if needs[7] else None), grad_b_gate, grad_b_up,
        summed(grad, b_down if needs[10] else None), None, None, None, None,
    )  # fmt: skip


def _composition(tensors: Sequence[Any], activation: str, indicator: str) -> Tensor:
    """The same values of the operator's tensors, by operations that autograd sees through."""
    *first, params = tensors
    composed: tuple[Any, ...] = (*first[:5], None, *first[5:], *[None] * 7, params, activation, indicator)
    return gated_mlp.differentiable(*composed)


FORWARD = Op(
    "gated_mlp_fwd",
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, Tensor? token_scale, "
    "Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
    "Tensor? activation_params, str activation, str indicator",
    returns="(Tensor, Tensor, Tensor)",
    fake=lambda x, w, *args: (
        x.new_empty(x.shape),
        *(x.new_empty((x.shape[0], w.shape[0])) for _ in range(2)),
    ),
    reference=reference.gated_mlp_fwd,
    backends=compiled_and_triton("training", "x", "w_gate", function="gated_mlp_fwd"),
    castable=(0, 1, 2, 3, 8, 9, 10),
    derivative=(_save, _derive),
)


def _fake_bwd(grad: Tensor, x: Tensor, w_gate: Tensor, *args: Any) -> tuple[Tensor, ...]:
    names, mean = names_of(args[-1]), args[6]
    f, d = w_gate.shape
    shapes = {"x": x.shape, "w_gate": (f, d), "w_up": (f, d), "w_down_t": (f, d)}
    return tuple(
        empty_gradient(x, mean, name, shapes.get(name, (f,)) if name in names else (0,))
        for name in GATED_WANTED
    )


BACKWARD = Op(
    "gated_mlp_bwd",
    "Tensor grad, Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor pre, Tensor up, Tensor threshold, "
    "Tensor? token_scale, Tensor? skipped_mean, Tensor? activation_params, str activation, str indicator, str wanted",
    returns=f"({', '.join(['Tensor'] * len(GATED_WANTED))})",
    fake=_fake_bwd,
    reference=reference.gated_mlp_bwd,
    backends=compiled_and_triton("training", "grad", "x", function="gated_mlp_bwd"),
    castable=(),
    derivative_hint="differentiate sparsemlp.gated_mlp with create_graph=True",
)
