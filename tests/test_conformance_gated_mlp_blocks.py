"""`gated_mlp` under other block sizes than the conformance tests take, products of active tiles, negated views."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparsemlp
from sparsemlp.ops.gated_mlp import OP
from tests import test_conformance_gated_mlp as conformance
from tests.backends import backends
from tests.blocks import TILES
from tests.cases import CASES, Case, build
from tests.test_conformance_gated_mlp import EVERY_BACKEND, EVERY_DTYPE, check

ROUNDED = (torch.float32, torch.float16)
"""Triton's interpreter cuts float32 off to bfloat16 instead of rounding, which three roundings in a row add up."""
MANY = [case for case in CASES if case.tokens > 16 and case.indicator == "gate" and case.f < 1000]
TRITON = pytest.mark.parametrize("backend", backends(OP, only="triton"))


@TRITON
@pytest.mark.parametrize("number", range(len(MANY)), ids=[case.name for case in MANY])
def test_products_of_active_tiles(number: int, backend: str) -> None:
    """The same results where only tiles with an active entry are multiplied; dtypes in turn."""
    from sparsemlp.kernels import _configs

    with _configs.use("gated_mlp_prefill", TILES):
        check(build(MANY[number], ROUNDED[number % 2]), backend)


@TRITON
@EVERY_DTYPE
@pytest.mark.parametrize("where", ["w_up", "w_down_t", "b_up"])
def test_tiles_count_for_the_tokens_that_want_them(where: str, dtype: torch.dtype, backend: str) -> None:
    from sparsemlp.kernels import _configs

    with _configs.use("gated_mlp_prefill", TILES):
        conformance.test_rows_count_for_the_tokens_that_want_them(where, torch.inf, 40, dtype, backend)
        conformance.test_exact_zeros_are_skipped("relu", 40, dtype, backend)


@TRITON
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [1, 2, 9, 16, 30])
@pytest.mark.parametrize("d", [96, 577])
def test_default_blocks(d: int, tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Other tests use small blocks; these use what a GPU without a file of its own gets."""
    sample = build(Case("default", tokens=tokens, d=d, f=210, biases="gud", density="neurons"), dtype)
    check(sample, backend, sample.run(sparsemlp.gated_mlp, backend=backend))


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [3, 20])
def test_lazily_negated_tensors(tokens: int, backend: str) -> None:
    """A view that says "negate me" (`z.conj().imag` gives such) is read as what it says, in every argument."""
    sample = build(
        Case("negated", tokens=tokens, mean="mean+out", biases="gud", scale="varied"), torch.float32
    )
    check(sample, backend)

    def lazily(t: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-t)

    negated = {name: lazily(t) for name, t in sample.options.items()}
    weights = {
        name: lazily(getattr(sample, name)) for name in ("x", "w_gate", "w_up", "w_down_t", "threshold")
    }
    out = replace(sample, options=negated, **weights).run(sparsemlp.gated_mlp, backend=backend)
    check(sample, backend, out)
