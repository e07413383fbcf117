"""What only a GPU can show about the Triton kernels; the checks themselves are `benchmarks.gpu_checks`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu_checks import CHECKS, Skip
from benchmarks.gpu_device import Device


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; the dry run of gpu_run.sh runs the same code"
)
@pytest.mark.parametrize("name", CHECKS)
def test_triton_on_a_gpu(name: str) -> None:
    """Graphs, streams, waiting, repeatability, offsets beyond 2³¹."""
    try:
        CHECKS[name](Device(dry=False))
    except Skip as reason:
        pytest.skip(str(reason))
