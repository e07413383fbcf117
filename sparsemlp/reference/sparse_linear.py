"""The sparse linear layer's reference: plain PyTorch, any floating dtype; `differentiable` has gradients."""

from __future__ import annotations

from torch import Tensor

from sparsemlp.reference.gated_mlp import check_values, hidden
from sparsemlp.reference.products import recomputed, rows_linear

__all__ = ["differentiable", "masked", "sparse_linear"]


def masked(x: Tensor, threshold: Tensor, token_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x with 0 where |x| < s·t, in x's dtype, and the mask of entries that are kept and not 0, both (T, K).

    It is the gated MLP's rule with x for the activation and nothing to multiply. At a kept 0 the gradient flows.
    """
    return hidden(x, x.new_ones(()), threshold, token_scale, None, None, "identity")


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
    out = rows_linear(h, weight_t.t(), scale, bias)

    def row(i: int) -> Tensor:
        rows = active[i].nonzero().flatten()
        return rows_linear(h[i : i + 1, rows], weight_t[rows].t(), None, bias)

    # 0·inf and 0·NaN of entries that are not active are taken back: their rows count as not read. Integers are finite.
    return recomputed(out, row) if on_cpu and scale is None else out


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
    return rows_linear(h, weight_t.t(), scale, bias)
