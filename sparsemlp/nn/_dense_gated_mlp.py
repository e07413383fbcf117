"""What a dense gated MLP looks like, which activation it has, and which of its children may be read past.

No library's class names are used: a module is recognised by its members and by evaluating it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sparsemlp import activations

__all__ = [
    "CALL_HOOKS",
    "HOOKS",
    "REPLACED",
    "Members",
    "activation_of",
    "bare",
    "close",
    "disturbance",
    "evaluated",
    "further",
    "is_plain_tensor",
    "is_untouched",
    "members_of",
    "obstacle",
    "probe_linear",
    "recognised",
    "why_not",
]

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
CALL_HOOKS = (*HOOKS, "_is_full_backward_hook")
"""What a module shares with the one it stands for, so that hooks on either, and their handles, go on working."""
REPLACED = "has a replaced forward (a device hook, or another library's patch)"
_PLAIN = (Tensor, nn.Parameter)
_ACT_NAMES = ("act_fn", "activation_fn")


@dataclass(frozen=True)
class Members:
    """The names of a gated MLP's children: `gate` and `up` are the same name where the two are merged."""

    gate: str
    up: str
    down: str
    act: str | None
    """None where the module has no activation of its own: the caller names it."""

    @property
    def merged(self) -> bool:
        return self.gate == self.up

    @property
    def linears(self) -> tuple[str, ...]:
        return (self.gate, self.down) if self.merged else (self.gate, self.up, self.down)


def members_of(module: nn.Module) -> Members | None:
    """The members by which a gated MLP is recognised, or None. Says nothing yet about what `forward` computes."""
    children = module._modules
    act = next((name for name in _ACT_NAMES if callable(getattr(module, name, None))), None)
    if all(isinstance(children.get(name), nn.Module) for name in ("gate_proj", "up_proj", "down_proj")):
        return Members("gate_proj", "up_proj", "down_proj", act)
    if all(isinstance(children.get(name), nn.Module) for name in ("gate_up_proj", "down_proj")):
        return Members("gate_up_proj", "gate_up_proj", "down_proj", act)
    return None


def why_not(module: nn.Module, activation: str | None = None, params: Tensor | None = None) -> str | None:
    """Why the module is not down(φ(gate(x)) · up(x)), in words, or None.

    Args:
        module: any module.
        activation: φ for a module without an activation member; its own activation is used otherwise.
        params: the activation's parameters.
    """
    members = members_of(module)
    if members is None:
        return "has no children gate_proj, up_proj, down_proj (or gate_up_proj, down_proj)"
    if members.act is None and activation is None:
        return "has no member act_fn or activation_fn"
    return further(module, {*members.linears, members.act}) or evaluated(
        lambda: _computes_formula(module, members, activation, params), "down(act(gate(x)) * up(x))"
    )


def further(module: nn.Module, known: set[str | None]) -> str | None:
    """What the module has beside the children `known` that may take part in its forward, in words, or None."""
    if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
        return "has parameters or buffers of its own beside its linear layers"
    for name, child in module._modules.items():
        inert = (
            child is None or type(child) is nn.Identity or (isinstance(child, nn.Dropout) and child.p == 0)
        )
        if name not in known and not inert:
            return f"has a further child {name} ({type(child).__name__})"
    return REPLACED if "forward" in module.__dict__ else None


def evaluated(probe: Callable[[], bool], formula: str) -> str | None:
    """What is against taking a module for the formula that a probe of it confirms, in words, or None."""
    try:
        same = probe()
    except Exception as error:  # whatever a forward that is not ours to know may raise
        return f"could not be evaluated on a small probe ({type(error).__name__}: {error})"
    return None if same else f"computes something else than {formula}"


def probe_linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A small float64 layer of random numbers."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, device="cpu", dtype=torch.float64)
    for p in (layer.weight, layer.bias):
        p.requires_grad_(False)
        p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu"))
    return layer


def close(out: object, expected: Tensor) -> bool:
    """Whether a float64 probe's output is what is expected: the same to rounding, which is 1e-14 of such small sums."""
    return (
        isinstance(out, Tensor)
        and out.shape == expected.shape
        and torch.allclose(out, expected, rtol=1e-9, atol=1e-9)
    )


def bare(module: nn.Module) -> nn.Module:
    """A shallow copy without hooks: evaluating it neither triggers nor feeds what watches the original."""
    twin = copy.copy(module)
    for hooks in HOOKS:
        twin.__dict__[hooks] = OrderedDict()
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def _own_activation(module: nn.Module, members: Members) -> Callable[[Tensor], Tensor]:
    act = getattr(module, str(members.act))
    return bare(act) if isinstance(act, nn.Module) else act


def _computes_formula(
    module: nn.Module, members: Members, activation: str | None, params: Tensor | None
) -> bool:
    """Whether forward is the gated formula, found out on a twin whose linear layers are tiny float64 ones.

    Members alone do not tell: Gemma-3n's MLP has the same and thresholds inside. The module's own weights are not
    touched (they may be quantised, offloaded, hooked, or a gigabyte), random numbers come from a private generator,
    and float64 makes a different formula differ by far more than rounding.
    """
    width, neurons, tokens = 3, 5, 4
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        probes = {members.gate: probe_linear(width, (2 if members.merged else 1) * neurons, generator)}
        if not members.merged:
            probes[members.up] = probe_linear(width, neurons, generator)
        probes[members.down] = probe_linear(neurons, width, generator)
        twin = bare(module)
        twin.__dict__["_modules"].update(probes)
        if members.act is not None:
            act = _own_activation(module, members)
            (twin.__dict__["_modules"] if isinstance(act, nn.Module) else twin.__dict__)[members.act] = act
        else:
            act = lambda p: activations.apply(p, str(activation), params)  # noqa: E731
        x = 2 * torch.randn(1, tokens, width, generator=generator, dtype=torch.float64, device="cpu")
        if members.merged:
            gate, up = probes[members.gate](x).chunk(2, dim=-1)
        else:
            gate, up = probes[members.gate](x), probes[members.up](x)
        return close(type(module).forward(twin, x), probes[members.down](act(gate) * up))


def activation_of(module: nn.Module) -> str | None:
    """The row of the activation table that the module's activation is, or None."""
    members = members_of(module)
    if members is None or members.act is None:
        return None
    return recognised(_own_activation(module, members))


def recognised(act: Callable[[Tensor], Tensor]) -> str | None:
    """The row of the activation table that the function is, or None.

    Decided by values in float64 rather than by name: one function has many names (gelu_new, gelu_pytorch_tanh,
    gelu_fast) and quick_gelu, clipped gelu or relu6 must not be taken for their relatives. The far points tell the
    clipped ones.
    """
    far = torch.tensor([-100.0, -50.0, -20.0, 0.0, 20.0, 50.0, 100.0], dtype=torch.float64, device="cpu")
    points = torch.cat([torch.linspace(-12, 12, 197, dtype=torch.float64, device="cpu"), far])
    with torch.no_grad():
        try:
            values = act(points.clone())
        except Exception:  # an activation that takes no float64, or needs another device
            return None
        if not isinstance(values, Tensor) or values.shape != points.shape:
            return None
        for name, row in activations.ACTIVATIONS.items():
            if not row.params and torch.allclose(values.double(), row.forward(points), rtol=1e-7, atol=1e-9):
                return name
    return None


def is_plain_tensor(tensor: Tensor | None) -> bool:
    """A tensor whose memory may be read, or what stands for one while torch.export traces."""
    return type(tensor) in _PLAIN or (
        torch.compiler.is_compiling() and type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")
    )


def is_untouched(linear: nn.Module) -> bool:
    """Whether a layer of a class known to be a plain product is no more than that: its tensors may be read past it.

    Called three times a forward, and traced by torch.compile: attribute reads only.
    """
    if (
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
    ):
        return False
    tensors = linear._parameters
    bias = tensors.get("bias")
    return (
        is_plain_tensor(tensors.get("weight"))
        and (bias is None or is_plain_tensor(bias))
        and "forward" not in linear.__dict__
    )


def obstacle(child: nn.Module | None) -> str | None:
    """Why the layer is not exactly x @ weight.T + bias, in words, or None."""
    if type(child) is not nn.Linear:
        kind = type(child)
        return f"is {kind.__module__}.{kind.__qualname__}, not exactly nn.Linear"
    return disturbance(child)


def disturbance(child: nn.Module, names: tuple[str, ...] = ("weight", "bias")) -> str | None:
    """`is_untouched`'s reasons in words, or None; `names` are the tensors that are read past the layer."""
    if any(getattr(child, hooks) for hooks in HOOKS):
        return "has forward or backward hooks"
    if "forward" in child.__dict__:
        return REPLACED
    for name in names:
        tensor = child._parameters.get(name, child._buffers.get(name))
        if tensor is not None and not is_plain_tensor(tensor):
            return f"has a {name} of type {type(tensor).__name__}, not a plain tensor"
    if "weight" in names and child._parameters.get("weight") is None:
        return "has no parameter weight"
    if _has_any_global_hook():
        return "is called with global module hooks"
    return None
