"""The activation's reference: plain PyTorch, any floating dtype; the `differentiable` ones can be traced."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import activations
from sparsemlp.activations import wide

__all__ = [
    "activation", "activation_bwd", "activation_counts", "check", "check_bwd", "counts_of", "differentiable",
    "differentiable_bwd",
]  # fmt: skip


def _fresh(result: Tensor, p: Tensor) -> Tensor:
    """`result` as the operators return it: not p itself, with the strides of `torch.empty_like(p)`."""
    if result is not p and p.is_contiguous() and result.stride() == p.stride():
        return result
    return torch.empty_like(p).copy_(result)


def check(p: Tensor, params: Tensor | None, name: str) -> None:
    """What every backend asks of the operator's arguments: a known row, and as many parameters as it has."""
    names = activations.get(name, "name").params
    if params is None and not names:
        return
    wanted = f"a float32 tensor of shape ({len(names)},): ({', '.join(names)})" if names else "None"
    if not isinstance(params, Tensor) or tuple(params.shape) != (len(names),) or not names:
        what = f"shape {tuple(params.shape)}" if isinstance(params, Tensor) else type(params).__name__
        raise ValueError(f"params is {what}, expected {wanted} for activation {name!r}; pass that")
    if params.layout != torch.strided:
        raise ValueError(f"params has layout {params.layout}, expected torch.strided; call params.to_dense()")
    if params.dtype not in (torch.float32, torch.float64) or params.device != p.device:
        raise ValueError(
            f"params is {_dtype(params)} on {params.device}, expected float32 on p's device {p.device}; convert it"
        )


def check_bwd(grad: Tensor, p: Tensor, params: Tensor | None, name: str) -> None:
    """`check`, and that grad is one for p."""
    check(p, params, name)
    if grad.shape != p.shape:
        raise ValueError(f"grad has shape {tuple(grad.shape)}, expected p's, {tuple(p.shape)}; expand it")
    if grad.dtype != p.dtype or grad.device != p.device:
        raise ValueError(
            f"grad is {_dtype(grad)} on {grad.device}, expected p's {_dtype(p)} on {p.device}; convert it"
        )


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def activation(p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """φ(p), rounded once to p's dtype."""
    check(p, params, name)
    return _fresh(activations.apply(p, name, params), p)


def counts_of(out: Tensor, p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """(2,) int64: the entries of `out` and those of φ'(p), unrounded, that are not 0; NaN is not 0."""
    slope = activations.apply(wide(p), name, params, derivative=True)
    return torch.stack([(out != 0).sum(), (slope != 0).sum()])


def activation_counts(p: Tensor, params: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """`activation`, and `counts_of` it."""
    out = activation(p, params, name)
    return out, counts_of(out, p, params, name)


def activation_bwd(grad: Tensor, p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """grad · φ'(p), rounded once to p's dtype, and 0 where φ'(p) is 0, whatever grad is."""
    check_bwd(grad, p, params, name)
    slope = activations.apply(wide(p), name, params, derivative=True)
    product = torch.where(slope == 0, 0, wide(grad) * slope)
    return _fresh(product.to(p.dtype), p)


def differentiable(p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """φ(p) as a composition that PyTorch differentiates, in p and in the parameters, any number of times."""
    out = activations.apply(p, name, params)
    return out.clone() if out is p else out


def differentiable_bwd(grad: Tensor, p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """`activation_bwd` as a composition that PyTorch differentiates in grad and p."""
    slope = activations.apply(wide(p), name, params, derivative=True)
    wide_grad = wide(grad)
    # At φ'(p) = 0 the product is 0 and φ''(p) must still be seen; only a grad that is not finite would make it NaN.
    kept = torch.where((slope == 0) & ~wide_grad.isfinite(), 0, wide_grad)
    return (kept * slope).to(p.dtype)
