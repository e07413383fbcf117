"""The speed of a large model's MLPs, from random weights of its shape: what sparsity buys when memory is the limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations, gated_mlp
from sparsemlp.ops.screen import scores
from sparsemlp.screen import PackedWeight, pack

__all__ = ["RELU_SHIFT", "StackPoint", "measure_stack"]

RELU_SHIFT = -1.2815515655446004
"""The normal distribution's 10 % point: with this gate bias 90 % of unit-variance pre-activations are negative."""


@dataclass(frozen=True)
class StackPoint:
    """One configuration of the stack; `dense` is PyTorch's three `F.linear`."""

    activation: str
    target: float | None
    """Fraction of neurons to skip; None for PyTorch's dense MLP."""
    sparsity: float
    """Fraction of neurons skipped by the inputs that were timed."""
    ms: float
    """Median milliseconds of one layer for one token."""
    error: float | None = None
    """max |out − dense out| / max |dense out| on one input, where nothing but exact zeros is skipped."""
    indicator: str = "gate"
    """By what is decided: "gate" or "screen"."""


@dataclass
class _Layer:
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    """(D, F), as `nn.Linear` stores it, for the dense baseline."""
    w_down_t: Tensor
    """(F, D), as the sparse kernel reads it."""
    shift: Tensor
    screens: tuple[PackedWeight, PackedWeight]


@dataclass
class _Configuration:
    activation: str
    target: float | None
    run: Callable[[_Layer, Tensor, Tensor], Tensor]
    thresholds: list[Tensor]
    indicator: str = "gate"
    times: list[float] = field(default_factory=list)
    inputs: list[list[Tensor]] = field(default_factory=list)


def measure_stack(
    dtype: torch.dtype,
    *,
    d: int = 4096,
    f: int = 14336,
    layers: int = 3,
    targets: Sequence[float] = (0.0, 0.5, 0.7, 0.9),
    rounds: int = 8,
) -> list[StackPoint]:
    """Times one token through thresholded SiLU MLPs of the shape, a ReLU one at 90 % exact zeros, and dense ones.

    The layers' weights are used in turn (at the default sizes 1 GB in bfloat16, past any last-level cache), every call
    gets a fresh random token, so its mask is fresh too, and all configurations take turns in one run.

    Args:
        dtype: of weights and tokens.
        d, f: model and MLP width.
        layers: how many layers of weights to cycle through.
        targets: sparsities of the SiLU MLP; its thresholds are the targets' quantiles of |a|, or of the screen's
            scores, measured on 64 tokens.
        rounds: how often each configuration goes through the layers.

    Returns:
        Dense SiLU, SiLU at the targets, by the screen at those above 0, dense ReLU, ReLU.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        stack = [_random_layer(d, f, dtype, generator) for _ in range(layers)]
        configurations = _configurations(stack, targets, generator)
        for r in range(-1, rounds):
            first = r % len(configurations)
            for c in configurations[first:] + configurations[:first]:
                _turn(c, stack, timed=r >= 0, generator=generator)
        return [_point(c, stack) for c in configurations]


def _random(rows: int, columns: int, scale: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator).mul_(scale).to(dtype)


def _random_layer(d: int, f: int, dtype: torch.dtype, generator: torch.Generator) -> _Layer:
    w_down = _random(d, f, f**-0.5, dtype, generator)
    # unit variance of a token: unit variance of p
    w_gate, w_up = (_random(f, d, d**-0.5, dtype, generator) for _ in range(2))
    return _Layer(
        w_gate=w_gate,
        w_up=w_up,
        w_down=w_down,
        w_down_t=w_down.t().contiguous(),
        shift=torch.full((f,), RELU_SHIFT, dtype=dtype),
        screens=(pack(w_gate), pack(w_up)),
    )


def _configurations(
    stack: list[_Layer], targets: Sequence[float], generator: torch.Generator
) -> list[_Configuration]:
    d, dtype = stack[0].w_gate.shape[1], stack[0].w_gate.dtype
    zero = [torch.zeros(()) for _ in stack]
    sample = _random(64, d, 1.0, dtype, generator)
    found = [_Configuration("silu", None, _dense_silu, zero)]
    for target in targets:
        thresholds = [
            _quantile(F.silu(F.linear(sample, layer.w_gate)).float().abs(), target) for layer in stack
        ]
        found.append(_Configuration("silu", target, _sparse_silu, thresholds))
    for target in targets:
        if target > 0:
            thresholds = [_quantile(_scores(layer, sample).abs(), target) for layer in stack]
            found.append(_Configuration("silu", target, _screened_silu, thresholds, "screen"))
    found.append(_Configuration("relu", None, _dense_relu, zero))
    found.append(_Configuration("relu", 0.9, _sparse_relu, zero))
    return found


def _quantile(values: Tensor, fraction: float) -> Tensor:
    if fraction <= 0:
        return torch.zeros(())
    flat = values.flatten()
    return flat.kthvalue(max(1, min(flat.numel(), round(fraction * flat.numel())))).values


def _dense_silu(layer: _Layer, x: Tensor, threshold: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, layer.w_gate)) * F.linear(x, layer.w_up), layer.w_down)


def _dense_relu(layer: _Layer, x: Tensor, threshold: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, layer.w_gate, layer.shift)) * F.linear(x, layer.w_up), layer.w_down)


def _sparse_silu(layer: _Layer, x: Tensor, threshold: Tensor) -> Tensor:
    return gated_mlp(x, layer.w_gate, layer.w_up, layer.w_down_t, threshold=threshold)


def _screened_silu(layer: _Layer, x: Tensor, threshold: Tensor) -> Tensor:
    gate, up = layer.screens
    return gated_mlp(
        x, layer.w_gate, layer.w_up, layer.w_down_t, threshold=threshold, indicator="screen", screen_gate=gate,
        screen_up=up,
    )  # fmt: skip


def _scores(layer: _Layer, x: Tensor) -> Tensor:
    """By what the screen decides, (T, F)."""
    return scores(x, *layer.screens, layer.w_gate.shape[0])


def _sparse_relu(layer: _Layer, x: Tensor, threshold: Tensor) -> Tensor:
    return gated_mlp(x, layer.w_gate, layer.w_up, layer.w_down_t, b_gate=layer.shift, activation="relu")


def _turn(c: _Configuration, stack: list[_Layer], *, timed: bool, generator: torch.Generator) -> None:
    d, dtype = stack[0].w_gate.shape[1], stack[0].w_gate.dtype
    tokens = [_random(1, d, 1.0, dtype, generator) for _ in stack]
    for layer, x, threshold in zip(stack, tokens, c.thresholds, strict=True):
        start = time.perf_counter()
        c.run(layer, x, threshold)
        if timed:
            c.times.append(1000 * (time.perf_counter() - start))
    if timed:
        c.inputs.append(tokens)


def _point(c: _Configuration, stack: list[_Layer]) -> StackPoint:
    ms = statistics.median(c.times)
    if c.target is None:
        return StackPoint(c.activation, None, 0.0, ms)
    sparsities = []
    for i, layer in enumerate(stack):
        x = torch.cat([tokens[i] for tokens in c.inputs])
        if c.indicator == "screen":
            sparsities.append(float((_scores(layer, x).abs() < c.thresholds[i]).float().mean()))
            continue
        pre = F.linear(x, layer.w_gate, layer.shift if c.activation == "relu" else None)
        act = activations.apply(pre, c.activation).float().abs()
        sparsities.append(float(((act < c.thresholds[i]) | (act == 0)).float().mean()))
    error = None
    if c.activation == "relu" or c.target == 0:
        x, dense = c.inputs[-1][0], _dense_relu if c.activation == "relu" else _dense_silu
        expected = dense(stack[0], x, c.thresholds[0]).float()
        error = float(
            (c.run(stack[0], x, c.thresholds[0]).float() - expected).abs().max() / expected.abs().max()
        )
    return StackPoint(c.activation, c.target, statistics.fmean(sparsities), ms, error, c.indicator)
