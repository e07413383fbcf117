"""Launches the compiled activation kernels: forward, forward with counts, backward."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import dense, float32_run, laid_out_like
from sparsemlp.ops import _direct
from sparsemlp.reference.activation import check, check_bwd

__all__ = ["backward", "counted", "direct", "forward"]

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define("_activation_native(Tensor p, Tensor? params, int activation, int isa) -> Tensor")
_lib.define(
    "_activation_counts_native(Tensor p, Tensor? params, int activation, int isa) -> (Tensor, Tensor)"
)
_lib.define(
    "_activation_bwd_native(Tensor grad, Tensor p, Tensor? params, int activation, int isa) -> Tensor"
)
_forward = torch.ops.sparsemlp._activation_native.default
_counted = torch.ops.sparsemlp._activation_counts_native.default
_backward = torch.ops.sparsemlp._activation_bwd_native.default


def direct(p: Tensor, params: Tensor | None, name: str) -> Tensor | None:
    """The kernel for a plain eager call on unchecked arguments that needs no gradient and no copy; None: not so.

    The kernel checks what it needs itself; the public function's checks are then only for naming what is wrong.
    """
    number = activations.IDS.get(name) if type(name) is str else None
    if number is None or not _direct.allowed() or not _direct.takes((p, params)):
        return None
    if not p.is_contiguous() or p.is_neg() or (params is not None and params.dim() != 1):
        return None
    try:
        return _forward(p, params, number, _native.isa())
    except RuntimeError:
        return None


def forward(p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """The operator's arguments in order."""
    check(p, params, name)
    return _forward(dense(p), float32_run(params), activations.IDS[name], _native.isa())


def counted(p: Tensor, params: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The same, and the counts."""
    check(p, params, name)
    return _counted(dense(p), float32_run(params), activations.IDS[name], _native.isa())


def backward(grad: Tensor, p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """The backward operator's arguments in order."""
    check_bwd(grad, p, params, name)
    p = dense(p)
    return _backward(laid_out_like(grad, p), p, float32_run(params), activations.IDS[name], _native.isa())
