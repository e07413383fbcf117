"""Ungated MLPs without a module of their own: their two layers and the activation lie in a larger layer.

OPT's decoder layer calls `fc1`, `activation_fn` and `fc2` itself, BERT's does so through two modules of which one adds
the residual. What such a layer computes is more than an MLP, so the probe is another: the whole layer, evaluated once
as it is and once with the MLP moved into its first layer, must give the same.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparsemlp.nn import _projections
from sparsemlp.nn._dense_gated_mlp import HOOKS, evaluated, obstacle, recognised
from sparsemlp.nn._dense_mlp import ACT_NAMES, PAIRS

__all__ = ["Form", "activation_of", "draws_in_training", "form_of", "get", "why_not"]


@dataclass(frozen=True)
class Form:
    """Where in the layer the MLP's parts are: dotted paths."""

    first: str
    act: str
    last: str

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.first, self.act, self.last


_FORMS = (
    *(Form(first, act, last) for first, last in PAIRS for act in ACT_NAMES),
    Form("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
)


def get(layer: nn.Module, path: str) -> Any:
    """The part at a dotted path, or None."""
    part: Any = layer
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def parent_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the part, and the name it has there."""
    above, _, name = path.rpartition(".")
    return (get(layer, above) if above else layer), name


def form_of(layer: nn.Module) -> Form | None:
    """The MLP that lies in the layer, by members, or None; says nothing yet about what `forward` computes."""
    for form in _FORMS:
        parts = [get(layer, path) for path in form.paths]
        if callable(parts[1]) and all(_projections.is_projection(part) for part in (parts[0], parts[2])):
            return form
    return None


def activation_of(layer: nn.Module, form: Form) -> str | None:
    """The row of the activation table that the layer's activation is, or None."""
    return recognised(_without_hooks(get(layer, form.act), {}))


_looked_at: WeakKeyDictionary[nn.Module, tuple[object, str | None]] = WeakKeyDictionary()
"""Layer -> (what it consisted of, the reason found): the probe reads the layer's other weights."""


def why_not(layer: nn.Module, form: Form) -> str | None:
    """Why the MLP in the layer cannot be computed by its first layer alone, in words, or None."""
    first, last = get(layer, form.first), get(layer, form.last)
    for path, part in ((form.first, first), (form.last, last)):
        reason = obstacle(part)
        if reason is not None:
            return f"has a layer {path} that {reason}"
    sizes = _projections.sizes(first), _projections.sizes(last)
    if sizes[0] != tuple(reversed(sizes[1])):  # type: ignore[arg-type]
        return f"has layers of sizes {sizes[0]} and {sizes[1]} (inputs, outputs), which are not each other's reverse"
    key = form, tuple((id(module), type(module), "forward" in module.__dict__) for module in layer.modules())
    known = _looked_at.get(layer)
    if known is None or known[0] != key:
        reason = evaluated(
            lambda: _same_with_moved_mlp(layer, form, training=False),
            "last(act(first(x))) with its two layers",
        )
        known = _looked_at[layer] = key, reason
    return known[1]


def draws_in_training(layer: nn.Module, form: Form) -> bool:
    """Whether the MLP moved into its first layer is another in training: dropout on the hidden values."""
    try:
        return not _same_with_moved_mlp(layer, form, training=True)
    except Exception:
        return True


def _without_hooks(part: Any, made: dict[int, Any]) -> Any:
    """A copy of a module and all below it, over the same tensors, without hooks; of anything else the thing itself."""
    if not isinstance(part, nn.Module):
        return part
    if id(part) not in made:
        twin = made[id(part)] = copy.copy(part)
        for hooks in HOOKS:
            twin.__dict__[hooks] = OrderedDict()
        children = part._modules.items()
        twin.__dict__["_modules"] = {name: _without_hooks(child, made) for name, child in children}
    return made[id(part)]


class _Whole(nn.Module):
    """The whole MLP where its first layer was."""

    def __init__(self, first: nn.Module, act: Callable[[Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.act = first, last, (act,)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act[0](self.first(x)))


def _same_with_moved_mlp(layer: nn.Module, form: Form, *, training: bool) -> bool:
    """Whether the layer gives the same as it is and with the whole MLP in the place of its first layer.

    The MLP's own layers are random ones of five neurons; everything else in the layer is real and runs on three tokens
    in the layer's dtype and on its device. Random numbers are put back.
    """
    first = get(layer, form.first)
    width, neurons = first.in_features, 5
    like = next(
        (p for p in layer.parameters() if p.is_floating_point() and p.device.type != "meta"), first.weight
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(like.device, like.dtype)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        made = nn.utils.skip_init(nn.Linear, inputs, outputs, device=like.device, dtype=like.dtype)
        made.weight.copy_(draw(outputs, inputs) / inputs**0.5)
        made.bias.copy_(draw(outputs))
        return made

    devices = [like.device] if like.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        parts = linear(width, neurons), get(_without_hooks(layer, {}), form.act), linear(neurons, width)
        x = draw(1, 3, width)
        moved = _Whole(*parts), nn.Identity(), nn.Identity()
        without = _Whole(parts[0], parts[1], linear(neurons, width)), nn.Identity(), nn.Identity()
        plain, whole, other = (_outputs(layer, form, p, x, training) for p in (parts, moved, without))
    return _alike(plain, whole) and not _alike(plain, other)


def _outputs(
    layer: nn.Module, form: Form, parts: tuple[Any, Any, Any], x: Tensor, training: bool
) -> list[Tensor]:
    """The layer's outputs for one input with other parts for the MLP's."""
    twin = _without_hooks(layer, {})
    for module in twin.modules():
        module.training = training
    for path, part in zip(form.paths, parts, strict=True):
        parent, name = parent_of(twin, path)
        if isinstance(part, nn.Module):
            part.training = training
            parent.__dict__.pop(name, None)
            parent._modules[name] = part
    torch.manual_seed(0)
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind in named]
    try:
        out = type(layer).forward(twin, x.clone(), **dict.fromkeys(missing))
    except (TypeError, AttributeError):  # a residual, say
        out = type(layer).forward(twin, x.clone(), **{name: x.clone() for name in missing})
    return [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """The same up to the rounding of sums in another order."""
    return len(one) == len(other) > 0 and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=64 * torch.finfo(a.dtype).eps, atol=0.0)
        for a, b in zip(one, other, strict=True)
    )
