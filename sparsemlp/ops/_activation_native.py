"""Launches the compiled activation kernels: forward, forward with counts, backward."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import dense, laid_out_like

__all__ = ["backward", "counted", "forward"]

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


def _float32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float().contiguous()


def forward(p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """The operator's arguments in order."""
    return _forward(dense(p), _float32(params), activations.IDS[name], _native.isa())


def counted(p: Tensor, params: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The same, and the counts."""
    return _counted(dense(p), _float32(params), activations.IDS[name], _native.isa())


def backward(grad: Tensor, p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """The backward operator's arguments in order."""
    p = dense(p)
    return _backward(laid_out_like(grad, p), p, _float32(params), activations.IDS[name], _native.isa())
