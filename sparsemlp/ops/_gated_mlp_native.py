"""Launches the compiled gated MLP: by rows that are skipped, by dense products, or by PyTorch's GEMMs.

The three are `ROUTES`; `forward` is the choice that depends on nothing but the number of tokens, and
`sparsemlp.router` the one that depends on what is fastest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsemlp import _native, activations
from sparsemlp._layout import float32_run
from sparsemlp._op import PLAIN_TENSORS, VALUE_ERROR, is_plain_eager, value_error
from sparsemlp.ops import _sparse_linear_native as sparse_linear
from sparsemlp.ops._checks import number_tensor
from sparsemlp.ops._products import neuron_linear, rows_linear
from sparsemlp.reference.gated_mlp import gemm_bias, input_kept
from sparsemlp.router.decide import fused_tokens

__all__ = ["CHUNK", "INDICATORS", "ROUTES", "direct", "forward"]

CHUNK = 32
"""Tokens in one call of the fused kernel; with more, the same operator multiplies densely."""

INDICATORS = {"gate": 0, "up": 1, "product": 2}
"""The compiled kernel's ids."""

_SLICE = 2048
"""Neurons, or columns of the down projection, of int8 weights that are widened at a time."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_gated_mlp_native(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, Tensor? token_scale, "
    "Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_gate, Tensor? b_up, Tensor? b_down, Tensor? scale_gate, "
    "Tensor? scale_up, Tensor? scale_down, Tensor? pre, Tensor? activation_params, int activation, int indicator, "
    "int isa) -> Tensor"
)
_lib.define(
    "_hidden_native(Tensor pre, Tensor? up, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, "
    "Tensor? activation_params, int activation, int indicator, int isa, Tensor? weight=None) -> Tensor"
)
_fused = torch.ops.sparsemlp._gated_mlp_native.default
_hidden = torch.ops.sparsemlp._hidden_native.default


def direct(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: float | Tensor,
    input_threshold: float | Tensor | None,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    scale_gate: Tensor | None,
    scale_up: Tensor | None,
    scale_down: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> Tensor | None:
    """The fused kernel for a plain eager call of few tokens on unchecked arguments, x of shape (..., D); None: not so.

    The kernel checks what it needs itself, and the public function's own checks are then only for naming what is wrong.
    A call then costs 9 µs instead of 18 beyond the computing (inference mode, everything in the cache).
    """
    name = activations.IDS.get(activation) if type(activation) is str else None
    decides = INDICATORS.get(indicator) if type(indicator) is str else None
    if (
        name is None
        or decides is None
        or torch.compiler.is_compiling()
        or _native.problem() is not None
        or not is_plain_eager("cpu")
    ):
        return None
    limit = number_tensor(threshold)
    input_limit = None if input_threshold is None else number_tensor(input_threshold)
    if limit is None or (input_limit is None) != (input_threshold is None):
        return None
    grad = torch.is_grad_enabled()
    for t in (
        x,
        w_gate,
        w_up,
        w_down_t,
        limit,
        input_limit,
        token_scale,
        skipped_mean,
        skipped_out,
        b_gate,
        b_up,
        b_down,
        scale_gate,
        scale_up,
        scale_down,
    ):
        if t is not None and (type(t) not in PLAIN_TENSORS or (grad and t.requires_grad)):
            return None
    if grad and activation_params is not None and activation_params.requires_grad:
        return None
    if x.dim() == 0 or x.numel() > fused_tokens(x.dtype, scale_down is not None) * x.shape[-1]:
        return None
    try:
        pre = None
        if input_limit is not None:
            if w_gate.dim() != 2 or not input_major(w_gate):
                return None
            pre = _sparse_gate(x, w_gate, input_limit, scale_gate).reshape(-1, w_gate.shape[0])
        return _fused(
            x, w_gate, w_up, w_down_t, limit, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down,
            scale_gate, scale_up, scale_down, pre, activation_params, name, decides, _native.isa(),
        )  # fmt: skip
    except RuntimeError as error:
        if VALUE_ERROR in str(error):
            raise value_error(error) from None
        return None


def input_major(w: Tensor) -> bool:
    """Whether a column of w (F, D) lies in consecutive memory."""
    return w.stride(0) == 1 or w.shape[0] <= 1 or w.shape[1] == 0


def _sparse_gate(x: Tensor, w_gate: Tensor, input_threshold: Tensor, scale: Tensor | None) -> Tensor:
    """p without bias, float32, of the x_k that are not below their threshold; the others' columns are not read."""
    ones = None if scale is None else torch.ones(w_gate.shape[1])
    try:
        pre = sparse_linear._fused(x, w_gate.t(), input_threshold, None, None, ones, True, _native.isa())
    except RuntimeError as error:
        if VALUE_ERROR in str(error):
            raise ValueError(f"input_{value_error(error)}") from None
        raise
    return pre if scale is None else pre.mul_(scale)


def forward(*args: Any) -> Tensor:
    """The operator's arguments in order; up to CHUNK tokens by skipping rows, more by dense products."""
    return run("sparse" if args[0].shape[0] <= CHUNK else "dense", *args)


def run(
    route: str,
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
    """One of `ROUTES` with the operator's arguments in order; x is (T, D)."""
    limit = float32_run(threshold)
    assert limit is not None
    call = _Call(
        w_gate,
        w_up,
        w_down_t,
        limit,
        float32_run(input_threshold),
        float32_run(skipped_mean),
        float32_run(skipped_out),
        _run(b_gate),
        _run(b_up),
        _run(b_down),
        float32_run(scale_gate),
        float32_run(scale_up),
        float32_run(scale_down),
        float32_run(activation_params),
        activation,
        indicator,
    )
    scale = float32_run(token_scale)
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    if route == "pytorch":
        return call.by_pytorch(x, scale)
    if x.shape[0] <= CHUNK:
        return call.fused(x, scale)
    if route == "dense":
        return call.fused(x, scale)
    scales = (None,) * -(-x.shape[0] // CHUNK) if scale is None else scale.split(CHUNK)
    return torch.cat([call.fused(part, s) for part, s in zip(x.split(CHUNK), scales, strict=True)])


ROUTES = {name: functools.partial(run, name) for name in ("sparse", "dense", "pytorch")}
"""Functions of the operator's arguments. `sparse` reads the rows that some of CHUNK tokens wants; `dense` multiplies by
all weights and is `sparse` up to CHUNK tokens; `pytorch` likewise, by PyTorch's GEMMs, and rounds p and u to x's dtype
first."""


@dataclass(frozen=True)
class _Call:
    """What all tokens of a call share, as the compiled kernel wants it."""

    w_gate: Tensor
    w_up: Tensor
    w_down_t: Tensor
    threshold: Tensor
    input_threshold: Tensor | None
    mean: Tensor | None
    skipped_out: Tensor | None
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    scale_gate: Tensor | None
    scale_up: Tensor | None
    scale_down: Tensor | None
    params: Tensor | None
    activation: str
    indicator: str

    def by_pytorch(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """PyTorch's matrix products around a fused mask."""
        act, decides, isa = activations.IDS[self.activation], INDICATORS[self.indicator], _native.isa()
        if self.input_threshold is None:
            pre = _rows(x, self.w_gate, self.scale_gate, self.b_gate)
        else:
            _check_input_threshold(self.input_threshold)
            seen = torch.where(input_kept(x, self.input_threshold), x, 0)
            pre = _rows(seen, self.w_gate, self.scale_gate, self.b_gate, by_input=True)
        up = _rows(x, self.w_up, self.scale_up, self.b_up)
        h = _hidden(pre, up, self.threshold, scale, self.mean, self.params, act, decides, isa, self.w_down_t)
        bias = gemm_bias(self.b_down, self.skipped_out, x.dtype)
        out = _down(h, self.w_down_t, self.scale_down, bias)
        bad = out.sum(dim=-1, dtype=torch.float32).isfinite().logical_not_()
        # 0·inf of something skipped, or a true inf or NaN: the fused kernel tells them apart. With finite weights it is
        # the latter.
        if bool(bad.any()) and not self._finite():
            out = out.clone()
            for i in bad.nonzero().flatten().tolist():
                out[i : i + 1] = self.fused(x[i : i + 1], None if scale is None else scale[i : i + 1])
        return out

    def fused(self, x: Tensor, scale: Tensor | None) -> Tensor:
        pre = None
        if self.input_threshold is not None:
            limit, gate = self.input_threshold, self.scale_gate
            pre = torch.cat([_sparse_gate(part, self.w_gate, limit, gate) for part in x.split(CHUNK)])
        return _fused(
            x, self.w_gate, self.w_up, self.w_down_t, self.threshold, scale, self.mean, self.skipped_out, self.b_gate,
            self.b_up, self.b_down, self.scale_gate, self.scale_up, self.scale_down, pre, self.params,
            activations.IDS[self.activation], INDICATORS[self.indicator], _native.isa(),
        )  # fmt: skip

    def _finite(self) -> bool:
        """Whether all weights are, whose products with 0 count: the sum is not finite where one of them is not."""
        down = self.w_down_t if self.scale_down is None else self.scale_down
        weights = (down,) if self.input_threshold is None else (down, self.w_gate)
        return all(bool(w.sum(dtype=torch.float32).isfinite()) for w in weights)


def _run(b: Tensor | None) -> Tensor | None:
    return None if b is None else b.contiguous()


def _check_input_threshold(threshold: Tensor) -> None:
    if not bool((threshold >= 0).all()):
        raise ValueError(
            "input_threshold holds a negative or NaN value, expected values >= 0 (inf: never active)"
        )


def _rows(x: Tensor, w: Tensor, scale: Tensor | None, b: Tensor | None, *, by_input: bool = False) -> Tensor:
    """x @ w.T + b; of int8 weights a slice at a time, the integers as x's dtype (exact), rounded again by the scale."""

    def product(rows: Tensor, bias: Tensor | None) -> Tensor:
        return neuron_linear(x, rows.t(), bias) if by_input else rows_linear(x, rows, bias)

    if scale is None:
        return product(w, b)
    wide = torch.cat([product(rows.to(x.dtype), None) for rows in w.split(_SLICE)], dim=-1).mul_(scale)
    return wide if b is None else wide.add_(b)


def _down(h: Tensor, w_t: Tensor, scale: Tensor | None, b: Tensor | None) -> Tensor:
    """h @ w_t + b, likewise."""
    if scale is None:
        return neuron_linear(h, w_t, b)
    h = h.mul_(scale)
    slices = w_t.split(_SLICE, dim=1)
    biases = (None,) * len(slices) if b is None else b.split(_SLICE)
    parts = [neuron_linear(h, c.to(h.dtype), bias) for c, bias in zip(slices, biases, strict=True)]
    return torch.cat(parts, dim=-1)
