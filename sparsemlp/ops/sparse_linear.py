"""`sparse_linear`: a linear layer that never reads the weights of the channels that its input leaves at 0."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp._op import Op, differentiates
from sparsemlp.ops import _sparse_linear_native as native
from sparsemlp.ops._backends import compiled_and_triton
from sparsemlp.ops._checks import (
    as_threshold,
    check_bias,
    check_differentiable,
    check_float32,
    check_int8_place,
    check_like,
    check_token_scale,
    check_x,
    describe,
    dtype_text,
)
from sparsemlp.reference import sparse_linear as reference

__all__ = ["OP", "sparse_linear"]


def _fake(x: Tensor, weight_t: Tensor, *args: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_t.shape[1]))


OP = Op(
    "sparse_linear",
    "Tensor x, Tensor weight_t, Tensor threshold, Tensor? token_scale, Tensor? bias, Tensor? scale",
    fake=_fake,
    reference=reference.sparse_linear,
    backends=compiled_and_triton("sparse_linear", "x", "weight_t"),
    castable=(0, 1, 4),
    derivative_hint="call sparsemlp.sparse_linear with backend='auto' or 'reference' to differentiate",
)


def sparse_linear(
    x: Tensor,
    weight_t: Tensor,
    bias: Tensor | None = None,
    *,
    threshold: float | Tensor = 0.0,
    token_scale: Tensor | None = None,
    scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Linear layer over the entries of x that reach a threshold; the weights of channels no token wants are not read.

    Equivalent to::

        kept = ~(abs(x) < token_scale[:, None] * threshold)      # a NaN is kept
        out = where(kept, x, 0) @ weight_t + bias                # or ... @ (weight_t * scale) + bias, int8 weights

    Args:
        x: (..., K), float32, bfloat16, float16 or float64.
        weight_t: (K, N), x's dtype or int8: the weight channel by channel, the transpose of an `nn.Linear` weight,
            stored so that a row is contiguous (any stride between rows).
        bias: (N,), x's dtype.
        threshold: t ≥ 0, a number, or a float32 tensor of shape () or (K,); inf means never kept. Prefer a tensor
            under `torch.compile`: another number compiles again.
        token_scale: s ≥ 0, (T,) float32 with T = x.numel() / K, or x's leading shape. 0 runs the token dense.
        scale: (N,) float32, with int8 weights and only then: what each output is multiplied by, see
            `sparsemlp.quantization.quantize_columns`.
        backend: "auto", "native" (compiled CPU kernels), "triton" (GPUs) or "reference". An explicit one never falls
            back.

    Returns:
        (..., N) in x's dtype, contiguous.

    Gradients: where grad mode is on and an input requires grad, "auto" and "reference" compute a differentiable
        PyTorch composition: the derivative in x is 0 where x is skipped (not where it is a kept 0), in the threshold
        and the token scale 0 everywhere; int8 weights have none. "native" and "triton" raise.
    Raises:
        ValueError: an argument of the wrong rank, size, dtype, device or stride, a negative or NaN threshold, or an
            unknown backend; the message names it. The values of a threshold tensor are checked by the CPU kernels and
            the CPU reference only; elsewhere a NaN or negative one keeps the entry.
        BackendUnavailableError: the backend named cannot compute this call.
    Numerics: s·t is rounded to float32 and compared with x as it is (float64 for float64 x), so every backend skips the
        same entries. float32 accumulation, rounded once; int8 weights are widened, not rounded.
        Entries that are exactly 0 are skipped, so at threshold 0 the result is the dense layer's up to summation
        order. A skipped entry adds nothing even where its channel's weights hold inf or NaN (in the differentiable
        composition they do, as in the dense layer).
    Source: TEAL (Liu et al.) for one threshold; WINA for one per channel, t_k = τ / ‖weight_t[k]‖₂. See
        docs/ops/sparse_linear.md.
    """
    if backend in ("auto", "native"):
        done = native.direct(x, weight_t, threshold, token_scale, bias, scale)
        if done is not None:
            return done
    OP.check_backend(backend)
    tokens = _check_tensors(x, weight_t, bias, scale)
    limit = as_threshold(threshold, x, weight_t.shape[0], letter="K")
    if token_scale is not None:
        token_scale = check_token_scale(token_scale, x, tokens)
    flat = x if x.dim() == 2 else x.reshape(tokens, x.shape[-1])
    if differentiates(x, weight_t, limit, token_scale, bias, scale):
        check_differentiable(backend)
        out = reference.differentiable(flat, weight_t, limit, token_scale, bias, scale)
    else:
        out = OP(flat, weight_t, limit, token_scale, bias, scale, backend=backend)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight_t.shape[1])


def _check_tensors(x: Tensor, weight_t: Tensor, bias: Tensor | None, scale: Tensor | None) -> int:
    """Checks x, the weights with their scales, and the bias; returns the number of tokens."""
    tokens, k = check_x(x, "K"), x.shape[-1]
    if not isinstance(weight_t, Tensor) or weight_t.dim() != 2 or weight_t.shape[0] != k:
        raise ValueError(
            f"weight_t is {describe(weight_t)}, expected (K, N) with x's K = {k}: the transposed nn.Linear weight"
        )
    n = weight_t.shape[1]
    if weight_t.dtype != torch.int8:
        check_like("weight_t", weight_t, x)
        if scale is not None:
            raise ValueError(
                f"scale is given with {dtype_text(weight_t)} weights, expected it with int8 weights only; leave it None"
            )
    else:
        check_int8_place("weight_t", weight_t, x)
        if scale is None:
            raise ValueError(f"scale is None, expected (N,) = ({n},) beside int8 weights; pass their scales")
        check_float32("scale", scale, (n,), "N", x)
    if n > 1 and k > 0 and weight_t.stride(1) != 1:
        raise ValueError(
            f"weight_t has strides {tuple(weight_t.stride())}, expected unit stride inside a row; store it channel by "
            "channel, e.g. weight_t.contiguous()"
        )
    check_bias("bias", bias, n, "N", x)
    return tokens
