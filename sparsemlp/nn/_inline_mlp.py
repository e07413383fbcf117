"""Sparse MLPs in a layer that has no module for its MLP: three parts stand where the MLP's were.

The first part computes the whole MLP, the activation and the last part hand on what they get. The names, Parameters and
the state dict stay: each part shares the dictionaries of the one it stands for. The first asks the MLP whether it is
fused at that moment; the others see from the width of what they get what it did. Where it is not fused they are the
dense parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sparsemlp._layout import has_columns, has_rows
from sparsemlp.nn import _dense_inline_mlp as inline
from sparsemlp.nn import _projections
from sparsemlp.nn._dense_gated_mlp import CALL_HOOKS, disturbance, is_untouched
from sparsemlp.nn._thresholded import warn
from sparsemlp.nn._thresholds import checked_mean, checked_threshold
from sparsemlp.nn.mlp import SparseMLP

__all__ = ["InlineAct", "InlineFirst", "InlineLast", "InlineMLP"]


class InlineMLP(SparseMLP):
    """The MLP of a larger layer (`inline.Form`); the child `mlp` of the part that stands where its first layer was."""

    form: inline.Form
    _layer: tuple[nn.Module]
    _replaced: tuple[Any, Any, Any]
    _parts: tuple[InlineFirst, InlineAct, InlineLast]
    _places: tuple[tuple[nn.Module, str, nn.Module], ...]
    _sizes: tuple[int, int]

    @classmethod
    def insert(
        cls,
        layer: nn.Module,
        form: inline.Form,
        activation: str,
        *,
        threshold: float | Tensor = 0.0,
        skipped_mean: Tensor | None = None,
        backend: str = "auto",
    ) -> InlineMLP:
        """Puts the three parts into the layer; `inline.why_not` must have no reason against it."""
        neurons = inline.get(layer, form.first).out_features
        limit, mean = checked_threshold(threshold, neurons), checked_mean(skipped_mean, neurons)
        sparse = cls(activation, True, inline.draws_in_training(layer, form), backend)
        sparse.name = type(layer).__name__
        sparse.form = form
        sparse._layer = (layer,)  # in tuples: nothing here is a child, which would give it a second name
        first, act, last = (inline.get(layer, path) for path in form.paths)
        sparse._replaced = first, act, last
        sparse._parts = InlineFirst(first, sparse), InlineAct(act, sparse), InlineLast(last, sparse)
        sparse._sizes = first.in_features, first.out_features
        places = [inline.parent_of(layer, path) for path in form.paths]
        sparse._places = tuple((*place, part) for place, part in zip(places, sparse._parts, strict=True))
        for parent, name, part in sparse._places:
            setattr(parent, name, part)
        sparse.training = layer.training
        sparse._set("threshold", limit)
        sparse._set("skipped_mean", mean)
        sparse._relayout()
        return sparse

    def to_dense(self) -> nn.Module:
        """Puts the very objects back that the parts stand for, with the weights of now; returns the layer."""
        for (parent, name, part), dense in zip(self._places, self._replaced, strict=True):
            if isinstance(dense, nn.Module):
                dense.training = part.training
                dense._is_full_backward_hook = part._is_full_backward_hook
            if getattr(parent, name) is part:
                if not isinstance(dense, nn.Module):  # a function: the name is to be an attribute again
                    delattr(parent, name)
                setattr(parent, name, dense)
        last = self._replaced[2]
        if "last" in self._moved and _projections.store(last, by_column=False):
            self._moved.clear()
        return self._layer[0]

    def quantize(self) -> None:
        """Raises: int8 weights are not built for an MLP without a module of its own."""
        raise ValueError(
            f"quantize is 'int8' and {self.name} has the MLP's layers inside a larger layer, expected an MLP that is a "
            "module of its own; leave quantize None"
        )

    def train(self, mode: bool = True) -> InlineMLP:
        nn.Module.train(self, mode)
        return self

    def _layers(self) -> tuple[Any, Any, Any]:
        first, act, last = self._replaced
        return first, last, act

    def _standing(self) -> bool:
        """Whether the three parts are where they were put."""
        for parent, name, part in self._places:  # noqa: SIM110, a loop costs half of what all() does
            if parent._modules.get(name) is not part:
                return False
        return True

    def fuses(self, part: nn.Module) -> bool:
        """Whether the part, one of the three, is to compute or hand on the whole MLP; a replica of it is not."""
        return any(part is own for own in self._parts) and self._fusable()

    def has_run(self, x: Tensor, part: nn.Module) -> bool:
        """Whether x, which the part got, is the MLP's output already."""
        width, neurons = self._sizes
        return x.shape[-1] == width if width != neurons else self.fuses(part)

    def _drops(self) -> bool:
        return self._draws and self._layer[0].training

    def _fusable(self) -> bool:
        """Whether nothing would be bypassed and the weights are stored as they should be."""
        first, act, last = self._parts
        if self._dense_only or self._drops() or _has_any_global_hook() or not self._standing():
            return False
        if not (is_untouched(first) and is_untouched(last)) or _projections.is_watched(act):
            return False
        w_in, w_out = _projections.tensors(first)[0], _projections.tensors(last)[0]
        return w_in.dtype is w_out.dtype and has_rows(w_in) and has_columns(w_out)

    def _why_dense(self) -> str | None:
        form = self.form
        if not self._standing():
            return f"one of {form.first}, {form.act} and {form.last} was replaced"
        for path, part in ((form.first, self._parts[0]), (form.last, self._parts[2])):
            reason = disturbance(part)
            if reason is not None:
                return f"{path} {reason}"
        if _projections.is_watched(self._parts[1]):
            return f"{form.act} has forward or backward hooks"
        w_in, w_out = (_projections.tensors(self._parts[i])[0] for i in (0, 2))
        if w_in.dtype is not w_out.dtype:
            return f"{form.first}.weight is {w_in.dtype} and {form.last}.weight {w_out.dtype} (they must be the same)"
        for path, layer, by_column in (
            (form.first, self._replaced[0], False),
            (form.last, self._replaced[2], True),
        ):
            reason = _projections.misplaced(layer, by_column=by_column)
            if reason is not None:
                return f"{path}.{reason}"
        return None

    def _forward_dense(self, x: Tensor) -> Tensor:
        first, act, last = self._replaced
        return last(act(first(x)))


class _Linear(nn.Linear):
    """Stands for a linear layer: its Parameters and hooks are the same."""

    def __init__(self, dense: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        for name in ("_parameters", *CALL_HOOKS):
            setattr(self, name, getattr(dense, name))
        self.training = dense.training


class InlineFirst(_Linear):
    """Stands for the MLP's first layer, and computes the whole of it."""

    def __init__(self, dense: nn.Linear, mlp: InlineMLP) -> None:
        super().__init__(dense)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        mlp: Any = self._modules["mlp"]
        if mlp.fuses(self):
            return mlp(x) if _projections.is_watched(mlp) else mlp._forward_fused(x)
        if not (mlp._warned or mlp._dense_only or mlp._drops()):
            warn(mlp)
        return super().forward(x)


class InlineAct(nn.Module):
    """Stands for the activation, and hands on the MLP's output."""

    def __init__(self, dense: Callable[[Tensor], Tensor], mlp: InlineMLP) -> None:
        super().__init__()
        self._mlp = (mlp,)
        self._dense = (dense,)
        if isinstance(dense, nn.Module):
            for name in CALL_HOOKS:
                setattr(self, name, getattr(dense, name))
            self.training = dense.training

    def forward(self, x: Tensor) -> Tensor:
        if self._mlp[0].has_run(x, self):
            return x
        act = self._dense[0]
        # Its hooks are this module's, and were called already.
        return act.forward(x) if isinstance(act, nn.Module) else act(x)


class InlineLast(_Linear):
    """Stands for the MLP's last layer, and hands on the MLP's output."""

    def __init__(self, dense: nn.Linear, mlp: InlineMLP) -> None:
        super().__init__(dense)
        self._mlp = (mlp,)
        self.register_load_state_dict_post_hook(_after_load)

    def forward(self, x: Tensor) -> Tensor:
        return x if self._mlp[0].has_run(x, self) else super().forward(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InlineLast:
        super()._apply(fn, recurse)
        self._mlp[0]._relayout()
        return self


def _after_load(module: nn.Module, incompatible: Any) -> None:
    """`load_state_dict(assign=True)` brings a weight in the dense layout."""
    assert isinstance(module, InlineLast)
    module._mlp[0]._relayout()
