"""`gated_mlp`: the thresholded gated MLP that never reads the up and down rows of inactive neurons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp._layout import has_columns
from sparsemlp._op import Op, differentiates
from sparsemlp._reasons import spelled
from sparsemlp.ops import _gated_mlp_native as native
from sparsemlp.ops import gated_mlp_training as training_op
from sparsemlp.ops import mlp_training as training
from sparsemlp.ops._backends import compiled_and_triton
from sparsemlp.ops._checks import (
    as_threshold,
    check_activation,
    check_bias,
    check_differentiable,
    check_int8,
    check_like,
    check_screen,
    check_token_scale,
    check_x,
    checked_skipped_out,
    describe,
    dtype_text,
)
from sparsemlp.reference import gated_mlp as reference
from sparsemlp.router.decide import Router
from sparsemlp.screen import PackedWeight

__all__ = ["OP", "gated_mlp"]

INDICATORS = ("gate", "up", "product", "screen")


def _fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _stored_by_row(x: Tensor, *args: Any) -> str | None:
    """The kernels leave out columns of the gate only where a column is consecutive."""
    if not args or args[4] is None or has_columns(args[0]):
        return None
    return (
        "needs w_gate stored input by input with input_threshold (strides (1, F), as w_gate.t().contiguous().t()), "
        f"it has strides {tuple(args[0].stride())}"
    )


OP = Op(
    "gated_mlp",
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, Tensor? input_threshold, "
    "Tensor? token_scale, Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
    "Tensor? scale_gate, Tensor? scale_up, Tensor? scale_down, Tensor? screen_gate, Tensor? screen_up, "
    "Tensor? screen_scale_gate, Tensor? screen_scale_up, Tensor? activation_params, str activation, str indicator",
    fake=_fake,
    reference=reference.gated_mlp,
    backends=compiled_and_triton("gated_mlp", "x", "w_gate", further=_stored_by_row),
    castable=(0, 1, 2, 3, 9, 10, 11),
    route=Router(native.ROUTES, weight=3, gated=True),
    derivative_hint="call sparsemlp.gated_mlp to differentiate",
)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    *,
    threshold: float | Tensor = 0.0,
    token_scale: Tensor | None = None,
    skipped_mean: Tensor | None = None,
    skipped_out: Tensor | None = None,
    activation: str = "silu",
    activation_params: Tensor | None = None,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    indicator: str = "gate",
    input_threshold: float | Tensor | None = None,
    scale_gate: Tensor | None = None,
    scale_up: Tensor | None = None,
    scale_down: Tensor | None = None,
    screen_gate: PackedWeight | None = None,
    screen_up: PackedWeight | None = None,
    backend: str = "auto",
) -> Tensor:
    """Thresholded gated MLP; the up and down rows of neurons that no token wants are not read.

    Equivalent to::

        seen = where(abs(x) < input_threshold, 0, x)             # x itself without input_threshold
        a = activation(seen @ w_gate.T + b_gate)
        u = x @ w_up.T + b_up
        m = {"gate": a, "up": u, "product": a * u}[indicator]    # or, by "screen":
        # m = activation(x8 @ screen_gate.T + b_gate) * (x8 @ screen_up.T + b_up), x8 being x rounded to int8
        kept = ~(abs(m) < token_scale[:, None] * threshold)      # a NaN is kept
        h = where(kept & (a != 0), a * u, 0)                     # or where(kept, a * u - skipped_mean, 0)
        out = h @ w_down_t + b_down + skipped_out

    Args:
        x: (..., D), float32, bfloat16, float16 or float64.
        w_gate, w_up: (F, D), x's dtype or int8, unit stride inside a row, any stride between rows (an `nn.Linear`
            weight as it is, or views of an interleaved (F, 2, D) pack). With `input_threshold` w_gate may and for the
            compiled kernels must be stored input by input: strides (1, F), as `w_gate.t().contiguous().t()`.
        w_down_t: (F, D), x's dtype or int8: the down projection neuron by neuron, the transpose of an `nn.Linear`
            weight, stored so that a row is contiguous (likewise any stride between rows).
        threshold: t ≥ 0, a number, or a float32 tensor of shape () or (F,); inf means never active. Prefer a tensor
            under `torch.compile`: another number compiles again.
        token_scale: s ≥ 0, (T,) float32 with T = x.numel() / D, or x's leading shape. 0 runs the token dense (but
            `input_threshold` is not scaled).
        skipped_mean: μ (F,) float32, what a skipped neuron's hidden value is replaced by.
        skipped_out: (D,) float32, μ @ w_down_t, which is added to the output; computed here (reading all of w_down_t)
            when only `skipped_mean` is given, so pass it where μ is fixed.
        activation: a row of `sparsemlp.activations.ACTIVATIONS`.
        activation_params: (n,) float32, the row's parameters in its order; None for a row without parameters.
        b_gate, b_up: (F,) biases, b_down: (D,) bias, x's dtype.
        indicator: whose magnitude is compared with the threshold: "gate" (a; CATS), "up" (u, computed for every neuron
            and a only for the kept ones; M-CountDown), "product" (a·u, both computed, only w_down_t's rows skipped;
            D-CountDown) or "screen" (a·u as low-bit copies of both weights have it; the rows of all three weights are
            read for kept neurons only).
        input_threshold: t_x ≥ 0, a number, or a float32 tensor of shape () or (D,): the gate (only it) takes x_k for 0
            where |x_k| < t_x (TEAL), and for few tokens does not read that column of w_gate. None: no such thing.
        scale_gate, scale_up: (F,) float32, scale_down: (D,) float32, with int8 weights (all three int8) and only then:
            what each output is multiplied by, see `sparsemlp.quantization.quantize_rows` and `quantize_columns`.
        screen_gate, screen_up: low-bit copies of w_gate and w_up, from `sparsemlp.screen.pack`, with indicator "screen"
            and only then; not with `input_threshold`.
        backend: "auto", "native" (compiled CPU kernels), "triton" (GPUs) or "reference". An explicit one never falls
            back.

    Returns:
        (..., D) in x's dtype, contiguous.

    Gradients: where grad mode is on and an input requires grad, operators with a derivative compute this call, which
        leave out what has derivative 0 (docs/training.md); the derivative in the thresholds and the token scale is 0.
        A differentiable PyTorch composition of the same values does on "auto" for small calls, and on "auto" and
        "reference" where only it can: gradients of `activation_params`, `torch.func` transforms, `input_threshold`
        (none flows through the gate to an x_k below it), the screen, int8 weights (which have no derivative and are
        widened whole); there "native" and "triton" raise.
    Raises:
        ValueError: an argument of the wrong rank, size, dtype, device or stride, a negative or NaN threshold, or an
            unknown activation, indicator or backend; the message names it. The values of a threshold tensor are
            checked by the CPU kernels and the CPU reference only; elsewhere a NaN or negative one keeps the neuron.
        BackendUnavailableError: the backend named cannot compute this call.
    Numerics: float32 accumulation. The native kernels decide on unrounded float32 values; at a given thread count and
        number of tokens a token's bits do not depend on its batch mates. In the reference, where "auto" takes
        PyTorch's GEMMs, and where gradients are wanted, p and u are rounded once to x's dtype and decided from there.
        Which route "auto" takes may
        change with the density it sees: docs/router.md. Products with int8 weights: docs/int8.md.
        By "screen" the decision is that of the copies and of x in int8 (`sparsemlp.reference.screen`), in float32
        sums; a token with NaN or inf, or a neuron whose copy was made of one, is kept.
        Exact zeros are skipped, so for the ReLU family at threshold 0 the result is the dense MLP's up to summation
        order. A skipped neuron adds nothing even where its rows hold inf or NaN (in the differentiable composition
        its down row does, as in the dense MLP); the same holds for a column of w_gate that `input_threshold` skips.
    Source: CATS (Lee et al.), SATS; M- and D-CountDown for the indicators; TEAL (Liu et al.) for `input_threshold`;
        the screen, mean compensation and token scale as in docs/ops/gated_mlp.md.
    """
    if (skipped_mean is None) == (skipped_out is None) and backend in ("auto", "native"):
        done = native.direct(
            x, w_gate, w_up, w_down_t, threshold, input_threshold, token_scale, skipped_mean, skipped_out, b_gate, b_up,
            b_down, scale_gate, scale_up, scale_down, screen_gate, screen_up, activation_params, activation, indicator,
        )  # fmt: skip
        if done is not None:
            return done
    OP.check_backend(backend)
    tokens = check_x(x)
    scales = scale_gate, scale_up, scale_down
    _check_weights(x, (w_gate, w_up, w_down_t), scales, by_input=input_threshold is not None)
    for name, b, size, letter in (
        ("b_gate", b_gate, w_gate.shape[0], "F"),
        ("b_up", b_up, w_gate.shape[0], "F"),
        ("b_down", b_down, x.shape[-1], "D"),
    ):
        check_bias(name, b, size, letter, x)
    check_indicator(indicator)
    screens = check_screen(indicator, screen_gate, screen_up, x, w_gate.shape[0])
    if input_threshold is not None and indicator == "screen":
        raise ValueError(
            "input_threshold is given with indicator 'screen', expected None: what is kept is read from w_gate's rows"
        )
    params = check_activation(x, activation, activation_params)
    limit = as_threshold(threshold, x, w_gate.shape[0])
    if input_threshold is not None:
        input_threshold = as_threshold(input_threshold, x, x.shape[-1], "input_threshold", "D")
    if token_scale is not None:
        token_scale = check_token_scale(token_scale, x, tokens)
    skipped_out = checked_skipped_out(x, skipped_mean, skipped_out, w_down_t, scale_down)
    flat = x if x.dim() == 2 else x.reshape(tokens, x.shape[-1])
    tensors = (
        flat, w_gate, w_up, w_down_t, limit, input_threshold, token_scale, skipped_mean, skipped_out, b_gate, b_up,
        b_down, *scales,
    )  # fmt: skip
    if differentiates(*tensors, params):
        out = _with_gradient(tensors, screens, params, (activation, indicator), backend)
    else:
        out = OP(*tensors, *screens, params, activation, indicator, backend=backend)
    return out if x.dim() == 2 else out.reshape(x.shape)


def _with_gradient(
    tensors: Any,
    screens: Any,
    params: Tensor | None,
    names: Any,
    backend: str,
) -> Tensor:
    """A call of which derivatives may be wanted, in checked arguments."""
    x, w_gate, input_threshold = tensors[0], tensors[1], tensors[5]
    if training.needs_composition(w_gate, params) or input_threshold is not None or names[1] == "screen":
        check_differentiable(backend)
    elif backend != "auto" or not training.is_small(x.shape[0], w_gate):
        out: Tensor = training_op.FORWARD(*tensors[:5], *tensors[6:12], params, *names, backend=backend)[0]
        return out
    elif (act := training.layer(tensors[4], tensors[7:9], names[0])) is not None:
        hidden = act(F.linear(x, w_gate, tensors[9])) * F.linear(x, tensors[2], tensors[10])
        return F.linear(hidden, tensors[3].t(), tensors[11])
    composed: tuple[Any, ...] = (*tensors, *screens, params, *names)
    return reference.differentiable(*composed)


def _check_weights(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    by_input: bool,
) -> None:
    """Checks the three weights and their scales; with `by_input` w_gate may be stored input by input."""
    d, w_gate = x.shape[-1], weights[0]
    if not isinstance(w_gate, Tensor) or w_gate.dim() != 2 or w_gate.shape[1] != d:
        raise ValueError(f"w_gate is {describe(w_gate)}, expected (F, D) with x's D = {d}")
    f = w_gate.shape[0]
    hints = (
        "an nn.Linear weight as it is",
        "an nn.Linear weight as it is",
        "the transposed nn.Linear weight",
    )
    for name, w, hint, scale in zip(("w_gate", "w_up", "w_down_t"), weights, hints, scales, strict=True):
        if not isinstance(w, Tensor) or w.dim() != 2 or w.shape[0] != f or w.shape[1] != d:
            raise ValueError(f"{name} is {describe(w)}, expected (F, D) = ({f}, {d}): {hint}")
        if w_gate.dtype == torch.int8:
            check_int8(name, w, _scale_name(name), scale, x, "w_gate", "three")
        else:
            check_like(name, w, x)
            if scale is not None:
                raise ValueError(
                    f"{_scale_name(name)} is given with a {name} of {dtype_text(w)}, expected it beside int8 weights; "
                    "leave it None"
                )
        if d > 1 and f > 0 and w.stride(1) != 1 and not (by_input and w is w_gate and has_columns(w)):
            or_else = " (or, with input_threshold, inside a column)" if by_input and w is w_gate else ""
            raise ValueError(
                f"{name} has strides {tuple(w.stride())}, expected unit stride inside a row{or_else}; store it row by "
                f"row, e.g. {name}.contiguous()"
            )


def _scale_name(weight: str) -> str:
    return {"w_gate": "scale_gate", "w_up": "scale_up", "w_down_t": "scale_down"}[weight]


def check_indicator(indicator: str) -> None:
    """Whether there is such an indicator."""
    if not isinstance(indicator, str) or indicator not in INDICATORS:
        raise ValueError(f"indicator is {spelled(indicator)}, expected one of: {', '.join(INDICATORS)}")
