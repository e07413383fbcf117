"""Hugging Face models: every MLP becomes a `SparseGatedMLP` or `SparseMLP` in place, and back.

Known by their members and by what they compute, not by class name. Gated: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3,
SmolLM3 (gate_proj, up_proj, down_proj, act_fn), Phi-3 (gate_up_proj, down_proj, activation_fn). Ungated: ViT, CLIP,
SigLIP, DINOv2, Phi (fc1, activation_fn, fc2), T5 (wi, act, wo), GPT-2 (c_fc, act, c_proj), and inside a larger layer
OPT, BART, Whisper (fc1, activation_fn, fc2) and BERT (intermediate, output). And whatever else has the same MLP.
Transformers itself is not imported: a model is an `nn.Module` here.
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
from sparsemlp.integrations import _mlps
from sparsemlp.integrations._indicator import Indicator, asked_for
from sparsemlp.integrations._mlps import SPARSE, parts_of
from sparsemlp.nn import SparseGatedMLP, SparseMLP
from sparsemlp.nn._inline_mlp import InlineMLP
from sparsemlp.nn._projections import own_weight
from sparsemlp.nn._thresholds import checked_mean, checked_threshold
from sparsemlp.nn.int8_linear import check_quantizable, check_quantize
from sparsemlp.ops.gated_mlp import OP

if TYPE_CHECKING:
    from sparsemlp.calibration import Plan

__all__ = ["activation_of", "densify", "find_mlps", "sparsify"]

_Model = TypeVar("_Model", bound=nn.Module)
_Sparse = SparseGatedMLP | SparseMLP


def find_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """The model's MLPs, gated and ungated, dense or sparse, by qualified name, in model order.

    A module used in several places is listed once. Experts of a mixture are left out: thresholds measured on all
    tokens do not fit what a router sends them. So is an MLP with an unknown activation where others' are known.

    Args:
        model: any module; nothing in it is changed, and none of the MLPs' weights is read. (A layer with an MLP inside
            is evaluated on three tokens, once, which reads its other weights.)

    Returns:
        Qualified name (as in `model.named_modules()`) to module. An MLP inside a larger layer, such as OPT's, has the
        layer's name; the module is the layer while dense, and a `SparseMLP`, which is a part of it, when sparse.
    """
    return _mlps.survey(model)[0]


def activation_of(module: nn.Module, model: nn.Module) -> str:
    """The activation of an MLP, found by evaluating it.

    Args:
        module: one of `find_mlps(model)`.
        model: the model it belongs to; its config names the activation in the error.

    Returns:
        A name of `sparsemlp.activations.ACTIVATIONS`.
    Raises:
        ValueError: it is none of them.
    """
    name = _mlps.activation_of(module)
    if name is not None:
        return name
    act = _mlps.act_of(module)
    config = getattr(model, "config", None)
    keys = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")
    hinted = next((value for key in keys if (value := getattr(config, key, None))), None)
    what = f"{hinted!r} ({type(act).__name__})" if hinted else type(act).__name__
    known = ", ".join(row.name for row in ACTIVATIONS.values() if not row.params)
    raise ValueError(
        f"activation of {type(model).__name__}'s {type(module).__name__} is {what}, expected one of: {known}; use "
        "from_dense(..., activation=...) of SparseGatedMLP or SparseMLP to replace it by another"
    )


def sparsify(
    model: _Model,
    plan: Plan | None = None,
    *,
    threshold: float | Tensor = 0.0,
    indicator: str | None = None,
    screen_bits: int | None = None,
    screen_group: int | None = None,
    screen_tokens: int | str | None = None,
    quantize: str | None = None,
    backend: str = "auto",
) -> _Model:
    """Replaces every MLP of the model by a `SparseGatedMLP` or `SparseMLP`, in place; again: new thresholds.

    The weights are not duplicated: each down projection is stored anew, one layer after the other, the rest is left
    where it is; a screen's low-bit copies come on top (see below). The state dict, `save_pretrained` and `generate` are
    the dense model's. Nothing is changed when an error is raised.

    Args:
        model: a model with MLPs that `find_mlps` finds.
        plan: thresholds and means by qualified name, from `sparsemlp.calibrate`; its layers must be the model's.
        threshold: without a plan, one t ≥ 0 for all layers; 0 gives the dense model's outputs.
        indicator: "gate", "up", "product" or "screen", whose magnitude is compared with the thresholds, see
            `sparsemlp.gated_mlp`; also of MLPs that are sparse already. Ungated ones have "gate" only. None: the
            plan's, without a plan "gate".
        screen_bits, screen_group: of the low-bit copies that "screen" decides by, made of the gate and up weights (4.5
            bits a weight by default, see `SparseGatedMLP.from_dense`); None: the plan's, without a plan 4 and 32.
        screen_tokens: with "screen", calls of more tokens compute every neuron; None: the screen decides in all;
            "auto": as many as it is predicted to pay for here, layer by layer at the plan's sparsity (0: never).
        quantize: None leaves the weights as they are; "int8" rounds the MLPs' weights, one layer after the other, and
            frees the float ones: `densify` does not bring them back, and the state dict is another (docs/int8.md).
        backend: "auto", "native", "triton" or "reference", see `sparsemlp.gated_mlp`.

    Returns:
        `model`.
    Raises:
        ValueError: no such MLP (the message lists what was seen), an unknown activation, a plan for another model, an
            indicator or screen that is not the plan's or that an MLP cannot have.
    """
    OP.check_backend(backend)
    check_quantize(quantize)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is {type(model).__name__}, expected a loaded model (torch.nn.Module); load it first"
        )
    if plan is not None and not hasattr(plan, "check"):
        raise ValueError(
            f"plan is {type(plan).__name__}, expected a sparsemlp.Plan; load it with sparsemlp.Plan.load"
        )
    mlps, rejected = _mlps.survey(model)
    if not mlps:
        raise ValueError(_nothing_found(model, rejected))
    if "" in mlps and not isinstance(mlps[""], InlineMLP) and _mlps.inline_form(mlps[""]) is None:
        raise ValueError(
            f"model is a {type(model).__name__}, an MLP itself, expected a model that contains MLPs; "
            "use from_dense of sparsemlp.nn.SparseGatedMLP or SparseMLP"
        )
    limits = _limits(model, mlps, plan, threshold)
    asked = asked_for(plan, indicator, screen_bits, screen_group, screen_tokens)
    asked.check(mlps)
    indicators = {name: asked.at(name, module, plan, quantize) for name, module in mlps.items()}
    names = {name: activation_of(module, model) for name, module in mlps.items()}
    if quantize is not None:
        _check_quantizable(mlps)
    for name, reason in rejected.items():
        warnings.warn(
            f"{name} stays dense: {type(model.get_submodule(name)).__name__} {reason}", stacklevel=2
        )
    weights = _shared_weights(mlps.values())
    made: dict[int, _Sparse] = {}
    for name, module in mlps.items():
        (t, mean), decides = limits[name], indicators[name]
        if isinstance(module, SPARSE):
            module.set_thresholds(t, mean)
            module.backend = backend
            if quantize is not None:
                module.quantize()
            if isinstance(module, SparseGatedMLP):
                module.set_indicator(decides.indicator, screen_bits=decides.bits, screen_group=decides.group)
                module.screen_tokens = decides.tokens
            sparse = module
        else:
            sparse = _made_sparse(module, names[name], t, mean, quantize, decides, backend)
            if not isinstance(sparse, InlineMLP):
                made[id(module)] = sparse
        sparse.name = name
        _retie(sparse, weights)
    _exchange(model, made)
    _warn_dense(module for module in model.modules() if isinstance(module, SPARSE))
    return model


def _made_sparse(
    module: nn.Module,
    activation: str,
    threshold: Tensor,
    mean: Tensor | None,
    quantize: str | None,
    decides: Indicator,
    backend: str,
) -> _Sparse:
    """The sparse form of a dense MLP; of one inside a layer, put there already."""
    form = _mlps.inline_form(module)
    if form is not None:
        return InlineMLP.insert(
            module, form, activation, threshold=threshold, skipped_mean=mean, backend=backend
        )
    sparse: _Sparse
    if parts_of(module).gated:
        sparse = SparseGatedMLP.from_dense(
            module,
            threshold=threshold,
            skipped_mean=mean,
            indicator=decides.indicator,
            screen_bits=decides.bits,
            screen_group=decides.group,
            screen_tokens=decides.tokens,
            quantize=quantize,
            backend=backend,
        )
    else:
        sparse = SparseMLP.from_dense(
            module, threshold=threshold, skipped_mean=mean, quantize=quantize, backend=backend
        )
    assert sparse.activation == activation
    return sparse


def densify(model: _Model) -> _Model:
    """Puts the dense modules back, in place: the very objects `sparsify` replaced, with the weights of now.

    Args:
        model: a model, sparsified or not.

    Returns:
        `model`.
    """
    sparse = [module for module in model.modules() if isinstance(module, SPARSE)]
    weights = _shared_weights(sparse)
    dense: dict[int, nn.Module] = {}
    for module in sparse:
        whole = module.to_dense()
        if not isinstance(module, InlineMLP):
            dense[id(module)] = whole
        _retie(module, weights)
    _exchange(model, dense)
    return model


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
        f"model {type(model).__name__} has no MLP of a known form ({seen}{because}), expected children "
        "gate_proj, up_proj, down_proj, act_fn that compute down(act(gate(x)) * up(x)), or two layers with an "
        "activation, such as fc1, activation_fn, fc2; use from_dense of sparsemlp.nn.SparseGatedMLP or SparseMLP for "
        "MLPs of your own"
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


def _check_quantizable(mlps: dict[str, nn.Module]) -> None:
    """Every layer can be rounded, found out before any is."""
    for name, module in mlps.items():
        if isinstance(module, InlineMLP) or _mlps.inline_form(module) is not None:
            raise ValueError(
                f"quantize is 'int8' and the MLP of {name} lies inside a larger layer ({type(module).__name__}), "
                "expected MLPs that are modules of their own; leave quantize None"
            )
        parts = parts_of(module)
        layers = {n: layer for n, layer in module._modules.items() if layer in (*parts.inputs, parts.last)}
        check_quantizable(module, tuple(layers), f"{name}.")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _neurons(module: nn.Module) -> int | None:
    return parts_of(module).neurons


def _shared_weights(mlps: Iterable[nn.Module]) -> dict[int, list[nn.Parameter]]:
    """Weights that are different Parameters over the same memory: id of each to all of its group."""
    groups: dict[tuple[object, ...], dict[int, nn.Parameter]] = defaultdict(dict)
    for module in mlps:
        for weight in _weights_of(module):
            if type(weight) is nn.Parameter and weight.device.type != "meta" and weight.numel():
                key = (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
                groups[key][id(weight)] = weight
    return {key: list(group.values()) for group in groups.values() if len(group) > 1 for key in group}


def _weights_of(module: nn.Module) -> list[nn.Parameter]:
    """The weights that may be stored anew, where they are plain: the last layer's, of an ungated MLP both."""
    layers = module._linears() if isinstance(module, SparseMLP) else None
    if layers is None:
        parts = parts_of(module)
        layers = [parts.last] if parts.gated else [*parts.inputs, parts.last]
    weights = (own_weight(layer) for layer in layers)
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


def _retie(module: nn.Module, shared: dict[int, list[nn.Parameter]]) -> None:
    """Lets the other Parameters over a weight's former memory follow it to its new one."""
    for weight in _weights_of(module):
        for other in shared.get(id(weight), ()):
            if other is not weight:
                with torch.no_grad():
                    other.data = weight.data


def _exchange(model: nn.Module, new: dict[int, nn.Module] | dict[int, _Sparse]) -> None:
    """Puts new modules where the old ones (by id) are, everywhere they are used."""
    for parent in list(model.modules()):
        if isinstance(parent, SPARSE):
            continue
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])


def _warn_dense(modules: Iterable[_Sparse]) -> None:
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
