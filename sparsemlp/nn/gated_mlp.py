"""`SparseGatedMLP`: a dense gated MLP's own layers, run by `sparsemlp.gated_mlp`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sparsemlp import activations
from sparsemlp._layout import has_columns, has_rows
from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.nn import _projections, _screens
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
from sparsemlp.ops.gated_mlp import OP, gated_mlp
from sparsemlp.screen import PackedWeight

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
        indicator: "gate", "up", "product" or "screen": whose magnitude is compared with the threshold.
        input_threshold: t_x, float32 buffer of shape () or (D,), or None, likewise.
        screen_bits, screen_group: of the low-bit copies that indicator "screen" decides by; the copies are four buffers
            that are not saved (`screen_gate`, `screen_up`: uint8; `screen_scale_gate`, `screen_scale_up`: bfloat16).
        screen_tokens: calls of more tokens compute every neuron; None: the screen decides in every call. May be set.
        backend: passed to `sparsemlp.gated_mlp`.
    Source: CATS (Lee et al.) for the thresholded gate; the equations are in docs/ops/gated_mlp.md.
    """

    input_threshold: Tensor | None
    screen_gate: Tensor | None
    screen_scale_gate: Tensor | None
    screen_up: Tensor | None
    screen_scale_up: Tensor | None
    _kept = (*Thresholded._kept, "input_threshold", *_screens.BUFFERS)

    def __init__(
        self,
        dense: nn.Module,
        members: dense_gated_mlp.Members,
        activation: str,
        own_activation: bool,
        backend: str,
    ) -> None:
        super().__init__(backend)
        self.register_load_state_dict_post_hook(_screens.renew_after_load)
        self.activation = activation
        self.indicator = "gate"
        self.screen_bits, self.screen_group = 4, 32
        self.screen_tokens: int | None = None
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
        screen_bits: int = 4,
        screen_group: int = 32,
        screen_tokens: int | None = None,
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
            indicator: "gate", "up", "product" or "screen", whose magnitude is compared with the threshold.
            input_threshold: t_x ≥ 0, a number or a tensor of shape () or (D,), below which the gate takes x_k for 0;
                its weight is then stored column by column. None: no such thing. Not with `gate_up_proj`.
            quantize: None, or "int8": the layers become `Int8Linear`s, and their float weights are freed.
            screen_bits, screen_group: with indicator "screen", of the copies that `sparsemlp.screen.pack` makes of the
                gate and up weights (int8: of their values). They take 2·F·D·(bits + 16 / group) / 8 bytes, F rounded up
                to 16 and D to the group: 4.5 bits a weight by default, 3/16 of the bytes of a bfloat16 MLP.
            screen_tokens: with indicator "screen", calls of more tokens compute every neuron (at threshold 0, without
                the mean): many tokens together want nearly all, and the screen's own products are extra. None: what is
                skipped for a token does not depend on how many others are in the call.
            backend: "auto", "native", "triton" or "reference".

        Returns:
            The sparse module. `module` must no longer be used; `to_dense` gives it back.
        Raises:
            ValueError: the module is not such an MLP, its activation is unknown, or an argument is invalid; nothing
                has been changed then.
        """
        OP.check_backend(backend)
        _screens.check(indicator, screen_bits, screen_group, screen_tokens, input_threshold)
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
        sparse = cls(module, members, name, own is not None, backend)
        for buffer, value in buffers.items():
            sparse._set(buffer, value)
        sparse._relayout()
        sparse.set_indicator(indicator, screen_bits=screen_bits, screen_group=screen_group)
        sparse.screen_tokens = screen_tokens
        return sparse

    def set_indicator(self, indicator: str, *, screen_bits: int = 4, screen_group: int = 32) -> None:
        """Another indicator; the low-bit copies are made or freed. Thresholds stay: give those that belong to it.

        Args:
            indicator: "gate", "up", "product" or "screen".
            screen_bits, screen_group: as for `from_dense`.
        Raises:
            ValueError: an unknown indicator or option, or "screen" with an input threshold; nothing has been changed.
        """
        _screens.check(indicator, screen_bits, screen_group, None, self._buffers["input_threshold"])
        wanted = indicator, screen_bits, screen_group
        if wanted != (self.indicator, self.screen_bits, self.screen_group):
            self.indicator, self.screen_bits, self.screen_group = wanted
            _screens.renew(self)

    def repack_screen(self) -> None:
        """Makes the low-bit copies anew from the weights of now.

        `load_state_dict`, `quantize` and a layer put in do it by themselves. Training, or writing into a weight, leaves
        the copies as they were: what is kept is computed exactly, but chosen by the former weights.

        Raises:
            ValueError: another indicator than "screen" decides, so there are no copies.
        """
        _screens.repack(self)

    def set_input_threshold(self, input_threshold: float | Tensor | None) -> None:
        """A new threshold for what the gate sees; its weight is stored column by column with one, by row without.

        Args:
            input_threshold: t_x ≥ 0, a number or a tensor of shape () or (D,), or None.
        Raises:
            ValueError: a negative or NaN threshold, a wrong shape, gate and up are one layer, or indicator "screen".
        """
        members = self._members
        limit = checked_input(input_threshold, self._modules[members.gate], members.merged)
        _screens.check(self.indicator, self.screen_bits, self.screen_group, None, limit)
        self._set("input_threshold", limit)
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
        if layers:
            _screens.renew(self)

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
        if self.indicator == "screen":
            _screens.ensure(self)
        if not self._fusable():
            if not self._warned:
                warn(self)
            if self.indicator == "screen":
                _screens.drop_while_dense(self)
            return self._forward_dense(x)
        (w_gate, b_gate, s_gate), (w_up, b_up, s_up), (w_down, b_down, s_down) = self._operands()
        threshold: float | Tensor = self.threshold
        mean, indicator = self._buffers["skipped_mean"], self.indicator
        screens: tuple[PackedWeight | None, PackedWeight | None] = None, None
        if indicator == "screen" and self._is_long(x):
            threshold, mean, indicator = 0.0, None, "gate"
        elif indicator == "screen":
            screens = _screens.copies(self)
        return gated_mlp(
            x,
            w_gate,
            w_up,
            w_down.t(),
            threshold=threshold,
            token_scale=token_scale,
            skipped_mean=mean,
            skipped_out=None if mean is None else skipped_out(mean, w_down, s_down),
            activation=self.activation,
            activation_params=self._buffers["activation_params"],
            b_gate=b_gate,
            b_up=b_up,
            b_down=b_down,
            indicator=indicator,
            input_threshold=self._buffers["input_threshold"],
            scale_gate=s_gate,
            scale_up=s_up,
            scale_down=s_down,
            screen_gate=screens[0],
            screen_up=screens[1],
            backend=self.backend,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Copies of a layer that is exchanged, or put back with something merged into it, are no longer its own."""
        if name == "screen_tokens":
            _screens.check_tokens(value)
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and name in (self._members.gate, self._members.up):
            _screens.drop(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseGatedMLP:
        _screens.drop_from_meta(self)
        return super()._apply(fn, recurse)

    def _operands(self) -> tuple[_projections.Tensors, ...]:
        """(weight, bias, scale) of gate, up and down; each None but the weight where there is none."""
        members, children, tensors = self._members, self._modules, _projections.tensors
        down = tensors(children[members.down])
        gate, up = tensors(children[members.gate]), tensors(children[members.up])
        if members.merged:
            n = down[0].shape[1]
            gate, up = _projections.rows(gate, slice(n)), _projections.rows(up, slice(n, None))
        return gate, up, down

    def _is_long(self, x: Tensor) -> bool:
        """Whether the screen does not decide for so many tokens."""
        return self.screen_tokens is not None and math.prod(x.shape[:-1]) > self.screen_tokens

    def _shown(self) -> str:
        decides = "" if self.indicator == "gate" else f", indicator={self.indicator!r}"
        if self.indicator == "screen":
            long = "" if self.screen_tokens is None else f", screen_tokens={self.screen_tokens}"
            decides += f", screen_bits={self.screen_bits}, screen_group={self.screen_group}{long}"
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
        if self.indicator == "screen" and self._buffers["screen_gate"] is None:
            return False
        tensors = _projections.tensors
        stored = has_rows if self._buffers["input_threshold"] is None else has_columns
        return has_columns(tensors(down)[0]) and stored(tensors(gate)[0]) and has_rows(tensors(up)[0])

    def _why_dense(self) -> str | None:
        """`_fusable`'s reasons in words, or None."""
        reason = self._disturbance()
        if reason is None and self.indicator == "screen" and self._buffers["screen_gate"] is None:
            return "the low-bit copies of its weights are not made yet (call it once before exporting it)"
        return reason

    def _disturbance(self) -> str | None:
        """Why its layers may not be read past, in words, or None."""
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
