"""Hugging Face models: every gated MLP becomes a `SparseGatedMLP` in place, and back.

Known by their members and by what they compute, not by class name: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3,
SmolLM3 (gate_proj, up_proj, down_proj, act_fn), Phi-3 (gate_up_proj, down_proj, activation_fn), and whatever else has
the same MLP. Transformers itself is not imported: a model is an `nn.Module` here.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from sparsemlp.activations import ACTIVATIONS
from sparsemlp.nn import SparseGatedMLP
from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.nn._thresholds import checked_mean, checked_threshold
from sparsemlp.ops.gated_mlp import OP

if TYPE_CHECKING:
    from sparsemlp.calibration import Plan

__all__ = ["activation_of", "densify", "find_mlps", "sparsify"]

_Model = TypeVar("_Model", bound=nn.Module)


def find_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """The model's gated MLPs, dense or sparse, by qualified name, in model order.

    A module used in several places is listed once. Experts of a mixture are left out: thresholds measured on all
    tokens do not fit what a router sends them.

    Args:
        model: any module; nothing in it is changed, no weight is read.

    Returns:
        Qualified name (as in `model.named_modules()`) to module.
    """
    return _survey(model)[0]


def activation_of(module: nn.Module, model: nn.Module) -> str:
    """The activation of a gated MLP, found by evaluating it.

    Args:
        module: one of `find_mlps(model)`.
        model: the model it belongs to; its config names the activation in the error.

    Returns:
        A name of `sparsemlp.activations.ACTIVATIONS`.
    Raises:
        ValueError: it is none of them.
    """
    if isinstance(module, SparseGatedMLP):
        return module.activation
    name = dense_gated_mlp.activation_of(module)
    if name is not None:
        return name
    members = dense_gated_mlp.members_of(module)
    act = getattr(module, members.act, None) if members is not None and members.act is not None else None
    config = getattr(model, "config", None)
    hinted = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    what = f"{hinted!r} ({type(act).__name__})" if hinted else type(act).__name__
    known = ", ".join(row.name for row in ACTIVATIONS.values() if not row.params)
    raise ValueError(
        f"activation of {type(model).__name__}'s {type(module).__name__} is {what}, expected one of: {known}; use "
        "SparseGatedMLP.from_dense(..., activation=...) to replace it by another"
    )


def sparsify(
    model: _Model, plan: Plan | None = None, *, threshold: float | Tensor = 0.0, backend: str = "auto"
) -> _Model:
    """Replaces every gated MLP of the model by a `SparseGatedMLP`, in place; a second time only sets new thresholds.

    The weights are not duplicated: each down projection is stored anew, one layer after the other, the rest is left
    where it is. The state dict, `save_pretrained` and `generate` are the dense model's. Nothing is changed when an
    error is raised.

    Args:
        model: a model with MLPs that `find_mlps` finds.
        plan: thresholds and means by qualified name, from `sparsemlp.calibrate`; its layers must be the model's.
        threshold: without a plan, one t ≥ 0 for all layers; 0 gives the dense model's outputs.
        backend: "auto", "native" or "reference", see `sparsemlp.gated_mlp`.

    Returns:
        `model`.
    Raises:
        ValueError: no such MLP (the message lists what was seen), an unknown activation, or a plan for another model.
    """
    OP.check_backend(backend)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is {type(model).__name__}, expected a loaded model (torch.nn.Module); load it first"
        )
    if plan is not None and not hasattr(plan, "check"):
        raise ValueError(
            f"plan is {type(plan).__name__}, expected a sparsemlp.Plan; load it with sparsemlp.Plan.load"
        )
    mlps, rejected = _survey(model)
    if not mlps:
        raise ValueError(_nothing_found(model, rejected))
    if "" in mlps:
        raise ValueError(
            f"model is a {type(model).__name__}, an MLP itself, expected a model that contains MLPs; "
            "use sparsemlp.nn.SparseGatedMLP.from_dense"
        )
    limits = _limits(model, mlps, plan, threshold)
    names = {name: activation_of(module, model) for name, module in mlps.items()}
    for name, reason in rejected.items():
        warnings.warn(
            f"{name} stays dense: {type(model.get_submodule(name)).__name__} {reason}", stacklevel=2
        )
    weights = _shared_weights(mlps.values())
    made: dict[int, SparseGatedMLP] = {}
    for name, module in mlps.items():
        t, mean = limits[name]
        if isinstance(module, SparseGatedMLP):
            module.set_thresholds(t, mean)
            module.backend = backend
            sparse = module
        else:
            sparse = SparseGatedMLP.from_dense(module, threshold=t, skipped_mean=mean, backend=backend)
            assert sparse.activation == names[name]
            made[id(module)] = sparse
        sparse.name = name
        _retie(sparse, weights)
    _exchange(model, made)
    _warn_dense(module for module in model.modules() if isinstance(module, SparseGatedMLP))
    return model


def densify(model: _Model) -> _Model:
    """Puts the dense modules back, in place: the very objects `sparsify` replaced, with the weights of now.

    Args:
        model: a model, sparsified or not.

    Returns:
        `model`.
    """
    sparse = [module for module in model.modules() if isinstance(module, SparseGatedMLP)]
    weights = _shared_weights(sparse)
    dense: dict[int, nn.Module] = {}
    for module in sparse:
        dense[id(module)] = module.to_dense()
        _retie(module, weights)
    _exchange(model, dense)
    return model


def _survey(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """(MLPs by name, look-alikes by name with the reason against them)."""
    found: dict[str, nn.Module] = {}
    rejected: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseGatedMLP):
            found[name] = module
            continue
        if dense_gated_mlp.members_of(module) is None:
            continue
        if "experts" in name.split("."):
            reason: str | None = "is an expert of a mixture, which is not supported yet"
        else:
            reason = dense_gated_mlp.why_not(module)
        if reason is None:
            found[name] = module
        else:
            rejected[name] = reason
    return found, rejected


def _nothing_found(model: nn.Module, rejected: dict[str, str]) -> str:
    mlp_like = re.compile(r"mlp|feed|ffn|(?-i:FF$)", re.IGNORECASE)
    kinds = {type(m).__name__ for m in model.modules() if mlp_like.search(type(m).__name__)}
    kinds |= {type(model.get_submodule(name)).__name__ for name in rejected}
    seen = f"saw {', '.join(sorted(kinds))}" if kinds else "saw no module named like an MLP"
    because = ""
    if rejected:
        name, reason = next(iter(rejected.items()))
        because = f", where {name} {reason}"
    return (
        f"model {type(model).__name__} has no gated MLP of a known form ({seen}{because}), expected children "
        "gate_proj, up_proj, down_proj, act_fn or gate_up_proj, down_proj, activation_fn that compute "
        "down(act(gate(x)) * up(x)); use sparsemlp.nn.SparseGatedMLP.from_dense for MLPs of your own"
    )


def _limits(
    model: nn.Module, mlps: dict[str, nn.Module], plan: Plan | None, threshold: float | Tensor
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Checked (threshold, mean) of each layer."""
    if plan is None:
        return {name: (checked_threshold(threshold, _neurons(module)), None) for name, module in mlps.items()}
    if isinstance(threshold, Tensor) or threshold != 0.0:
        raise ValueError("threshold is given together with plan, expected one of them; leave threshold away")
    plan.check(model)
    missing, extra = [n for n in mlps if n not in plan.layers], [n for n in plan.layers if n not in mlps]
    if missing:
        raise ValueError(
            f"plan lacks {_some(missing)}, expected all of the model's MLPs; calibrate this model"
        )
    if extra:
        raise ValueError(f"plan has {_some(extra)}, expected the model's MLPs only; calibrate this model")
    limits = {}
    for name, module in mlps.items():
        layer, neurons = plan.layers[name], _neurons(module)
        try:
            limits[name] = (
                checked_threshold(layer.threshold, neurons),
                checked_mean(layer.skipped_mean, neurons),
            )
        except ValueError as error:
            raise ValueError(f"plan for {name}: {error}") from None
    return limits


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _down(module: nn.Module) -> nn.Module | None:
    members = dense_gated_mlp.members_of(module)
    return None if members is None else module._modules[members.down]


def _neurons(module: nn.Module) -> int | None:
    return getattr(_down(module), "in_features", None)


def _shared_weights(mlps: Iterable[nn.Module]) -> dict[int, list[nn.Parameter]]:
    """Down weights that are different Parameters over the same memory: id of each to all of its group."""
    groups: dict[tuple[object, ...], dict[int, nn.Parameter]] = defaultdict(dict)
    for module in mlps:
        down = _down(module)
        weight = down._parameters.get("weight") if type(down) is nn.Linear else None
        if type(weight) is nn.Parameter and weight.device.type != "meta" and weight.numel():
            key = (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
            groups[key][id(weight)] = weight
    return {key: list(group.values()) for group in groups.values() if len(group) > 1 for key in group}


def _retie(module: nn.Module, shared: dict[int, list[nn.Parameter]]) -> None:
    """Lets the other Parameters over a weight's former memory follow it to its new one."""
    down = _down(module)
    weight = down._parameters.get("weight") if down is not None else None
    if weight is None:
        return
    for other in shared.get(id(weight), ()):
        if other is not weight:
            with torch.no_grad():
                other.data = weight.data


def _exchange(model: nn.Module, new: dict[int, nn.Module] | dict[int, SparseGatedMLP]) -> None:
    """Puts new modules where the old ones (by id) are, everywhere they are used."""
    for parent in list(model.modules()):
        if isinstance(parent, SparseGatedMLP):
            continue
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])


def _warn_dense(modules: Iterable[SparseGatedMLP]) -> None:
    """One warning for all modules that will run dense; they do not repeat it."""
    dense = [(module, reason) for module in modules if (reason := module._why_dense()) is not None]
    if not dense:
        return
    first, reason = dense[0]
    more = f" and {len(dense) - 1} more run" if len(dense) > 1 else " runs"
    warnings.warn(
        f"{first.name}{more} dense and no neuron there is thresholded or skipped: in {first.name}, {reason}",
        stacklevel=3,
    )
    for module, _ in dense:
        module._warned = True
