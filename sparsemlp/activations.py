"""The activation table: one row an activation, the only place where names, parameters and formulas are listed.

`forward(p, *params)` and `derivative(p, *params)` are plain PyTorch. Both propagate NaN; `derivative` is 0 where the
derivative does not exist. `apply` computes half precision in float32 and rounds once. A row's position is its id in
the compiled kernels (`csrc/include/activations.h` lists the same names in the same order; a test compares them).

Sources: JSReLU and the shifted "weird" activation are from "A Theoretical Explanation of Activation Sparsity through
Flat Minima and Adversarial Robustness" (Peng et al.); FATReLU is from ProSparse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp._reasons import spelled

__all__ = ["ACTIVATIONS", "IDS", "Activation", "apply", "get", "wide"]


@dataclass(frozen=True)
class Activation:
    """One row: the name, the names of its parameters in order, φ and φ'."""

    name: str
    forward: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    params: tuple[str, ...] = ()
    zero_at_negative: bool = False
    """φ(p) = 0 for every p ≤ 0 whatever the parameters: exact zeros are to be expected."""


def _select(condition: Tensor, p: Tensor, value: Tensor) -> Tensor:
    """`value` where the condition holds, else 0, and NaN where p is NaN (a comparison with NaN is False)."""
    return torch.where(condition, value, torch.where(torch.isnan(p), p, torch.zeros_like(p)))


def _relu(p: Tensor) -> Tensor:
    return torch.relu(p)


def _d_relu(p: Tensor) -> Tensor:
    return _select(p > 0, p, torch.ones_like(p))


def _relu2(p: Tensor) -> Tensor:
    q = torch.relu(p)
    return q * q


def _d_relu2(p: Tensor) -> Tensor:
    return 2 * torch.relu(p)


def _jsrelu(p: Tensor) -> Tensor:
    # p·(1 + p/2), not ½((p+1)² − 1): no cancellation near 0. relu first, so that autograd sees derivative 0 at p ≤ 0
    # and never multiplies 0 by an infinite p.
    q = torch.relu(p)
    return q * (1 + 0.5 * q)


def _d_jsrelu(p: Tensor) -> Tensor:
    return _select(p > 0, p, p + 1)


def _weird(p: Tensor, dx: Tensor, dy: Tensor, w: Tensor) -> Tensor:
    q = p - dx
    return _jsrelu(q - w) - _jsrelu(-q - w) + dy


def _d_weird(p: Tensor, dx: Tensor, dy: Tensor, w: Tensor) -> Tensor:
    q = p - dx
    return _d_jsrelu(q - w) + _d_jsrelu(-q - w)


def _fatrelu(p: Tensor, tau: Tensor) -> Tensor:
    # p == τ keeps its value and has derivative 0: detached, so that autograd agrees with `derivative`.
    return torch.where(p < tau, torch.zeros_like(p), torch.where(p == tau, p.detach(), p))


def _d_fatrelu(p: Tensor, tau: Tensor) -> Tensor:
    return torch.where(p <= tau, torch.zeros_like(p), _d_identity(p))  # τ = NaN keeps every p, as `_fatrelu`


def _mix(p: Tensor, lam: Tensor) -> Tensor:
    # (1 − λ)·relu + λ·jsrelu without 0·inf for a large p where λ is 0
    q = torch.relu(p)
    return q * (1 + (0.5 * lam) * q)


def _d_mix(p: Tensor, lam: Tensor) -> Tensor:
    return _select(p > 0, p, 1 + lam * p)


def _d_silu(p: Tensor) -> Tensor:
    s = torch.sigmoid(p)
    return s + p * s * torch.sigmoid(-p)  # 1 − s would cancel


def _d_gelu(p: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(p * 0.5**0.5))
    return cdf + p * torch.exp(-0.5 * p * p) * (0.5 / torch.pi) ** 0.5


def _gelu_tanh(p: Tensor) -> Tensor:
    return F.gelu(p, approximate="tanh")


def _d_gelu_tanh(p: Tensor) -> Tensor:
    # with s = ½(1 + tanh z): ½(1 − tanh² z) = 2·s·(1 − s), which is 0 long before p² overflows
    q = torch.clamp(p, -64, 64)
    c = 2 * (2 / torch.pi) ** 0.5
    z = c * q * (1 + 0.044715 * q * q)
    s = torch.sigmoid(z)
    return s + q * s * torch.sigmoid(-z) * c * (1 + 3 * 0.044715 * q * q)


def _identity(p: Tensor) -> Tensor:
    return p


def _d_identity(p: Tensor) -> Tensor:
    return torch.where(torch.isnan(p), p, torch.ones_like(p))


_ROWS = (
    Activation("relu", _relu, _d_relu, zero_at_negative=True),
    Activation("relu2", _relu2, _d_relu2, zero_at_negative=True),
    Activation("jsrelu", _jsrelu, _d_jsrelu, zero_at_negative=True),
    Activation("weird", _weird, _d_weird, params=("dx", "dy", "w")),
    Activation("fatrelu", _fatrelu, _d_fatrelu, params=("tau",)),
    Activation("mix", _mix, _d_mix, params=("lam",), zero_at_negative=True),
    Activation("silu", F.silu, _d_silu),
    Activation("gelu", F.gelu, _d_gelu),
    Activation("gelu_tanh", _gelu_tanh, _d_gelu_tanh),
    Activation("identity", _identity, _d_identity),
)

ACTIVATIONS: dict[str, Activation] = {row.name: row for row in _ROWS}
"""Every activation by name, in the order of the compiled kernels' ids."""

IDS: dict[str, int] = {row.name: i for i, row in enumerate(_ROWS)}
"""The activations' ids in the compiled kernels."""


def get(name: str, argument: str = "activation") -> Activation:
    """The row of an activation; ValueError naming the caller's argument and the known rows otherwise."""
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{argument} is {spelled(name)}, expected one of: {known}") from None


def wide(t: Tensor) -> Tensor:
    """t in the dtype that is computed in: half precision in float32."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def apply(p: Tensor, name: str, params: Tensor | None = None, *, derivative: bool = False) -> Tensor:
    """φ(p), or φ'(p), in p's dtype; half precision is computed in float32 and rounded once.

    Args:
        p: any shape, floating point.
        name: a row of `ACTIVATIONS`.
        params: the row's parameters, shape (len(row.params),), or None for a row without parameters.
        derivative: φ' instead of φ.
    """
    row = get(name)
    q = wide(p)
    values = () if params is None else tuple(params.to(q.dtype).unbind())
    return (row.derivative if derivative else row.forward)(q, *values).to(p.dtype)
