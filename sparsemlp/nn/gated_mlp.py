"""`SparseGatedMLP`: a dense gated MLP's own layers, run by `sparsemlp.gated_mlp`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sparsemlp import activations
from sparsemlp._layout import has_columns, has_rows
from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.nn import _projections
from sparsemlp.nn._dense_gated_mlp import CALL_HOOKS
from sparsemlp.nn._skipped_out import skipped_out
from sparsemlp.nn._thresholded import Thresholded, warn
from sparsemlp.nn._thresholds import (
    checked_activation,
    checked_input,
    checked_mean,
    checked_params,
    checked_threshold,
)
from sparsemlp.nn.int8_linear import Int8Linear, quantized
from sparsemlp.ops.gated_mlp import OP, check_indicator, gated_mlp

__all__ = ["SparseGatedMLP"]


class SparseGatedMLP(Thresholded):
    """A thresholded gated MLP over the dense module's own `nn.Linear` layers; made by `from_dense`.

    Its state dict is the dense module's: the children are the same objects under the same names. `down_proj.weight`
    stays a Parameter of shape (D, F), stored neuron by neuron (strides (1, D)), so that a skipped neuron's column is
    not read; there is no second copy. With an input threshold `gate_proj.weight` is stored column by column likewise.
    With int8 weights the children are `Int8Linear`s under the same names, and the float weights are gone.

    A child that is not exactly `nn.Linear`, or that has hooks, a replaced forward or tensors of a subclass (LoRA,
    parametrizations, quantised or distributed weights, offloading), is not bypassed: the module then calls its
    children as the dense one does, thresholds nothing, and warns once.

    Attributes:
        threshold: t, float32 buffer of shape () or (F,); not saved, keeps its dtype in `.to(dtype)`.
        skipped_mean: μ, float32 buffer (F,) or None, likewise.
        activation: the name of a row of `sparsemlp.activations.ACTIVATIONS`.
        activation_params: float32 buffer of the row's parameters, or None, likewise.
        indicator: "gate", "up" or "product": whose magnitude is compared with the threshold.
        input_threshold: t_x, float32 buffer of shape () or (D,), or None, likewise.
        backend: passed to `sparsemlp.gated_mlp`.
    Source: CATS (Lee et al.) for the thresholded gate; the equations are in docs/ops/gated_mlp.md.
    """

    input_threshold: Tensor | None
    _kept = (*Thresholded._kept, "input_threshold")

    def __init__(
        self,
        dense: nn.Module,
        members: dense_gated_mlp.Members,
        activation: str,
        own_activation: bool,
        indicator: str,
        backend: str,
    ) -> None:
        super().__init__(backend)
        self.activation = activation
        self.indicator = indicator
        self.name = type(dense).__name__
        self._members = members
        self._own_activation = own_activation
        self._dense = (dense,)  # in a tuple: not a child, so no second name for its layers
        self._moved: set[str] = set()
        """Layers whose weight this module stores by column and the dense one had by row."""
        for name, child in dense._modules.items():
            self.register_module(name, child)
        self._act_type = type(self._modules.get(str(members.act)))
        self.training = dense.training
        for hooks in CALL_HOOKS:  # the same dictionaries: hooks on the MLP go on working, their handles too
            setattr(self, hooks, getattr(dense, hooks))

    @classmethod
    def from_dense(
        cls,
        module: nn.Module,
        *,
        activation: str | None = None,
        activation_params: Tensor | None = None,
        threshold: float | Tensor = 0.0,
        skipped_mean: Tensor | None = None,
        indicator: str = "gate",
        input_threshold: float | Tensor | None = None,
        quantize: str | None = None,
        backend: str = "auto",
    ) -> SparseGatedMLP:
        """A sparse module that takes over a dense gated MLP's layers.

        Args:
            module: children `gate_proj`, `up_proj`, `down_proj`, or `gate_up_proj` (rows [gate; up]) and `down_proj`;
                usually an activation `act_fn` or `activation_fn`; its forward must be down(act(gate(x)) * up(x)).
            activation: a row of `sparsemlp.activations.ACTIVATIONS`; None: the module's own. Another one than its own
                replaces it.
            activation_params: (n,) float32, the row's parameters, or None.
            threshold: t ≥ 0, a number or a tensor of shape () or (F,).
            skipped_mean: μ (F,), what a skipped neuron's hidden value is replaced by, or None.
            indicator: "gate", "up" or "product", whose magnitude is compared with the threshold.
            input_threshold: t_x ≥ 0, a number or a tensor of shape () or (D,), below which the gate takes x_k for 0;
                its weight is then stored column by column. None: no such thing. Not with `gate_up_proj`.
            quantize: None, or "int8": the layers become `Int8Linear`s, and their float weights are freed.
            backend: "auto", "native", "triton" or "reference".

        Returns:
            The sparse module. `module` must no longer be used; `to_dense` gives it back.
        Raises:
            ValueError: the module is not such an MLP, its activation is unknown, or an argument is invalid; nothing
                has been changed then.
        """
        OP.check_backend(backend)
        check_indicator(indicator)
        reason = dense_gated_mlp.why_not(module, activation, activation_params)
        if reason is not None:
            raise ValueError(
                f"module is a {type(module).__name__} that {reason}, expected a gated MLP: down(act(gate(x)) * up(x))"
            )
        members = dense_gated_mlp.members_of(module)
        assert members is not None
        own = dense_gated_mlp.activation_of(module) if activation is None else None
        name = checked_activation(module, members.act, own if activation is None else activation)
        params = checked_params(name, activation_params)
        neurons = getattr(module._modules[members.down], "in_features", None)
        buffers = {
            "threshold": checked_threshold(threshold, neurons),
            "skipped_mean": checked_mean(skipped_mean, neurons),
            "activation_params": params,
            "input_threshold": checked_input(input_threshold, module._modules[members.gate], members.merged),
        }
        module._modules.update(quantized(module, members.linears, members.down, quantize))
        sparse = cls(module, members, name, own is not None, indicator, backend)
        for buffer, value in buffers.items():
            sparse._set(buffer, value)
        sparse._relayout()
        return sparse

    def set_input_threshold(self, input_threshold: float | Tensor | None) -> None:
        """A new threshold for what the gate sees; its weight is stored column by column with one, by row without.

        Args:
            input_threshold: t_x ≥ 0, a number or a tensor of shape () or (D,), or None.
        Raises:
            ValueError: a negative or NaN threshold, a wrong shape, or gate and up are one layer.
        """
        members = self._members
        self._set(
            "input_threshold", checked_input(input_threshold, self._modules[members.gate], members.merged)
        )
        self._relayout()

    def quantize(self) -> None:
        """Rounds the weights to int8, as `from_dense(..., quantize="int8")` does; nothing where they are already.

        Raises:
            ValueError: a layer is not plain (hooks, adapters) or holds NaN or inf; nothing has been changed then.
        """
        layers = quantized(self, self._members.linears, self._members.down, "int8")
        self._modules.update(layers)
        self._dense[0]._modules.update(layers)
        self._relayout()

    def to_dense(self) -> nn.Module:
        """The dense module back: the very object given to `from_dense`, with the layers this one has now.

        Weights are stored row by row again; int8 layers become `nn.Linear`s of their values (rounding to int8 is not
        undone). The sparse module must no longer be used.
        """
        dense = self._dense[0]
        dense._modules.update(self._modules)
        dense.training = self.training
        dense._is_full_backward_hook = self._is_full_backward_hook
        for name in self._members.linears:
            layer = self._modules[name]
            if type(layer) is Int8Linear:
                dense._modules[name] = layer.to_linear()
            elif name in self._moved:
                _projections.store(layer, by_column=False)
        self._moved.clear()
        return dense

    def forward(self, x: Tensor, *, token_scale: Tensor | None = None) -> Tensor:
        """The MLP's output.

        Args:
            x: (..., D) in the weights' dtype.
            token_scale: s ≥ 0, float32, (T,) or x's leading shape, multiplies the threshold; 0 runs the token dense.

        Returns:
            (..., D) in x's dtype.
        """
        if not self._fusable():
            if not self._warned:
                warn(self)
            return self._forward_dense(x)
        members, children, tensors = self._members, self._modules, _projections.tensors
        w_gate, b_gate, s_gate = tensors(children[members.gate])
        w_up, b_up, s_up = tensors(children[members.up])
        w_down, b_down, s_down = tensors(children[members.down])
        if members.merged:
            n = w_down.shape[1]
            w_gate, w_up = w_gate[:n], w_gate[n:]
            if b_gate is not None:
                b_gate, b_up = b_gate[:n], b_gate[n:]
            if s_gate is not None:
                s_gate, s_up = s_gate[:n], s_gate[n:]
        mean = self._buffers["skipped_mean"]
        return gated_mlp(
            x,
            w_gate,
            w_up,
            w_down.t(),
            threshold=self.threshold,
            token_scale=token_scale,
            skipped_mean=mean,
            skipped_out=None if mean is None else skipped_out(mean, w_down, s_down),
            activation=self.activation,
            activation_params=self._buffers["activation_params"],
            b_gate=b_gate,
            b_up=b_up,
            b_down=b_down,
            indicator=self.indicator,
            input_threshold=self._buffers["input_threshold"],
            scale_gate=s_gate,
            scale_up=s_up,
            scale_down=s_down,
            backend=self.backend,
        )

    def _shown(self) -> str:
        decides = "" if self.indicator == "gate" else f", indicator={self.indicator!r}"
        return decides if self.input_threshold is None else f"{decides}, input_threshold"

    def _fusable(self) -> bool:
        """Whether no child would be bypassed and the weights are stored as they should be; ≈ 1 µs."""
        members, plain = self._members, _projections.is_plain
        children: dict[str, Any] = self._modules
        gate, up, down = children[members.gate], children[members.up], children[members.down]
        if not (plain(gate) and (members.merged or plain(up)) and plain(down)):
            return False
        if not type(gate) is type(up) is type(down) or _has_any_global_hook():
            return False
        if members.act is not None:
            act = children.get(members.act)
            if type(act) is not self._act_type or _projections.is_watched(act):
                return False
        tensors = _projections.tensors
        stored = has_rows if self._buffers["input_threshold"] is None else has_columns
        return has_columns(tensors(down)[0]) and stored(tensors(gate)[0]) and has_rows(tensors(up)[0])

    def _why_dense(self) -> str | None:
        """`_fusable`'s reasons in words, or None."""
        members = self._members
        children: dict[str, Any] = self._modules
        for name in members.linears:
            reason = _projections.obstacle(children[name])
            if reason is not None:
                return f"{name} {reason}"
        if len({type(children[name]) for name in members.linears}) > 1:
            return "some of its layers are int8 and some are not (quantize() rounds the others)"
        if members.act is not None:
            reason = _projections.change(members.act, children.get(members.act), self._act_type)
            if reason is not None:
                return reason
        for name in members.linears:
            reason = _projections.misplaced(children[name], by_column=self._by_column(name))
            if reason is not None:
                return f"{name}.{reason}"
        return None

    def _forward_dense(self, x: Tensor) -> Tensor:
        """The dense composition through the children's own calls."""
        members = self._members
        if members.merged:
            gate, up = getattr(self, members.gate)(x).chunk(2, dim=-1)
        else:
            gate, up = getattr(self, members.gate)(x), getattr(self, members.up)(x)
        act = self._modules.get(str(members.act))
        if act is not None and (self._own_activation or type(act) is not self._act_type):
            return getattr(self, members.down)(act(gate) * up)
        hidden = activations.apply(gate, self.activation, self.activation_params) * up
        return getattr(self, members.down)(hidden)

    def _linears(self) -> list[nn.Module | None]:
        return [self._modules[name] for name in self._members.linears]

    def _last(self) -> nn.Module | None:
        return self._modules[self._members.down]

    def _by_column(self, name: str) -> bool:
        """How the layer's weight is stored: the down projection neuron by neuron, the gate input by input."""
        by_input = name == self._members.gate and self._buffers["input_threshold"] is not None
        return by_input or name == self._members.down

    def _relayout(self) -> None:
        """Stores the weights as this module reads them, where they are not."""
        for name in self._members.linears:
            layer = self._modules[name]
            if self._by_column(name):
                if type(layer) in (nn.Linear, Int8Linear) and _projections.store(layer, by_column=True):
                    self._moved.add(name)
            elif name in self._moved:
                _projections.store(layer, by_column=False)
                self._moved.discard(name)
