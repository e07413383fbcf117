"""The ungated MLP's reference: plain PyTorch, any floating dtype; `differentiable` can be traced and has gradients."""

from __future__ import annotations

from torch import Tensor

from sparsemlp.reference import gated_mlp as gated
from sparsemlp.reference.gated_mlp import check_values, skipped_out
from sparsemlp.reference.products import add, neuron_linear, rows_linear, unread

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
    return gated.hidden(pre, one, threshold, token_scale, skipped_mean, activation_params, activation)


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
        check_values("threshold", threshold)
    pre = rows_linear(x, w_in, scale_in, b_in)
    h, active = hidden(pre, threshold, token_scale, skipped_mean, activation_params, activation)
    out = neuron_linear(h, w_out_t, scale_out)
    if on_cpu and scale_out is None:  # integers are finite
        out = unread(out, h, active, w_out_t)
    return add(out, b_out, skipped_out)


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
    pre = rows_linear(x, w_in, scale_in, b_in)
    h, _ = hidden(pre, threshold, token_scale, skipped_mean, activation_params, activation)
    return add(neuron_linear(h, w_out_t, scale_out), b_out, skipped_out)
