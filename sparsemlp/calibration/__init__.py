"""Threshold calibration: one pass over text, mergeable statistics, plans for any target and method."""

from sparsemlp.calibration.oracle import LayerRecall, Recall, recall
from sparsemlp.calibration.plan import METHODS, LayerPlan, Plan
from sparsemlp.calibration.statistics import Statistics, calibrate, collect

__all__ = [
    "METHODS", "LayerPlan", "LayerRecall", "Plan", "Recall", "Statistics", "calibrate", "collect", "recall",
]  # fmt: skip
