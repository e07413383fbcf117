"""What a dense ungated MLP looks like: a module of two projections, an activation between them, and dropouts.

No library's class names are used: a module is recognised by its members and by evaluating it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsemlp import activations
from sparsemlp.nn import _projections
from sparsemlp.nn._dense_gated_mlp import bare, close, evaluated, further, probe_linear, recognised

__all__ = [
    "ACT_NAMES",
    "Members",
    "act_of",
    "activation_of",
    "draws_in_training",
    "hidden_dropouts",
    "members_of",
    "why_not",
]

PAIRS = (
    ("fc1", "fc2"),
    ("wi", "wo"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("up_proj", "down_proj"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("intermediate_dense", "output_dense"),
)
"""Names of the two projections in libraries' models."""
ACT_NAMES = ("activation_fn", "act_fn", "act", "activation", "intermediate_act_fn", "gelu_impl")


@dataclass(frozen=True)
class Members:
    """The names of an ungated MLP's children."""

    first: str
    last: str
    act: str | None
    """None where the module has no activation of its own: the caller names it."""
    dropouts: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        return self.first, self.last


def members_of(module: nn.Module) -> Members | None:
    """The members by which an ungated MLP is recognised, or None. Says nothing yet about what `forward` computes."""
    children = module._modules
    if "gate_proj" in children or "gate_up_proj" in children:
        return None
    for first, last in PAIRS:
        if _projections.is_projection(children.get(first)) and _projections.is_projection(children.get(last)):
            act = next((name for name in ACT_NAMES if callable(getattr(module, name, None))), None)
            dropouts = tuple(name for name, child in children.items() if isinstance(child, nn.Dropout))
            return Members(first, last, act, dropouts)
    return None


def act_of(
    module: nn.Module, members: Members, activation: str | None = None, params: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """The module's own activation without hooks or, where it has none, the named one."""
    if members.act is None:
        return lambda p: activations.apply(p, str(activation), params)
    act = module._modules.get(members.act)
    return getattr(module, members.act) if act is None else bare(act)


def activation_of(module: nn.Module) -> str | None:
    """The row of the activation table that the module's activation is, or None."""
    members = members_of(module)
    if members is None or members.act is None:
        return None
    return recognised(act_of(module, members))


def why_not(module: nn.Module, activation: str | None = None, params: Tensor | None = None) -> str | None:
    """Why the module is not last(φ(first(x))) outside of training, in words, or None.

    Args:
        module: any module.
        activation: φ for a module without an activation member; its own activation is used otherwise.
        params: the activation's parameters.
    """
    members = members_of(module)
    if members is None:
        return "has no two linear layers of known names (fc1 and fc2, wi and wo, c_fc and c_proj …)"
    first, last = (_projections.sizes(module._modules[name]) for name in members.linears)  # type: ignore[arg-type]
    if first is None or last is None or first != (last[1], last[0]):
        return f"has layers of sizes {first} and {last} (inputs, outputs), which are not each other's reverse"
    if members.act is None and activation is None:
        return f"has no member {', '.join(ACT_NAMES[:-1])} or {ACT_NAMES[-1]}"
    return further(module, {*members.linears, members.act, *members.dropouts}) or evaluated(
        lambda: _computes_formula(module, members, activation, params), "last(act(first(x)))"
    )


def _computes_formula(
    module: nn.Module, members: Members, activation: str | None, params: Tensor | None
) -> bool:
    """Whether forward is the formula, found out on a twin whose layers are tiny float64 ones, as for gated MLPs."""
    with torch.no_grad():
        twin, x, (first, last) = _twin(module, members)
        act = act_of(module, members, activation, params)
        return close(type(module).forward(twin, x), last(act(first(x))))


def _twin(module: nn.Module, members: Members) -> tuple[nn.Module, Tensor, tuple[nn.Linear, nn.Linear]]:
    """The module without hooks and training, with layers of 3 to 5 and 5 to 3 features; an input; the layers."""
    width, neurons, tokens = 3, 5, 4
    generator = torch.Generator().manual_seed(0)
    layers = probe_linear(width, neurons, generator), probe_linear(neurons, width, generator)
    twin = bare(module)
    twin.__dict__["training"] = False
    twin.__dict__["_modules"].update(zip(members.linears, layers, strict=True))
    for name in members.dropouts:  # names of children that are there
        child = bare(module.get_submodule(name))
        child.__dict__["training"] = False
        twin.__dict__["_modules"][name] = child
    if members.act is not None:
        act = act_of(module, members)
        (twin.__dict__["_modules"] if isinstance(act, nn.Module) else twin.__dict__)[members.act] = act
    x = 2 * torch.randn(1, tokens, width, generator=generator, dtype=torch.float64, device="cpu")
    return twin, x, layers


def draws_in_training(
    module: nn.Module, members: Members, activation: str | None = None, params: Tensor | None = None
) -> bool:
    """Whether forward does something else in training than the formula and the module's dropout children.

    That is dropout as a function, as Starcoder-2's MLP has it, which no child shows. `activation` as in `why_not`.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        twin, x, (first, last) = _twin(module, members)
        twin.__dict__["training"] = True
        act = act_of(module, members, activation, params)
        return not close(type(module).forward(twin, x), last(act(first(x))))


class _Marker(nn.Module):
    """Stands for a dropout; the result tells where it was applied."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def hidden_dropouts(
    module: nn.Module, members: Members, activation: str | None = None, params: Tensor | None = None
) -> tuple[str, ...]:
    """Those of the dropout children that are applied to the hidden values, not to the output."""
    found = []
    with torch.no_grad():
        twin, x, (first, last) = _twin(module, members)
        act = act_of(module, members, activation, params)
        for name in members.dropouts:
            marked = bare(twin)
            marked.__dict__["_modules"][name] = _Marker()
            if close(type(module).forward(marked, x), last(3 * act(first(x)))):
                found.append(name)
    return tuple(found)
