"""The thresholded gated MLP on a GPU, for few tokens: two launches, nothing of the data is looked at by the host.

1. `_select`: gate rows, activation, threshold, up rows of wanted neurons, and the list of active neurons.
2. `_rows`: down rows of the neurons in the list, in a fixed order.

By a low-bit screen the first looks at the copies instead of the gate, then reads the gate and up rows of wanted
neurons; a launch before it rounds the tokens to int8 (`_screen`). By input sparsity two launches of the same kinds come
before them, over input channels instead of neurons: what they give is the gate's pre-activations, in float32
(`_channels`).

Many tokens: `kernels.gated_mlp_prefill`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp._layout import float32_run, in_memory
from sparsemlp.kernels import _channels, _configs, _rows, _screen, _select, gated_mlp_prefill
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run
from sparsemlp.kernels._rule import Rule
from sparsemlp.kernels._screen import Screen
from sparsemlp.screen import ROWS

__all__ = ["DECODE_TOKENS", "decode", "default", "forward"]

DECODE_TOKENS = _rows.MOST_TOKENS
"""Up to here the launches of this file."""


def default(tokens: int, d: int, f: int, dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory."""
    return {**_select.default(tokens, dtype), **_rows.default(tokens, dtype)}


def _beside_a_screen(config: _configs.Config, dealt: _rows.Deal) -> tuple[int, int]:
    """(block_d, select_stages) where the kernel holds a screen's sums too: it must leave registers for them.

    Tiles of full rows hold as much as without one, half as much where threads hold them, and one at most is copied to
    shared memory ahead of its use.
    """
    held = config["block_f"] * config["block_d"] // (1 if dealt.dot else 2)
    return max(16, held // dealt.block_f), min(2, config["select_stages"])


def decode(
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
) -> tuple[Tensor, list[Launch]]:
    """The output, not yet computed, and the launches that compute it; at most DECODE_TOKENS tokens.

    With `input_threshold`, w_gate has strides (1, F). `screen` is given by the indicator "screen" and only then.
    """
    (tokens, d), f = x.shape, w_gate.shape[0]
    key = {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[x.dtype]}
    config = _configs.find("gated_mlp", x.device, key, default(tokens, d, f, x.dtype))
    pre, seen, first = None, None, []
    if input_threshold is not None:
        pre, first = _channels.few(x, w_gate.t(), input_threshold, None, None, torch.float32)
    blocks = config if screen is None else {**config, "block_f": max(ROWS, config["block_f"])}
    dealt = _rows.deal(tokens, d, f, x.dtype, blocks)
    block_d, stages = config["block_d"], config["select_stages"]
    if screen is not None:
        block_d, stages = _beside_a_screen(config, dealt)
        seen, quantize = _screen.quantize_tokens(x, screen)
        first = [quantize]
    listed = dealt.listed(x.device)
    rule = Rule(threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    select = _select.launch(
        dealt, listed, rule, x, None if pre is not None else w_gate, w_up, pre, b_gate, b_up,
        block_d, config["select_warps"], stages, screen, seen,
    )  # fmt: skip
    out, rest = _rows.launches(dealt, listed, w_down_t, b_down, skipped_out, x.dtype, config)
    return out, [*first, select, *rest]


def forward(
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
    """The operator's arguments in order; x is (T, D)."""
    x, w_gate, w_up, w_down_t = (in_memory(t) for t in (x, w_gate, w_up, w_down_t))
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    if 0 in x.shape:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    b_gate, b_up, b_down = (None if b is None else in_memory(b).contiguous() for b in (b_gate, b_up, b_down))
    small = map(float32_run, (threshold, input_threshold, token_scale, skipped_mean, skipped_out))
    args = (
        x, w_gate, w_up, w_down_t, *small,
        b_gate, b_up, b_down, float32_run(activation_params), activation, indicator,
    )  # fmt: skip
    screen = None
    if screen_gate is not None:
        screen = Screen(screen_gate, screen_up, screen_scale_gate, screen_scale_up)
    if x.shape[0] > DECODE_TOKENS:
        return gated_mlp_prefill.prefill(*args, screen)
    out, launches = decode(*args, screen)
    run(launches)
    return out
