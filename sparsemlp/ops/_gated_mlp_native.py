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
from sparsemlp._layout import contiguous, float32_run, has_columns, with_rows
from sparsemlp._op import raise_value_error
from sparsemlp.ops import _direct
from sparsemlp.ops import _sparse_linear_native as sparse_linear
from sparsemlp.ops._checks import number_tensor
from sparsemlp.ops._products import active_product, by_chunks, hidden, rows_linear
from sparsemlp.reference.gated_mlp import check_values, gemm_bias, input_kept
from sparsemlp.router.decide import fused_tokens
from sparsemlp.screen import PackedWeight

__all__ = ["CHUNK", "INDICATORS", "ROUTES", "direct", "forward"]

CHUNK = 32
"""Tokens in one call of the fused kernel; with more, the same operator multiplies densely."""

INDICATORS = {"gate": 0, "up": 1, "product": 2, "screen": 3}
"""The compiled kernel's ids."""

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define(
    "_gated_mlp_native(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, Tensor? token_scale, "
    "Tensor? skipped_mean, Tensor? skipped_out, Tensor? b_gate, Tensor? b_up, Tensor? b_down, Tensor? scale_gate, "
    "Tensor? scale_up, Tensor? scale_down, Tensor? pre, Tensor? scores, Tensor? activation_params, int activation, "
    "int indicator, int isa) -> Tensor"
)
_lib.define(
    "_screen_native(Tensor x, Tensor gate, Tensor up, Tensor scale_gate, Tensor scale_up, Tensor? b_gate, "
    "Tensor? b_up, Tensor? activation_params, int neurons, int activation, int isa) -> Tensor"
)
_fused = torch.ops.sparsemlp._gated_mlp_native.default
screen_scores = torch.ops.sparsemlp._screen_native.default
"""By what the screen decides, (T, F) float32: the one pass over the low-bit copies."""


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
    screen_gate: PackedWeight | None,
    screen_up: PackedWeight | None,
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
    if name is None or decides is None or not _direct.allowed():
        return None
    limit = number_tensor(threshold)
    input_limit = None if input_threshold is None else number_tensor(input_threshold)
    if limit is None or (input_limit is None) != (input_threshold is None):
        return None
    tensors = (
        x, w_gate, w_up, w_down_t, limit, input_limit, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down,
        scale_gate, scale_up, scale_down, activation_params,
    )  # fmt: skip
    if not _direct.takes(tensors) or x.dim() == 0:
        return None
    if x.numel() > fused_tokens(x.dtype, scale_down is not None) * x.shape[-1]:
        return None
    try:
        pre = scores = None
        if indicator == "screen" or screen_gate is not None or screen_up is not None:
            why = indicator != "screen" or screen_gate is None or screen_up is None or input_limit is not None
            if why or type(screen_gate) is not PackedWeight or type(screen_up) is not PackedWeight:
                return None
            (gate, s_gate), (up, s_up) = screen_gate, screen_up
            if not _direct.takes((x, gate, up, s_gate, s_up)):
                return None
            scores = screen_scores(
                x, gate, up, s_gate, s_up, b_gate, b_up, activation_params, w_up.shape[0], name, _native.isa()
            )
        if input_limit is not None:
            if w_gate.dim() != 2 or not has_columns(w_gate):
                return None
            pre = _sparse_gate(x, w_gate, input_limit, scale_gate).reshape(-1, w_gate.shape[0])
        return _fused(
            x, w_gate, w_up, w_down_t, limit, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down,
            scale_gate, scale_up, scale_down, pre, scores, activation_params, name, decides, _native.isa(),
        )  # fmt: skip
    except RuntimeError as error:
        raise_value_error(error)
        return None


def _sparse_gate(x: Tensor, w_gate: Tensor, input_threshold: Tensor, scale: Tensor | None) -> Tensor:
    """p without bias, float32, of the x_k that are not below their threshold; the others' columns are not read."""
    try:
        return sparse_linear._fused(x, w_gate.t(), input_threshold, None, None, scale, True, _native.isa())
    except RuntimeError as error:
        raise_value_error(error, prefix="input_")
        raise


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
        contiguous(b_gate),
        contiguous(b_up),
        contiguous(b_down),
        float32_run(scale_gate),
        float32_run(scale_up),
        float32_run(scale_down),
        (screen_gate, screen_up, screen_scale_gate, screen_scale_up),
        float32_run(activation_params),
        activation,
        indicator,
    )
    x, scale = with_rows(x), float32_run(token_scale)
    if route == "pytorch":
        return call.by_pytorch(x, scale)
    if x.shape[0] <= CHUNK or route == "dense":
        return call.fused(x, scale)
    return by_chunks(call.fused, x, scale, CHUNK)


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
    screens: tuple[Tensor | None, ...]
    params: Tensor | None
    activation: str
    indicator: str

    def by_pytorch(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """PyTorch's matrix products around a fused mask."""
        act, decides, isa = activations.IDS[self.activation], INDICATORS[self.indicator], _native.isa()
        seen, w_by_input = x, None
        if self.input_threshold is not None:
            check_values("input_threshold", self.input_threshold)
            seen, w_by_input = torch.where(input_kept(x, self.input_threshold), x, 0), self.w_gate
        pre = rows_linear(seen, self.w_gate, self.scale_gate, self.b_gate)
        up = rows_linear(x, self.w_up, self.scale_up, self.b_up)
        h = hidden(
            pre,
            up,
            self.threshold,
            scale,
            self.mean,
            self.params,
            act,
            decides,
            isa,
            self.w_down_t,
            self.scores(x),
        )
        bias = gemm_bias(self.b_down, self.skipped_out, x.dtype)
        return active_product(h, self.w_down_t, self.scale_down, bias, self.fused, x, scale, w_by_input)

    def scores(self, x: Tensor) -> Tensor | None:
        """By what the screen decides, where it does."""
        if self.screens[0] is None:
            return None
        act, neurons = activations.IDS[self.activation], self.w_up.shape[0]
        return screen_scores(
            x, *self.screens, self.b_gate, self.b_up, self.params, neurons, act, _native.isa()
        )

    def fused(self, x: Tensor, scale: Tensor | None) -> Tensor:
        pre = None
        if self.input_threshold is not None:
            limit, gate = self.input_threshold, self.scale_gate
            pre = torch.cat([_sparse_gate(part, self.w_gate, limit, gate) for part in x.split(CHUNK)])
        return _fused(
            x, self.w_gate, self.w_up, self.w_down_t, self.threshold, scale, self.mean, self.skipped_out, self.b_gate,
            self.b_up, self.b_down, self.scale_gate, self.scale_up, self.scale_down, pre, self.scores(x), self.params,
            activations.IDS[self.activation], INDICATORS[self.indicator], _native.isa(),
        )  # fmt: skip
