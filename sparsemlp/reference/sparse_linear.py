"""The sparse linear layer's reference: plain PyTorch, any floating dtype; `differentiable` has gradients."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from sparsemlp.activations import wide
from sparsemlp.reference import int8
from sparsemlp.reference.gated_mlp import check_values, hidden
from sparsemlp.reference.products import recomputed

__all__ = ["differentiable", "masked", "sparse_linear"]


def masked(x: Tensor, threshold: Tensor, token_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x with 0 where |x| < s·t, in x's dtype, and the mask of entries that are kept and not 0, both (T, K).

    It is the gated MLP's rule with x for the activation and nothing to multiply. At a kept 0 the gradient flows.
    """
    return hidden(x, x.new_ones(()), threshold, token_scale, None, None, "identity")


def _product(h: Tensor, weight_t: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """h @ weight_t + bias; of int8 weights Σ_k (h_k · scale_k) · weight_t[k] + bias in float32, rounded once."""
    if scale is None:
        return F.linear(h, weight_t.t(), bias)
    out = int8.neuron_linear(wide(h), weight_t, scale)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(h.dtype)


def sparse_linear(
    x: Tensor,
    weight_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """y of `sparsemlp.sparse_linear` for x of shape (T, K); the operator's arguments in order."""
    on_cpu = x.device.type == "cpu"  # elsewhere a look at the values would stall the device
    if on_cpu:
        check_values("threshold", threshold)
    h, active = masked(x, threshold, token_scale)
    out = _product(h, weight_t, bias, scale)

    def row(i: int) -> Tensor:
        rows = active[i].nonzero().flatten()
        return _product(h[i : i + 1, rows], weight_t[rows], bias, None if scale is None else scale[rows])

    # 0·inf and 0·NaN of entries that are not active are taken back: their rows count as not read.
    return recomputed(out, row) if on_cpu else out


def differentiable(
    x: Tensor,
    weight_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """The same values by operations that autograd, `torch.func` and `torch.compile` see through.

    Unlike `sparse_linear`, an inf or NaN in the weights of a skipped channel reaches the output, as in the dense layer.
    """
    h, _ = masked(x, threshold, token_scale)
    return _product(h, weight_t, bias, scale)
