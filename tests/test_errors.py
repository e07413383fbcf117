"""Every error of `gated_mlp`: one sentence that names the argument, says what it was and what is expected."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import sparsemlp
from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends

D, F, T = 6, 4, 3


def arguments(**changes: Any) -> dict[str, Any]:
    """A valid call with some arguments replaced."""
    good: dict[str, Any] = {
        "x": torch.randn(T, D),
        "w_gate": torch.randn(F, D),
        "w_up": torch.randn(F, D),
        "w_down_t": torch.randn(F, D),
    }
    return {**good, **changes}


def call(backend: str = "auto", **changes: Any) -> torch.Tensor:
    return sparsemlp.gated_mlp(**{"backend": backend, **arguments(**changes)})


def raises(message: str, **changes: Any) -> None:
    """The whole message matches, and it is one sentence: no line break, no full stop inside or at the end."""
    with pytest.raises(ValueError, match=r"\S") as info:
        call(**changes)
    text = str(info.value)
    assert re.fullmatch(message, text), text
    assert "\n" not in text
    assert not re.search(r"\.( |$)", text.replace("e.g. ", ""))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def nan_in(size: int) -> torch.Tensor:
    t = torch.ones(size)
    t[-1] = torch.nan
    return t


BAD = {
    # rank
    "x-scalar": (dict(x=torch.tensor(1.0)), r"x is shape \(\), expected a tensor of shape \(\.\.\., D\); .*"),
    "x-list": (dict(x=[1.0]), r"x is list, expected a tensor of shape \(\.\.\., D\); .*"),
    "gate-rank": (
        dict(w_gate=torch.randn(F, D, 1)),
        r"w_gate is shape \(4, 6, 1\), expected \(F, D\) with x's D = 6",
    ),
    "gate-none": (dict(w_gate=None), r"w_gate is NoneType, expected \(F, D\) with x's D = 6"),
    "up-rank": (dict(w_up=torch.randn(F * D)), r"w_up is shape \(24\), expected \(F, D\) = \(4, 6\): .*"),
    "down-rank": (
        dict(w_down_t=torch.randn(1, F, D)),
        r"w_down_t is shape \(1, 4, 6\), expected \(F, D\) = \(4, 6\): .*",
    ),
    "b_gate-rank": (dict(b_gate=torch.randn(1, F)), r"b_gate is shape \(1, 4\), expected \(F,\) = \(4,\)"),
    "b_up-scalar": (dict(b_up=torch.tensor(0.0)), r"b_up is shape \(\), expected \(F,\) = \(4,\)"),
    "b_down-number": (dict(b_down=1.0), r"b_down is float, expected \(D,\) = \(6,\)"),
    "threshold-rank": (
        dict(threshold=torch.ones(1, F)),
        r"threshold is shape \(1, 4\), expected \(F,\) = \(4,\)",
    ),
    "scale-rank": (
        dict(token_scale=torch.ones(T, 1)),
        r"token_scale is shape \(3, 1\), expected \(T,\) = \(3,\) or x's leading shape",
    ),
    "mean-rank": (
        dict(skipped_mean=torch.ones(F, 1)),
        r"skipped_mean is shape \(4, 1\), expected \(F,\) = \(4,\)",
    ),
    # sizes
    "gate-D": (
        dict(w_gate=torch.randn(F, D + 1)),
        r"w_gate is shape \(4, 7\), expected \(F, D\) with x's D = 6",
    ),
    "up-F": (dict(w_up=torch.randn(F + 1, D)), r"w_up is shape \(5, 6\), expected \(F, D\) = \(4, 6\): .*"),
    "up-D": (dict(w_up=torch.randn(F, D - 1)), r"w_up is shape \(4, 5\), expected \(F, D\) = \(4, 6\): .*"),
    "down-not-transposed": (
        dict(w_down_t=torch.randn(D, F)),
        r"w_down_t is shape \(6, 4\), expected \(F, D\) = \(4, 6\): the transposed nn\.Linear weight",
    ),
    "b_gate-D": (dict(b_gate=torch.randn(D)), r"b_gate is shape \(6\), expected \(F,\) = \(4,\)"),
    "b_up-D": (dict(b_up=torch.randn(D)), r"b_up is shape \(6\), expected \(F,\) = \(4,\)"),
    "b_down-F": (dict(b_down=torch.randn(F)), r"b_down is shape \(4\), expected \(D,\) = \(6,\)"),
    "threshold-D": (dict(threshold=torch.ones(D)), r"threshold is shape \(6\), expected \(F,\) = \(4,\)"),
    "threshold-1": (dict(threshold=torch.ones(1)), r"threshold is shape \(1\), expected \(F,\) = \(4,\)"),
    "scale-size": (
        dict(token_scale=torch.ones(T + 1)),
        r"token_scale is shape \(4\), expected \(T,\) = \(3,\) .*",
    ),
    "scale-number": (dict(token_scale=1.0), r"token_scale is float, expected \(T,\) = \(3,\) .*"),
    "mean-D": (dict(skipped_mean=torch.ones(D)), r"skipped_mean is shape \(6\), expected \(F,\) = \(4,\)"),
    "out-F": (
        dict(skipped_mean=torch.ones(F), skipped_out=torch.ones(F)),
        r"skipped_out is shape \(4\), expected \(D,\) = \(6,\)",
    ),
    # dtypes
    "x-int": (
        dict(x=torch.ones(T, D, dtype=torch.int64)),
        r"x is int64, expected float32, bfloat16, float16 or float64; .*",
    ),
    "x-bool": (dict(x=torch.ones(T, D, dtype=torch.bool)), r"x is bool, expected float32, .*"),
    "x-complex": (dict(x=torch.ones(T, D, dtype=torch.complex64)), r"x is complex64, expected float32, .*"),
    "x-float8": (
        dict(x=torch.ones(T, D).to(torch.float8_e4m3fn)),
        r"x is float8_e4m3fn, expected float32, .*",
    ),
    "gate-dtype": (
        dict(w_gate=torch.randn(F, D).bfloat16()),
        r"w_gate is bfloat16, expected x's dtype float32; .*",
    ),
    "up-int": (
        dict(w_up=torch.ones(F, D, dtype=torch.int8)),
        r"w_up is int8, expected x's dtype float32; .*",
    ),
    "down-dtype": (
        dict(w_down_t=torch.randn(F, D).double()),
        r"w_down_t is float64, expected x's dtype float32; .*",
    ),
    "b_gate-dtype": (
        dict(b_gate=torch.randn(F).half()),
        r"b_gate is float16, expected x's dtype float32; .*",
    ),
    "b_up-int": (
        dict(b_up=torch.ones(F, dtype=torch.int32)),
        r"b_up is int32, expected x's dtype float32; .*",
    ),
    "b_down-dtype": (
        dict(b_down=torch.randn(D).double()),
        r"b_down is float64, expected x's dtype float32; .*",
    ),
    "threshold-half": (dict(threshold=torch.ones(F).half()), r"threshold is float16, expected float32; .*"),
    "threshold-0d-int": (
        dict(threshold=torch.tensor(1)),
        r"threshold is int64 on cpu, expected float32 on x's device cpu",
    ),
    "threshold-double": (
        dict(threshold=torch.ones(F).double()),
        r"threshold is float64, expected float32; .*",
    ),
    "scale-half": (dict(token_scale=torch.ones(T).half()), r"token_scale is float16, expected float32; .*"),
    "scale-int": (
        dict(token_scale=torch.ones(T, dtype=torch.int64)),
        r"token_scale is int64, expected float32; .*",
    ),
    "mean-half": (dict(skipped_mean=torch.ones(F).half()), r"skipped_mean is float16, expected float32; .*"),
    "out-half": (
        dict(skipped_mean=torch.ones(F), skipped_out=torch.ones(D).half()),
        r"skipped_out is float16, expected float32; .*",
    ),
    # devices
    "gate-device": (dict(w_gate=meta(F, D)), r"w_gate is on meta, expected x's device cpu; .*"),
    "up-device": (dict(w_up=meta(F, D)), r"w_up is on meta, expected x's device cpu; .*"),
    "down-device": (dict(w_down_t=meta(F, D)), r"w_down_t is on meta, expected x's device cpu; .*"),
    "b_gate-device": (dict(b_gate=meta(F)), r"b_gate is on meta, expected x's device cpu; .*"),
    "b_up-device": (dict(b_up=meta(F)), r"b_up is on meta, expected x's device cpu; .*"),
    "b_down-device": (dict(b_down=meta(D)), r"b_down is on meta, expected x's device cpu; .*"),
    "threshold-device": (dict(threshold=meta(F)), r"threshold is on meta, expected x's device cpu; .*"),
    "threshold-0d-device": (
        dict(threshold=meta()),
        r"threshold is float32 on meta, expected float32 on x's device cpu",
    ),
    "scale-device": (dict(token_scale=meta(T)), r"token_scale is on meta, expected x's device cpu; .*"),
    "mean-device": (dict(skipped_mean=meta(F)), r"skipped_mean is on meta, expected x's device cpu; .*"),
    "params-device": (
        dict(activation="mix", activation_params=meta(1)),
        r"activation_params is float32 on meta, expected float32 on x's device cpu",
    ),
    # strides
    "gate-stride": (
        dict(w_gate=torch.randn(D, F).t()),
        r"w_gate has strides \(1, 4\), expected unit stride inside a row; .*",
    ),
    "up-stride": (
        dict(w_up=torch.randn(F, 2 * D)[:, ::2]),
        r"w_up has strides \(12, 2\), expected unit stride inside a row; .*",
    ),
    "down-stride": (
        dict(w_down_t=torch.randn(D, F).t()),
        r"w_down_t has strides \(1, 4\), expected unit stride inside a row; .*w_down_t\.contiguous\(\)",
    ),
    "gate-broadcast": (
        dict(w_gate=torch.randn(F, 1).expand(F, D)),
        r"w_gate has strides \(1, 0\), expected unit stride inside a row; .*",
    ),
    # values
    "threshold-negative": (
        dict(threshold=-0.1),
        r"threshold is -0\.1, expected a number ≥ 0 \(inf: never active\)",
    ),
    "threshold-minus-inf": (dict(threshold=-torch.inf), r"threshold is -inf, expected a number ≥ 0 .*"),
    "threshold-nan": (
        dict(threshold=torch.nan),
        r"threshold is nan, expected a number ≥ 0 \(inf: never active\)",
    ),
    "threshold-text": (
        dict(threshold="0.1"),
        r"threshold is str, expected a number ≥ 0 or a float32 tensor of shape \(\) or \(F,\)",
    ),
    "threshold-none": (dict(threshold=None), r"threshold is NoneType, expected a number ≥ 0 or .*"),
    "threshold-bool": (dict(threshold=True), r"threshold is bool, expected a number ≥ 0 or .*"),
    "out-alone": (
        dict(skipped_out=torch.ones(D)),
        r"skipped_out is given without skipped_mean, expected both or the mean alone; .*",
    ),
    # names
    "activation": (dict(activation="swish"), r"activation is 'swish', expected one of: relu, .*, identity"),
    "activation-list": (
        dict(activation=[], threshold=torch.tensor(0.0)),
        r"activation is \[\], expected one of: relu, .*",
    ),
    "threshold-beyond-floats": (
        dict(threshold=10**400),
        r"threshold is an integer beyond every float, expected a number ≥ 0 .*",
    ),
    "params-half": (
        dict(activation="mix", activation_params=torch.ones(1, dtype=torch.float16)),
        r"activation_params is float16 on cpu, expected float32 on x's device cpu",
    ),
    "x-sparse": (
        dict(x=torch.eye(D).to_sparse()),
        r"x has layout torch.sparse_coo, expected torch.strided; .*",
    ),
    "weight-sparse": (
        dict(w_up=torch.ones(F, D).to_sparse()),
        r"w_up has layout torch.sparse_coo, expected torch.strided; .*",
    ),
    "activation-none": (dict(activation=None), r"activation is None, expected one of: relu, .*"),
    "backend": (dict(backend="cuda"), r"backend is 'cuda', expected one of: auto, native, .*reference"),
    "backend-none": (dict(backend=None), r"backend is None, expected one of: auto, .*"),
    "indicator": (dict(indicator="down"), r"indicator is 'down', expected one of: gate, up, product, screen"),
    "screen-missing": (
        dict(indicator="screen"),
        r"screen_gate is NoneType, expected a PackedWeight with indicator 'screen'; make it with .*pack\(w_gate\)",
    ),
    # activation parameters
    "params-missing": (
        dict(activation="weird"),
        r"activation_params is None, expected a tensor of 3 for activation 'weird': \(dx, dy, w\)",
    ),
    "params-count": (
        dict(activation="weird", activation_params=torch.ones(2)),
        r"activation_params is shape \(2\), expected \(3,\): \(dx, dy, w\) for activation 'weird'",
    ),
    "params-0d": (
        dict(activation="mix", activation_params=torch.tensor(0.5)),
        r"activation_params is shape \(\), expected \(1,\): \(lam\) for activation 'mix'",
    ),
    "params-unwanted": (
        dict(activation="silu", activation_params=torch.ones(1)),
        r"activation_params is shape \(1\), expected None for activation 'silu'",
    ),
    "params-unwanted-empty": (
        dict(activation="silu", activation_params=torch.ones(0)),
        r"activation_params is shape \(0\), expected None for activation 'silu'",
    ),
    "params-number": (
        dict(activation="mix", activation_params=0.5),
        r"activation_params is float, expected \(1,\): .*",
    ),
    "params-int": (
        dict(activation="mix", activation_params=torch.ones(1, dtype=torch.int64)),
        r"activation_params is int64 on cpu, expected float32 on x's device cpu",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_message(changes: dict[str, Any], message: str) -> None:
    raises(message, **changes)


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_the_same_message_when_gradients_are_wanted(changes: dict[str, Any], message: str) -> None:
    """The differentiable path checks before it computes, as the other one does."""
    if "w_gate" not in changes:
        changes = {**changes, "w_gate": torch.randn(F, D, requires_grad=True)}
    raises(message, **changes)


@pytest.mark.parametrize("backend", backends(OP))
@pytest.mark.parametrize("tokens", [1, 3, 40, 130])
@pytest.mark.parametrize("threshold", [
    torch.tensor(-1.0), torch.tensor(torch.nan), nan_in(F), torch.tensor([0.0, -0.5, 1.0, 1.0]),
    torch.tensor([-torch.inf, 1.0, 1.0, 1.0]),
], ids=["negative", "nan", "one-nan", "one-negative", "minus-inf"])  # fmt: skip
def test_values_inside_a_threshold_tensor(threshold: torch.Tensor, tokens: int, backend: str) -> None:
    """The computation itself finds them on a CPU; a GPU's would have to stall for it, and keeps the neuron instead."""
    message = r"threshold holds a negative or NaN value, expected values (>=|≥) 0 \(inf: never active\)"
    if backend == "triton":
        same, keeps = arguments() | {"x": torch.randn(tokens, D)}, torch.where(threshold >= 0, threshold, 0.0)
        out = [call(**same | {"threshold": t, "backend": backend}) for t in (threshold, keeps)]
        assert torch.equal(*out)
        return
    raises(message, x=torch.randn(tokens, D), threshold=threshold, backend=backend)


@pytest.mark.parametrize("backend", backends(OP))
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(
    "threshold", [0, 0.0, -0.0, 1, 2.5, torch.inf, torch.tensor(0.5), torch.tensor(torch.inf)]
)
def test_legal_thresholds(threshold: Any, tokens: int, backend: str) -> None:
    assert call(x=torch.randn(tokens, D), threshold=threshold, backend=backend).isfinite().all()


def test_a_backend_without_derivative_says_so() -> None:
    """Of what only the differentiable composition has: parameters of φ, int8 weights, input thresholds, transforms."""
    message = (
        r"backend is 'native', which has no derivative, and an input requires grad \(or torch\.func transforms it\); "
        r".*torch\.no_grad\(\)"
    )
    leaf = arguments()["x"].requires_grad_(True)
    raises(message, backend="native", activation="mix", activation_params=torch.ones(1, requires_grad=True))
    raises(message, backend="native", x=leaf, input_threshold=0.5)
    weights = {name: torch.ones(F, D, dtype=torch.int8) for name in ("w_gate", "w_up", "w_down_t")}
    scales = {"scale_gate": torch.ones(F), "scale_up": torch.ones(F), "scale_down": torch.ones(D)}
    raises(message, backend="native", x=leaf, **weights, **scales)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda x: call(backend="native", x=x).sum())(arguments()["x"])
    # without a compiled library that is the error here
    with torch.no_grad(), contextlib.suppress(sparsemlp.BackendUnavailableError):
        call(backend="native", x=leaf)


def test_an_explicit_backend_never_falls_back() -> None:
    """Its error lists every backend with its reason."""
    double = {k: v.double() for k, v in arguments().items()}
    with pytest.raises(sparsemlp.BackendUnavailableError) as info:
        call(backend="native", **double)
    text = str(info.value)
    assert re.fullmatch(
        r"gated_mlp: backend 'native' cannot compute this call \(native: [^;]*; .*reference: available\); "
        r"use backend='auto' .*",
        text,
    ), text


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("SPARSEMLP_ISA", "sse9", "is 'sse9', expected one of: portable, avx2, avx512, avx512bf16"),
    ("SPARSEMLP_NATIVE", "yes", "is 'yes', expected one of: 0, 1"),
])  # fmt: skip
def test_environment_variables(variable: str, value: str, message: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import sparsemlp"],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert run.stderr.strip().splitlines()[-1] == f"ValueError: environment variable {variable} {message}"


def test_switched_off_by_the_environment() -> None:
    """SPARSEMLP_NATIVE=0: the explicit backend says why not, auto still answers."""
    code = (
        "import torch, sparsemlp\n"
        "a = [torch.randn(3, 6), torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6)]\n"
        "assert sparsemlp.gated_mlp(*a).shape == (3, 6)\n"
        "sparsemlp.gated_mlp(*a, backend='native')\n"
    )
    env = {**os.environ, "SPARSEMLP_NATIVE": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert re.fullmatch(
        r"sparsemlp\._op\.BackendUnavailableError: gated_mlp: backend 'native' cannot compute this call \(native: "
        r"switched off by SPARSEMLP_NATIVE=0; triton: .*; reference: available\); use backend='auto' or another one",
        run.stderr.strip().splitlines()[-1],
    )


def test_float64_is_not_mixed_even_under_autocast() -> None:
    """Autocast leaves float64 alone, so it cannot make one dtype of it and float32."""
    with torch.autocast("cpu", torch.bfloat16):
        raises(r"w_gate is float32, expected x's dtype float64; .*", x=torch.randn(T, D).double())
        raises(r"w_up is float64, expected x's dtype float32; .*", w_up=torch.randn(F, D).double())
