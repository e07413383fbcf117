"""Predicates that backends share. Each returns the reason why not, in words, or None."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["dtype_not_in"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_not_in(tensor: Tensor, allowed: Iterable[torch.dtype], what: str = "x") -> str | None:
    """The tensor's dtype is not one the backend computes."""
    allowed = tuple(allowed)
    if tensor.dtype in allowed:
        return None
    return f"computes {', '.join(map(_name, allowed))}, {what} is {_name(tensor.dtype)}"
