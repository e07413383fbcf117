"""Modules over the package's operators."""

from sparsemlp.nn.activation import Activation
from sparsemlp.nn.gated_mlp import SparseGatedMLP

__all__ = ["Activation", "SparseGatedMLP"]
