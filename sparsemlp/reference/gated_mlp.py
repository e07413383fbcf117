"""The gated MLP's reference: plain PyTorch, any floating dtype; `differentiable` can be traced and has gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import activations
from sparsemlp.activations import wide
from sparsemlp.reference import screen
from sparsemlp.reference.products import add, neuron_linear, recomputed, rows_linear, unread
from sparsemlp.screen import PackedWeight

__all__ = [
    "check_values", "differentiable", "gated_mlp", "gemm_bias", "hidden", "input_kept", "kept_entries", "skipped_out",
]  # fmt: skip

_CHUNK = 1024
"""Neurons widened at a time in `skipped_out`: no wide copy of a half-precision weight."""


def hidden(
    pre: Tensor,
    up: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str = "gate",
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h = C(φ(pre)) ⊙ up, rounded once to pre's dtype, and the mask of active entries, both (T, F).

    A neuron is kept unless |m| < s·t (so a NaN is kept), m being a, u or a·u by the indicator, or `scores` (T, F), by
    the screen; active is kept and a ≠ 0, or just kept with `skipped_mean` μ, where the kept entries are a·u − μ (the
    caller adds W_down μ). Inactive entries are 0 whatever `up` holds.
    """
    p, u = wide(pre), wide(up)
    a = activations.apply(p, activation, activation_params)
    kept = kept_entries(a, u, threshold, token_scale, indicator, scores)
    if skipped_mean is not None:
        return torch.where(kept, a * u - skipped_mean.to(a.dtype), 0).to(pre.dtype), kept
    active = kept & (a != 0)
    # At a = 0 the product is 0 and a's gradient must still flow to pre; only a non-finite u would make it NaN.
    h = torch.where(active | (kept & u.isfinite()), a * u, 0)
    return h.to(pre.dtype), active


def kept_entries(
    a: Tensor,
    u: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    indicator: str,
    scores: Tensor | None = None,
) -> Tensor:
    """Where not |m| < s·t, (T, F), for a and u in the dtype that is computed in; u may be a scalar."""
    m = {"gate": a, "up": u, "product": a * u}[indicator] if scores is None else scores
    limit = threshold.to(a.dtype)
    if token_scale is not None:
        scale = token_scale.to(a.dtype)[:, None]
        limit = torch.where(
            scale == 0, torch.zeros_like(scale), scale * limit
        )  # s = 0 is dense, even at t = inf
    return ~(m.abs() < limit)


def input_kept(x: Tensor, input_threshold: Tensor) -> Tensor:
    """Which x_k the gate sees, (T, D) bool: not |x_k| < t_k, so a NaN is kept; `input_threshold` is () or (D,)."""
    x_wide = wide(x)
    return ~(x_wide.abs() < input_threshold.to(x_wide.dtype))


def skipped_out(skipped_mean: Tensor, w_down_t: Tensor, scale_down: Tensor | None = None) -> Tensor:
    """μ @ w_down_t (of int8: · scale_down) in float32, (D,) from μ (F,) and w_down_t (F, D), differentiable.

    In float64 where the weights or, with int8 ones, the means are.
    """
    decides = w_down_t if scale_down is None else skipped_mean
    dtype = torch.float64 if decides.dtype == torch.float64 else torch.float32
    total = torch.zeros(w_down_t.shape[1], dtype=dtype, device=w_down_t.device)
    for mean, rows in zip(skipped_mean.split(_CHUNK), w_down_t.split(_CHUNK), strict=True):
        total = total + mean.to(dtype) @ rows.to(dtype)
    return total if scale_down is None else total * scale_down.to(dtype)


def _gate(
    x: Tensor, w_gate: Tensor, input_threshold: Tensor | None, scale: Tensor | None, b: Tensor | None
) -> Tensor:
    """p of the x_k that the gate sees."""
    if input_threshold is not None:
        x = torch.where(input_kept(x, input_threshold), x, 0)
    return rows_linear(x, w_gate, scale, b)


def _scores(
    x: Tensor,
    neurons: int,
    screens: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    b_gate: Tensor | None,
    b_up: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor | None:
    """By what the screen decides, (T, F), or None without one."""
    gate, up, scale_gate, scale_up = screens
    if gate is None or up is None or scale_gate is None or scale_up is None:
        return None
    copies = PackedWeight(gate, scale_gate), PackedWeight(up, scale_up)
    return screen.scores(x, *copies, neurons, b_gate, b_up, activation_params, activation)


def gemm_bias(b_down: Tensor | None, skipped_out: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to every token's output, as one bias of the down projection's GEMM in the backends that use one."""
    if skipped_out is None:
        return b_down
    return (skipped_out if b_down is None else skipped_out + b_down.float()).to(dtype)


def _unread_gate(
    pre: Tensor,
    x: Tensor,
    w_gate: Tensor,
    input_threshold: Tensor,
    b: Tensor | None,
) -> Tensor:
    """`pre` with 0·inf and 0·NaN of the x_k that the gate does not see taken back."""

    def row(i: int) -> Tensor:
        one = x[i : i + 1]
        seen = (input_kept(one, input_threshold) & (one != 0))[0].nonzero().flatten()
        return rows_linear(one[:, seen], w_gate[:, seen], None, b)

    return recomputed(pre, row)


def check_values(name: str, threshold: Tensor) -> None:
    """Raises where a threshold is negative or NaN."""
    if not bool((threshold >= 0).all()):
        raise ValueError(f"{name} holds a negative or NaN value, expected values >= 0 (inf: never active)")


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    input_threshold: Tensor | None,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    scale_gate: Tensor | None,
    scale_up: Tensor | None,
    scale_down: Tensor | None,
    screen_gate: Tensor | None,
    screen_up: Tensor | None,
    screen_scale_gate: Tensor | None,
    screen_scale_up: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> Tensor:
    """y of `sparsemlp.gated_mlp` for x of shape (T, D); the operator's arguments in order."""
    on_cpu = x.device.type == "cpu"  # elsewhere a look at the values would stall the device
    if on_cpu:
        check_values("threshold", threshold)
    pre = _gate(x, w_gate, input_threshold, scale_gate, b_gate)
    if on_cpu and input_threshold is not None:
        check_values("input_threshold", input_threshold)
        if scale_gate is None:  # integers are finite
            pre = _unread_gate(pre, x, w_gate, input_threshold, b_gate)
    up = rows_linear(x, w_up, scale_up, b_up)
    screens = screen_gate, screen_up, screen_scale_gate, screen_scale_up
    scores = _scores(x, w_gate.shape[0], screens, b_gate, b_up, activation_params, activation)
    h, active = hidden(
        pre, up, threshold, token_scale, skipped_mean, activation_params, activation, indicator, scores
    )
    out = neuron_linear(h, w_down_t, scale_down)
    if on_cpu and scale_down is None:
        out = unread(out, h, active, w_down_t)
    return add(out, b_down, skipped_out)


def differentiable(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    input_threshold: Tensor | None,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    scale_gate: Tensor | None,
    scale_up: Tensor | None,
    scale_down: Tensor | None,
    screen_gate: Tensor | None,
    screen_up: Tensor | None,
    screen_scale_gate: Tensor | None,
    screen_scale_up: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> Tensor:
    """The same values by operations that autograd, `torch.func` and `torch.compile` see through.

    Unlike `gated_mlp`, an inf or NaN in a down row of an inactive neuron, or in the gate's weights for an x_k below its
    threshold, reaches the output, as in the dense MLP.
    """
    pre = _gate(x, w_gate, input_threshold, scale_gate, b_gate)
    up = rows_linear(x, w_up, scale_up, b_up)
    screens = screen_gate, screen_up, screen_scale_gate, screen_scale_up
    scores = _scores(x, w_gate.shape[0], screens, b_gate, b_up, activation_params, activation)
    h, _ = hidden(
        pre, up, threshold, token_scale, skipped_mean, activation_params, activation, indicator, scores
    )
    return add(neuron_linear(h, w_down_t, scale_down), b_down, skipped_out)
