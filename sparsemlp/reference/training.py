"""Training's reference: a forward that stores what it decides from, and the backward of docs/training.md by hand.

p, and u of a gated MLP, are rounded once to x's dtype and stored; forward and backward both decide from what is stored.
Source: Peng et al., "A Theoretical Explanation of Activation Sparsity through Flat Minima and Adversarial
Robustness", for the backward that leaves out what has derivative 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations
from sparsemlp.activations import wide
from sparsemlp.reference import gated_mlp as gated
from sparsemlp.reference.gated_mlp import check_values
from sparsemlp.reference.products import add, unread

__all__ = [
    "GATED_WANTED", "WANTED", "Entries", "entries", "gated_mlp_bwd", "gated_mlp_fwd", "mlp_bwd", "mlp_fwd", "names_of",
]  # fmt: skip

WANTED = ("x", "w_in", "w_out_t", "b_in", "skipped_mean")
"""What `mlp_bwd` can return gradients of, in the order of its outputs."""

GATED_WANTED = ("x", "w_gate", "w_up", "w_down_t", "b_gate", "b_up", "skipped_mean")
"""The same of `gated_mlp_bwd`."""


class Entries(NamedTuple):
    """What a backward pass multiplies, each (T, F): values, 0 where the mask says no.

    Args:
        hidden: h, rounded once to pre's dtype. active: its pattern, which ∂ℓ/∂W_out follows.
        grad_pre: ∂ℓ/∂p, rounded once. moving: its pattern: kept, and φ'(p) ≠ 0.
        grad_up: ∂ℓ/∂u, rounded once, of pattern `active`; None without a gate.
        grad_mean: ∂ℓ/∂μ (F,), in the dtype that is computed in.
    """

    hidden: Tensor
    active: Tensor
    grad_pre: Tensor
    moving: Tensor
    grad_up: Tensor | None
    grad_mean: Tensor


def names_of(wanted: str) -> tuple[str, ...]:
    """`wanted` as the operators take it, names joined by commas, as a tuple."""
    return tuple(wanted.split(",")) if wanted else ()


def entries(
    grad_hidden: Tensor,
    pre: Tensor,
    up: Tensor | None,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> Entries:
    """`Entries` from ∂ℓ/∂h = `grad_hidden`, which counts only where an entry is active or moving."""
    u = pre.new_ones(()) if up is None else up
    h, active = gated.hidden(
        pre, u, threshold, token_scale, skipped_mean, activation_params, activation, indicator
    )
    p, u_wide, g = wide(pre), wide(u), wide(grad_hidden)
    a, slope = (activations.apply(p, activation, activation_params, derivative=d) for d in (False, True))
    kept = gated.kept_entries(a, u_wide, threshold, token_scale, indicator)
    moving = kept & (slope != 0)
    grad_pre = torch.where(moving, g * u_wide * slope, 0).to(pre.dtype)
    grad_up = None if up is None else torch.where(active, g * a, 0).to(pre.dtype)
    return Entries(h, active, grad_pre, moving, grad_up, -torch.where(kept, g, 0).sum(dim=0))


def mlp_fwd(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y (T, D) of `sparsemlp.mlp` for x (T, D), and p (T, F)."""
    pre = F.linear(x, w_in, b_in)
    h, active = gated.hidden(
        pre, pre.new_ones(()), threshold, token_scale, skipped_mean, activation_params, activation
    )
    return _output(h, active, w_out_t, threshold, b_out, skipped_out), pre


def gated_mlp_fwd(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (T, D) of `sparsemlp.gated_mlp` for x (T, D), p and u (T, F)."""
    pre, up = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    h, active = gated.hidden(
        pre, up, threshold, token_scale, skipped_mean, activation_params, activation, indicator
    )
    return _output(h, active, w_down_t, threshold, b_down, skipped_out), pre, up


def _output(
    h: Tensor,
    active: Tensor,
    w_t: Tensor,
    threshold: Tensor,
    b: Tensor | None,
    skipped_out: Tensor | None,
) -> Tensor:
    if h.device.type == "cpu":  # elsewhere a look at the values would stall the device
        check_values("threshold", threshold)
    return add(_product(h, active, w_t), b, skipped_out)


def mlp_bwd(
    grad: Tensor,
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    pre: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    wanted: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `WANTED` for `grad` = ∂ℓ/∂y (T, D); of what `wanted` does not name, an empty tensor."""
    e = entries(
        grad @ w_out_t.t(), pre, None, threshold, token_scale, skipped_mean, activation_params, activation, "gate"
    )  # fmt: skip
    names = names_of(wanted)
    return (
        _product(e.grad_pre, e.moving, w_in) if "x" in names else _nothing(x),
        _product(e.grad_pre.t(), e.moving.t(), x) if "w_in" in names else _nothing(x),
        _product(e.hidden.t(), e.active.t(), grad) if "w_out_t" in names else _nothing(x),
        _column_sums(e.grad_pre) if "b_in" in names else _nothing(x),
        _mean(e, skipped_mean) if "skipped_mean" in names else _no_mean(x, skipped_mean),
    )


def gated_mlp_bwd(
    grad: Tensor,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    pre: Tensor,
    up: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
    wanted: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `GATED_WANTED` for `grad` = ∂ℓ/∂y (T, D); of what `wanted` does not name, an empty tensor."""
    e = entries(
        grad @ w_down_t.t(), pre, up, threshold, token_scale, skipped_mean, activation_params, activation, indicator
    )  # fmt: skip
    assert e.grad_up is not None
    names = names_of(wanted)

    def grad_x() -> Tensor:
        assert e.grad_up is not None
        both = wide(_product(e.grad_pre, e.moving, w_gate)) + wide(_product(e.grad_up, e.active, w_up))
        return both.to(x.dtype)

    return (
        grad_x() if "x" in names else _nothing(x),
        _product(e.grad_pre.t(), e.moving.t(), x) if "w_gate" in names else _nothing(x),
        _product(e.grad_up.t(), e.active.t(), x) if "w_up" in names else _nothing(x),
        _product(e.hidden.t(), e.active.t(), grad) if "w_down_t" in names else _nothing(x),
        _column_sums(e.grad_pre) if "b_gate" in names else _nothing(x),
        _column_sums(e.grad_up) if "b_up" in names else _nothing(x),
        _mean(e, skipped_mean) if "skipped_mean" in names else _no_mean(x, skipped_mean),
    )


def _product(rows: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    """rows @ w, where an inf or NaN of w that only masked entries meet counts as not there."""
    out = rows @ w
    return unread(out, rows, mask, w) if out.device.type == "cpu" else out


def _column_sums(t: Tensor) -> Tensor:
    return wide(t).sum(dim=0).to(t.dtype)


def _mean(e: Entries, skipped_mean: Tensor | None) -> Tensor:
    assert skipped_mean is not None
    return e.grad_mean.to(skipped_mean.dtype)


def _nothing(x: Tensor) -> Tensor:
    """An output that is not wanted; each is a tensor of its own, as an operator may return none twice."""
    return x.new_empty((0,))


def _no_mean(x: Tensor, mean: Tensor | None) -> Tensor:
    return _nothing(wide(x)) if mean is None else _nothing(mean)
