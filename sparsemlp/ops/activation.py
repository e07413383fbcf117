"""`activation`: φ(p) for every row of the activation table, in one pass each way, with counts of what is not zero."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparsemlp._op import Op, differentiates, transformed
from sparsemlp.ops import _activation_native as native
from sparsemlp.ops._backends import DTYPES, compiled_and_triton
from sparsemlp.ops._checks import dtype_text
from sparsemlp.reference import activation as reference

__all__ = ["BACKWARD", "COUNTED", "OP", "activation"]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    p, params, ctx.name, ctx.backend = inputs
    ctx.save_for_backward(p, params)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def _derive(ctx: Any, grad: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
    p, params = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        raise ValueError(
            "params requires grad, expected one that does not: the operator has no derivative in params; "
            "call sparsemlp.activation with backend='auto', or use params.detach()"
        )
    # create_graph: the result will be differentiated again; is_grads_batched: grad is many, without memory of its own
    if differentiates(grad, p) or _batched(grad):
        return reference.differentiable_bwd(grad, p, params, ctx.name), None, None, None
    return BACKWARD(grad, p, params, ctx.name, backend=ctx.backend), None, None, None


def _batched(grad: Tensor) -> bool:
    """Whether the vmap of `torch.autograd.grad`, which is not the one of `torch.func`, sees this call."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad)


OP = Op(
    "activation",
    "Tensor p, Tensor? params, str name",
    fake=lambda p, *args: torch.empty_like(p),
    reference=reference.activation,
    backends=compiled_and_triton("activation", "p"),
    castable=(),
    derivative=(_save, _derive),
)

COUNTED = Op(
    "activation_counts",
    "Tensor p, Tensor? params, str name",
    returns="(Tensor, Tensor)",
    fake=lambda p, *args: (torch.empty_like(p), p.new_empty((2,), dtype=torch.int64)),
    reference=reference.activation_counts,
    backends=compiled_and_triton("activation", "p", function="counted"),
    castable=(),
    derivative=(_save, _derive),
)

BACKWARD = Op(
    "activation_bwd",
    "Tensor grad, Tensor p, Tensor? params, str name",
    fake=lambda grad, p, *args: torch.empty_like(p),
    reference=reference.activation_bwd,
    backends=compiled_and_triton("activation", "p", function="backward"),
    castable=(),
    derivative_hint="differentiate sparsemlp.activation with create_graph=True",
)


@overload
def activation(
    p: Tensor, name: str, *, params: Tensor | None = ..., counts: Literal[False] = ..., backend: str = ...
) -> Tensor: ...
@overload
def activation(
    p: Tensor, name: str, *, params: Tensor | None = ..., counts: bool, backend: str = ...
) -> Any: ...
def activation(
    p: Tensor, name: str, *, params: Tensor | None = None, counts: bool = False, backend: str = "auto"
) -> Any:
    """φ(p), read and written once, and on request how much of φ(p) and φ'(p) is not zero.

    Equivalent to::

        out = sparsemlp.activations.apply(p, name, params)
        slope = sparsemlp.activations.apply(p.float(), name, params, derivative=True)
        counts = torch.stack([(out != 0).sum(), (slope != 0).sum()])

    Args:
        p: any shape and strides, float32, bfloat16, float16 or float64.
        name: a row of `sparsemlp.activations.ACTIVATIONS`.
        params: (n,) float32 on p's device, the row's parameters in its order; None for a row without parameters. Its
            values may change from call to call without compiling again.
        counts: also return the counts.
        backend: "auto", "native" (compiled CPU kernels), "triton" (GPUs) or "reference". An explicit one never falls
            back.

    Returns:
        φ(p) of p's shape and dtype, fresh memory, the strides of `torch.empty_like(p)`; with counts a pair of it and
        an int64 tensor (2,) on p's device: how many entries of the output, as stored, are not 0, and at how many φ'(p)
        is not 0. NaN counts as not 0.

    Gradients: in p, one pass over grad and p, which is all that is kept. Where φ'(p) is 0 the gradient is 0, whatever
        grad is. With create_graph=True, under `torch.func` transforms and forward-mode differentiation, and where
        params require grad (they then get one), a differentiable PyTorch composition is used; of these the last two
        need backend "auto" or "reference". Counts have no derivative.
    Raises:
        ValueError: p or params of the wrong kind, dtype, shape or device, or an unknown name or backend.
        BackendUnavailableError: the backend named cannot compute this call.
    Numerics: float32 inside (float64 for float64), rounded once. A p that is neither contiguous nor a permutation of a
        contiguous tensor is copied first. Autocast changes nothing. Bits do not depend on the number of threads.
    Source: docs/ops/activation.md has the table with its papers.
    """
    if backend in ("auto", "native") and not counts:
        done = native.direct(p, params, name)
        if done is not None:
            return done
    OP.check_backend(backend)
    _check(p, name, params)
    if (not torch.compiler.is_compiling() and transformed()) or differentiates(params):
        if backend not in ("auto", "reference"):
            raise ValueError(
                f"backend is {backend!r}, which has no derivative in params and none under torch.func transforms, "
                "expected 'auto' or 'reference' for this call; use backend='auto', or params.detach()"
            )
        out = reference.differentiable(p, params, name)
        if not counts:
            return out
        return out, reference.counts_of(
            out.detach(), p.detach(), None if params is None else params.detach(), name
        )
    return (COUNTED if counts else OP)(p, params, name, backend=backend)


def _check(p: Tensor, name: str, params: Tensor | None) -> None:
    if not isinstance(p, Tensor):
        raise ValueError(f"p is {type(p).__name__}, expected a tensor; convert it with torch.as_tensor")
    if p.dtype not in DTYPES and p.dtype != torch.float64:
        raise ValueError(f"p is {dtype_text(p)}, expected float32, bfloat16, float16 or float64; convert it")
    if p.layout != torch.strided:
        raise ValueError(f"p has layout {p.layout}, expected torch.strided; call p.to_dense()")
    reference.check(p, params, name)
