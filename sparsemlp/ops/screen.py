"""The public `scores`: by what a low-bit screen decides which neurons are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import contiguous, float32_run, with_rows
from sparsemlp.ops import _gated_mlp_native as native
from sparsemlp.ops._checks import check_activation, check_bias, check_screen, check_x
from sparsemlp.reference import screen as reference
from sparsemlp.screen import PackedWeight

__all__ = ["scores"]

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scores(
    x: Tensor,
    screen_gate: PackedWeight,
    screen_up: PackedWeight,
    neurons: int,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    activation: str = "silu",
    activation_params: Tensor | None = None,
) -> Tensor:
    """m, by which `sparsemlp.gated_mlp(..., indicator="screen")` decides which neurons are computed.

    Equivalent to, with x̂ = x rounded to int8 in groups (`sparsemlp.reference.screen.quantize_tokens`)::

        m = act(x̂ @ unpack(screen_gate).T + b_gate) * (x̂ @ unpack(screen_up).T + b_up)

    Args:
        x: (..., D) float32, bfloat16, float16 or float64.
        screen_gate, screen_up: low-bit copies of the weights (F, D), made by `sparsemlp.screen.pack`.
        neurons: F, which the copies round up.
        b_gate, b_up: (F,) in x's dtype, or None.
        activation: a name of `sparsemlp.activations.ACTIVATIONS`.
        activation_params: (n,) float32, the parameters of that row, or None.

    Returns:
        (..., F) float32, float64 of a float64 x. A neuron is kept unless |m| < s·t, so it is where m is NaN.

    Gradients: none; m decides and is no part of the output.
    Backends: the compiled kernel for an x on the CPU in float32, bfloat16 or float16 where the library is there, as
        `gated_mlp` itself uses it; else PyTorch operations on x's device.
    Raises:
        ValueError: an argument of the wrong size, dtype or device, or an unknown activation; the message names it.
    Numerics: x̂ and the copies are the same bits everywhere; sums are float32 and differ by their order.
    Source: this package (docs/ops/gated_mlp.md).
    """
    tokens = check_x(x)
    codes_gate, codes_up, scale_gate, scale_up = check_screen("screen", screen_gate, screen_up, x, neurons)
    for name, b in (("b_gate", b_gate), ("b_up", b_up)):
        check_bias(name, b, neurons, "F", x)
    params = check_activation(x, activation, activation_params)
    with torch.no_grad():
        flat = x.detach().reshape(tokens, x.shape[-1])
        b_gate, b_up = (None if b is None else b.detach().to(x.dtype) for b in (b_gate, b_up))
        if x.device.type == "cpu" and x.dtype in _NATIVE_DTYPES and _native.problem() is None:
            out: Tensor = native.screen_scores(
                with_rows(flat), codes_gate, codes_up, scale_gate, scale_up, contiguous(b_gate), contiguous(b_up),
                float32_run(params), neurons, activations.IDS[activation], _native.isa(),
            )  # fmt: skip
        else:
            out = reference.scores(flat, screen_gate, screen_up, neurons, b_gate, b_up, params, activation)
    return out.reshape(*x.shape[:-1], neurons)
