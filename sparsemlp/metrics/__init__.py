"""Figures of a model's sparsity, and a term of the loss that raises it."""

from sparsemlp.metrics.density import Densities, DensityRecorder, LayerDensity, densities
from sparsemlp.metrics.l1 import HiddenL1, l1_penalty

__all__ = ["Densities", "DensityRecorder", "HiddenL1", "LayerDensity", "densities", "l1_penalty"]
