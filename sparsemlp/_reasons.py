"""Predicates that backends share. Each returns the reason why not, in words, or None."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["dtype_not_in", "subclass"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_not_in(tensor: Tensor, allowed: Iterable[torch.dtype]) -> str | None:
    """x's dtype is not one the backend computes."""
    allowed = tuple(allowed)
    if tensor.dtype in allowed:
        return None
    return f"computes {', '.join(map(_name, allowed))}, x is {_name(tensor.dtype)}"


def subclass(tensors: Iterable[Tensor | None]) -> str | None:
    """A tensor subclass (quantised, distributed …) whose memory a kernel must not read as plain numbers."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"needs plain tensors, got {type(tensor).__name__}"
    return None
