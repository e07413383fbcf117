"""`gated_mlp`: the thresholded gated MLP that never reads the up and down rows of inactive neurons."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from sparsemlp import _native, _reasons, _triton, activations
from sparsemlp._op import Backend, Op, autocasts, differentiates
from sparsemlp.ops import _gated_mlp_native as native
from sparsemlp.reference import gated_mlp as reference

__all__ = ["OP", "gated_mlp"]

INDICATORS = ("gate", "up", "product", "screen")
_NOT_BUILT = "is not built yet; leave it None"
_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _native_call(x: Tensor, *args: object) -> str | None:
    if args and args[-1] != "gate":
        return f"computes indicator 'gate', the call has {args[-1]!r}"
    return _reasons.dtype_not_in(x, _NATIVE_DTYPES)


def _triton_call(x: Tensor, *args: object) -> str | None:
    return _triton.cpu_only_interpreted(x) or _reasons.dtype_not_in(x, _NATIVE_DTYPES)


OP = Op(
    "gated_mlp",
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, Tensor? input_threshold, "
    "Tensor? token_scale, Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
    "Tensor? scale_gate, Tensor? scale_up, Tensor? scale_down, Tensor? screen_gate, Tensor? screen_up, "
    "Tensor? screen_scale_gate, Tensor? screen_scale_up, Tensor? activation_params, str activation, str indicator",
    fake=_fake,
    reference=reference.gated_mlp,
    backends=(
        Backend(
            "native",
            ("cpu",),
            "sparsemlp.ops._gated_mlp_native:forward",
            machine=_native.problem,
            call=_native_call,
        ),
        Backend(
            "triton",
            _triton.DEVICES,
            "sparsemlp.kernels.gated_mlp:forward",
            machine=_triton.problem,
            call=_triton_call,
            unasked=("cpu",),
        ),
    ),
    castable=(0, 1, 2, 3, 9, 10, 11),
    derivative_hint="call sparsemlp.gated_mlp with backend='auto' or 'reference' to differentiate",
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
    input_threshold: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Thresholded gated MLP; the up and down rows of neurons that no token wants are not read.

    Equivalent to::

        a = activation(x @ w_gate.T + b_gate)
        u = x @ w_up.T + b_up
        m = {"gate": a, "up": u, "product": a * u}[indicator]
        kept = ~(abs(m) < token_scale[:, None] * threshold)      # a NaN is kept
        h = where(kept & (a != 0), a * u, 0)                     # or where(kept, a * u - skipped_mean, 0)
        out = h @ w_down_t + b_down + skipped_out

    Args:
        x: (..., D), float32, bfloat16, float16 or float64.
        w_gate, w_up: (F, D), x's dtype, unit stride inside a row, any stride between rows (an `nn.Linear` weight as
            it is, or views of an interleaved (F, 2, D) pack).
        w_down_t: (F, D), x's dtype: the down projection neuron by neuron, the transpose of an `nn.Linear` weight,
            stored so that a row is contiguous (likewise any stride between rows).
        threshold: t ≥ 0, a number, or a float32 tensor of shape () or (F,); inf means never active. Prefer a tensor
            under `torch.compile`: another number compiles again.
        token_scale: s ≥ 0, (T,) float32 with T = x.numel() / D, or x's leading shape. 0 runs the token dense.
        skipped_mean: μ (F,) float32, what a skipped neuron's hidden value is replaced by.
        skipped_out: (D,) float32, μ @ w_down_t, which is added to the output; computed here (reading all of w_down_t)
            when only `skipped_mean` is given, so pass it where μ is fixed.
        activation: a row of `sparsemlp.activations.ACTIVATIONS`.
        activation_params: (n,) float32, the row's parameters in its order; None for a row without parameters.
        b_gate, b_up: (F,) biases, b_down: (D,) bias, x's dtype.
        indicator: whose magnitude is compared with the threshold: "gate" (a; CATS), "up" (u, computed for every neuron
            and a only for the kept ones; M-CountDown) or "product" (a·u, both computed, only w_down_t's rows skipped;
            D-CountDown). "up" and "product" have no compiled CPU kernel. "screen" is not built yet.
        input_threshold: not built yet.
        backend: "auto", "native" (compiled CPU kernels), "triton" (GPUs) or "reference". An explicit one never falls
            back.

    Returns:
        (..., D) in x's dtype, contiguous.

    Gradients: where grad mode is on and an input requires grad, "auto" and "reference" compute a differentiable
        PyTorch composition, whose derivative in the threshold and the token scale is 0; "native" and "triton" raise.
    Raises:
        ValueError: an argument of the wrong rank, size, dtype, device or stride, a negative or NaN threshold, or an
            unknown activation, indicator or backend; the message names it. The values of a threshold tensor are
            checked by the CPU kernels and the CPU reference only; elsewhere a NaN or negative one keeps the neuron.
        BackendUnavailableError: the backend named cannot compute this call.
    Numerics: float32 accumulation. For few tokens (bfloat16: 32, float32: 128, float16: any) the native kernel
        decides on unrounded float32 values and a token's result is the same bits whatever its batch mates are (at a
        given thread count); above, and in the reference, p and u are rounded once to x's dtype and decided from there.
        Exact zeros are skipped, so for the ReLU family at threshold 0 the result is the dense MLP's up to summation
        order. A skipped neuron adds nothing even where its rows hold inf or NaN (in the differentiable composition
        its down row does, as in the dense MLP).
    Source: CATS (Lee et al.), SATS; mean compensation and token scale as in docs/ops/gated_mlp.md.
    """
    if (
        isinstance(threshold, Tensor)
        and (skipped_mean is None) == (skipped_out is None)
        and indicator == "gate"
        and input_threshold is None
        and backend in ("auto", "native")
    ):
        done = native.direct(
            x, w_gate, w_up, w_down_t, threshold, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down,
            activation_params, activation,
        )  # fmt: skip
        if done is not None:
            return done
    OP.check_backend(backend)
    tokens = _check_tensors(x, w_gate, w_up, w_down_t, b_gate, b_up, b_down)
    _check_unbuilt(indicator, input_threshold)
    params = _check_activation(x, activation, activation_params)
    limit = _as_threshold(threshold, x, w_gate.shape[0])
    if token_scale is not None:
        token_scale = _check_token_scale(token_scale, x, tokens)
    if skipped_mean is None and skipped_out is not None:
        raise ValueError(
            "skipped_out is given without skipped_mean, expected both or the mean alone; pass the mean"
        )
    if skipped_mean is not None:
        _check_float32("skipped_mean", skipped_mean, (w_gate.shape[0],), "F", x)
        if skipped_out is None:
            skipped_out = reference.skipped_out(skipped_mean, w_down_t)
        _check_float32("skipped_out", skipped_out, (x.shape[-1],), "D", x)
    flat = x if x.dim() == 2 else x.reshape(tokens, x.shape[-1])
    if differentiates(
        x, w_gate, w_up, w_down_t, limit, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down, params
    ):
        if backend not in ("auto", "reference"):
            raise ValueError(
                f"backend is {backend!r}, which has no derivative, and an input requires grad (or torch.func "
                "transforms it); use backend='auto', or call it under torch.no_grad()"
            )
        out = reference.differentiable(
            flat, w_gate, w_up, w_down_t, limit, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down, params,
            activation, indicator,
        )  # fmt: skip
    else:
        out = OP(
            flat, w_gate, w_up, w_down_t, limit, None, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down,
            None, None, None, None, None, None, None, params, activation, indicator, backend=backend,
        )  # fmt: skip
    return out if x.dim() == 2 else out.reshape(x.shape)


def _shape(t: Tensor) -> str:
    return f"({', '.join(map(str, t.shape))})"


def _check_tensors(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> int:
    """Checks x, the weights and the biases; returns the number of tokens."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        what = f"shape {_shape(x)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x is {what}, expected a tensor of shape (..., D); add a dimension")
    _check_like("x", x, x)
    if not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(f"x is {_dtype(x)}, expected float32, bfloat16, float16 or float64; convert it")
    d = x.shape[-1]
    if not isinstance(w_gate, Tensor) or w_gate.dim() != 2 or w_gate.shape[1] != d:
        raise ValueError(f"w_gate is {_what(w_gate)}, expected (F, D) with x's D = {d}")
    f = w_gate.shape[0]
    hints = (
        "an nn.Linear weight as it is",
        "an nn.Linear weight as it is",
        "the transposed nn.Linear weight",
    )
    for name, w, hint in zip(("w_gate", "w_up", "w_down_t"), (w_gate, w_up, w_down_t), hints, strict=True):
        if not isinstance(w, Tensor) or w.dim() != 2 or w.shape[0] != f or w.shape[1] != d:
            raise ValueError(f"{name} is {_what(w)}, expected (F, D) = ({f}, {d}): {hint}")
        _check_like(name, w, x)
        if d > 1 and f > 0 and w.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tuple(w.stride())}, expected unit stride inside a row; store it row by row, e.g. "
                f"{name}.contiguous()"
            )
    for name, b, size, letter in (
        ("b_gate", b_gate, f, "F"),
        ("b_up", b_up, f, "F"),
        ("b_down", b_down, d, "D"),
    ):
        if b is None:
            continue
        if not isinstance(b, Tensor) or b.dim() != 1 or b.shape[0] != size:
            raise ValueError(f"{name} is {_what(b)}, expected ({letter},) = ({size},)")
        _check_like(name, b, x)
    return x.numel() // d if d else math.prod(x.shape[:-1])


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _what(t: object) -> str:
    return f"shape {_shape(t)}" if isinstance(t, Tensor) else type(t).__name__


def _check_like(name: str, t: Tensor, x: Tensor) -> None:
    """t's layout, dtype and device are x's; under autocast the dtypes may differ, the operator converts them."""
    if t.layout != torch.strided:
        raise ValueError(f"{name} has layout {t.layout}, expected torch.strided; call {name}.to_dense()")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, expected x's device {x.device}; move one of them")
    if t.dtype == x.dtype:
        return
    if autocasts(x.device.type) and {t.dtype, x.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return  # autocast leaves float64 alone
    raise ValueError(f"{name} is {_dtype(t)}, expected x's dtype {_dtype(x)}; convert one of them")


def _check_float32(name: str, t: Tensor, shape: tuple[int, ...], letters: str, x: Tensor) -> None:
    if not isinstance(t, Tensor) or tuple(t.shape) != shape:
        raise ValueError(f"{name} is {_what(t)}, expected ({letters},) = ({', '.join(map(str, shape))},)")
    if t.dtype != torch.float32 and not (x.dtype == torch.float64 and t.dtype == torch.float64):
        raise ValueError(f"{name} is {_dtype(t)}, expected float32; convert it")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, expected x's device {x.device}; move one of them")


def _check_unbuilt(indicator: str, input_threshold: Tensor | None) -> None:
    if indicator not in INDICATORS:
        raise ValueError(f"indicator is {indicator!r}, expected one of: {', '.join(INDICATORS)}")
    if indicator == "screen":
        raise ValueError("indicator is 'screen', expected gate, up or product; screen is not built yet")
    if input_threshold is not None:
        raise ValueError(f"input_threshold {_NOT_BUILT}")


def _check_activation(x: Tensor, activation: str, params: Tensor | None) -> Tensor | None:
    names = activations.get(activation).params
    if params is None:
        if names:
            raise ValueError(
                f"activation_params is None, expected a tensor of {len(names)} for activation {activation!r}: "
                f"({', '.join(names)})"
            )
        return None
    if not isinstance(params, Tensor) or tuple(params.shape) != (len(names),) or not names:
        wanted = f"({len(names)},): ({', '.join(names)})" if names else "None"
        raise ValueError(
            f"activation_params is {_what(params)}, expected {wanted} for activation {activation!r}"
        )
    if params.dtype not in (torch.float32, torch.float64) or params.device != x.device:
        raise ValueError(
            f"activation_params is {_dtype(params)} on {params.device}, expected float32 on x's device {x.device}"
        )
    return params


def _as_threshold(threshold: float | Tensor, x: Tensor, f: int) -> Tensor:
    if isinstance(threshold, Tensor):
        if threshold.dim() != 0:
            _check_float32("threshold", threshold, (f,), "F", x)
        elif threshold.dtype not in (torch.float32, torch.float64) or threshold.device != x.device:
            raise ValueError(
                f"threshold is {_dtype(threshold)} on {threshold.device}, expected float32 on x's device {x.device}"
            )
        return threshold
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise ValueError(
            f"threshold is {type(threshold).__name__}, expected a number ≥ 0 or a float32 tensor of shape () or (F,)"
        )
    try:
        number = float(threshold)
    except OverflowError:  # an integer beyond the floats
        number = math.nan
    if not number >= 0:
        raise ValueError(f"threshold is {threshold}, expected a number ≥ 0 (inf: never active)")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if number > torch.finfo(dtype).max:
        number = math.inf
    return torch.full((), number, dtype=dtype, device=x.device)


def _check_token_scale(scale: Tensor, x: Tensor, tokens: int) -> Tensor:
    if not isinstance(scale, Tensor) or (scale.shape != x.shape[:-1] and tuple(scale.shape) != (tokens,)):
        raise ValueError(f"token_scale is {_what(scale)}, expected (T,) = ({tokens},) or x's leading shape")
    flat = scale.reshape(tokens)
    _check_float32("token_scale", flat, (tokens,), "T", x)
    return flat
