"""Tensors as elementwise kernels walk them: as one run of memory, whatever the order of their dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense", "laid_out_like"]


def dense(t: Tensor) -> Tensor:
    """t itself where its entries fill their memory without gaps or overlaps, else a copy laid out as `empty_like`."""
    if t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride():
        return t.resolve_neg()
    return torch.empty_like(t).copy_(t)


def laid_out_like(t: Tensor, model: Tensor) -> Tensor:
    """t with the strides of the dense `model` of its shape, copied where it has others."""
    if t.stride() == model.stride() or (t.is_contiguous() and model.is_contiguous()):
        return t.resolve_neg()
    return torch.empty_like(model, dtype=t.dtype).copy_(t)
