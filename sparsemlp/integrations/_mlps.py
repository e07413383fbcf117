"""Which MLPs a model has, dense or sparse, and what their parts are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sparsemlp.nn import SparseGatedMLP, SparseMLP, _projections
from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.nn import _dense_inline_mlp as dense_inline_mlp
from sparsemlp.nn import _dense_mlp as dense_mlp
from sparsemlp.nn._inline_mlp import InlineMLP

__all__ = ["SPARSE", "Parts", "act_of", "activation_of", "inline_form", "parts_of", "survey"]

SPARSE = (SparseGatedMLP, SparseMLP)


@dataclass(frozen=True)
class Parts:
    """An MLP's layers: those that neurons come from, (gate, up), (gate and up merged,) or (first,), and the last."""

    inputs: tuple[nn.Module, ...]
    last: nn.Module
    gated: bool

    @property
    def hidden_size(self) -> int | None:
        return (_projections.sizes(self.last) or (None, None))[1]

    @property
    def neurons(self) -> int | None:
        return (_projections.sizes(self.last) or (None, None))[0]


def inline_form(module: nn.Module) -> dense_inline_mlp.Form | None:
    """Where the MLP's parts are, for a dense layer with an MLP inside; None for a module that is an MLP."""
    if isinstance(module, SPARSE) or dense_gated_mlp.members_of(module) is not None:
        return None
    if dense_mlp.members_of(module) is not None and dense_mlp.why_not(module) is None:
        return None
    return dense_inline_mlp.form_of(module)


def parts_of(module: nn.Module) -> Parts:
    """The layers of one of `survey`'s MLPs; of one inside a layer, those that stand there now."""
    if isinstance(module, InlineMLP):
        return Parts((module._parts[0],), module._parts[2], gated=False)
    if isinstance(module, SparseMLP):
        first, last, _ = module._layers()
        assert first is not None
        assert last is not None
        return Parts((first,), last, gated=False)
    gated = dense_gated_mlp.members_of(module)
    if gated is not None:
        names = dict.fromkeys((gated.gate, gated.up))
        return Parts(tuple(getattr(module, n) for n in names), getattr(module, gated.down), gated=True)
    form = inline_form(module)
    if form is not None:
        first, last = (dense_inline_mlp.get(module, path) for path in (form.first, form.last))
        return Parts((first,), last, gated=False)
    members = dense_mlp.members_of(module)
    assert members is not None
    return Parts((getattr(module, members.first),), getattr(module, members.last), gated=False)


def act_of(module: nn.Module) -> object:
    """A dense MLP's own activation, or None."""
    form = inline_form(module)
    if form is not None:
        return dense_inline_mlp.get(module, form.act)
    members = dense_gated_mlp.members_of(module) or dense_mlp.members_of(module)
    return None if members is None or members.act is None else getattr(module, members.act, None)


def activation_of(module: nn.Module) -> str | None:
    """The activation of one of `survey`'s MLPs, a name of `sparsemlp.activations.ACTIVATIONS`, or None."""
    if isinstance(module, SPARSE):
        return module.activation
    if dense_gated_mlp.members_of(module) is not None:
        return dense_gated_mlp.activation_of(module)
    form = inline_form(module)
    if form is not None:
        return dense_inline_mlp.activation_of(module, form)
    return dense_mlp.activation_of(module)


def _why_not(module: nn.Module) -> str | None:
    """What is against a dense look-alike, in words, or None."""
    if dense_gated_mlp.members_of(module) is not None:
        return dense_gated_mlp.why_not(module)
    form = dense_inline_mlp.form_of(module)
    reason = dense_mlp.why_not(module) if dense_mlp.members_of(module) is not None else "is none"
    if reason is None or form is None:
        return reason
    return dense_inline_mlp.why_not(module, form)


def survey(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """(MLPs by name, look-alikes by name with the reason against them).

    An MLP inside a larger layer goes by the layer's name: dense it is the layer, sparse the `SparseMLP` in it. One
    whose activation is unknown is a look-alike where another's is known.
    """
    found: dict[str, nn.Module] = {}
    rejected: dict[str, str] = {}
    inside = {id(m._layer[0]): m for m in model.modules() if isinstance(m, InlineMLP)}
    for name, module in model.named_modules():
        if id(module) in inside:
            found[name] = inside[id(module)]
        elif isinstance(module, InlineMLP):
            continue  # found with its layer, even where an adapter was put around the part that holds it
        elif isinstance(module, SPARSE):
            found[name] = module
        elif _looks_like_one(module):
            if "experts" in name.split("."):
                reason: str | None = "is an expert of a mixture, which is not supported yet"
            else:
                reason = _why_not(module)
            if reason is None:
                found[name] = module
            else:
                rejected[name] = reason
    unknown = [name for name, module in found.items() if activation_of(module) is None]
    if len(unknown) < len(found):
        for name in unknown:
            act = type(act_of(found.pop(name))).__name__
            rejected[name] = (
                f"has the activation {act}, which is not one of sparsemlp.activations.ACTIVATIONS"
            )
    return found, rejected


def _looks_like_one(module: nn.Module) -> bool:
    forms = dense_gated_mlp.members_of, dense_mlp.members_of, dense_inline_mlp.form_of
    return any(form(module) is not None for form in forms)
