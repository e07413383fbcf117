"""Modules over the package's operators."""

from sparsemlp.nn.activation import Activation
from sparsemlp.nn.gated_mlp import SparseGatedMLP
from sparsemlp.nn.int8_linear import Int8Linear
from sparsemlp.nn.mlp import SparseMLP
from sparsemlp.nn.sparse_linear import SparseLinear

__all__ = ["Activation", "Int8Linear", "SparseGatedMLP", "SparseLinear", "SparseMLP"]
