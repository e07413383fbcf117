"""The two backends of every operator, compiled CPU kernels and Triton, and the reasons that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsemlp import _native, _reasons, _triton
from sparsemlp._op import Backend

__all__ = ["DTYPES", "compiled_and_triton"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels compute."""


def compiled_and_triton(
    op: str,
    *names: str,
    function: str = "forward",
    further: Callable[..., str | None] = lambda *args: None,
) -> tuple[Backend, Backend]:
    """The backends "native" and "triton", in the order in which `auto` asks them.

    Args:
        op: the operator's name in the tree: its launchers are `ops/_<op>_native.py` and `kernels/<op>.py`.
        names: what the operator's first tensors are called; of these the first must be of one of `DTYPES`, for the
            Triton kernels all.
        function: the launchers' function.
        further: another reason against a call, asked last; called with the arguments, of which there may be only the
            first.
    """

    def native(*args: Any) -> str | None:
        return _reasons.dtype_not_in(args[0], DTYPES, names[0]) or further(*args)

    def triton(*args: Any) -> str | None:
        reason = _triton.cpu_only_interpreted(args[0])
        for tensor, name in zip(args, names):  # noqa: B905, there may be fewer arguments
            reason = reason or _reasons.dtype_not_in(tensor, DTYPES, name)
        return reason or further(*args)

    compiled = Backend(
        "native",
        ("cpu",),
        f"sparsemlp.ops._{op}_native:{function}",
        machine=_native.problem,
        call=native,
    )
    interpreted = Backend(
        "triton",
        _triton.DEVICES,
        f"sparsemlp.kernels.{op}:{function}",
        machine=_triton.problem,
        call=triton,
        unasked=("cpu",),
    )
    return compiled, interpreted
