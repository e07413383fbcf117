"""Made-up activations, and the statistics of a model that has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsemlp.calibration import Statistics
from sparsemlp.calibration.histogram import LayerStatistics

EPS = torch.finfo(torch.float32).eps


SCREEN = (4, 32)
"""The screen that made-up scores are said to be of."""


def layer_of(a: Tensor, u: Tensor, parts: int = 1, m: Tensor | None = None) -> LayerStatistics:
    layer = LayerStatistics(a.shape[1])
    tensors = (a, u) if m is None else (a, u, m)
    for part in zip(*(t.chunk(parts) for t in tensors), strict=True):
        layer.add(*part)
    return layer


def score_of(a: Tensor, u: Tensor) -> Tensor:
    """A screen's score: h, each entry off by some 20 % and now and then of the other sign."""
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(4))
    return a * u * (1 + 0.2 * noise)


def decides(method: str, a: Tensor, u: Tensor) -> Tensor:
    """The magnitude that the method's thresholds are for."""
    return (score_of(a, u) if method == "screen" else a).abs()


def statistics_of(a: Tensor, u: Tensor) -> Statistics:
    """Statistics of a model with the one layer "mlp", from its activations and `score_of` them."""
    sizes = {"hidden_size": 1, "intermediate_size": a.shape[1], "activation": "silu"}
    identity = {"architecture": "Test", "layers": {"mlp": sizes}}
    screened = {"mlp": layer_of(a, u, 3, score_of(a, u))}
    return Statistics(identity, {"mlp": layer_of(a, u, 3)}, SCREEN, screened)


def correlated(tokens: int = 2000, neurons: int = 40) -> tuple[Tensor, Tensor]:
    """a like SiLU's, u whose size depends on the neuron and on |a|, as in real models."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    a = nn.functional.silu(draw(tokens, neurons) * 2 - draw(neurons).abs())
    u = (draw(tokens, neurons) + 0.3) * draw(neurons).exp() * (0.2 + a.abs())
    return a, u
