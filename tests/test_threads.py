"""Thread counts, Python threads at once, and processes: the same answers, at one thread count the same bits."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sparsemlp
from sparsemlp import _triton
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.testing import assert_within_budget
from tests.backends import backends, decided_from
from tests.batches import assert_independent
from tests.cases import DTYPES, Case, Sample, Truth, build

INTERPRETED = pytest.mark.skipif(
    _triton.interpreting(),
    reason="Triton's interpreter runs one launch at a time in a process and knows nothing of PyTorch's threads",
)
EVERY_BACKEND = pytest.mark.parametrize("backend", [
    pytest.param(*p.values, marks=[*p.marks, INTERPRETED]) if p.values == ("triton",) else p for p in backends(OP)
])  # fmt: skip
NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))

pytestmark = pytest.mark.usefixtures("threads")


def sample_of(tokens: int, dtype: torch.dtype, f: int = 1001) -> Sample:
    """Large enough for 16 shares of neurons, the last one ragged."""
    return build(
        Case("threads", tokens=tokens, d=300, f=f, density="neurons", biases="gud", scale="varied"), dtype
    )


@EVERY_BACKEND
@EVERY_DTYPE
@pytest.mark.parametrize("tokens", [1, 5, 32, 40])
def test_any_thread_count(tokens: int, dtype: torch.dtype, backend: str) -> None:
    sample = sample_of(tokens, dtype)
    truth = Truth(sample)
    peers, flips = truth.peers(), truth.flips(decided_from(backend, tokens, dtype))
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        out = sample.run(sparsemlp.gated_mlp, backend=backend)
        assert_within_budget(out, peers, truth.out, flips=flips, what=f"out with {count} threads")


@NATIVE
@EVERY_DTYPE
@pytest.mark.parametrize("count", [1, 2, 16])
def test_repeated_runs_give_the_same_bits(count: int, dtype: torch.dtype, backend: str) -> None:
    torch.set_num_threads(count)
    for tokens in (1, 6, 32):
        sample = sample_of(tokens, dtype)
        first = sample.run(sparsemlp.gated_mlp, backend=backend)
        for _ in range(20):
            assert torch.equal(sample.run(sparsemlp.gated_mlp, backend=backend), first)


@NATIVE
@pytest.mark.parametrize("count", [2, 16])
def test_a_token_does_not_depend_on_its_batch(count: int, backend: str) -> None:
    torch.set_num_threads(count)
    for dtype in DTYPES:
        for tokens in (4, 9, 40):
            assert_independent(sample_of(tokens, dtype), sparsemlp.gated_mlp, backend)


@EVERY_BACKEND
@pytest.mark.parametrize("count", [1, 2])
def test_many_python_threads_at_once(count: int, backend: str) -> None:
    """Eight threads, fifty calls each, different inputs: the bits of the serial calls."""
    torch.set_num_threads(count)
    samples = [sample_of(tokens, torch.bfloat16, f=301) for tokens in (1, 2, 3, 4, 5, 8, 16, 40)]

    def run(sample: Sample, *, times: int) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [sample.run(sparsemlp.gated_mlp, backend=backend) for _ in range(times)]

    with ThreadPoolExecutor(1) as pool:  # a thread of its own may have another OpenMP team than the main one
        serial = [pool.submit(run, sample, times=1).result()[0] for sample in samples]
    with ThreadPoolExecutor(len(samples)) as pool:
        futures = [pool.submit(run, sample, times=50) for sample in samples]
        results = [f.result(timeout=120) for f in futures]
    for expected, outs in zip(serial, results, strict=True):
        assert all(torch.equal(expected, out) for out in outs)


@EVERY_BACKEND
def test_the_thread_count_may_change_in_another_thread(backend: str) -> None:
    sample = sample_of(3, torch.float32)
    truth = Truth(sample)
    peers, flips = truth.peers(), truth.flips(decided_from(backend, 3, torch.float32))
    for count in (1, 16, 2):
        other = threading.Thread(target=torch.set_num_threads, args=(count,))
        other.start()
        other.join()
        out = sample.run(sparsemlp.gated_mlp, backend=backend)
        assert_within_budget(out, peers, truth.out, flips=flips)


def _in_child(backend: str) -> list[float]:
    torch.set_num_threads(2)
    sample = sample_of(3, torch.float32, f=201)
    return sample.run(sparsemlp.gated_mlp, backend=backend).flatten().tolist()


@EVERY_BACKEND
def test_a_spawned_process(backend: str) -> None:
    """After use in the parent (a forked child would hang in OpenMP, as PyTorch's own operators do)."""
    expected = _in_child(backend)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_in_child, (backend,)).get(timeout=120) == expected


@NATIVE
def test_the_first_call_may_come_from_several_threads(backend: str) -> None:
    """Loading the library and the launcher is safe when eight threads do it at once."""
    code = (
        "import threading, torch, sparsemlp\n"
        "a = [torch.randn(2, 64), *(torch.randn(96, 64) for _ in range(3))]\n"
        "gate, out = threading.Barrier(8), []\n"
        "def run():\n"
        "    gate.wait()\n"
        f"    out.append(sparsemlp.gated_mlp(*a, threshold=0.1, backend={backend!r}))\n"
        "threads = [threading.Thread(target=run) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert len(out) == 8 and all(torch.equal(o, out[0]) for o in out)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
