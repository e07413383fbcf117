"""Who is active: the rule as a value, and its part that the kernels for many tokens share."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sparsemlp import activations
from sparsemlp.kernels import _activations
from sparsemlp.kernels._tiles import kept_mask, limits

__all__ = ["Rule", "active_entries"]


class Rule(NamedTuple):
    """Who is active, and what a kept neuron's hidden value is reduced by: see `sparsemlp.gated_mlp`; float32.

    The indicator "ungated" is that of an MLP without up rows: m = a and h = a.
    """

    threshold: Tensor
    token_scale: Tensor | None
    skipped_mean: Tensor | None
    activation_params: Tensor | None
    activation: str
    indicator: str

    @property
    def constants(self) -> dict[str, object]:
        return {
            "ACT": _activations.FORWARD[self.activation],
            "N_PARAMS": len(activations.get(self.activation).params),
            "PER_NEURON": self.threshold.dim() == 1,
            "INDICATOR": self.indicator,
        }

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.threshold, self.token_scale, self.skipped_mean, self.activation_params


@triton.jit
def active_entries(
    pre, up, scores, threshold, token_scale, skipped_mean, params, t, j, mask, F,
    ACT: tl.constexpr, N_PARAMS: tl.constexpr, PER_NEURON: tl.constexpr, INDICATOR: tl.constexpr,
):  # fmt: skip
    """(activation, active) of entries (t, j) of pre (T, F); t is a column of int64, j a row of int64.

    `up` and `scores` (T, F) are read by the indicators that look at them.
    """
    a, b, c = _activations.params(params, N_PARAMS)
    act = ACT(tl.load(pre + t * F + j, mask=mask, other=0.0).to(tl.float32), a, b, c)
    m = act
    if INDICATOR == "up" or INDICATOR == "product":
        m = tl.load(up + t * F + j, mask=mask, other=0.0).to(tl.float32)
    if INDICATOR == "product":
        m = act * m
    if INDICATOR == "screen":
        m = tl.load(scores + t * F + j, mask=mask, other=0.0)
    limit, scale = limits(threshold, token_scale, t, j, mask, PER_NEURON)
    active = kept_mask(m, limit, scale, token_scale is not None) & mask
    if skipped_mean is None:
        active = active & (act != 0)
    return act, active
