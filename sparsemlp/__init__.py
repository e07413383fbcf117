"""sparsemlp: kernels that skip the zeros in Transformer MLPs.

Importing the package needs PyTorch only. See `sparsemlp.gated_mlp` for the operator, `sparsemlp.nn` for modules,
`sparsemlp.calibrate` for thresholds, and `sparsemlp.integrations.transformers` for Hugging Face models.
"""

from sparsemlp._op import BackendUnavailableError
from sparsemlp.ops import gated_mlp

__version__ = "0.1.0"

__all__ = ["BackendUnavailableError", "__version__", "gated_mlp"]
