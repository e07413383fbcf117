"""An L1 term on hidden activations, which drives their density down."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp.metrics._stored import sparse_modules, stored
from sparsemlp.nn import _projections
from sparsemlp.nn.mlp import SparseMLP
from sparsemlp.ops.mlp import mlp
from sparsemlp.reference import gated_mlp as reference

__all__ = ["HiddenL1", "l1_penalty"]

_NEVER_NEGATIVE = ("relu", "relu2", "jsrelu")
_WHERE_PARAMETER_IS_NOT = ("fatrelu", "mix")
"""φ ≥ 0 where their parameter is not negative."""

_WIDER = 16
"""Columns that are added to x and the weights: one for the sum, the others keep rows aligned."""


def l1_penalty(model: nn.Module) -> HiddenL1:
    """The mean of |h| over tokens and neurons of every sparse MLP that runs inside a `with` block.

    ::

        with l1_penalty(model) as penalty:
            loss = criterion(model(x), y) + 0.01 * penalty()
            loss.backward()

    Equivalent to, for each module that ran, `h.abs().mean()` of the dense composition's h = C(φ(p)), of a gated module
    h = C(φ(p)) ⊙ u, averaged over the calls. An entry that the threshold leaves out is 0 and gets no gradient.

    Args:
        model: holds at least one `SparseMLP` or `SparseGatedMLP`.

    Returns:
        A context manager whose value is called for the term, a scalar in float32 (float64 for float64).
    Gradients: in x and in every weight and bias that p and u come from: sign(h)·∂h, 0 where an entry is left out or
        φ'(p) = 0. Where φ ≥ 0 (`relu`, `relu2`, `jsrelu`; `fatrelu` and `mix` with a parameter ≥ 0) an ungated module's
        sum over neurons is one more output of the same operator, so that forward and backward skip for it what they
        skip anyway; weights are copied once a call for that. Other modules pay dense products, one forward and two
        backward, gated ones twice that.
    Numerics: the sum of a token's h is rounded to x's dtype once more; the mean is taken in float32.
    Raises:
        ValueError: the model has no sparse module, none ran or all ran without gradients (a reentrant checkpoint), or
            one is decided by a screen or an input threshold.
    Source: ProSparse (Song et al.) for L1 on hidden activations.
    """
    return HiddenL1(model)


class HiddenL1:
    """What `l1_penalty` returns. Its call gives the term for all calls of modules since the last one, and forgets them.

    With activation checkpointing, `backward` belongs inside the block: it calls the modules again. A graph that was
    compiled before the block does not see it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = sparse_modules(model)
        self._means: list[Tensor] = []
        self._done: set[int] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> HiddenL1:
        for module in self._modules.values():
            self._hooks.append(module.register_forward_hook(self._hook(), with_kwargs=True))
            if isinstance(module, SparseMLP):
                module.__dict__["_forward_fused"] = MethodType(self._fused(), module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        for module in self._modules.values():
            module.__dict__.pop("_forward_fused", None)
        self._done.clear()

    def __call__(self) -> Tensor:
        if not self._means:
            raise ValueError(
                "no sparse MLP ran since the last call of the penalty, expected a call of the model inside the `with` "
                "block before it; a compiled model must run uncompiled there"
            )
        means, self._means = self._means, []
        if torch.is_grad_enabled() and not any(m.requires_grad for m in means) and self._learns():
            raise ValueError(
                "the sparse MLPs ran without gradients, so the penalty has none, expected calls with grad mode on; use "
                "checkpoint(..., use_reentrant=False), or call the penalty under torch.no_grad()"
            )
        return torch.stack(means).mean()

    def _learns(self) -> bool:
        return any(p.requires_grad for module in self._modules.values() for p in module.parameters())

    def _sees(self, module: nn.Module) -> bool:
        """Whether it is one of the model's, inside the block; a copy that was made there takes what is set along."""
        return bool(self._hooks) and any(module is m for m in self._modules.values())

    def _fused(self) -> Callable[..., Tensor]:
        """A module's fused forward with one more output, where h is never negative; else as it is."""

        def forward(module: SparseMLP, x: Tensor, token_scale: Tensor | None = None) -> Tensor:
            if not self._sees(module) or not _never_negative(module):
                return type(module)._forward_fused(module, x, token_scale)
            out, mean = _with_mean(module, x, token_scale)
            self._keep(mean)
            self._done.add(id(module))
            return out

        return forward

    def _hook(self) -> Callable[..., None]:
        """The second path, where the first did not bring the sum; a function, which a copied module shares."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            if id(module) in self._done or not self._sees(module):
                self._done.discard(id(module))
                return
            s = stored(module, args[0] if args else kwargs["x"], kwargs.get("token_scale"))
            up = s.pre.new_ones(()) if s.up is None else s.up
            rule = s.threshold, s.token_scale, s.skipped_mean, s.activation_params, s.activation, s.indicator
            h, _ = reference.hidden(s.pre, up, *rule)
            self._keep(_wide(h).abs().mean())

        return hook

    def _keep(self, mean: Tensor) -> None:
        """Except of calls that a checkpoint makes again in the backward pass."""
        if torch._C._current_graph_task_id() == -1:
            self._means.append(mean)


def _never_negative(module: SparseMLP) -> bool:
    """Whether h is φ(p) ≥ 0 or 0: then Σ|h| is Σh, which one more column of the last weight gives."""
    if module.skipped_mean is not None or module._layers()[1] is None:
        return False
    if _projections.tensors(module._layers()[1])[0].dtype == torch.int8:
        return False
    if module.activation in _NEVER_NEGATIVE:
        return True
    if module.activation not in _WHERE_PARAMETER_IS_NOT or torch.compiler.is_compiling():
        return False
    assert module.activation_params is not None
    return bool(module.activation_params[0] >= 0)


def _with_mean(module: SparseMLP, x: Tensor, token_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The module's output for x, and the mean of h over tokens and neurons."""
    first, last, _ = module._layers()
    by_input = module._by_input
    w_in, b_in, _ = _projections.tensors(first)
    w_out, b_out, _ = _projections.tensors(last)
    w_in, w_out_t = (w_in.t() if by_input[0] else w_in), (w_out if by_input[1] else w_out.t())
    neurons, width = w_out_t.shape
    share = 2.0 ** -round(math.log2(max(neurons, 1)))  # a power of two: no rounding
    column = w_out_t.new_zeros(neurons, _WIDER)
    column[:, 0] = share
    wider = mlp(
        F.pad(x, (0, _WIDER)),
        F.pad(w_in, (0, _WIDER)),
        torch.cat([w_out_t, column], dim=1),
        threshold=module.threshold,
        token_scale=token_scale,
        activation=module.activation,
        activation_params=module.activation_params,
        b_in=b_in,
        b_out=None if b_out is None else F.pad(b_out, (0, _WIDER)),
        backend=module.backend,
    )
    mean = _wide(wider[..., width]).mean() / (share * neurons)
    return wider[..., :width], mean


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
