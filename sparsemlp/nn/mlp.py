"""`SparseMLP`: a dense ungated MLP's own layers, run by `sparsemlp.mlp`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sparsemlp import activations
from sparsemlp._layout import has_columns, has_rows
from sparsemlp.nn import _dense_mlp as dense_mlp
from sparsemlp.nn import _projections
from sparsemlp.nn._dense_gated_mlp import CALL_HOOKS
from sparsemlp.nn._skipped_out import skipped_out
from sparsemlp.nn._thresholded import Thresholded, warn
from sparsemlp.nn._thresholds import checked_activation, checked_mean, checked_params, checked_threshold
from sparsemlp.nn.int8_linear import Int8Linear, quantized
from sparsemlp.ops.mlp import OP, mlp

__all__ = ["SparseMLP"]


class SparseMLP(Thresholded):
    """A thresholded MLP, last(act(first(x))), over the dense module's own layers; made by `from_dense`.

    Its state dict is the dense module's: the children are the same objects under the same names. The last layer's
    weight keeps its shape but is stored neuron by neuron (`nn.Linear`'s (D, F) with strides (1, D)), so that a skipped
    neuron's weights are not read; of a `Conv1D` pair it is the first layer's that is stored anew. There is no second
    copy. With int8 weights the children are `Int8Linear`s under the same names, and the float weights are gone.

    A layer that is not exactly `nn.Linear` (or `Conv1D`), or that has hooks, a replaced forward or tensors of a
    subclass (LoRA, parametrizations, quantised or distributed weights, offloading), is not bypassed: the module then
    runs the dense module's forward, thresholds nothing, and warns once. In training it runs dense, without a warning,
    where the MLP has dropout.

    Attributes:
        threshold: t, float32 buffer of shape () or (F,); not saved, keeps its dtype in `.to(dtype)`.
        skipped_mean: μ, float32 buffer (F,) or None, likewise.
        activation: the name of a row of `sparsemlp.activations.ACTIVATIONS`. A child of this name is reached through
            `named_children`.
        activation_params: float32 buffer of the row's parameters, or None, likewise.
        backend: passed to `sparsemlp.mlp`.
    Source: CATS (Lee et al.) for the threshold; the equations are in docs/ops/mlp.md.
    """

    def __init__(self, activation: str, own_activation: bool, draws: bool, backend: str) -> None:
        super().__init__(backend)
        self._activation = activation
        self._own_activation = own_activation
        self._draws = draws
        """Dropout in training that no child shows."""
        self._dense_only = False
        """Set while a calibration looks at the layers."""
        self._moved: set[str] = set()
        """Roles of layers whose weight this module stores by column and the dense one had by row."""
        self._hidden_dropouts: tuple[str, ...] = ()

    @property
    def activation(self) -> str:
        """The name of a row of `sparsemlp.activations.ACTIVATIONS`, also where a child has this name."""
        return self._activation

    @classmethod
    def from_dense(
        cls,
        module: nn.Module,
        *,
        activation: str | None = None,
        activation_params: Tensor | None = None,
        threshold: float | Tensor = 0.0,
        skipped_mean: Tensor | None = None,
        quantize: str | None = None,
        backend: str = "auto",
    ) -> SparseMLP:
        """A sparse module that takes over a dense MLP's layers.

        Args:
            module: two linear layers of names that libraries use (`fc1` and `fc2`, `wi` and `wo`, `c_fc` and `c_proj`,
                `fc_in` and `fc_out`, `up_proj` and `down_proj` …), `nn.Linear` or `Conv1D`; usually an activation
                `act`, `act_fn`, `activation_fn` or `activation`; perhaps dropouts. Outside of training its forward must
                be last(act(first(x))).
            activation: a row of `sparsemlp.activations.ACTIVATIONS`; None: the module's own. Another one than its own
                replaces it.
            activation_params: (n,) float32, the row's parameters, or None.
            threshold: t ≥ 0, a number or a tensor of shape () or (F,).
            skipped_mean: μ (F,), what a skipped neuron's activation is replaced by, or None.
            quantize: None, or "int8": the layers become `Int8Linear`s, and their float weights are freed.
            backend: "auto", "native", "triton" or "reference".

        Returns:
            The sparse module. `module` must no longer be used; `to_dense` gives it back.
        Raises:
            ValueError: the module is not such an MLP, its activation is unknown, or an argument is invalid; nothing
                has been changed then.
        """
        OP.check_backend(backend)
        reason = dense_mlp.why_not(module, activation, activation_params)
        if reason is not None:
            raise ValueError(
                f"module is a {type(module).__name__} that {reason}, expected an MLP: last(act(first(x)))"
            )
        members = dense_mlp.members_of(module)
        assert members is not None
        found = dense_mlp.activation_of(module) if activation is None else activation
        name = checked_activation(module, members.act, found)
        params = checked_params(name, activation_params)
        replaces = members.act is None or activation is not None
        draws = dense_mlp.draws_in_training(module, members, activation, activation_params)
        if draws and (replaces or quantize is not None):
            what = "activation" if replaces else "quantize"
            raise ValueError(
                f"{what} is given for a {type(module).__name__}, which has dropout inside its forward, expected None; "
                "set the dropout's probability to 0 first"
            )
        _, neurons = _projections.sizes(module._modules[members.first]) or (0, None)  # type: ignore[arg-type]
        limit, mean = checked_threshold(threshold, neurons), checked_mean(skipped_mean, neurons)
        hidden_dropouts = dense_mlp.hidden_dropouts(module, members, activation, activation_params)
        module._modules.update(quantized(module, members.linears, members.last, quantize))
        sparse = cls(name, not replaces, draws, backend)
        sparse._hidden_dropouts = hidden_dropouts
        sparse._take_over(module, members)
        for buffer, value in (("threshold", limit), ("skipped_mean", mean), ("activation_params", params)):
            sparse._set(buffer, value)
        sparse._relayout()
        return sparse

    def _take_over(self, dense: nn.Module, members: dense_mlp.Members) -> None:
        self.name = type(dense).__name__
        self._members = members
        self._dense = (dense,)  # in a tuple: not a child, so no second name for its layers
        self.training = dense.training
        # The same dictionaries: children put in later are those of both, and hooks go on working, their handles too.
        for name in ("_modules", *CALL_HOOKS):
            setattr(self, name, getattr(dense, name))
        self._act_type = type(self._modules.get(str(members.act)))

    def to_dense(self) -> nn.Module:
        """The dense module back: the very object given to `from_dense`, with the layers this one has now.

        Weights are stored row by row again; int8 layers become `nn.Linear`s of their values (rounding to int8 is not
        undone). The sparse module must no longer be used.
        """
        dense = self._dense[0]
        dense._modules = self._modules
        dense.training = self.training
        dense._is_full_backward_hook = self._is_full_backward_hook
        for role, name in zip(("first", "last"), self._members.linears, strict=True):
            layer = self._modules[name]
            if type(layer) is Int8Linear:
                dense._modules[name] = layer.to_linear()
            elif role in self._moved:
                _projections.store(layer, by_column=False)
        self._moved.clear()
        return dense

    def quantize(self) -> None:
        """Rounds the weights to int8, as `from_dense(..., quantize="int8")` does; nothing where they are already.

        Raises:
            ValueError: a layer is not a plain `nn.Linear` (hooks, adapters, `Conv1D`), holds NaN or inf, or the MLP has
                dropout inside its forward; nothing has been changed then.
        """
        if self._draws:
            raise ValueError(
                f"{self.name} has dropout inside its forward, expected none beside int8 weights; set its probability "
                "to 0 before the module is made"
            )
        self._modules.update(quantized(self, self._members.linears, self._members.last, "int8"))
        self._relayout()

    def train(self, mode: bool = True) -> SparseMLP:
        self._dense[0].training = mode
        return super().train(mode)

    def forward(self, x: Tensor, *, token_scale: Tensor | None = None) -> Tensor:
        """The MLP's output.

        Args:
            x: (..., D) in the weights' dtype.
            token_scale: s ≥ 0, float32, (T,) or x's leading shape, multiplies the threshold; 0 runs the token dense.

        Returns:
            (..., D) in x's dtype.
        """
        if self._drops() or not self._fusable():
            if not (self._warned or self._dense_only or self._drops()):
                warn(self)
            return self._forward_dense(x)
        return self._forward_fused(x, token_scale)

    def _forward_fused(self, x: Tensor, token_scale: Tensor | None = None) -> Tensor:
        first, last, _ = self._layers()
        by_input = self._by_input
        w_in, b_in, s_in = _projections.tensors(first)
        w_out, b_out, s_out = _projections.tensors(last)
        mean = self._buffers["skipped_mean"]
        shift = None if mean is None else skipped_out(mean, w_out, s_out, by_neuron=by_input[1])
        return mlp(
            x,
            w_in.t() if by_input[0] else w_in,
            w_out if by_input[1] else w_out.t(),
            threshold=self.threshold,
            token_scale=token_scale,
            skipped_mean=mean,
            skipped_out=shift,
            activation=self.activation,
            activation_params=self._buffers["activation_params"],
            b_in=b_in,
            b_out=b_out,
            scale_in=s_in,
            scale_out=s_out,
            backend=self.backend,
        )

    def skipped(self, x: Tensor) -> Tensor:
        """Which neurons the module skips for an input (..., D), (..., F) bool; none where it runs dense."""
        first, _, _ = self._layers()
        assert first is not None
        pre = first(x)
        if self._drops() or not self._fusable():
            return torch.zeros(pre.shape, dtype=torch.bool, device=pre.device)
        act = activations.apply(pre, self.activation, self.activation_params).float()
        below = act.abs() < self.threshold
        return below if self.skipped_mean is not None else below | (act == 0)

    def _layers(self) -> tuple[nn.Module | None, nn.Module | None, nn.Module | None]:
        """The first and the last layer and the activation, as they are now."""
        members, children = self._members, self._modules
        return children[members.first], children[members.last], children.get(str(members.act))

    def _linears(self) -> list[nn.Module | None]:
        return list(self._layers()[:2])

    def _last(self) -> nn.Module | None:
        return self._layers()[1]

    def _drops(self) -> bool:
        """Whether dropout is at work, which only the dense forward knows to apply."""
        if self.training and self._draws:
            return True
        children: dict[str, Any] = self._modules
        for name in self._members.dropouts:
            child = children.get(name)
            if type(child) is nn.Dropout and child.training and child.p > 0:
                return True
        return False

    def _fusable(self) -> bool:
        """Whether no child would be bypassed and the weights are stored as they should be; ≈ 1 µs."""
        first, last, act = self._layers()
        kinds, plain = self._kinds, _projections.is_plain
        if not (plain(first, kinds[0]) and plain(last, kinds[1])) or (kinds[0] is Int8Linear) != (
            kinds[1] is Int8Linear
        ):
            return False
        if _has_any_global_hook() or self._dense_only:
            return False
        if self._members.act is not None and (
            type(act) is not self._act_type or _projections.is_watched(act)
        ):
            return False
        for name in self._members.dropouts:
            child = self._modules.get(name)
            if type(child) not in (nn.Dropout, nn.Identity) or _projections.is_watched(child):
                return False
        w_in, w_out = _projections.tensors(first)[0], _projections.tensors(last)[0]
        stored, by_input = (has_rows, has_columns), self._by_input
        return w_in.dtype is w_out.dtype and stored[by_input[0]](w_in) and stored[not by_input[1]](w_out)

    def _why_dense(self) -> str | None:
        """`_fusable`'s reasons in words, or None."""
        first, last, act = self._layers()
        names = self._members.linears
        for name, layer, kind in zip(names, (first, last), self._kinds, strict=True):
            reason = _projections.obstacle(layer, kind)
            if reason is not None:
                return f"{name} {reason}"
        if (self._kinds[0] is Int8Linear) != (self._kinds[1] is Int8Linear):
            return "one of its layers is int8 and one is not (quantize() rounds the other)"
        if self._members.act is not None:
            reason = _projections.change(self._members.act, act, self._act_type)
            if reason is not None:
                return reason
        for name in self._members.dropouts:
            reason = _projections.change(name, self._modules.get(name), nn.Dropout, nn.Identity)
            if reason is not None:
                return reason
        w_in, w_out = _projections.tensors(first)[0], _projections.tensors(last)[0]
        if w_in.dtype is not w_out.dtype:
            return f"{names[0]}.weight is {w_in.dtype} and {names[1]}.weight {w_out.dtype} (they must be the same)"
        for name, layer, by_column in zip(names, (first, last), self._by_column(), strict=True):
            reason = _projections.misplaced(layer, by_column=by_column)
            if reason is not None:
                return f"{name}.{reason}"
        return None

    def _forward_dense(self, x: Tensor) -> Tensor:
        """What the dense module computes, through its children's own calls, without thresholds."""
        dense, (first, last, act) = self._dense[0], self._layers()
        own = self._own_activation or (self._members.act is not None and type(act) is not self._act_type)
        if own and type(last) is not Int8Linear:
            if dense._modules is not self._modules:  # a replica of this module
                dense = copy.copy(dense)
                dense._modules = self._modules
            return dense.forward(x)
        assert first is not None
        assert last is not None
        pre = first(x)
        if own:
            hidden = (act if act is not None else getattr(dense, str(self._members.act)))(pre)
        else:
            hidden = activations.apply(pre, self.activation, self.activation_params)
        out, late = hidden, []
        for name in self._members.dropouts:
            child = self._modules.get(name)
            if child is not None and name in self._hidden_dropouts:
                out = child(out)
            elif child is not None:
                late.append(child)
        out = last(out)
        for child in late:
            out = child(out)
        return out

    def _by_column(self) -> tuple[bool, bool]:
        """How the two weights are stored: a row of (F, D) is in one piece, so an (out, in) last weight by column."""
        return self._by_input[0], not self._by_input[1]

    def _relayout(self) -> None:
        """Looks at the layers anew, and stores their weights as this module reads them, where they are not."""
        layers = self._layers()[:2]
        self._kinds = tuple(_projections.kind_of(layer) for layer in layers)
        self._by_input = tuple(layer is not None and _projections.stored_by_input(layer) for layer in layers)
        for role, layer, by_column in zip(("first", "last"), layers, self._by_column(), strict=True):
            if by_column and _projections.store(layer, by_column=True):
                self._moved.add(role)
