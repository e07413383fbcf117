"""Launches the compiled gated MLP: the fused kernel for few tokens, GEMMs around a fused mask for many."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import _native, activations
from sparsemlp._layout import float32_run
from sparsemlp._op import PLAIN_TENSORS, VALUE_ERROR, is_plain_eager, value_error
from sparsemlp.reference.gated_mlp import gemm_bias

__all__ = ["CHUNK", "MAX_FUSED_TOKENS", "direct", "forward"]

CHUNK = 32
"""Tokens in one call of the fused kernel."""

MAX_FUSED_TOKENS = {torch.bfloat16: CHUNK, torch.float32: 4 * CHUNK, torch.float16: 2**62}
"""Up to here the fused kernel, chunk by chunk, above it PyTorch's GEMMs. Where it stops paying on two AVX-512 cores (D
4096, F 14336, nothing skipped): float32 620 against 830 ms at 128 tokens and 1250 against 1330 at 256; float16 626
against 2306 ms at 256; bfloat16 37 against 38 ms at 32 and, in two chunks, 73 against 62 at 64."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_gated_mlp_native(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, Tensor? token_scale, "
    "Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
    "Tensor? activation_params, int activation, int isa) -> Tensor"
)
_lib.define(
    "_gated_mlp_hidden_native(Tensor pre, Tensor up, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, "
    "Tensor? activation_params, int activation, int isa) -> Tensor"
)
_fused = torch.ops.sparsemlp._gated_mlp_native.default
_hidden = torch.ops.sparsemlp._gated_mlp_hidden_native.default


def direct(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> Tensor | None:
    """The fused kernel for a plain eager call of few tokens on unchecked arguments, x of shape (..., D); None: not so.

    The kernel checks what it needs itself, and the public function's own checks are then only for naming what is wrong.
    A call then costs 9 µs instead of 18 beyond the computing (inference mode, everything in the cache).
    """
    name = activations.IDS.get(activation) if type(activation) is str else None
    if (
        name is None
        or torch.compiler.is_compiling()
        or _native.problem() is not None
        or not is_plain_eager("cpu")
    ):
        return None
    grad = torch.is_grad_enabled()
    if grad and activation_params is not None and activation_params.requires_grad:
        return None
    tensors = (
        x,
        w_gate,
        w_up,
        w_down_t,
        threshold,
        token_scale,
        skipped_mean,
        skipped_out,
        b_gate,
        b_up,
        b_down,
    )
    for t in tensors:
        if t is not None and (type(t) not in PLAIN_TENSORS or (grad and t.requires_grad)):
            return None
    if x.dim() == 0 or x.numel() > CHUNK * x.shape[-1]:
        return None
    try:
        return _fused(*tensors, activation_params, name, _native.isa())
    except RuntimeError as error:
        if VALUE_ERROR in str(error):
            raise value_error(error) from None
        return None


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
    act, isa = activations.IDS[activation], _native.isa()
    limit, params = float32_run(threshold), float32_run(activation_params)
    mean, token_scale, skipped_out = (
        float32_run(skipped_mean),
        float32_run(token_scale),
        float32_run(skipped_out),
    )
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    b_gate, b_up, b_down = (None if b is None else b.contiguous() for b in (b_gate, b_up, b_down))

    def fused(tokens: Tensor, scale: Tensor | None) -> Tensor:
        return _fused(
            tokens,
            w_gate,
            w_up,
            w_down_t,
            limit,
            scale,
            mean,
            skipped_out,
            b_gate,
            b_up,
            b_down,
            params,
            act,
            isa,
        )

    if x.shape[0] <= CHUNK:
        return fused(x, token_scale)
    if x.shape[0] <= MAX_FUSED_TOKENS[x.dtype]:
        scales = (None,) * -(-x.shape[0] // CHUNK) if token_scale is None else token_scale.split(CHUNK)
        return torch.cat([fused(part, scale) for part, scale in zip(x.split(CHUNK), scales, strict=True)])
    pre, up = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    h = _hidden(pre, up, limit, token_scale, mean, params, act, isa)
    out = F.linear(h, w_down_t.t(), gemm_bias(b_down, skipped_out, x.dtype))
    bad = out.sum(dim=-1, dtype=torch.float32).isfinite().logical_not_()
    # 0·inf of a skipped neuron, or a true inf or NaN: the fused kernel tells them apart. With finite weights it is the
    # latter; their sum is not finite where one of them is not.
    if bool(bad.any()) and not bool(w_down_t.sum(dtype=torch.float32).isfinite()):
        out = out.clone()
        for i in bad.nonzero().flatten().tolist():
            out[i : i + 1] = fused(x[i : i + 1], None if token_scale is None else token_scale[i : i + 1])
    return out
