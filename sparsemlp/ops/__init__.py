"""Public operators: one file, one contract."""

from sparsemlp.ops.gated_mlp import gated_mlp

__all__ = ["gated_mlp"]
