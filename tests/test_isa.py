"""Each instruction set by itself: in this process for every case, in fresh ones for the environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import sparsemlp
from sparsemlp import _env, _native, activations
from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends
from tests.batches import assert_independent
from tests.cases import CASES, DTYPES, Case, build
from tests.test_conformance_gated_mlp import check

NATIVE = pytest.mark.parametrize("backend", backends(OP, only="native"))
EVERY_ISA = pytest.mark.parametrize("isa", [
    pytest.param(name, marks=[] if _native.problem() or name in _native.isa_names() else
                 [pytest.mark.skip(reason=f"this CPU has no {name}")])
    for name in _env.ISA_NAMES
])  # fmt: skip
UseIsa = Callable[[str], None]


@NATIVE
@EVERY_ISA
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.usefixtures("threads")
def test_every_case(dtype: torch.dtype, isa: str, backend: str, use_isa: UseIsa) -> None:
    use_isa(isa)
    torch.set_num_threads(1)  # the conformance tests run with all; small calls are quicker with one
    for case in CASES:
        try:
            check(build(case, dtype), backend)
        except Exception as error:
            raise AssertionError(f"case {case.name}") from error


@NATIVE
@EVERY_ISA
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
def test_a_token_does_not_depend_on_its_batch(
    activation: str, isa: str, backend: str, use_isa: UseIsa
) -> None:
    use_isa(isa)
    for dtype in DTYPES:
        for tokens in (4, 7, 40):
            case = Case(
                "isa", tokens=tokens, d=77, f=203, activation=activation, biases="gud", mean="mean+out"
            )
            assert_independent(build(case, dtype), sparsemlp.gated_mlp, backend)


@NATIVE
@EVERY_ISA
def test_float16_conversions(isa: str, backend: str, use_isa: UseIsa) -> None:
    """All 65,536 float16 numbers in, and float16 out by round to nearest even: identity of one neuron."""
    use_isa(isa)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    one = torch.ones(1, 1, dtype=torch.float16)
    zero = torch.zeros(1, 1, dtype=torch.float16)
    call = dict(b_up=one[0], activation="identity", backend=backend)
    every = every[every.isfinite()]
    for chunk in every[:, None].split(32):
        out = sparsemlp.gated_mlp(chunk, one, zero, one, **call)
        assert torch.equal(out, chunk)
    x = torch.linspace(-3, 3, 32, dtype=torch.float16)[:, None]
    for exponent in range(-26, 18):
        w = torch.tensor([[1.3 * 2.0 ** (exponent // 2)]], dtype=torch.float16)
        v = torch.tensor([[1.7 * 2.0 ** (exponent - exponent // 2)]], dtype=torch.float16)
        out = sparsemlp.gated_mlp(x, w, zero, v, **call)
        assert torch.equal(out, ((x.float() * w.float()) * v.float()).half())


@NATIVE
@EVERY_ISA
def test_bfloat16_rounds_to_nearest_even(isa: str, backend: str, use_isa: UseIsa) -> None:
    use_isa(isa)
    x = torch.linspace(-3, 3, 32).bfloat16()[:, None]
    one, zero = torch.ones(1, 1).bfloat16(), torch.zeros(1, 1).bfloat16()
    for v in torch.linspace(0.5, 2, 100).bfloat16():
        out = sparsemlp.gated_mlp(
            x, one, zero, v.reshape(1, 1), b_up=one[0], activation="identity", backend=backend
        )
        assert torch.equal(out, (x.float() * v.float()).bfloat16())


@NATIVE
@EVERY_ISA
def test_the_environment_variable_chooses(isa: str, backend: str, use_isa: UseIsa) -> None:
    """A fresh process with SPARSEMLP_ISA computes the bits that this one computes with that instruction set."""
    code = (
        "import torch\n"
        "from sparsemlp import _native, gated_mlp\n"
        "from tests.cases import Case, build\n"
        "torch.set_num_threads(1)\n"
        "out = build(Case('variable', tokens=3, d=100), torch.bfloat16).run(gated_mlp, backend='native')\n"
        "print(_native.isa_names()[_native.isa()], out.float().flatten().tolist())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "SPARSEMLP_ISA": isa}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    use_isa(isa)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    out = build(Case("variable", tokens=3, d=100), torch.bfloat16).run(sparsemlp.gated_mlp, backend=backend)
    torch.set_num_threads(before)
    assert run.stdout.strip() == f"{isa} {out.float().flatten().tolist()}"


@NATIVE
def test_an_isa_this_cpu_lacks_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel too: an id beyond the CPU's best is an error, not an illegal instruction."""
    for wrong in (-1, len(_env.ISA_NAMES)):
        monkeypatch.setattr(_native, "isa", lambda wrong=wrong: wrong)
        with pytest.raises(RuntimeError, match="is not one this CPU runs"):
            build(Case("wrong-isa"), torch.float32).run(sparsemlp.gated_mlp, backend=backend)
