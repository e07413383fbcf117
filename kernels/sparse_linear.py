"""A linear layer over the entries of x that reach a threshold, on a GPU: rows of other channels are not read."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp._layout import float32_run, in_memory
from sparsemlp.kernels import _channels
from sparsemlp.kernels._channels import default
from sparsemlp.kernels._launch import run
from sparsemlp.kernels._rows import MOST_TOKENS

__all__ = ["default", "forward"]


def forward(
    x: Tensor,
    weight_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """The operator's arguments in order; x is (T, K)."""
    x, weight_t = in_memory(x), in_memory(weight_t)
    tokens, n = x.shape[0], weight_t.shape[1]
    if tokens == 0 or n == 0:
        return torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    args = (
        x,
        weight_t,
        float32_run(threshold),
        float32_run(token_scale),
        None if bias is None else in_memory(bias).contiguous(),
    )
    if tokens > MOST_TOKENS:
        return _channels.many(*args)
    out, launches = _channels.few(*args, x.dtype)
    run(launches)
    return out
