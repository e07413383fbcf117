"""What a sparse module's call decides from: p, u and the rule, computed by its layers beside the operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsemlp.nn._inline_mlp import InlineMLP
from sparsemlp.nn.gated_mlp import SparseGatedMLP
from sparsemlp.nn.mlp import SparseMLP

__all__ = ["Stored", "sparse_modules", "stored"]

Sparse = SparseMLP | SparseGatedMLP


class Stored(NamedTuple):
    """p and u (T, F), u None without a gate, and what `sparsemlp.reference` takes beside them."""

    pre: Tensor
    up: Tensor | None
    threshold: Tensor
    token_scale: Tensor | None
    skipped_mean: Tensor | None
    activation_params: Tensor | None
    activation: str
    indicator: str


def sparse_modules(model: nn.Module) -> dict[str, Sparse]:
    """The sparse MLPs of a model by their names; ValueError where there is none."""
    found: dict[str, Sparse] = {
        name or type(module).__name__: module
        for name, module in model.named_modules()
        if isinstance(module, (SparseMLP, SparseGatedMLP))
    }
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without a SparseMLP or SparseGatedMLP in it, expected at least one; "
            "make them with from_dense or sparsemlp.integrations.transformers.sparsify"
        )
    return found


def stored(module: Sparse, x: Tensor, token_scale: Tensor | None) -> Stored:
    """Of a call with x (..., D); a module that runs dense thresholds nothing.

    Raises:
        ValueError: a screen of low-bit weights or an input threshold decides, which p and u do not show.
    """
    if isinstance(module, SparseGatedMLP):
        if module.indicator == "screen" or module.input_threshold is not None:
            what = "indicator 'screen'" if module.indicator == "screen" else "an input threshold"
            raise ValueError(
                f"{module.name} has {what}, expected indicator 'gate', 'up' or 'product' alone: what it skips is not "
                "seen from p and u; leave the module out"
            )
        pre, up = _gate_and_up(module, x)
        fused, indicator = module._fusable(), module.indicator
    else:
        first: Any = module._replaced[0] if isinstance(module, InlineMLP) else module._layers()[0]
        pre, up = first(x), None
        fused, indicator = not module._drops() and module._fusable(), "gate"
    return Stored(
        pre.flatten(0, -2) if pre.dim() > 1 else pre[None],
        up if up is None else up.flatten(0, -2) if up.dim() > 1 else up[None],
        module.threshold if fused else torch.zeros((), device=pre.device),
        None if token_scale is None or not fused else token_scale.flatten(),
        module.skipped_mean if fused else None,
        module.activation_params,
        module.activation,
        indicator,
    )


def _gate_and_up(module: SparseGatedMLP, x: Tensor) -> Iterator[Tensor]:
    members, children = module._members, module._modules
    gate: Any = children[members.gate]
    up: Any = children[members.up]
    return iter(gate(x).chunk(2, dim=-1) if members.merged else (gate(x), up(x)))
