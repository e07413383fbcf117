"""Tensors as kernels read them; elementwise ones as one run of memory, whatever the order of their dimensions.

What `dense`, `laid_out_like`, `float32_run` and `in_memory` give is not lazy: a negation that PyTorch has put off is
done, and its zero tensor without memory gets some.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "contiguous",
    "dense",
    "float32_run",
    "has_columns",
    "has_rows",
    "in_memory",
    "laid_out_like",
    "with_rows",
]


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


def contiguous(t: Tensor | None) -> Tensor | None:
    """t contiguous; None stays."""
    return None if t is None else t.contiguous()


def with_rows(x: Tensor) -> Tensor:
    """x (T, D) with every row in consecutive memory, copied where they are not."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def has_rows(w: Tensor) -> bool:
    """Whether a row of w lies in consecutive memory."""
    return w.stride(1) == 1 or w.shape[1] <= 1 or w.shape[0] == 0


def has_columns(w: Tensor) -> bool:
    """Whether a column of w lies in consecutive memory."""
    return w.stride(0) == 1 or w.shape[0] <= 1 or w.shape[1] == 0
