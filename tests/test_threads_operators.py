"""Every native operator from many Python threads, again and again, and in a data loader's processes: the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import sparsemlp
from sparsemlp.ops.gated_mlp import OP
from tests import cases, mlp_cases, sparse_linear_cases
from tests.activation_cases import values
from tests.backends import backends

NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
PYTHON_THREADS, TIMES = 16, 1000
WIDE = dict(d=64, f=600, density="neurons", scale="varied")
"""Enough work for two threads, with a share of neurons or channels each."""
Call = Callable[[], Tensor]

pytestmark = pytest.mark.usefixtures("threads")


def _gated_mlp(tokens: int, dtype: torch.dtype, backend: str = "native", **more: object) -> Call:
    case = cases.Case("threads", tokens=tokens, biases="gud", mean="mean+out", **{**WIDE, **more})
    sample = cases.build(case, dtype)
    return lambda: sample.run(sparsemlp.gated_mlp, backend=backend)


def _mlp(tokens: int, dtype: torch.dtype, backend: str = "native", **more: object) -> Call:
    sample = mlp_cases.build(mlp_cases.Case("threads", tokens=tokens, biases="io", **{**WIDE, **more}), dtype)
    return lambda: sample.run(sparsemlp.mlp, backend=backend)


def _sparse_linear(tokens: int, dtype: torch.dtype, **more: object) -> Call:
    case = sparse_linear_cases.Case(
        "threads", tokens=tokens, k=600, n=64, density="channels", bias=True, **more
    )
    sample = sparse_linear_cases.build(case, dtype)
    return lambda: sample.run(sparsemlp.sparse_linear, backend="native")


def _activation(tokens: int, dtype: torch.dtype) -> Call:
    p = values((tokens, 2100), dtype)

    def call() -> Tensor:
        out, counts = sparsemlp.activation(p, "gelu", counts=True, backend="native")
        with torch.inference_mode(False), torch.enable_grad():
            leaf = p.detach().requires_grad_(True)
            (grad,) = torch.autograd.grad(sparsemlp.activation(leaf, "gelu", backend="native"), leaf, p)
        return torch.cat([t.flatten().double() for t in (out, counts, grad)])

    return call


CALLS: dict[str, Callable[[int, torch.dtype], Call]] = {
    "gated_mlp": _gated_mlp,
    "gated_mlp-up": lambda *at: _gated_mlp(*at, indicator="up"),
    "gated_mlp-product": lambda *at: _gated_mlp(*at, indicator="product"),
    "gated_mlp-inputs": lambda *at: _gated_mlp(*at, inputs=0.5),
    "gated_mlp-int8": lambda *at: _gated_mlp(*at, int8=True),
    "mlp": _mlp,
    "mlp-int8": lambda *at: _mlp(*at, int8=True),
    "sparse_linear": _sparse_linear,
    "sparse_linear-int8": lambda *at: _sparse_linear(*at, int8=True),
    "activation": _activation,
}
EVERY_CALL = pytest.mark.parametrize("name", list(CALLS))


def different(call: Call, expected: Tensor, times: int) -> int:
    """How many of the calls do not give the expected bits."""
    with torch.inference_mode():
        return sum(not torch.equal(call(), expected) for _ in range(times))


def at_once(calls: list[Call], times: list[int]) -> list[int]:
    """`different` of each call against itself made serially, in a Python thread each, which begin together."""
    with ThreadPoolExecutor(1) as pool, torch.inference_mode():
        serial = [pool.submit(call).result() for call in calls]
    together = threading.Barrier(len(calls))

    def repeat(call: Call, expected: Tensor, count: int) -> int:
        together.wait()
        return different(call, expected, count)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(repeat, calls, serial, times))


@NATIVE
@pytest.mark.parametrize("count", [1, 2])
def test_many_python_threads_at_once(count: int, backend: str) -> None:
    """16 threads, 1,000 calls each, of all operators: the bits of serial calls with as many of PyTorch's threads."""
    torch.set_num_threads(count)
    names = [*CALLS, *CALLS][:PYTHON_THREADS]
    calls = [CALLS[name](1 + i % 4, cases.DTYPES[i % len(cases.DTYPES)]) for i, name in enumerate(names)]
    assert at_once(calls, [TIMES] * PYTHON_THREADS) == [0] * PYTHON_THREADS


@NATIVE
@pytest.mark.parametrize("count", [1, 2])
def test_many_python_threads_and_a_frozen_router(count: int, backend: str) -> None:
    """`auto` too, once its choices hold for good: of few tokens and of so many that it has a choice."""
    torch.set_num_threads(count)
    cases_of = [
        (build, tokens, dtype)
        for build in (_gated_mlp, _mlp)
        for tokens in (1, 4, 40, 140)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert len(cases_of) == PYTHON_THREADS
    with sparsemlp.set_router("frozen"):
        calls = [build(tokens, dtype, backend="auto") for build, tokens, dtype in cases_of]
        found = at_once(calls, [TIMES if tokens <= 4 else TIMES // 40 for _, tokens, _ in cases_of])
    assert found == [0] * PYTHON_THREADS


@NATIVE
@EVERY_CALL
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_runs_repeat(count: int, name: str, backend: str) -> None:
    """The same thread count, the same bits, for few tokens and for many."""
    torch.set_num_threads(count)
    for tokens, dtype in (
        (1, torch.bfloat16),
        (8, torch.float32),
        (32, torch.float16),
        (140, torch.bfloat16),
    ):
        call = CALLS[name](tokens, dtype)
        assert different(call, call(), 10) == 0, f"{tokens} tokens, {dtype}"


class Batches(Dataset[Tensor]):
    """A data set that computes its entries with the operators."""

    def __len__(self) -> int:
        return len(CALLS)

    def __getitem__(self, index: int) -> Tensor:
        return list(CALLS.values())[index](2, torch.float32)()


@NATIVE
def test_a_data_loader_that_spawns(backend: str) -> None:
    """After use in this process; forked processes would hang in OpenMP, as with PyTorch's own operators."""
    torch.set_num_threads(1)  # as many as a data loader's processes have
    expected = list(DataLoader(Batches(), batch_size=None))
    loader = DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    for name, here, there in zip(CALLS, expected, loader, strict=True):
        assert torch.equal(here, there), name
