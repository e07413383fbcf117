"""`SparseGatedMLP`: a dense gated MLP's own layers, run by `sparsemlp.gated_mlp`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sparsemlp import activations
from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.nn import _weights
from sparsemlp.nn._skipped_out import forget, skipped_out
from sparsemlp.nn._thresholds import checked_input, checked_mean, checked_params, checked_threshold
from sparsemlp.nn.int8_linear import Int8Linear, quantized
from sparsemlp.ops.gated_mlp import OP, check_indicator, gated_mlp

__all__ = ["SparseGatedMLP"]

_CALL_HOOKS = (*dense_gated_mlp._HOOKS, "_is_full_backward_hook")
_is_neuron_major = _weights.has_columns
_BUFFERS = ("threshold", "skipped_mean", "activation_params", "input_threshold")


class SparseGatedMLP(nn.Module):
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

    threshold: Tensor
    skipped_mean: Tensor | None
    activation_params: Tensor | None
    input_threshold: Tensor | None

    def __init__(
        self,
        dense: nn.Module,
        members: dense_gated_mlp.Members,
        activation: str,
        own_activation: bool,
        indicator: str,
        backend: str,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.indicator = indicator
        self.backend = backend
        self.name = type(dense).__name__
        """What warnings call this module; `sparsify` sets the qualified name."""
        self._members = members
        self._own_activation = own_activation
        self._dense = (dense,)  # in a tuple: not a child, so no second name for its layers
        self._moved: set[str] = set()
        """Layers whose weight this module stores by column and the dense one had by row."""
        self._warned = False
        for name, child in dense._modules.items():
            self.register_module(name, child)
        self._act_type = type(self._modules.get(str(members.act)))
        self.training = dense.training
        for hooks in _CALL_HOOKS:  # the same dictionaries: hooks on the MLP go on working, their handles too
            setattr(self, hooks, getattr(dense, hooks))
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self.register_load_state_dict_post_hook(_after_load)

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
        name = activation if activation is not None else own
        if name is None:
            what, known = type(getattr(module, str(members.act))).__name__, ", ".join(activations.ACTIVATIONS)
            raise ValueError(
                f"activation of {type(module).__name__} is {what}, expected one of: {known}; name it in activation="
            )
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

    def set_thresholds(self, threshold: float | Tensor, skipped_mean: Tensor | None = None) -> None:
        """New thresholds and means; a compiled graph sees them without compiling again where the shapes stay.

        Args:
            threshold: t ≥ 0, a number or a tensor of shape () or (F,); inf: never active.
            skipped_mean: μ (F,), finite, or None for none.
        Raises:
            ValueError: a negative or NaN threshold, a mean that is not finite, or a wrong shape.
        """
        neurons = getattr(self._modules[self._members.down], "in_features", None)
        mean = checked_mean(skipped_mean, neurons)
        self._set("threshold", checked_threshold(threshold, neurons))
        self._set("skipped_mean", mean)
        self._relayout()

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
                _weights.store(layer, by_column=False)
        self._moved.clear()
        return dense

    def train(self, mode: bool = True) -> SparseGatedMLP:
        forget(self._down_weight())
        return super().train(mode)

    def __setattr__(self, name: str, value: Any) -> None:
        """A child put in or back, such as a layer that an adapter was merged into, may have another weight inside."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            forget(self._down_weight())

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
                _warn(self)
            return self._forward_dense(x)
        members, children, tensors = self._members, self._modules, _weights.tensors
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

    def extra_repr(self) -> str:
        t = self.threshold
        limit = (
            f"{t.item():.4g}"
            if t.dim() == 0 and t.device.type != "meta"
            else f"({', '.join(map(str, t.shape))})"
        )
        mean = "" if self.skipped_mean is None else ", skipped_mean"
        inputs = "" if self.input_threshold is None else ", input_threshold"
        decides = "" if self.indicator == "gate" else f", indicator={self.indicator!r}"
        what = f"threshold={limit}{mean}{decides}{inputs}"
        return f"activation={self.activation!r}, {what}, backend={self.backend!r}"

    def _fusable(self) -> bool:
        """Whether no child would be bypassed and the weights are stored as they should be; ≈ 1 µs."""
        members, plain = self._members, _weights.is_plain
        children: dict[str, Any] = self._modules
        gate, up, down = children[members.gate], children[members.up], children[members.down]
        if not (plain(gate) and (members.merged or plain(up)) and plain(down)):
            return False
        if not type(gate) is type(up) is type(down) or _has_any_global_hook():
            return False
        if members.act is not None:
            act = children.get(members.act)
            if type(act) is not self._act_type or _weights.is_watched(act):
                return False
        columns, rows, tensors = _weights.has_columns, _weights.has_rows, _weights.tensors
        stored = rows if self._buffers["input_threshold"] is None else columns
        return columns(tensors(down)[0]) and stored(tensors(gate)[0]) and rows(tensors(up)[0])

    def _why_dense(self) -> str | None:
        """`_fusable`'s reasons in words, or None."""
        members = self._members
        children: dict[str, Any] = self._modules
        for name in members.linears:
            reason = _weights.obstacle(children[name])
            if reason is not None:
                return f"{name} {reason}"
        if len({type(children[name]) for name in members.linears}) > 1:
            return "some of its layers are int8 and some are not (quantize() rounds the others)"
        if members.act is not None:
            act = children.get(members.act)
            if type(act) is not self._act_type:
                return f"{members.act} was replaced by {type(act).__name__}"
            if act is not None and any(getattr(act, hooks) for hooks in dense_gated_mlp._HOOKS):
                return f"{members.act} has forward or backward hooks"
        for name in members.linears:
            reason = _weights.misplaced(children[name], by_column=self._by_column(name))
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

    def _down_weight(self) -> Tensor | None:
        """The down layer's weight, where it is this module's to store as it likes."""
        return _weights.weight_of(self._modules[self._members.down])

    def _by_column(self, name: str) -> bool:
        """How the layer's weight is stored: the down projection neuron by neuron, the gate input by input."""
        by_input = name == self._members.gate and self._buffers["input_threshold"] is not None
        return by_input or name == self._members.down

    def _relayout(self) -> None:
        """Stores the weights as this module reads them, where they are not."""
        for name in self._members.linears:
            if self._by_column(name):
                if _weights.store(self._modules[name], by_column=True):
                    self._moved.add(name)
            elif name in self._moved:
                _weights.store(self._modules[name], by_column=False)
                self._moved.discard(name)

    def _device(self) -> torch.device:
        """Where the thresholds live."""
        return _weights.device_of([self._modules[name] for name in self._members.linears])

    def _set(self, name: str, value: Tensor | None) -> None:
        """A buffer's new value, written into the old one where it has the same shape."""
        device, old = self._device(), self._buffers[name]
        same = old is not None and value is not None and old.shape == value.shape and old.device == device
        if same and not old.is_inference():  # type: ignore[union-attr]
            old.copy_(value)  # type: ignore[union-attr, arg-type]
        else:
            with torch.inference_mode(False):  # plain tensors, which `skipped_out` can watch for changes
                self._buffers[name] = None if value is None else value.clone().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseGatedMLP:
        """`.to()`, `.half()` …: the thresholds move but stay float32, the weights stay stored as they were."""
        before = {name: self._buffers[name] for name in _BUFFERS}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None:
                # The old values: `fn` may round, drop or (to_empty) invent them.
                self._buffers[name] = old.to(new.device)
        self._relayout()
        return self


def _after_load(module: nn.Module, incompatible: Any) -> None:
    """`load_state_dict(assign=True)` brings weights in the dense layout."""
    assert isinstance(module, SparseGatedMLP)
    module._relayout()


def _warn(module: SparseGatedMLP) -> None:
    """Says once that the module runs dense."""
    module._warned = True
    warnings.warn(
        f"{module.name} runs dense and no neuron of it is thresholded or skipped: {module._why_dense()}",
        stacklevel=3,
    )


# torch.compile then runs it while tracing and leaves it out of the graph. This is what
# `torch.compiler.assume_constant_result` sets; calling that would import all of the compiler with this package.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]
