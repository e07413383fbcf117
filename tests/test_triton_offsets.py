"""Offsets beyond 2³¹ elements: rows that far apart in memory of which almost nothing is ever touched."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparsemlp
from sparsemlp import _triton
from sparsemlp.ops.gated_mlp import OP
from tests import sparse_linear_cases as linears
from tests.backends import backends
from tests.cases import Case, build
from tests.test_conformance_gated_mlp import check
from tests.test_conformance_sparse_linear import check as check_linear

TRITON = pytest.mark.parametrize("backend", backends(OP, only="triton"))
INTERPRETED = pytest.mark.skipif(
    not _triton.interpreting(), reason="the memory is the host's: for Triton's interpreter"
)


def far_apart(values: Tensor) -> Tensor:
    """The same rows, the last beyond 2³¹ elements, in memory that the system gives out page by page on first touch."""
    n, d = values.shape
    stride = 2**31 // (n - 1) + 16
    size = values.element_size() * ((n - 1) * stride + d)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, size, flags=flags)
    flat = torch.frombuffer(memory, dtype=values.dtype, count=size // values.element_size())
    return flat.as_strided((n, d), (stride, 1)).copy_(values)


@TRITON
@INTERPRETED
@pytest.mark.parametrize("which", ["x", "w_gate", "w_up", "w_down_t"])
@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_rows_far_apart(tokens: int, which: str, backend: str) -> None:
    if which == "x" and tokens == 1:
        tokens = 5
    for dtype in (torch.float32, torch.float16):
        sample = build(Case("far", tokens=tokens, d=24, f=6, density=1, biases="gud"), dtype)
        near = sample.run(sparsemlp.gated_mlp, backend=backend)
        far = replace(sample, **{which: far_apart(getattr(sample, which))})
        out = far.run(sparsemlp.gated_mlp, backend=backend)
        check(sample, backend, out)
        assert tokens > 16 or torch.equal(out, near)  # above, PyTorch's GEMM may choose another order


@TRITON
@INTERPRETED
@pytest.mark.parametrize("which", ["x", "w_gate", "w_up", "w_down_t"])
@pytest.mark.parametrize("tokens", [4, 20])
def test_rows_far_apart_by_a_screen(tokens: int, which: str, backend: str) -> None:
    """Tokens are read by a launch of its own, full rows after the decision."""
    case = Case("far", tokens=tokens, d=40, f=6, density=0.5, biases="gud", indicator="screen", screen="4x32")
    sample = build(case, torch.float16)
    near = sample.run(sparsemlp.gated_mlp, backend=backend)
    out = replace(sample, **{which: far_apart(getattr(sample, which))}).run(
        sparsemlp.gated_mlp, backend=backend
    )
    check(sample, backend, out)
    assert tokens > 16 or torch.equal(out, near)


@TRITON
@INTERPRETED
@pytest.mark.parametrize("which", ["x", "weight_t"])
@pytest.mark.parametrize("tokens", [4, 20])
def test_channels_far_apart(tokens: int, which: str, backend: str) -> None:
    for dtype in (torch.float32, torch.float16):
        sample = linears.build(linears.Case("far", tokens=tokens, k=6, n=24, density=1, bias=True), dtype)
        near = sample.run(sparsemlp.sparse_linear, backend=backend)
        far = replace(sample, **{which: far_apart(getattr(sample, which))})
        out = far.run(sparsemlp.sparse_linear, backend=backend)
        check_linear(sample, backend, out)
        assert tokens > 16 or torch.equal(out, near)


@TRITON
@INTERPRETED
@pytest.mark.parametrize("tokens", [4, 20])
def test_columns_of_the_gate_far_apart(tokens: int, backend: str) -> None:
    """By input sparsity the gate is read column by column."""
    sample = build(Case("far", tokens=tokens, d=6, f=24, density=1, inputs=1), torch.float16)
    near = sample.run(sparsemlp.gated_mlp, backend=backend)
    out = replace(sample, w_gate=far_apart(sample.w_gate.t()).t()).run(sparsemlp.gated_mlp, backend=backend)
    check(sample, backend, out)
    assert tokens > 16 or torch.equal(out, near)
