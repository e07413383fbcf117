"""One kernel launch as a value: it can be run, and, made from meta tensors, compiled for a GPU that is not here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsemlp import _triton

__all__ = ["DTYPE_NAMES", "FP_FUSION", "Launch", "run", "upcast_dot"]

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""The dtypes that kernels compute, as configurations name them."""

FP_FUSION = True
"""a·b + c in one rounding; passed to every launch, because Triton's default changes between versions."""
_HIP = torch.version.hip is not None


@dataclass(frozen=True)
class Launch:
    """One launch.

    Args:
        kernel: a `triton.jit` function.
        grid: its programs.
        args: its runtime arguments in order: tensors, integers and None.
        constants: its constexpr arguments by name.
        num_warps, num_stages: as Triton has them.
        fp_fusion: `FP_FUSION`, or False where bits must be those of two roundings.
        on_amd: of `constants` those that are others on AMD's GPUs.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Tensor | int | None, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = FP_FUSION
    on_amd: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def arguments(self) -> dict[str, Tensor | int | None]:
        """`args` by name."""
        names = [name for name in inspect.signature(self.kernel.fn).parameters if name not in self.constants]
        return dict(zip(names, self.args, strict=True))

    def constants_for(self, backend: str) -> dict[str, Any]:
        """The constants on Triton's backend "cuda" or "hip"."""
        return {**self.constants, **self.on_amd} if backend == "hip" else self.constants

    def __call__(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            *self.args,
            **self.constants_for("hip" if _HIP else "cuda"),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=self.fp_fusion,
        )


def run(launches: Iterable[Launch]) -> None:
    """Runs them in order, on the current stream of the GPU that holds their tensors."""
    todo = list(launches)
    if not todo:
        return
    device = next(a.device for a in todo[0].args if isinstance(a, Tensor))
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        for launch in todo:
            launch()
        return
    with torch.cuda.device(device):
        for launch in todo:
            launch()


def upcast_dot(dtype: torch.dtype) -> bool:
    """Whether `tl.dot` operands must be widened first: Triton's interpreter returns garbage for bfloat16 ones."""
    return dtype == torch.bfloat16 and _triton.interpreting()
