"""Which backends a conformance test runs with: all the operator has, so that a new one is tested unnamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import sparsemlp
from sparsemlp import _env
from sparsemlp._op import Op

BUILT = any(Path(sparsemlp.__file__).parent.glob("_C*.so"))
"""The compiled library lies beside the package: then the native backend may not be skipped."""


def backends(op: Op, *, only: str | None = None) -> list[Any]:
    """`backend=` values as pytest parameters; one this machine lacks is skipped with the backend's own sentence."""
    import pytest  # here: the rest of this module and `tests.cases` are also used where there is no pytest

    problems = {b.name: b.machine() for b in op.backends}
    params = []
    for name in op.choices:
        if only is not None and name != only:
            continue
        problem = problems.get(name)
        must_run = name == "native" and BUILT and _env.NATIVE
        marks = [pytest.mark.skip(reason=f"{name}: {problem}")] if problem and not must_run else []
        params.append(pytest.param(name, marks=marks))
    return params


def decided_from(backend: str, tokens: int, dtype: torch.dtype) -> torch.dtype:
    """From which precision a backend decides who is active: the fused kernels from unrounded float32."""
    fused = {"native": 32, "triton": 16}
    return torch.float32 if tokens <= fused.get(backend, -1) and dtype != torch.float64 else dtype
