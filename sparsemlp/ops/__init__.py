"""Public operators: one file, one contract."""

from sparsemlp.ops.activation import activation
from sparsemlp.ops.gated_mlp import gated_mlp
from sparsemlp.ops.mlp import mlp
from sparsemlp.ops.sparse_linear import sparse_linear

__all__ = ["activation", "gated_mlp", "mlp", "sparse_linear"]
