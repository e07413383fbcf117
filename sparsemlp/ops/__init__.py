"""Public operators: one file, one contract."""

from sparsemlp.ops.activation import activation
from sparsemlp.ops.gated_mlp import gated_mlp

__all__ = ["activation", "gated_mlp"]
