"""The ungated MLP's reference: plain PyTorch, any floating dtype; `differentiable` can be traced and has gradients."""

from __future__ import annotations

from torch import Tensor

from sparsemlp.reference.gated_mlp import _add, _check_values, _down, _rows, _unread, skipped_out
from sparsemlp.reference.gated_mlp import hidden as _gated_hidden

__all__ = ["differentiable", "hidden", "mlp", "skipped_out"]


def hidden(
    pre: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """h = C(φ(pre)), rounded once to pre's dtype, and the mask of active entries, both (T, F).

    It is the gated MLP's rule with nothing to multiply: a neuron is kept unless |a| < s·t (so a NaN is kept); active is
    kept and a ≠ 0, or just kept with `skipped_mean` μ, where the kept entries are a − μ (the caller adds W_out μ).
    """
    one = pre.new_ones(())
    return _gated_hidden(pre, one, threshold, token_scale, skipped_mean, activation_params, activation)


def mlp(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: Tensor,
    input_threshold: Tensor | None,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    scale_in: Tensor | None,
    scale_out: Tensor | None,
    screen_in: Tensor | None,
    screen_scale_in: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor:
    """y of `sparsemlp.mlp` for x of shape (T, D); the operator's arguments in order."""
    on_cpu = x.device.type == "cpu"  # elsewhere a look at the values would stall the device
    if on_cpu:
        _check_values("threshold", threshold)
    pre = _rows(x, w_in, scale_in, b_in)
    h, active = hidden(pre, threshold, token_scale, skipped_mean, activation_params, activation)
    out = _down(h, w_out_t, scale_out)
    if on_cpu:
        out = _unread(out, h, active, w_out_t, scale_out)
    return _add(out, b_out, skipped_out)


def differentiable(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    scale_in: Tensor | None,
    scale_out: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor:
    """The same values by operations that autograd, `torch.func` and `torch.compile` see through.

    Unlike `mlp`, an inf or NaN in an output row of an inactive neuron reaches the output, as in the dense MLP.
    """
    pre = _rows(x, w_in, scale_in, b_in)
    h, _ = hidden(pre, threshold, token_scale, skipped_mean, activation_params, activation)
    return _add(_down(h, w_out_t, scale_out), b_out, skipped_out)
