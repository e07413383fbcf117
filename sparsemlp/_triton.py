"""Whether Triton kernels can run here, asked without importing Triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["DEVICES", "cpu_only_interpreted", "interpreting", "problem"]

DEVICES = ("cuda", "cpu")
"""CPU tensors: only in Triton's interpreter, which is for tests."""


def problem() -> str | None:
    """Why no Triton kernel can run here, as a sentence, or None."""
    return _not_installed() or (None if interpreting() else _no_gpu())


@functools.cache
def _not_installed() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed; CUDA and ROCm builds of PyTorch bring it, elsewhere: pip install triton"
        )
    return None


@functools.cache
def _no_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    return "no GPU is visible to PyTorch (CPU tensors: only in Triton's interpreter, TRITON_INTERPRET=1)"


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before their first use)."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def cpu_only_interpreted(x: Tensor) -> str | None:
    """x is on the CPU, and nothing interprets."""
    if x.device.type == "cpu" and not interpreting():
        return (
            "computes on cuda, the tensors are on cpu (in Triton's interpreter they may: TRITON_INTERPRET=1)"
        )
    return None
