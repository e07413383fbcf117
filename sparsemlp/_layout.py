"""Tensors as kernels read them; elementwise ones as one run of memory, whatever the order of their dimensions.

None of these is lazy: a negation that PyTorch has put off is done, and its zero tensor without memory gets some.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense", "float32_run", "in_memory", "laid_out_like"]


def dense(t: Tensor) -> Tensor:
    """t itself where its entries fill their memory without gaps or overlaps, else a copy laid out as `empty_like`."""
    t = in_memory(t)
    if t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride():
        return t
    return torch.empty_like(t).copy_(t)


def laid_out_like(t: Tensor, model: Tensor) -> Tensor:
    """t with the strides of the dense `model` of its shape, copied where it has others."""
    t = in_memory(t)
    if t.stride() == model.stride() or (t.is_contiguous() and model.is_contiguous()):
        return t
    return torch.empty_like(model, dtype=t.dtype).copy_(t)


def float32_run(t: Tensor | None) -> Tensor | None:
    """t as contiguous float32; None stays."""
    return None if t is None else in_memory(t).float().contiguous()


def in_memory(t: Tensor) -> Tensor:
    """t with its entries in its memory as they are."""
    return t.clone() if t._is_zerotensor() else t.resolve_neg()
