"""Launches the compiled training kernels: dense products of the living neurons, or lists of what is not zero."""

from __future__ import annotations

from sparsemlp.reference.training import gated_mlp_bwd, gated_mlp_fwd, mlp_bwd, mlp_fwd

__all__ = ["gated_mlp_bwd", "gated_mlp_fwd", "mlp_bwd", "mlp_fwd"]
