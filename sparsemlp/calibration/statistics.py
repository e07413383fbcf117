"""Collects the statistics of a model's MLPs in one pass, and turns them into plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp import activations
from sparsemlp.calibration import cats, upaware
from sparsemlp.calibration.fingerprints import differences, fingerprint, mlps_of
from sparsemlp.calibration.histogram import Cumulative, LayerStatistics
from sparsemlp.calibration.plan import LayerPlan, Plan, check_method, check_target
from sparsemlp.integrations._mlps import parts_of
from sparsemlp.nn import SparseGatedMLP, SparseMLP

__all__ = ["Batch", "Statistics", "calibrate", "collect"]

Batch = Tensor | Mapping[str, Any]
"""(B, S) int64 token ids, or the keyword arguments of the model's forward."""

_THRESHOLDS: dict[str, Callable[[LayerStatistics, float], Tensor]] = {
    "cats": cats.thresholds,
    "upaware": upaware.thresholds,
}


class Statistics:
    """What one pass over calibration text leaves: enough for the plans of every target and method.

    Args:
        fingerprint: what identifies the model, see `sparsemlp.calibration.fingerprints`.
        layers: statistics by the MLP's qualified name, in model order.
    """

    def __init__(self, fingerprint: dict[str, Any], layers: dict[str, LayerStatistics]) -> None:
        self.fingerprint = fingerprint
        self.layers = layers

    @property
    def tokens(self) -> int:
        """Calibration tokens, without masked ones."""
        return max((layer.tokens for layer in self.layers.values()), default=0)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both passes together, as one pass over all their batches gives (up to float32 sums).

        Raises:
            ValueError: the two are of different models.
        """
        differs = differences(self.fingerprint, other.fingerprint, "these statistics", "the others")
        if differs:
            raise ValueError(
                f"other is of another model ({differs}), expected the same one; collect both from one model"
            )
        merged = {name: layer.merge(other.layers[name]) for name, layer in self.layers.items()}
        return Statistics(self.fingerprint, merged)

    def plan(self, target: float, method: str = "upaware", *, mean: bool = True) -> Plan:
        """Thresholds that skip a share `target` of every layer's activations on the calibration text.

        Args:
            target: share of activations to skip, in [0, 1). 0 gives thresholds 0, which change nothing.
            method: "upaware" (a threshold per neuron; of an ungated MLP, which has no up projection, "cats" under
                another name) or "cats" (one per layer).
            mean: replace a skipped neuron's hidden value by its mean over the calibration tokens that skip it.

        Returns:
            The plan; each layer's `sparsity` is what its thresholds reach on the calibration text, and may be larger
            than the target where exact zeros alone are more.

        Raises:
            ValueError: a target outside [0, 1) or an unknown method.
        Source: CATS (Lee et al., 2024) for "cats"; "upaware" and the means are this package's, see docs/calibration.md.
        """
        check_target(target)
        check_method(method)
        layers = {}
        for name, statistics in self.layers.items():
            limit = torch.zeros(()) if target == 0 else _THRESHOLDS[method](statistics, target)
            layers[name] = _layer_plan(Cumulative(statistics), limit, mean)
        return Plan(method, float(target), self.fingerprint, layers, self.tokens)


def _layer_plan(cumulative: Cumulative, threshold: Tensor, mean: bool) -> LayerPlan:
    total = cumulative.total
    per_neuron = threshold.double().expand(len(total.tokens))
    skipped_mean = None
    if mean:
        part = cumulative.skipped(per_neuron, mean=True)
        exact = part.sum_h / part.tokens.where(part.tokens > 0, 1.0)
        # Where only exact zeros are skipped every mean is 0: without means they stay skipped at threshold 0 too.
        skipped_mean = exact.float() if bool(exact.any()) else None
    part = cumulative.skipped(per_neuron, mean=skipped_mean is not None)
    lost = part.sum_h2
    if skipped_mean is not None:
        lost = lost - part.sum_h * (part.sum_h / part.tokens.where(part.tokens > 0, 1.0))
    energy = float(total.sum_h2.sum())
    return LayerPlan(
        threshold=threshold,
        skipped_mean=skipped_mean,
        sparsity=min(1.0, float(part.tokens.sum() / total.tokens.sum())),
        hidden_error=max(0.0, float(lost.sum())) / energy if energy else 0.0,
    )


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    target: float = 0.5,
    method: str = "upaware",
    *,
    mean: bool = True,
    progress: bool = True,
) -> Plan:
    """Finds thresholds at which a share `target` of the model's MLP activations can be skipped.

    Equivalent to::

        collect(model, batches, progress=progress).plan(target, method, mean=mean)

    Args, Returns, Raises: see `collect` and `Statistics.plan`; to compare targets or methods, collect once.
    """
    check_target(target)
    check_method(method)
    return collect(model, batches, progress=progress).plan(target, method, mean=mean)


def collect(model: nn.Module, batches: Iterable[Batch], *, progress: bool = True) -> Statistics:
    """Runs the model over the batches and gathers the statistics of its MLPs; nothing else is kept.

    The model runs as it is: on its device, in its dtype, in eval mode and without gradients; modes are put back
    afterwards. MLPs that are sparse already run dense meanwhile, so the statistics are always the dense model's.

    Args:
        model: a Hugging Face causal language model, an encoder, a vision model, or any module with
            `SparseGatedMLP`s or `SparseMLP`s inside.
        batches: (B, S) int64 token ids, called as `model(ids)`, or dicts, called as `model(**batch)`. Positions where
            a dict's `attention_mask` (B, S) is 0 are left out. Some ten thousand tokens are plenty.
        progress: show a bar (needs tqdm; without it there is none).

    Returns:
        Statistics, 2 KiB a neuron (94 MB for a 135 M model, about 1 GB for an 8 B one), in CPU memory.

    Raises:
        ValueError: no batch, a batch without tokens or of another type, a model without MLPs of a known form, or
            activations that hold NaN or infinity; the message names the batch or the layer.
    Numerics: a, u and h are taken as float32 from what the gate and up layers return, or a = h from what an ungated
        MLP's first layer does (u is then 1).
    """
    mlps = mlps_of(model)
    identity = fingerprint(model)
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        for name, module in mlps.items():
            stack.enter_context(recorder.watching(name, module, identity["layers"][name]))
        position = -1
        for position, batch in enumerate(_with_bar(batches, progress)):
            arguments, keywords, recorder.mask = _arguments(model, batch, position)
            model(*arguments, **keywords)
    if position < 0:
        raise ValueError(
            "batches is empty, expected at least one batch of token ids; a generator can be used only once"
        )
    for name, layer in recorder.layers.items():
        if layer.tokens == 0:
            raise ValueError(f"layer {name} saw no token, expected every MLP to run; check the batches")
    return Statistics(identity, {name: _on_cpu(layer) for name, layer in recorder.layers.items()})


class _Recorder:
    """Forward hooks on gate and up (or first) layers that feed one `LayerStatistics` a module."""

    def __init__(self) -> None:
        self.layers: dict[str, LayerStatistics] = {}
        self.mask: Tensor | None = None
        """(B, S) bool of the running batch: which positions count; None: all."""

    @contextmanager
    def watching(self, name: str, module: nn.Module, sizes: Mapping[str, Any]) -> Iterator[None]:
        """Records the module's a and u while the context lasts; a sparse module runs dense."""
        parts = parts_of(module)
        activation, params = sizes["activation"], getattr(module, "activation_params", None)
        first = parts.inputs[0]
        device = next((p.device for p in first.parameters() if p.device.type != "meta"), torch.device("cpu"))
        self.layers[name] = LayerStatistics(sizes["intermediate_size"], device)
        halves: dict[str, Tensor] = {}

        def half_hook(half: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(child: nn.Module, args: Any, out: Tensor) -> None:
                halves[half] = out
                if len(halves) == 2:  # in whichever order the module calls them
                    self._record(name, activation, params, halves.pop("gate"), halves.pop("up"))

            return hook

        def merged_hook(child: nn.Module, args: Any, out: Tensor) -> None:
            self._record(name, activation, params, *out.chunk(2, dim=-1))

        def ungated_hook(child: nn.Module, args: Any, out: Tensor) -> None:
            self._record(name, activation, params, out, out.new_ones(()).expand_as(out))

        hooks: dict[nn.Module, Callable[..., None]]
        if not parts.gated:
            hooks = {first: ungated_hook}
        elif len(parts.inputs) == 1:
            hooks = {first: merged_hook}
        else:
            hooks = {first: half_hook("gate"), parts.inputs[1]: half_hook("up")}
        with ExitStack() as stack:
            for layer, hook in hooks.items():
                stack.callback(layer.register_forward_hook(hook).remove)
            if isinstance(module, (SparseGatedMLP, SparseMLP)):
                stack.enter_context(_running_dense(module))
            yield

    def _record(self, name: str, activation: str, params: Tensor | None, pre: Tensor, up: Tensor) -> None:
        layer = self.layers[name]
        pre, up = pre.reshape(-1, pre.shape[-1]), up.reshape(-1, up.shape[-1])
        if self.mask is not None:
            keep = self.mask.flatten().to(pre.device)
            if len(keep) != len(pre):
                raise ValueError(
                    f"attention_mask has {len(keep)} positions and layer {name} ran on {len(pre)}, expected one each; "
                    "pass a mask of input_ids' shape"
                )
            pre, up = pre[keep], up[keep]
        rows = max(1, (1 << 19) // max(1, layer.neurons))  # the wide copy of the gate stays in a cache
        try:
            for p, u in zip(pre.split(rows), up.split(rows), strict=True):
                layer.add(activations.apply(p.float(), activation, params), u)
        except ValueError as error:
            raise ValueError(
                f"layer {name}: {error}, expected finite activations; check the model's weights and dtype"
            ) from None


@contextmanager
def _running_dense(module: SparseGatedMLP | SparseMLP) -> Iterator[None]:
    """The module's dense composition through its children, in place of its forward."""
    if isinstance(module, SparseMLP):
        module._dense_only = True
        try:
            yield
        finally:
            module._dense_only = False
        return
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda x, token_scale=None: module._forward_dense(x)
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _arguments(
    model: nn.Module, batch: Batch, position: int
) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """Positional and keyword arguments of the call, and the mask of positions that count."""
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    known = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in known:
        extra["use_cache"] = False
    if "logits_to_keep" in known:  # the output layer is not needed: it is a fifth of a small model's work
        extra["logits_to_keep"] = 1
    if isinstance(batch, Tensor):
        if batch.numel() == 0:
            raise ValueError(
                f"batch {position} has shape {tuple(batch.shape)} and no token, expected (B, S); leave it out"
            )
        if batch.dim() != 2 and not batch.is_floating_point():
            raise ValueError(
                f"batch {position} has shape {tuple(batch.shape)}, expected (B, S) token ids; reshape it"
            )
        return [batch.to(device)], extra, None
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"batch {position} is {type(batch).__name__}, expected a (B, S) int64 tensor of token ids or a dict for "
            "model(**batch); tokenize the text first"
        )
    keywords = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    mask, ids = keywords.get("attention_mask"), keywords.get("input_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        what = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask of batch {position} is {what}, expected (B, S) with 0 at padding; pass it so"
        )
    empty = isinstance(ids, Tensor) and ids.numel() == 0
    if empty or (mask is not None and not bool(mask.any())):
        raise ValueError(
            f"batch {position} has no token that counts, expected at least one; leave the batch out"
        )
    if "labels" in keywords:  # a loss needs every logit
        extra.pop("logits_to_keep", None)
    return [], {**extra, **keywords}, None if mask is None or bool(mask.all()) else mask.bool()


def _with_bar(batches: Iterable[Batch], progress: bool) -> Iterable[Batch]:
    if not progress:
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc="calibrating", unit="batch")


def _on_cpu(layer: LayerStatistics) -> LayerStatistics:
    layer.count, layer.sum_u2, layer.sum_h, layer.sum_h2 = (table.cpu() for table in layer.tables())
    return layer
