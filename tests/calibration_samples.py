"""Made-up activations, and the statistics of a model that has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsemlp.calibration import Statistics
from sparsemlp.calibration.histogram import LayerStatistics

EPS = torch.finfo(torch.float32).eps


def layer_of(a: Tensor, u: Tensor, parts: int = 1) -> LayerStatistics:
    layer = LayerStatistics(a.shape[1])
    for part in zip(a.chunk(parts), u.chunk(parts), strict=True):
        layer.add(*part)
    return layer


def statistics_of(a: Tensor, u: Tensor) -> Statistics:
    """Statistics of a model with the one layer "mlp", from its activations."""
    sizes = {"hidden_size": 1, "intermediate_size": a.shape[1], "activation": "silu"}
    return Statistics({"architecture": "Test", "layers": {"mlp": sizes}}, {"mlp": layer_of(a, u, 3)})


def correlated(tokens: int = 2000, neurons: int = 40) -> tuple[Tensor, Tensor]:
    """a like SiLU's, u whose size depends on the neuron and on |a|, as in real models."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    a = nn.functional.silu(draw(tokens, neurons) * 2 - draw(neurons).abs())
    u = (draw(tokens, neurons) + 0.3) * draw(neurons).exp() * (0.2 + a.abs())
    return a, u
