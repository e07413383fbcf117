"""The activations and their derivatives as Triton functions of float32 values and up to three parameters.

`FORWARD[name]` and `DERIVATIVE[name]` are passed to kernels as constexpr arguments. Every function takes
(p, a, b, c), c to a being the parameters of the row of `sparsemlp.activations` in their order and 0 where it has none.
NaN in gives NaN out: no minimum or maximum, which may drop a NaN, and comparisons written so that NaN falls through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemlp import activations

__all__ = ["DERIVATIVE", "FORWARD", "params"]


@triton.jit
def params(pointer, COUNT: tl.constexpr):
    """The activation's parameters, (a, b, c), from a float32 pointer; 0 beyond COUNT."""
    a = 0.0
    b = 0.0
    c = 0.0
    if COUNT > 0:
        a = tl.load(pointer)
    if COUNT > 1:
        b = tl.load(pointer + 1)
    if COUNT > 2:
        c = tl.load(pointer + 2)
    return a, b, c


@triton.jit
def _relu(p, a, b, c):
    return tl.where(p <= 0, 0.0, p)


@triton.jit
def _d_relu(p, a, b, c):
    return tl.where(p <= 0, 0.0, tl.where(p > 0, 1.0, p))


@triton.jit
def _relu2(p, a, b, c):
    q = tl.where(p <= 0, 0.0, p)
    return q * q


@triton.jit
def _d_relu2(p, a, b, c):
    return 2 * tl.where(p <= 0, 0.0, p)


@triton.jit
def _jsrelu(p, a, b, c):
    # p·(1 + p/2), not ½((p+1)² − 1): no cancellation near 0
    q = tl.where(p <= 0, 0.0, p)
    return q * (1 + 0.5 * q)


@triton.jit
def _d_jsrelu(p, a, b, c):
    return tl.where(p <= 0, 0.0, p + 1)


@triton.jit
def _weird(p, dx, dy, w):
    q = p - dx
    return _jsrelu(q - w, 0.0, 0.0, 0.0) - _jsrelu(-q - w, 0.0, 0.0, 0.0) + dy


@triton.jit
def _d_weird(p, dx, dy, w):
    q = p - dx
    return _d_jsrelu(q - w, 0.0, 0.0, 0.0) + _d_jsrelu(-q - w, 0.0, 0.0, 0.0)


@triton.jit
def _fatrelu(p, tau, b, c):
    return tl.where(p < tau, 0.0, p)


@triton.jit
def _d_fatrelu(p, tau, b, c):
    return tl.where(p <= tau, 0.0, tl.where(p == p, 1.0, p))


@triton.jit
def _mix(p, lam, b, c):
    # (1 − λ)·relu + λ·jsrelu without 0·inf where λ is 0
    q = tl.where(p <= 0, 0.0, p)
    return q * (1 + 0.5 * lam * q)


@triton.jit
def _d_mix(p, lam, b, c):
    return tl.where(p <= 0, 0.0, 1 + lam * p)


@triton.jit
def _sigmoid(p):
    return 1 / (1 + tl.exp(-p))


@triton.jit
def _silu(p, a, b, c):
    return p / (1 + tl.exp(-p))


@triton.jit
def _d_silu(p, a, b, c):
    s = _sigmoid(p)
    return s + p * s * _sigmoid(-p)  # 1 − s would cancel


@triton.jit
def _gelu(p, a, b, c):
    return 0.5 * p * (1 + tl.erf(p * 0.7071067811865476))


@triton.jit
def _d_gelu(p, a, b, c):
    cdf = 0.5 * (1 + tl.erf(p * 0.7071067811865476))
    return cdf + p * tl.exp(-0.5 * p * p) * 0.3989422804014327


@triton.jit
def _gelu_tanh(p, a, b, c):
    # ½p(1 + tanh z) = p / (1 + e^(−2z)): no cancellation for negative p
    return p / (1 + tl.exp(-1.5957691216057308 * (p + 0.044715 * p * p * p)))


@triton.jit
def _d_gelu_tanh(p, a, b, c):
    # with s = ½(1 + tanh z): ½(1 − tanh² z) = 2·s·(1 − s), which is 0 long before p² overflows
    q = tl.where(p < -64, -64.0, tl.where(p > 64, 64.0, p))
    square = q * q
    z = 1.5957691216057308 * q * (1 + 0.044715 * square)
    s = _sigmoid(z)
    return s + q * s * _sigmoid(-z) * 1.5957691216057308 * (1 + 0.134145 * square)


@triton.jit
def _identity(p, a, b, c):
    return p


@triton.jit
def _d_identity(p, a, b, c):
    return tl.where(p == p, 1.0, p)


FORWARD = {
    "relu": _relu,
    "relu2": _relu2,
    "jsrelu": _jsrelu,
    "weird": _weird,
    "fatrelu": _fatrelu,
    "mix": _mix,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "identity": _identity,
}
"""φ by name."""

DERIVATIVE = {
    "relu": _d_relu,
    "relu2": _d_relu2,
    "jsrelu": _d_jsrelu,
    "weird": _d_weird,
    "fatrelu": _d_fatrelu,
    "mix": _d_mix,
    "silu": _d_silu,
    "gelu": _d_gelu,
    "gelu_tanh": _d_gelu_tanh,
    "identity": _d_identity,
}
"""φ' by name, 0 where it does not exist."""

assert [*FORWARD] == [*DERIVATIVE] == [*activations.ACTIVATIONS], "an activation lacks its Triton functions"
