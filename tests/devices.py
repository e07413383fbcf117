"""Where a backend's tensors must be, and how they get there."""

from __future__ import annotations

from torch import Tensor

from sparsemlp import _triton


def device_of(backend: str) -> str:
    """Where a backend's tensors must be in this process."""
    return "cuda" if backend == "triton" and not _triton.interpreting() else "cpu"


def on(device: str, t: Tensor) -> Tensor:
    """t on a device with its strides and everything around it in its storage."""
    if t.device.type == device:
        return t
    whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())
