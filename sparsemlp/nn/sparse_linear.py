"""`SparseLinear`: `nn.Linear` that reads the weights of those channels only whose input reaches a threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp._layout import has_columns
from sparsemlp.nn._dense_gated_mlp import CALL_HOOKS, REPLACED, is_plain_tensor
from sparsemlp.nn._thresholded import put, put_back, relayout_after_load, warn
from sparsemlp.nn._thresholds import checked_threshold, limit_text
from sparsemlp.ops.sparse_linear import OP, sparse_linear
from sparsemlp.reference import sparse_linear as reference

__all__ = ["SparseLinear"]


class SparseLinear(nn.Linear):
    """`nn.Linear` over the entries of its input that reach a threshold, by `sparsemlp.sparse_linear`.

    Equivalent to::

        out = F.linear(where(abs(x) < threshold, 0, x), weight, bias)

    Its state dict is `nn.Linear`'s. `weight` stays a Parameter of shape (out_features, in_features), stored channel by
    channel (strides (1, out_features)), so that the weights of a channel that is 0 are not read; there is no second
    copy. Where the weight is something else than such a plain tensor (parametrized, quantised, distributed, exchanged
    for one with other strides), the module thresholds its input all the same, calls `F.linear`, and warns once that
    everything is read.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`; the initial values are the same.
        threshold: t ≥ 0, a number or a tensor of shape () or (in_features,).
        backend: passed to `sparsemlp.sparse_linear`.

    Attributes:
        threshold: t, float32 buffer of shape () or (in_features,); not saved, keeps its dtype in `.to(dtype)`.
        backend: passed to `sparsemlp.sparse_linear`.
    Gradients: as those of `sparsemlp.sparse_linear`; parameters that require grad take the differentiable path
        wherever grad mode is on.
    Source: TEAL (Liu et al.) for one threshold, WINA for one per channel; docs/ops/sparse_linear.md.
    """

    threshold: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        threshold: float | Tensor = 0.0,
        backend: str = "auto",
    ) -> None:
        OP.check_backend(backend)
        limit = checked_threshold(threshold, in_features, letter="in_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.backend = backend
        self.name = type(self).__name__
        """What a warning calls this module; set it to the qualified name."""
        self._linear: tuple[
            nn.Linear, ...
        ] = ()  # in a tuple: not a child, so no second name for the parameters
        self._converted = False
        self._warned = False
        self.register_buffer("threshold", None, persistent=False)
        self.register_load_state_dict_post_hook(relayout_after_load)
        self._set(limit)
        self._relayout()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, threshold: float | Tensor = 0.0, backend: str = "auto"
    ) -> SparseLinear:
        """A sparse layer with the very parameters and hooks of a dense one, whose weight is stored anew.

        Args:
            linear: exactly an `nn.Linear` with plain parameters.
            threshold: t ≥ 0, a number or a tensor of shape () or (in_features,).
            backend: "auto", "native", "triton" or "reference".

        Returns:
            The sparse layer. `linear` must no longer be used; `to_linear` gives it back.
        Raises:
            ValueError: the layer is something else, or an argument is invalid; nothing is changed then.
        """
        reason = _why_not(linear)
        if reason is not None:
            raise ValueError(
                f"linear {reason}, expected an nn.Linear with plain parameters; merge or remove what was added"
            )
        sparse = cls(
            linear.in_features, linear.out_features, False, "meta", threshold=threshold, backend=backend
        )
        # The same dictionaries: parameters put in later and hooks, with their handles, are those of both.
        for name in ("_parameters", *CALL_HOOKS):
            setattr(sparse, name, getattr(linear, name))
        sparse._linear = (linear,)
        sparse._converted = False
        sparse.training = linear.training
        sparse.threshold = sparse.threshold.to(sparse._device())
        sparse._relayout()
        return sparse

    def to_linear(self) -> nn.Linear:
        """The dense layer: the very object given to `from_linear`, or a new one.

        It has this layer's parameters and hooks, and `weight` is stored row by row again. The sparse layer must no
        longer be used.
        """
        linear = self._linear[0] if self._linear else nn.Linear(1, 1, device="meta")
        linear.in_features, linear.out_features = self.in_features, self.out_features
        for name in ("_parameters", *CALL_HOOKS):
            setattr(linear, name, getattr(self, name))
        linear.training = self.training
        weight = self._own_weight()
        if self._converted and weight is not None:
            with torch.no_grad():
                weight.data = weight.data.contiguous()
            self._converted = False
        return linear

    def set_threshold(self, threshold: float | Tensor) -> None:
        """A new threshold; a compiled graph sees it without compiling again where the shape stays.

        Args:
            threshold: t ≥ 0, a number or a tensor of shape () or (in_features,); inf: never kept.

        Raises:
            ValueError: a negative or NaN threshold, or a wrong shape.
        """
        self._set(checked_threshold(threshold, self.in_features, letter="in_features"))
        self._relayout()

    def threshold_for(self, x: Tensor, sparsity: float, *, weight_aware: bool = False) -> Tensor:
        """The threshold that skips a given fraction of the entries of sample inputs; does not set it.

        Args:
            x: (..., in_features), inputs of this layer, of some hundred tokens or more.
            sparsity: the fraction of entries to skip, 0 ≤ sparsity < 1.
            weight_aware: compare |x_k|·‖weight[:, k]‖₂ instead of |x_k|, which gives one threshold per channel.

        Returns:
            float32, () or (in_features,): exactly ⌊sparsity · x.numel()⌋ entries of x are below it, fewer where equal
            magnitudes or, weight-aware, rounding forbid. A channel without weights (norm 0) gets inf.
        Raises:
            ValueError: x of another width or without entries, or a sparsity out of range.
        Source: TEAL: a quantile of |x|. WINA: t_k = τ / ‖weight[:, k]‖₂, τ a quantile of |x_k|·‖weight[:, k]‖₂.
        """
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity is {sparsity}, expected a number from 0 up to (not including) 1")
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features or x.numel() == 0:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x is {what}, expected (..., K) with K = {self.in_features} and some tokens")
        with torch.no_grad():
            size = x.detach().float().abs()
            norm = None
            if weight_aware:
                norm = torch.linalg.vector_norm(self.weight, dim=0, dtype=torch.float32)
                size = size * norm
            limit = size.flatten().kthvalue(1 + int(sparsity * x.numel())).values
            return limit if norm is None else torch.where(norm == 0, torch.inf, limit / norm)

    def forward(self, input: Tensor, *, token_scale: Tensor | None = None) -> Tensor:
        """The layer's output.

        Args:
            input: (..., in_features) in the weight's dtype.
            token_scale: s ≥ 0, float32, (T,) or input's leading shape, multiplies the threshold; 0 runs it dense.

        Returns:
            (..., out_features) in input's dtype.
        """
        weight = self._parameters.get("weight")
        if weight is None or not is_plain_tensor(weight) or not has_columns(weight):
            return self._forward_whole(input, token_scale)
        return sparse_linear(
            input,
            weight.t(),
            self._parameters["bias"],
            threshold=self.threshold,
            token_scale=token_scale,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        limit = limit_text(self.threshold)
        return f"{super().extra_repr()}, threshold={limit}, backend={self.backend!r}"

    def _forward_whole(self, x: Tensor, token_scale: Tensor | None) -> Tensor:
        """The same values by `F.linear`, which knows what the weight is."""
        if not self._warned:
            warn(self)
        scale = None if token_scale is None else token_scale.reshape(-1)
        h, _ = reference.masked(x.reshape(-1, x.shape[-1]), self.threshold, scale)
        return F.linear(h.reshape(x.shape), self.weight, self.bias)

    def _warning(self) -> str:
        return f"reads all of its weight, also for the entries it skips: {self._why_whole()}"

    def _why_whole(self) -> str:
        weight = self._parameters.get("weight")
        if weight is None:
            return "weight is computed (a parametrization, pruning or norm)"
        if not is_plain_tensor(weight):
            return f"weight is a {type(weight).__name__}, not a plain tensor"
        strides = tuple(weight.stride())
        return f"weight was exchanged for one with strides {strides} (set_threshold stores it anew)"

    def _own_weight(self) -> Tensor | None:
        """The weight, where it is this module's to store as it likes."""
        weight = self._parameters.get("weight")
        return weight if type(weight) is nn.Parameter else None

    def _relayout(self) -> None:
        """Stores the weight channel by channel; the old storage is freed unless somebody else holds it."""
        weight = self._own_weight()
        if weight is not None and not has_columns(weight):
            with torch.no_grad():
                weight.data = weight.data.t().contiguous().t()
            self._converted = True

    def _device(self) -> torch.device:
        """Where the threshold lives: with the weight, but never on meta, which would lose its values."""
        weight = self._parameters.get("weight")
        return torch.device("cpu") if weight is None or weight.device.type == "meta" else weight.device

    def _set(self, threshold: Tensor) -> None:
        put(self, "threshold", threshold, self._device())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        """`.to()`, `.half()` …: the threshold moves but stays float32, the weight stays in channels."""
        before: dict[str, Tensor | None] = {"threshold": self.threshold}
        super()._apply(fn, recurse)
        put_back(self, before)
        self._relayout()
        return self


def _why_not(linear: Any) -> str | None:
    """Why `from_linear` cannot take the layer, in words, or None. Hooks on it are no reason: they go along."""
    if type(linear) is not nn.Linear:
        return f"is {type(linear).__module__}.{type(linear).__qualname__}, not exactly nn.Linear"
    if "forward" in linear.__dict__:
        return REPLACED
    for name in ("weight", "bias"):
        tensor = linear._parameters.get(name)
        if tensor is not None and type(tensor) is not nn.Parameter:
            return f"has a {name} of type {type(tensor).__name__}, not a plain parameter"
    if linear._parameters.get("weight") is None:
        return "has no parameter weight (it is computed: pruning or a norm)"
    return None
