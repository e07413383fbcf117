"""CATS thresholds: one value per layer, the target's percentile of |a|."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemlp.calibration.histogram import Cumulative, LayerStatistics, float32_at_least

__all__ = ["thresholds"]


def thresholds(layer: LayerStatistics, target: float) -> Tensor:
    """The smallest t at which the empirical CDF of |a|, over the layer's tokens and neurons, reaches the target.

    Args:
        layer: the layer's statistics.
        target: share of activations to skip, in (0, 1).

    Returns:
        t, 0-d float32; 0 where exact zeros alone reach the target. Inside a bin the CDF is taken as linear, so the
        share of calibration activations below t is off by less than the share of the bin that holds t.

    Source: CATS (Lee et al., 2024).
    """
    value = Cumulative(layer, pooled=True).quantile(target)
    return float32_at_least(torch.tensor(value, dtype=torch.float64))
