"""`mlp`: the thresholded MLP without a gate that never reads the output rows of inactive neurons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp._op import Op, differentiates
from sparsemlp.ops import _mlp_native as native
from sparsemlp.ops import mlp_training as training
from sparsemlp.ops._backends import compiled_and_triton
from sparsemlp.ops._checks import (
    as_threshold,
    check_activation,
    check_bias,
    check_differentiable,
    check_int8,
    check_like,
    check_token_scale,
    check_x,
    checked_skipped_out,
    describe,
    dtype_text,
)
from sparsemlp.reference import mlp as reference
from sparsemlp.router.decide import Router

__all__ = ["OP", "mlp"]


def _fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


OP = Op(
    "mlp",
    "Tensor x, Tensor w_in, Tensor w_out_t, Tensor threshold, Tensor? input_threshold, Tensor? token_scale, "
    "Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_in, Tensor? b_out, Tensor? scale_in, Tensor? scale_out, "
    "Tensor? screen_in, Tensor? screen_scale_in, Tensor? activation_params, str activation",
    fake=_fake,
    reference=reference.mlp,
    backends=compiled_and_triton("mlp", "x", "w_in"),
    castable=(0, 1, 2, 8, 9),
    route=Router(native.ROUTES, weight=2, gated=False),
    derivative_hint="call sparsemlp.mlp to differentiate",
)


def mlp(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    *,
    threshold: float | Tensor = 0.0,
    token_scale: Tensor | None = None,
    skipped_mean: Tensor | None = None,
    skipped_out: Tensor | None = None,
    activation: str = "relu",
    activation_params: Tensor | None = None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    input_threshold: float | Tensor | None = None,
    scale_in: Tensor | None = None,
    scale_out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Thresholded MLP without a gate; the output rows of neurons that no token wants are not read.

    Equivalent to::

        a = activation(x @ w_in.T + b_in)
        kept = ~(abs(a) < token_scale[:, None] * threshold)      # a NaN is kept
        h = where(kept & (a != 0), a, 0)                         # or where(kept, a - skipped_mean, 0)
        out = h @ w_out_t + b_out + skipped_out

    Args:
        x: (..., D), float32, bfloat16, float16 or float64.
        w_in: (F, D), x's dtype or int8, unit stride inside a row, any stride between rows (an `nn.Linear` weight as it
            is; of a `Conv1D` weight (D, F), the transpose stored so that a row is contiguous).
        w_out_t: (F, D), x's dtype or int8: the output projection neuron by neuron, the transpose of an `nn.Linear`
            weight (a `Conv1D` weight as it is), stored so that a row is contiguous (any stride between rows).
        threshold: t ≥ 0, a number, or a float32 tensor of shape () or (F,); inf means never active. Prefer a tensor
            under `torch.compile`: another number compiles again.
        token_scale: s ≥ 0, (T,) float32 with T = x.numel() / D, or x's leading shape. 0 runs the token dense.
        skipped_mean: μ (F,) float32, what a skipped neuron's activation is replaced by.
        skipped_out: (D,) float32, μ @ w_out_t, which is added to the output; computed here (reading all of w_out_t)
            when only `skipped_mean` is given, so pass it where μ is fixed.
        activation: a row of `sparsemlp.activations.ACTIVATIONS`.
        activation_params: (n,) float32, the row's parameters in its order; None for a row without parameters.
        b_in: (F,) bias, b_out: (D,) bias, x's dtype.
        input_threshold: not built for this operator; None.
        scale_in: (F,) float32, scale_out: (D,) float32, with int8 weights (both int8) and only then: what each output
            is multiplied by, see `sparsemlp.quantization.quantize_rows` and `quantize_columns`.
        backend: "auto", "native" (compiled CPU kernels), "triton" (GPUs) or "reference". An explicit one never falls
            back.

    Returns:
        (..., D) in x's dtype, contiguous.

    Gradients: where grad mode is on and an input requires grad, operators with a derivative compute this call, which
        leave out what has derivative 0 (docs/training.md); the derivative in the thresholds and the token scale is 0.
        A differentiable PyTorch composition of the same values does on "auto" for small calls, and on "auto" and
        "reference" where only it can: gradients of `activation_params`, `torch.func` transforms, int8 weights (which
        have no derivative and are widened whole); there "native" and "triton" raise.
    Raises:
        ValueError: an argument of the wrong rank, size, dtype, device or stride, a negative or NaN threshold, an
            unknown activation or backend, or an `input_threshold`; the message names it. The values of a threshold
            tensor are checked by the CPU kernels and the CPU reference only; elsewhere a NaN or negative one keeps the
            neuron.
        BackendUnavailableError: the backend named cannot compute this call.
    Numerics: float32 accumulation. The native kernels decide on unrounded float32 values; at a given thread count and
        number of tokens a token's bits do not depend on its batch mates. In the reference, and where "auto" takes
        PyTorch's GEMMs (docs/router.md), p is rounded once to x's dtype and decided from there, likewise wherever
        gradients are wanted. Exact zeros are skipped, so for the ReLU family at threshold 0 the result is the dense
        MLP's up to summation order. A skipped neuron adds nothing even where its output row holds inf or NaN (in the
        differentiable composition it does, as in the dense MLP).
    Source: the threshold on |a| is CATS's (Lee et al.), there for gated MLPs; exact zeros: ReLU Strikes Back (Mirzadeh
        et al.); token scale and mean compensation as in docs/ops/mlp.md.
    """
    if (
        (skipped_mean is None) == (skipped_out is None)
        and input_threshold is None
        and backend in ("auto", "native")
    ):
        done = native.direct(
            x, w_in, w_out_t, threshold, token_scale, skipped_mean, skipped_out, b_in, b_out, scale_in, scale_out,
            activation_params, activation,
        )  # fmt: skip
        if done is not None:
            return done
    OP.check_backend(backend)
    if input_threshold is not None:
        raise ValueError(
            f"input_threshold is {type(input_threshold).__name__}, expected None, mlp thresholds activations only; "
            "compute the first layer with sparsemlp.sparse_linear, which thresholds its input"
        )
    tokens = check_x(x)
    _check_weights(x, w_in, w_out_t, scale_in, scale_out)
    check_bias("b_in", b_in, w_in.shape[0], "F", x)
    check_bias("b_out", b_out, x.shape[-1], "D", x)
    params = check_activation(x, activation, activation_params)
    limit = as_threshold(threshold, x, w_in.shape[0])
    if token_scale is not None:
        token_scale = check_token_scale(token_scale, x, tokens)
    skipped_out = checked_skipped_out(x, skipped_mean, skipped_out, w_out_t, scale_out)
    flat = x if x.dim() == 2 else x.reshape(tokens, x.shape[-1])
    first = flat, w_in, w_out_t, limit
    rest = token_scale, skipped_mean, skipped_out, b_in, b_out, scale_in, scale_out
    if differentiates(*first, *rest, params):
        out = _with_gradient(first, rest, params, activation, backend)
    else:
        out = OP(*first, None, *rest, None, None, params, activation, backend=backend)
    return out if x.dim() == 2 else out.reshape(x.shape)


def _with_gradient(first: Any, rest: Any, params: Tensor | None, activation: str, backend: str) -> Tensor:
    """A call of which derivatives may be wanted, in checked arguments."""
    x, w_in = first[:2]
    if training.needs_composition(w_in, params):
        check_differentiable(backend)
    elif backend != "auto" or not training.is_small(x.shape[0], w_in):
        out: Tensor = training.FORWARD(*first, *rest[:5], params, activation, backend=backend)[0]
        return out
    elif (act := training.layer(first[3], rest[1:3], activation)) is not None:
        return F.linear(act(F.linear(x, w_in, rest[3])), first[2].t(), rest[4])
    composed: tuple[Any, ...] = (*first, *rest, params, activation)
    return reference.differentiable(*composed)


def _check_weights(
    x: Tensor, w_in: Tensor, w_out_t: Tensor, scale_in: Tensor | None, scale_out: Tensor | None
) -> None:
    d = x.shape[-1]
    if not isinstance(w_in, Tensor) or w_in.dim() != 2 or w_in.shape[1] != d:
        raise ValueError(
            f"w_in is {describe(w_in)}, expected (F, D) with x's D = {d}: an nn.Linear weight as it is"
        )
    f = w_in.shape[0]
    if (
        not isinstance(w_out_t, Tensor)
        or w_out_t.dim() != 2
        or w_out_t.shape[0] != f
        or w_out_t.shape[1] != d
    ):
        raise ValueError(
            f"w_out_t is {describe(w_out_t)}, expected (F, D) = ({f}, {d}): the transposed nn.Linear weight"
        )
    for name, w, scale_name, scale in (
        ("w_in", w_in, "scale_in", scale_in),
        ("w_out_t", w_out_t, "scale_out", scale_out),
    ):
        if w_in.dtype == torch.int8:
            check_int8(name, w, scale_name, scale, x, "w_in", "two")
        else:
            check_like(name, w, x)
            if scale is not None:
                raise ValueError(
                    f"{scale_name} is given with {dtype_text(w)} weights, expected it beside int8 weights only; leave "
                    "it None"
                )
        if d > 1 and f > 0 and w.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tuple(w.stride())}, expected unit stride inside a row; store it row by row, "
                f"e.g. {name}.contiguous()"
            )
