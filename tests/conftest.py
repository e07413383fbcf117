"""Shared fixtures: NaN-poisoned allocations, one ISA at a time, and PyTorch's thread count restored.

Two variables are set before the package is imported, also for the processes that tests start. Without a GPU, Triton
kernels run in Triton's interpreter. And the cache is an empty folder, gone afterwards: routes that tests see must not
hang on what `sparsemlp tune` once measured here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers inherit it
    _cache = tempfile.TemporaryDirectory(prefix="sparsemlp-tests-")
    os.environ["SPARSEMLP_CACHE_DIR"] = _cache.name

from sparsemlp import _native


@pytest.fixture(scope="session", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Every fresh floating-point tensor is NaN, and every integer one its type's largest value.

    PyTorch does this below `at::empty`, so it reaches what compiled kernels allocate through the stable ABI too, which
    a patched `torch.empty` would not. warn_only: nothing else of deterministic mode is wanted.
    """
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """PyTorch's thread count is put back afterwards."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def use_isa(monkeypatch: pytest.MonkeyPatch):
    """A function that makes the compiled kernels use an instruction set, by name, for this test."""

    def use(name: str) -> None:
        monkeypatch.setattr(_native, "isa", lambda: _native.isa_names().index(name))

    return use


ONE_PROCESS = ("test_cli", "test_compile_only", "test_gpu_run", "test_mutations", "test_plan")
"""Modules whose tests share something made once, which takes long."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where pytest-xdist spreads tests over processes, those of a module that shares something stay together.

    Its own way, `--dist loadgroup`, does nothing under pytest 9.2 (pytest-xdist 3.8, issue 1386). Another `--dist` than
    `-n`'s is left alone.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::")[0]
            return module if Path(module).stem in ONE_PROCESS else nodeid

    return Scheduling(config, log)
