"""The thresholded gated MLP on a GPU for many tokens: the vendor's matrix products around a fused mask.

With many tokens nearly every neuron is wanted by some token, and three dense products win. Where whole tiles (tokens ×
neurons) are inactive, `skip_below` in the configuration of a GPU may send a call through products of active tiles
only: the share of active tiles below which that was measured to be faster. The share is then read back by the host, one
wait per call, and never while a CUDA graph is captured. The default is not to look.

By a low-bit screen its scores come first, (T, F), and the mask is made of them (`gated_mlp_screen`). By input sparsity
the gate's pre-activations come from `sparse_linear`'s path for many tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp.kernels import _channels, _configs, _masked
from sparsemlp.kernels._launch import DTYPE_NAMES, run
from sparsemlp.kernels._masked import hidden, repair
from sparsemlp.kernels._rule import Rule
from sparsemlp.kernels._screen import Screen
from sparsemlp.kernels.gated_mlp_screen import scores
from sparsemlp.kernels.gated_mlp_tiles import tile_list, tile_products
from sparsemlp.reference.gated_mlp import gemm_bias

__all__ = ["default", "prefill"]


def default(tokens: int, d: int, f: int, dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory."""
    half = dtype != torch.float32
    return {
        **_masked.DEFAULT,
        "skip_below": 0.0,  # the share of active tiles below which only they are multiplied; 0: never
        "tile_t": 64,
        "tile_f": 64 if half else 32,
        "tile_d": 128 if half else 64,
        "tile_k": 64 if half else 32,
        "tile_warps": 4,
        "tile_stages": 3,
    }


def prefill(
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
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
    screen: Screen | None = None,
) -> Tensor:
    """The output (T, D) for any number of tokens; `screen` is given by the indicator "screen" and only then."""
    (tokens, d), f = x.shape, w_gate.shape[0]
    key = {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[x.dtype]}
    config = _configs.find("gated_mlp_prefill", x.device, key, default(tokens, d, f, x.dtype))
    rule = Rule(threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    if input_threshold is None:
        pre = F.linear(x, w_gate, b_gate)
    else:
        pre = _channels.many(x, w_gate.t(), input_threshold, None, b_gate)
    m = None
    if screen is not None:
        m, launches = scores(x, screen, b_gate, b_up, f, rule, config)
        run(launches)
    look = config["skip_below"] > 0 and f > 0 and indicator == "gate"  # the others need up for every entry
    if look and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        flags, listed, counts, launches = tile_list(pre, rule, config)
        run(launches)
        if int(counts.sum()) < config["skip_below"] * flags.numel():
            h, out, launches = tile_products(
                x, w_up, w_down_t, b_up, b_down, skipped_out, pre, flags, listed, counts, rule, config
            )
            run([*launches, repair(pre, pre, h, w_down_t, b_down, skipped_out, out, rule, config)])
            return out
    up = F.linear(x, w_up, b_up)
    h, launch = hidden(pre, up, rule, config, m)
    run([launch])
    out = F.linear(h, w_down_t.t(), gemm_bias(b_down, skipped_out, x.dtype))
    run([repair(pre, up, h, w_down_t, b_down, skipped_out, out, rule, config, m)])
    return out
