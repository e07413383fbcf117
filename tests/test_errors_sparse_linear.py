"""Every error of `sparse_linear`: one sentence that names the argument, says what it was and what is expected."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch

import sparsemlp
from sparsemlp import sparse_linear
from sparsemlp.ops.sparse_linear import OP
from tests.backends import backends

K, N, T = 6, 4, 3
INT8 = torch.ones(K, N, dtype=torch.int8)


def arguments(**changes: Any) -> dict[str, Any]:
    """A valid call with some arguments replaced."""
    return {"x": torch.randn(T, K), "weight_t": torch.randn(K, N), **changes}


def call(backend: str = "auto", **changes: Any) -> torch.Tensor:
    return sparse_linear(**{"backend": backend, **arguments(**changes)})


def raises(message: str, **changes: Any) -> None:
    """The whole message matches, and it is one sentence: no line break, no full stop inside or at the end."""
    with pytest.raises(ValueError, match=r"\S") as info:
        call(**changes)
    text = str(info.value)
    assert re.fullmatch(message, text), text
    assert "\n" not in text
    assert not re.search(r"\.( |$)", text.replace("e.g. ", ""))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


BAD = {
    # rank and size
    "x-scalar": (dict(x=torch.tensor(1.0)), r"x is shape \(\), expected a tensor of shape \(\.\.\., K\); .*"),
    "x-list": (dict(x=[1.0]), r"x is list, expected a tensor of shape \(\.\.\., K\); .*"),
    "weight-rank": (
        dict(weight_t=torch.randn(K, N, 1)),
        r"weight_t is shape \(6, 4, 1\), expected \(K, N\) with x's K = 6: the transposed nn\.Linear weight",
    ),
    "weight-none": (dict(weight_t=None), r"weight_t is NoneType, expected \(K, N\) with x's K = 6: .*"),
    "weight-not-transposed": (
        dict(weight_t=torch.randn(N, K)),
        r"weight_t is shape \(4, 6\), expected \(K, N\) with x's K = 6: the transposed nn\.Linear weight",
    ),
    "bias-rank": (dict(bias=torch.randn(1, N)), r"bias is shape \(1, 4\), expected \(N,\) = \(4,\)"),
    "bias-K": (dict(bias=torch.randn(K)), r"bias is shape \(6\), expected \(N,\) = \(4,\)"),
    "bias-number": (dict(bias=1.0), r"bias is float, expected \(N,\) = \(4,\)"),
    "threshold-rank": (
        dict(threshold=torch.ones(1, K)),
        r"threshold is shape \(1, 6\), expected \(K,\) = \(6,\)",
    ),
    "threshold-N": (dict(threshold=torch.ones(N)), r"threshold is shape \(4\), expected \(K,\) = \(6,\)"),
    "threshold-1": (dict(threshold=torch.ones(1)), r"threshold is shape \(1\), expected \(K,\) = \(6,\)"),
    "token_scale-rank": (
        dict(token_scale=torch.ones(T, 1)),
        r"token_scale is shape \(3, 1\), expected \(T,\) = \(3,\) or x's leading shape",
    ),
    "token_scale-number": (dict(token_scale=1.0), r"token_scale is float, expected \(T,\) = \(3,\) .*"),
    "scale-K": (
        dict(weight_t=INT8, scale=torch.ones(K)),
        r"scale is shape \(6\), expected \(N,\) = \(4,\)",
    ),
    "scale-number": (dict(weight_t=INT8, scale=1.0), r"scale is float, expected \(N,\) = \(4,\)"),
    "scale-missing": (
        dict(weight_t=INT8),
        r"scale is None, expected \(N,\) = \(4,\) beside int8 weights; pass their scales",
    ),
    "scale-unwanted": (
        dict(scale=torch.ones(K)),
        r"scale is given with float32 weights, expected it with int8 weights only; leave it None",
    ),
    # dtypes
    "x-int": (
        dict(x=torch.ones(T, K, dtype=torch.int64)),
        r"x is int64, expected float32, bfloat16, float16 or float64; .*",
    ),
    "x-complex": (dict(x=torch.ones(T, K, dtype=torch.complex64)), r"x is complex64, expected float32, .*"),
    "x-float8": (dict(x=torch.ones(T, K).to(torch.float8_e4m3fn)), r"x is float8_e4m3fn, expected .*"),
    "weight-dtype": (
        dict(weight_t=torch.randn(K, N).bfloat16()),
        r"weight_t is bfloat16, expected x's dtype float32; .*",
    ),
    "weight-uint8": (
        dict(weight_t=torch.ones(K, N, dtype=torch.uint8)),
        r"weight_t is uint8, expected x's dtype float32; .*",
    ),
    "bias-dtype": (dict(bias=torch.randn(N).half()), r"bias is float16, expected x's dtype float32; .*"),
    "threshold-half": (dict(threshold=torch.ones(K).half()), r"threshold is float16, expected float32; .*"),
    "threshold-0d-int": (
        dict(threshold=torch.tensor(1)),
        r"threshold is int64 on cpu, expected float32 on x's device cpu",
    ),
    "token_scale-half": (
        dict(token_scale=torch.ones(T).half()),
        r"token_scale is float16, expected float32; .*",
    ),
    "scale-half": (
        dict(weight_t=INT8, scale=torch.ones(N).half()),
        r"scale is float16, expected float32; .*",
    ),
    # devices, layouts, strides
    "weight-device": (dict(weight_t=meta(K, N)), r"weight_t is on meta, expected x's device cpu; .*"),
    "int8-device": (
        dict(weight_t=meta(K, N, dtype=torch.int8), scale=torch.ones(N)),
        r"weight_t is torch\.strided on meta, expected torch\.strided on x's device cpu; .*",
    ),
    "bias-device": (dict(bias=meta(N)), r"bias is on meta, expected x's device cpu; .*"),
    "threshold-device": (dict(threshold=meta(K)), r"threshold is on meta, expected x's device cpu; .*"),
    "threshold-0d-device": (
        dict(threshold=meta()),
        r"threshold is float32 on meta, expected float32 on x's device cpu",
    ),
    "token_scale-device": (dict(token_scale=meta(T)), r"token_scale is on meta, expected x's .*"),
    "scale-device": (dict(weight_t=INT8, scale=meta(N)), r"scale is on meta, expected x's device cpu; .*"),
    "x-sparse": (
        dict(x=torch.eye(K).to_sparse()),
        r"x has layout torch.sparse_coo, expected torch.strided; .*",
    ),
    "weight-sparse": (
        dict(weight_t=torch.ones(K, N).to_sparse()),
        r"weight_t has layout torch.sparse_coo, expected torch.strided; .*",
    ),
    "weight-of-a-linear-layer": (
        dict(weight_t=torch.nn.Linear(K, N).weight.detach().t()),
        r"weight_t has strides \(1, 6\), expected unit stride inside a row; .*weight_t\.contiguous\(\)",
    ),
    "int8-stride": (
        dict(weight_t=INT8.t().contiguous().t(), scale=torch.ones(N)),
        r"weight_t has strides \(1, 6\), expected unit stride inside a row; .*",
    ),
    "weight-broadcast": (
        dict(weight_t=torch.randn(K, 1).expand(K, N)),
        r"weight_t has strides \(1, 0\), expected unit stride inside a row; .*",
    ),
    # values and names
    "threshold-negative": (
        dict(threshold=-0.1),
        r"threshold is -0\.1, expected a number ≥ 0 \(inf: never active\)",
    ),
    "threshold-nan": (dict(threshold=torch.nan), r"threshold is nan, expected a number ≥ 0 .*"),
    "threshold-text": (
        dict(threshold="0.1"),
        r"threshold is str, expected a number ≥ 0 or a float32 tensor of shape \(\) or \(K,\)",
    ),
    "threshold-none": (dict(threshold=None), r"threshold is NoneType, expected a number ≥ 0 or .*"),
    "backend": (dict(backend="cuda"), r"backend is 'cuda', expected one of: auto, native, .*reference"),
    "backend-none": (dict(backend=None), r"backend is None, expected one of: auto, .*"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_message(changes: dict[str, Any], message: str) -> None:
    raises(message, **changes)
    if isinstance(changes.get("threshold", 0.0), float):  # with a tensor the direct call is tried first
        raises(message, **{"threshold": torch.tensor(0.5), **changes})


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_the_same_message_when_gradients_are_wanted(changes: dict[str, Any], message: str) -> None:
    """The differentiable path checks before it computes, as the other one does."""
    if "weight_t" not in changes:
        changes = {**changes, "weight_t": torch.randn(K, N, requires_grad=True)}
    raises(message, **changes)


def holding(value: float) -> torch.Tensor:
    t = torch.ones(K)
    t[-1] = value
    return t


@pytest.mark.parametrize("backend", backends(OP))
@pytest.mark.parametrize("tokens", [1, 3, 40, 130])
@pytest.mark.parametrize("threshold", [
    torch.tensor(-1.0), torch.tensor(torch.nan), holding(torch.nan), holding(-0.5), holding(-torch.inf),
], ids=["negative", "nan", "one-nan", "one-negative", "minus-inf"])  # fmt: skip
@pytest.mark.parametrize("int8", [False, True])
def test_values_inside_a_threshold_tensor(
    int8: bool, threshold: torch.Tensor, tokens: int, backend: str
) -> None:
    """The computation itself finds them on a CPU; a GPU's would have to stall for it, and keeps the entry instead."""
    call_ = {
        "x": torch.randn(tokens, K),
        "backend": backend,
        **(dict(weight_t=INT8, scale=torch.ones(N)) if int8 else {}),
    }
    if backend != "triton":
        message = r"threshold holds a negative or NaN value, expected values (>=|≥) 0 \(inf: never active\)"
        raises(message, threshold=threshold, **call_)
    elif not int8:
        same, keeps = arguments(**call_), torch.where(threshold >= 0, threshold, 0.0)
        out = [sparse_linear(**{**same, "threshold": t}) for t in (threshold, keeps)]
        assert torch.equal(*out)


@pytest.mark.parametrize("backend", backends(OP))
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(
    "threshold", [0, 0.0, -0.0, 1, 2.5, torch.inf, 1e300, torch.tensor(0.5), torch.tensor(torch.inf)]
)
def test_legal_thresholds(threshold: Any, tokens: int, backend: str) -> None:
    assert call(x=torch.randn(tokens, K), threshold=threshold, backend=backend).isfinite().all()


def test_a_backend_without_derivative_says_so() -> None:
    message = (
        r"backend is 'native', which has no derivative, and an input requires grad \(or torch\.func transforms it\); "
        r".*torch\.no_grad\(\)"
    )
    for changes in (
        dict(x=torch.randn(T, K, requires_grad=True)),
        dict(weight_t=torch.randn(K, N, requires_grad=True)),
        dict(bias=torch.randn(N, requires_grad=True)),
        dict(weight_t=INT8, scale=torch.ones(N, requires_grad=True)),
    ):
        for threshold in (0.5, torch.tensor(0.5)):  # with a tensor the direct call is tried first
            raises(message, backend="native", threshold=threshold, **changes)
        # without a compiled library that is the error here
        with torch.no_grad(), contextlib.suppress(sparsemlp.BackendUnavailableError):
            call(backend="native", **changes)


def test_an_explicit_backend_never_falls_back() -> None:
    """Its error lists every backend with its reason."""
    double = {name: t.double() for name, t in arguments().items()}
    with pytest.raises(sparsemlp.BackendUnavailableError) as info:
        call(backend="native", **double)
    text = str(info.value)
    assert re.fullmatch(
        r"sparse_linear: backend 'native' cannot compute this call \(native: [^;]*; .*reference: available\); "
        r"use backend='auto' .*",
        text,
    ), text


def test_float64_is_not_mixed_even_under_autocast() -> None:
    """Autocast leaves float64 alone, so it cannot make one dtype of it and float32."""
    with torch.autocast("cpu", torch.bfloat16):
        raises(r"weight_t is float32, expected x's dtype float64; .*", x=torch.randn(T, K).double())
        raises(r"bias is float64, expected x's dtype float32; .*", bias=torch.randn(N).double())
