"""What a user of PyTorch alone would write to skip: `index_select` of the wanted rows, and `torch.sparse` CSR.

Both decide as this package does (the same thresholds, the mask from stored, rounded values), so that they skip as much.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.workload import Call, Workload, phi

__all__ = ["csr", "index_select", "masked"]


def _kept(m: Tensor, limit: Tensor) -> Tensor:
    return ~(m.abs() < limit) & (m != 0)


def masked(work: Workload, sparsity: float) -> Call:
    """What both compute: the dense layer of the masked values, which skips nothing and is not timed."""
    limits = [work.threshold(i, sparsity).to(work.dtype) for i in range(len(work.layers))]
    act = phi(work.activation)

    def call(i: int, x: Tensor) -> Tensor:
        w, limit = work.layers[i], limits[i]
        if work.op == "sparse_linear":
            return F.linear(torch.where(_kept(x, limit), x, 0), w.weight)
        a = act(F.linear(x, w.w_gate) if work.op == "gated_mlp" else F.linear(x, w.w_in, w.b_in))
        a = torch.where(_kept(a, limit), a, 0)
        return (
            F.linear(a * F.linear(x, w.w_up), w.w_down)
            if work.op == "gated_mlp"
            else F.linear(a, w.w_out, w.b_out)
        )

    return call


def index_select(work: Workload, sparsity: float) -> Call:
    """Copies the rows that some token wants and multiplies by the copies."""
    limits = [work.threshold(i, sparsity).to(work.dtype) for i in range(len(work.layers))]
    act = phi(work.activation)

    def gated(w: Any, x: Tensor, limit: Tensor) -> Tensor:
        a = act(F.linear(x, w.w_gate))
        kept = _kept(a, limit)
        wanted = kept.any(dim=0).nonzero().flatten()
        a = torch.where(kept, a, 0).index_select(1, wanted)
        h = a * F.linear(x, w.w_up.index_select(0, wanted))
        return h @ w.w_down_t.index_select(0, wanted)

    def ungated(w: Any, x: Tensor, limit: Tensor) -> Tensor:
        a = act(F.linear(x, w.w_in, w.b_in))
        kept = _kept(a, limit)
        wanted = kept.any(dim=0).nonzero().flatten()
        a = torch.where(kept, a, 0).index_select(1, wanted)
        return torch.addmm(w.b_out, a, w.w_out_t.index_select(0, wanted))

    def linear(w: Any, x: Tensor, limit: Tensor) -> Tensor:
        kept = _kept(x, limit)
        wanted = kept.any(dim=0).nonzero().flatten()
        return torch.where(kept, x, 0).index_select(1, wanted) @ w.weight_t.index_select(0, wanted)

    one = {"gated_mlp": gated, "mlp": ungated, "sparse_linear": linear}[work.op]
    return lambda i, x: one(work.layers[i], x, limits[i])


def csr(work: Workload, sparsity: float) -> Call:
    """The thresholded activations as a CSR matrix times the dense down projection.

    PyTorch's CSR product exists for float32 only, so half precision keeps a float32 copy of that one matrix.
    """
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    limits = [work.threshold(i, sparsity).to(work.dtype) for i in range(len(work.layers))]
    act = phi(work.activation)
    names = {"gated_mlp": "w_down_t", "mlp": "w_out_t", "sparse_linear": "weight_t"}
    wide = [
        work.derived("float32", i, lambda w=w: getattr(w, names[work.op]).float())
        for i, w in enumerate(work.layers)
    ]

    def gated(w: Any, x: Tensor, limit: Tensor) -> Tensor:
        a = act(F.linear(x, w.w_gate))
        return torch.where(_kept(a, limit), a * F.linear(x, w.w_up), 0)

    def ungated(w: Any, x: Tensor, limit: Tensor) -> Tensor:
        a = act(F.linear(x, w.w_in, w.b_in))
        return torch.where(_kept(a, limit), a, 0)

    def linear(w: Any, x: Tensor, limit: Tensor) -> Tensor:
        return torch.where(_kept(x, limit), x, 0)

    hidden: Callable[..., Tensor] = {"gated_mlp": gated, "mlp": ungated, "sparse_linear": linear}[work.op]

    def call(i: int, x: Tensor) -> Tensor:
        layer = work.layers[i]
        out = (hidden(layer, x, limits[i]).float().to_sparse_csr() @ wide[i]).to(x.dtype)
        return out + layer.b_out if work.op == "mlp" else out

    return call
