"""Plain eager calls that go to a compiled kernel past the public function's checks and PyTorch's dispatcher.

The kernels check what they need; every helper here is called once a call and costs 0.1 µs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import _native
from sparsemlp._op import PLAIN_TENSORS, is_plain_eager

__all__ = ["allowed", "takes"]


def allowed() -> bool:
    """Whether nothing but the tensors themselves may want the long way: no tracing, mode, transform or autocast."""
    return not torch.compiler.is_compiling() and _native.problem() is None and is_plain_eager("cpu")


def takes(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the first and all others that are given are plain tensors of which none needs a gradient."""
    if tensors[0] is None:
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:  # noqa: SIM110, a loop costs half of what all() does
        if t is not None and (type(t) not in PLAIN_TENSORS or (grad and t.requires_grad)):
            return False
    return True
