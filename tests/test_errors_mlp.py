"""Every error of `mlp`: one sentence that names the argument, says what it was and what is expected."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch

import sparsemlp
from sparsemlp.ops.mlp import OP
from tests.backends import backends

D, F, T = 6, 4, 3


def arguments(**changes: Any) -> dict[str, Any]:
    """A valid call with some arguments replaced."""
    good: dict[str, Any] = {
        "x": torch.randn(T, D),
        "w_in": torch.randn(F, D),
        "w_out_t": torch.randn(F, D),
    }
    return {**good, **changes}


def int8(**changes: Any) -> dict[str, Any]:
    """The changes that make the weights int8, with some of these replaced."""
    weights = {name: torch.ones(F, D, dtype=torch.int8) for name in ("w_in", "w_out_t")}
    return {**weights, "scale_in": torch.ones(F), "scale_out": torch.ones(D), **changes}


def raises(message: str, **changes: Any) -> None:
    """The whole message matches, and it is one sentence: no line break, no full stop inside or at the end."""
    with pytest.raises(ValueError, match=r"\S") as info:
        sparsemlp.mlp(**arguments(**changes))
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
    "in-rank": (
        dict(w_in=torch.randn(F, D, 1)),
        r"w_in is shape \(4, 6, 1\), expected \(F, D\) with x's D = 6: an nn\.Linear weight as it is",
    ),
    "in-none": (dict(w_in=None), r"w_in is NoneType, expected \(F, D\) with x's D = 6: .*"),
    "out-rank": (
        dict(w_out_t=torch.randn(F * D)),
        r"w_out_t is shape \(24\), expected \(F, D\) = \(4, 6\): .*",
    ),
    "out-none": (dict(w_out_t=None), r"w_out_t is NoneType, expected \(F, D\) = \(4, 6\): .*"),
    "b_in-rank": (dict(b_in=torch.ones(F, 1)), r"b_in is shape \(4, 1\), expected \(F,\) = \(4,\)"),
    "b_out-number": (dict(b_out=1.0), r"b_out is float, expected \(D,\) = \(6,\)"),
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
    "in-D": (
        dict(w_in=torch.randn(F, D + 1)),
        r"w_in is shape \(4, 7\), expected \(F, D\) with x's D = 6: .*",
    ),
    "out-F": (
        dict(w_out_t=torch.randn(F + 1, D)),
        r"w_out_t is shape \(5, 6\), expected \(F, D\) = \(4, 6\): .*",
    ),
    "out-not-transposed": (
        dict(w_out_t=torch.randn(D, F)),
        r"w_out_t is shape \(6, 4\), expected \(F, D\) = \(4, 6\): the transposed nn\.Linear weight",
    ),
    "b_in-D": (dict(b_in=torch.randn(D)), r"b_in is shape \(6\), expected \(F,\) = \(4,\)"),
    "b_out-F": (dict(b_out=torch.randn(F)), r"b_out is shape \(4\), expected \(D,\) = \(6,\)"),
    "threshold-D": (dict(threshold=torch.ones(D)), r"threshold is shape \(6\), expected \(F,\) = \(4,\)"),
    "scale-size": (
        dict(token_scale=torch.ones(T + 1)),
        r"token_scale is shape \(4\), expected \(T,\) = \(3,\) .*",
    ),
    "mean-D": (dict(skipped_mean=torch.ones(D)), r"skipped_mean is shape \(6\), expected \(F,\) = \(4,\)"),
    "shift-F": (
        dict(skipped_mean=torch.ones(F), skipped_out=torch.ones(F)),
        r"skipped_out is shape \(4\), expected \(D,\) = \(6,\)",
    ),
    # dtypes
    "x-int": (
        dict(x=torch.ones(T, D, dtype=torch.int64)),
        r"x is int64, expected float32, bfloat16, float16 or float64; .*",
    ),
    "x-float8": (
        dict(x=torch.ones(T, D).to(torch.float8_e4m3fn)),
        r"x is float8_e4m3fn, expected float32, .*",
    ),
    "in-dtype": (
        dict(w_in=torch.randn(F, D).bfloat16()),
        r"w_in is bfloat16, expected x's dtype float32; .*",
    ),
    "out-dtype": (
        dict(w_out_t=torch.randn(F, D).double()),
        r"w_out_t is float64, expected x's dtype float32; .*",
    ),
    "out-int": (
        dict(w_out_t=torch.ones(F, D, dtype=torch.int8)),
        r"w_out_t is int8, expected x's dtype float32; .*",
    ),
    "b_in-dtype": (dict(b_in=torch.randn(F).half()), r"b_in is float16, expected x's dtype float32; .*"),
    "threshold-half": (dict(threshold=torch.ones(F).half()), r"threshold is float16, expected float32; .*"),
    "threshold-0d-int": (
        dict(threshold=torch.tensor(1)),
        r"threshold is int64 on cpu, expected float32 on x's device cpu",
    ),
    "mean-half": (dict(skipped_mean=torch.ones(F).half()), r"skipped_mean is float16, expected float32; .*"),
    # int8
    "int8-in-only": (
        int8(w_out_t=torch.randn(F, D)),
        r"w_out_t is float32 beside an int8 w_in, expected two int8 weights or none; quantise it with .*",
    ),
    "int8-no-scale": (
        int8(scale_in=None),
        r"scale_in is None, expected \(F,\) = \(4,\) float32 beside an int8 w_in; pass the scales of .*",
    ),
    "int8-no-out-scale": (
        int8(scale_out=None),
        r"scale_out is None, expected \(D,\) = \(6,\) float32 beside an int8 w_out_t; .*quantize_columns",
    ),
    "int8-scale-size": (int8(scale_in=torch.ones(D)), r"scale_in is shape \(6\), expected \(F,\) = \(4,\)"),
    "int8-scale-half": (
        int8(scale_out=torch.ones(D).half()),
        r"scale_out is float16, expected float32; .*",
    ),
    "int8-device": (
        int8(w_out_t=meta(F, D).to(torch.int8)),
        r"w_out_t is torch\.strided on meta, expected torch\.strided on x's device cpu; .*",
    ),
    "scale-unwanted": (
        dict(scale_out=torch.ones(F)),
        r"scale_out is given with float32 weights, expected it beside int8 weights only; leave it None",
    ),
    # devices, layouts
    "in-device": (dict(w_in=meta(F, D)), r"w_in is on meta, expected x's device cpu; .*"),
    "out-device": (dict(w_out_t=meta(F, D)), r"w_out_t is on meta, expected x's device cpu; .*"),
    "b_out-device": (dict(b_out=meta(D)), r"b_out is on meta, expected x's device cpu; .*"),
    "threshold-device": (dict(threshold=meta(F)), r"threshold is on meta, expected x's device cpu; .*"),
    "x-sparse": (
        dict(x=torch.eye(D).to_sparse()),
        r"x has layout torch\.sparse_coo, expected torch\.strided; .*",
    ),
    "weight-sparse": (
        dict(w_in=torch.ones(F, D).to_sparse()),
        r"w_in has layout torch\.sparse_coo, expected torch\.strided; .*",
    ),
    # strides
    "in-stride": (
        dict(w_in=torch.randn(D, F).t()),
        r"w_in has strides \(1, 4\), expected unit stride inside a row; .*w_in\.contiguous\(\)",
    ),
    "out-stride": (
        dict(w_out_t=torch.randn(D, F).t()),
        r"w_out_t has strides \(1, 4\), expected unit stride inside a row; .*",
    ),
    # values, names
    "threshold-negative": (
        dict(threshold=-0.1),
        r"threshold is -0\.1, expected a number ≥ 0 \(inf: never active\)",
    ),
    "threshold-nan": (dict(threshold=torch.nan), r"threshold is nan, expected a number ≥ 0 .*"),
    "threshold-text": (
        dict(threshold="0.1"),
        r"threshold is str, expected a number ≥ 0 or a float32 tensor of shape \(\) or \(F,\)",
    ),
    "threshold-bool": (dict(threshold=True), r"threshold is bool, expected a number ≥ 0 or .*"),
    "shift-alone": (
        dict(skipped_out=torch.ones(D)),
        r"skipped_out is given without skipped_mean, expected both or the mean alone; .*",
    ),
    "input-threshold": (
        dict(input_threshold=0.1),
        r"input_threshold is float, expected None, mlp thresholds activations only; .*sparsemlp\.sparse_linear, .*",
    ),
    "input-threshold-tensor": (
        dict(input_threshold=torch.zeros(()), threshold=torch.zeros(())),
        r"input_threshold is Tensor, expected None, mlp thresholds activations only; .*",
    ),
    "activation": (dict(activation="swish"), r"activation is 'swish', expected one of: relu, .*, identity"),
    "activation-list": (
        dict(activation=[], threshold=torch.tensor(0.0)),
        r"activation is \[\], expected one of: relu, .*",
    ),
    "backend": (dict(backend="cuda"), r"backend is 'cuda', expected one of: auto, native, .*reference"),
    # activation parameters
    "params-missing": (
        dict(activation="weird"),
        r"activation_params is None, expected a tensor of 3 for activation 'weird': \(dx, dy, w\)",
    ),
    "params-unwanted": (
        dict(activation="silu", activation_params=torch.ones(1)),
        r"activation_params is shape \(1\), expected None for activation 'silu'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_message(changes: dict[str, Any], message: str) -> None:
    raises(message, **changes)


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_the_same_message_when_gradients_are_wanted(changes: dict[str, Any], message: str) -> None:
    """The differentiable path checks before it computes, as the other one does."""
    if "x" not in changes:
        changes = {**changes, "x": torch.randn(T, D, requires_grad=True)}
    raises(message, **changes)


@pytest.mark.parametrize("backend", backends(OP))
@pytest.mark.parametrize("tokens", [1, 3, 40, 130])
@pytest.mark.parametrize("threshold", [
    torch.tensor(-1.0), torch.tensor(torch.nan), nan_in(F), torch.tensor([0.0, -0.5, 1.0, 1.0]),
], ids=["negative", "nan", "one-nan", "one-negative"])  # fmt: skip
def test_values_inside_a_threshold_tensor(threshold: torch.Tensor, tokens: int, backend: str) -> None:
    """The computation itself finds them on a CPU; a GPU's would have to stall for it, and keeps the neuron instead."""
    same = arguments(x=torch.randn(tokens, D))
    if backend == "triton":
        keeps = torch.where(threshold >= 0, threshold, 0.0)
        out = [sparsemlp.mlp(**same, threshold=t, backend=backend) for t in (threshold, keeps)]
        assert torch.equal(*out)
        return
    message = r"threshold holds a negative or NaN value, expected values (>=|≥) 0 \(inf: never active\)"
    raises(message, **same, threshold=threshold, backend=backend)


@pytest.mark.parametrize("backend", backends(OP))
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(
    "threshold", [0, 0.0, -0.0, 1, torch.inf, torch.tensor(0.5), torch.tensor(torch.inf)]
)
def test_legal_thresholds(threshold: Any, tokens: int, backend: str) -> None:
    out = sparsemlp.mlp(**arguments(x=torch.randn(tokens, D)), threshold=threshold, backend=backend)
    assert out.isfinite().all()


def test_a_backend_without_derivative_says_so() -> None:
    """Of what only the differentiable composition has: parameters of φ, int8 weights, transforms."""
    message = (
        r"backend is 'native', which has no derivative, and an input requires grad \(or torch\.func transforms it\); "
        r".*torch\.no_grad\(\)"
    )
    leaf = torch.randn(T, D, requires_grad=True)
    raises(message, backend="native", activation="mix", activation_params=torch.ones(1, requires_grad=True))
    raises(message, backend="native", **int8(x=leaf))
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda x: sparsemlp.mlp(**arguments(x=x), backend="native").sum())(leaf.detach())
    # without a compiled library that is the error here
    with torch.no_grad(), contextlib.suppress(sparsemlp.BackendUnavailableError):
        sparsemlp.mlp(**arguments(x=leaf), backend="native")


def test_an_explicit_backend_never_falls_back() -> None:
    """Its error lists every backend with its reason."""
    double = {k: v.double() for k, v in arguments().items()}
    with pytest.raises(sparsemlp.BackendUnavailableError) as info:
        sparsemlp.mlp(**double, backend="native")
    assert re.fullmatch(
        r"mlp: backend 'native' cannot compute this call \(native: [^;]*; .*reference: available\); "
        r"use backend='auto' .*",
        str(info.value),
    )


def test_float64_is_not_mixed_even_under_autocast() -> None:
    """Autocast leaves float64 alone, so it cannot make one dtype of it and float32."""
    with torch.autocast("cpu", torch.bfloat16):
        raises(r"w_in is float32, expected x's dtype float64; .*", x=torch.randn(T, D).double())
        raises(r"w_out_t is float64, expected x's dtype float32; .*", w_out_t=torch.randn(F, D).double())
