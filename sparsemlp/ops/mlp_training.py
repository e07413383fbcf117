"""`mlp_fwd` and `mlp_bwd`: the ungated MLP with a derivative that leaves out what has derivative 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp._op import Op, differentiates, transformed
from sparsemlp.ops._backends import compiled_and_triton
from sparsemlp.reference import mlp
from sparsemlp.reference import training as reference
from sparsemlp.reference.training import WANTED, names_of

__all__ = [
    "BACKWARD",
    "FORWARD",
    "batched",
    "check_params",
    "composed",
    "empty_gradient",
    "is_small",
    "layer",
    "needs_composition",
    "summed",
]

_FEW_TOKENS = 64
_SMALL = 2**28
"""T·D·F below which an operator's cost in autograd (0.3 ms a forward and backward pass) may be more than it saves."""

_LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "identity": lambda p: p,
}
"""PyTorch's own layers that round once in every dtype."""

_HINT = "differentiate sparsemlp.mlp with create_graph=True"


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    *tensors, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(output[1], *tensors)


def _derive(ctx: Any, grad: Tensor | None, *unused: object) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    pre, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    check_params(needs[9], "mlp")
    if differentiates(grad, *tensors) or batched(grad):
        return *composed(_composition, tensors, needs, grad, ctx.activation), None, None
    x, w_in, w_out_t, threshold, token_scale, mean, skipped_out, _, b_out, params = tensors
    asked = dict(zip(WANTED, (needs[0], needs[1], needs[2], needs[7], needs[5]), strict=True))
    wanted = ",".join(name for name in WANTED if asked[name])
    found = (None,) * len(WANTED) if not wanted else BACKWARD(
        grad, x, w_in, w_out_t, pre, threshold, token_scale, mean, params, ctx.activation, wanted, backend=ctx.backend
    )  # fmt: skip
    grad_x, grad_w_in, grad_w_out_t, grad_b_in, grad_mean = (
        g if asked[name] else None for name, g in zip(WANTED, found, strict=True)
    )
    return (
        grad_x, grad_w_in, grad_w_out_t, None, None, grad_mean, summed(grad, skipped_out if needs[6] else None),
        grad_b_in, summed(grad, b_out if needs[8] else None), None, None, None,
    )  # fmt: skip


def _composition(tensors: Sequence[Any], activation: str) -> Tensor:
    """The same values of the operator's tensors, by operations that autograd sees through."""
    *first, params = tensors
    composed: tuple[Any, ...] = (*first, None, None, params, activation)
    return mlp.differentiable(*composed)


def is_small(tokens: int, w: Tensor) -> bool:
    """Whether a call with a weight (F, D) is left to PyTorch's own layers, whose autograd is C++."""
    return tokens < _FEW_TOKENS or tokens * w.numel() < _SMALL


def layer(
    threshold: Tensor, means: Sequence[Tensor | None], activation: str
) -> Callable[[Tensor], Tensor] | None:
    """φ as PyTorch's own layer where the MLP is dense: at threshold 0, whose value is looked at, without any means."""
    if any(mean is not None for mean in means) or threshold.dim() != 0:
        return None
    if (
        torch.compiler.is_compiling()
        or type(threshold) is not Tensor  # a fake one has no value
        or threshold.device.type != "cpu"
        or transformed()
        or threshold.item() != 0
    ):
        return None
    return _LAYERS.get(activation)


def needs_composition(w: Tensor, params: Tensor | None) -> bool:
    """Whether only a composition of PyTorch's operations has the derivative that is asked for."""
    if w.dtype == torch.int8 or (params is not None and params.requires_grad):
        return True
    return not torch.compiler.is_compiling() and transformed()


def check_params(requires_grad: bool, function: str) -> None:
    """Raises where the operator would silently drop a gradient."""
    if requires_grad:
        raise ValueError(
            "activation_params requires grad, expected one that does not: the operator has no derivative in it; use "
            f"sparsemlp.{function}, or detach it"
        )


def batched(grad: Tensor) -> bool:
    """Whether the vmap of `torch.autograd.grad`, which is not the one of `torch.func`, sees this call."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad)


def composed(
    composition: Callable[..., Tensor],
    tensors: Sequence[Any],
    needs: Sequence[bool],
    grad: Tensor,
    *names: str,
) -> list[Tensor | None]:
    """∂ℓ/∂ of each tensor that needs one, differentiable once more; for second derivatives."""
    wanted, again = [t for t, need in zip(tensors, needs, strict=False) if need], torch.is_grad_enabled()
    with torch.enable_grad():
        out = composition(tensors, *names)
        found = torch.autograd.grad(out, wanted, grad, create_graph=again, allow_unused=True)
    by_tensor = iter(found)
    return [next(by_tensor) if need else None for _, need in zip(tensors, needs, strict=False)]


def summed(grad: Tensor, like: Tensor | None) -> Tensor | None:
    """∂ℓ/∂y over tokens, the gradient of what is added to every token's output; None for None."""
    return None if like is None else grad.sum(dim=0, dtype=like.dtype)


FORWARD = Op(
    "mlp_fwd",
    "Tensor x, Tensor w_in, Tensor w_out_t, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, "
    "Tensor? skipped_out, Tensor? b_in, Tensor? b_out, Tensor? activation_params, str activation",
    returns="(Tensor, Tensor)",
    fake=lambda x, w_in, *args: (x.new_empty(x.shape), x.new_empty((x.shape[0], w_in.shape[0]))),
    reference=reference.mlp_fwd,
    backends=compiled_and_triton("training", "x", "w_in", function="mlp_fwd"),
    castable=(0, 1, 2, 7, 8),
    derivative=(_save, _derive),
)


def _fake_bwd(grad: Tensor, x: Tensor, w_in: Tensor, w_out_t: Tensor, *args: Any) -> tuple[Tensor, ...]:
    names = names_of(args[-1])
    f, d = w_in.shape
    shapes = {"x": x.shape, "w_in": (f, d), "w_out_t": (f, d), "b_in": (f,), "skipped_mean": (f,)}
    return tuple(empty_gradient(x, args[3], name, shapes[name] if name in names else (0,)) for name in WANTED)


def empty_gradient(x: Tensor, mean: Tensor | None, name: str, shape: Any) -> Tensor:
    """Where a backward's gradient goes: of x's dtype, but means have their own."""
    if name != "skipped_mean":
        return x.new_empty(shape)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(shape, dtype=wide if mean is None else mean.dtype)


BACKWARD = Op(
    "mlp_bwd",
    "Tensor grad, Tensor x, Tensor w_in, Tensor w_out_t, Tensor pre, Tensor threshold, Tensor? token_scale, "
    "Tensor? skipped_mean, Tensor? activation_params, str activation, str wanted",
    returns=f"({', '.join(['Tensor'] * len(WANTED))})",
    fake=_fake_bwd,
    reference=reference.mlp_bwd,
    backends=compiled_and_triton("training", "grad", "x", function="mlp_bwd"),
    castable=(),
    derivative_hint=_HINT,
)
