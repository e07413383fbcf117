"""sparsemlp: kernels that skip the zeros in Transformer MLPs.

Importing the package needs PyTorch only. See `sparsemlp.gated_mlp`, `sparsemlp.mlp`, `sparsemlp.sparse_linear` and
`sparsemlp.activation` for the operators, `sparsemlp.nn` for modules, `sparsemlp.calibrate` for thresholds, and
`sparsemlp.integrations.transformers` for Hugging Face models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsemlp._op import BackendUnavailableError
from sparsemlp.ops import activation, gated_mlp, mlp, sparse_linear
from sparsemlp.router import explain, set_router

if TYPE_CHECKING:
    from sparsemlp.calibration import Plan, calibrate

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "Plan",
    "__version__",
    "activation",
    "calibrate",
    "explain",
    "gated_mlp",
    "mlp",
    "set_router",
    "sparse_linear",
]


def __getattr__(name: str) -> Any:
    """What inference does not need is imported on first use."""
    if name in ("functional", "metrics", "nn"):
        return importlib.import_module(f"sparsemlp.{name}")
    if name in ("Plan", "calibrate"):
        from sparsemlp import calibration

        return getattr(calibration, name)
    raise AttributeError(f"module 'sparsemlp' has no attribute {name!r}")
