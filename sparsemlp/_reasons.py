"""Why not, in words: predicates that backends share, each a reason or None, and a wrong value as messages show it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["dtype_not_in", "spelled"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_not_in(tensor: Tensor, allowed: Iterable[torch.dtype], what: str = "x") -> str | None:
    """The tensor's dtype is not one the backend computes."""
    allowed = tuple(allowed)
    if tensor.dtype in allowed:
        return None
    return f"computes {', '.join(map(_name, allowed))}, {what} is {_name(tensor.dtype)}"


def spelled(value: object) -> str:
    """A value given for a name, in a message; of a tensor its type, whose repr fills lines."""
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)
