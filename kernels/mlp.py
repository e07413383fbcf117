"""The thresholded MLP without a gate on a GPU: the gated one's launches, without up rows.

Few tokens: `_select` (rows of w_in, activation, threshold, the list of active neurons) and `_rows` (rows of w_out_t of
the neurons in the list). Many: two dense products around a fused mask (`_masked`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp._layout import float32_run, in_memory
from sparsemlp.kernels import _configs, _masked, _rows, _select
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run
from sparsemlp.kernels._rule import Rule
from sparsemlp.reference.gated_mlp import gemm_bias

__all__ = ["decode", "default", "forward", "prefill"]


def default(tokens: int, d: int, f: int, dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory."""
    return {**_select.default(tokens, dtype), **_rows.default(tokens, dtype)}


def _key(x: Tensor, w_in: Tensor) -> dict[str, int | str]:
    (tokens, d), f = x.shape, w_in.shape[0]
    return {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[x.dtype]}


def decode(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    rule: Rule,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
) -> tuple[Tensor, list[Launch]]:
    """The output, not yet computed, and the launches that compute it; at most `_rows.MOST_TOKENS` tokens."""
    (tokens, d), f = x.shape, w_in.shape[0]
    config = _configs.find("mlp", x.device, _key(x, w_in), default(tokens, d, f, x.dtype))
    dealt = _rows.deal(tokens, d, f, x.dtype, config)
    listed = dealt.listed(x.device)
    select = _select.launch(
        dealt, listed, rule, x, w_in, None, None, b_in, None,
        config["block_d"], config["select_warps"], config["select_stages"],
    )  # fmt: skip
    out, rest = _rows.launches(dealt, listed, w_out_t, b_out, skipped_out, x.dtype, config)
    return out, [select, *rest]


def prefill(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    rule: Rule,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
) -> Tensor:
    """The output (T, D) for any number of tokens."""
    config = _configs.find("mlp_prefill", x.device, _key(x, w_in), _masked.DEFAULT)
    pre = F.linear(x, w_in, b_in)
    h, mask = _masked.hidden(pre, None, rule, config)
    run([mask])
    out = F.linear(h, w_out_t.t(), gemm_bias(b_out, skipped_out, x.dtype))
    run([_masked.repair(pre, None, h, w_out_t, b_out, skipped_out, out, rule, config)])
    return out


def forward(
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
    """The operator's arguments in order; x is (T, D)."""
    x, w_in, w_out_t = (in_memory(t) for t in (x, w_in, w_out_t))
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    if 0 in x.shape:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    b_in, b_out = (None if b is None else in_memory(b).contiguous() for b in (b_in, b_out))
    limit, mean = float32_run(threshold), float32_run(skipped_mean)
    assert limit is not None
    rule = Rule(limit, float32_run(token_scale), mean, float32_run(activation_params), activation, "ungated")
    args = x, w_in, w_out_t, rule, float32_run(skipped_out), b_in, b_out
    if x.shape[0] > _rows.MOST_TOKENS:
        return prefill(*args)
    out, launches = decode(*args)
    run(launches)
    return out
