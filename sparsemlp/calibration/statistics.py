"""Collects the statistics of a model's MLPs in one pass, and turns them into plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp.calibration import cats, recorder, upaware
from sparsemlp.calibration.fingerprints import differences, fingerprint, mlps_of
from sparsemlp.calibration.histogram import Cumulative, LayerStatistics
from sparsemlp.calibration.plan import LayerPlan, Plan, check_method, check_target
from sparsemlp.calibration.recorder import Batch, Call
from sparsemlp.calibration.screen import BITS, GROUP, check_screen, layer_screens
from sparsemlp.calibration.screen import thresholds as screen_thresholds
from sparsemlp.integrations._mlps import parts_of
from sparsemlp.nn._projections import device_of

__all__ = ["Batch", "Statistics", "calibrate", "collect"]

_THRESHOLDS: dict[str, Callable[[LayerStatistics, float], Tensor]] = {
    "cats": cats.thresholds,
    "upaware": upaware.thresholds,
    "screen": screen_thresholds,
}


class Statistics:
    """What one pass over calibration text leaves: enough for the plans of every target and method.

    Args:
        fingerprint: what identifies the model, see `sparsemlp.calibration.fingerprints`.
        layers: statistics by |a|, by the MLP's qualified name, in model order.
        screen: (bits, group) of the low-bit screen whose scores were taken as well, or None.
        screened: statistics by the screen's |m|, likewise, or None.
    """

    def __init__(
        self,
        fingerprint: dict[str, Any],
        layers: dict[str, LayerStatistics],
        screen: tuple[int, int] | None = None,
        screened: dict[str, LayerStatistics] | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.layers = layers
        self.screen = screen
        self.screened = screened

    @property
    def tokens(self) -> int:
        """Calibration tokens, without masked ones."""
        return max((layer.tokens for layer in self.layers.values()), default=0)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both passes together, as one pass over all their batches gives (up to float32 sums).

        Raises:
            ValueError: the two are of different models or screens.
        """
        differs = differences(self.fingerprint, other.fingerprint, "these statistics", "the others")
        if differs:
            raise ValueError(
                f"other is of another model ({differs}), expected the same one; collect both from one model"
            )
        if self.screen != other.screen:
            raise ValueError(
                f"other was collected with screen={other.screen}, expected {self.screen} as these statistics; collect "
                "both alike"
            )
        merged = {name: layer.merge(other.layers[name]) for name, layer in self.layers.items()}
        screened = None
        if self.screened is not None and other.screened is not None:
            screened = {name: layer.merge(other.screened[name]) for name, layer in self.screened.items()}
        return Statistics(self.fingerprint, merged, self.screen, screened)

    def plan(self, target: float, method: str = "upaware", *, mean: bool = True) -> Plan:
        """Thresholds that skip a share `target` of every layer's activations on the calibration text.

        Args:
            target: share of activations to skip, in [0, 1). 0 gives thresholds 0, which change nothing.
            method: "upaware" (a threshold per neuron; of an ungated MLP, which has no up projection, "cats" under
                another name), "cats" (one per layer), or "screen" (one per layer, on the scores of the low-bit screen
                that was collected).
            mean: replace a skipped neuron's hidden value by its mean over the calibration tokens that skip it.

        Returns:
            The plan; each layer's `sparsity` is what its thresholds reach on the calibration text, and may be larger
            than the target where exact zeros alone are more. With "screen" it is the share that the screen skips;
            exact zeros of a among the neurons it keeps are not counted.

        Raises:
            ValueError: a target outside [0, 1), an unknown method, or "screen" of statistics without a screen.
        Source: CATS (Lee et al., 2024) for "cats"; "upaware", "screen" and the means are this package's, see
            docs/calibration.md.
        """
        check_target(target)
        check_method(method)
        by_screen, bits, group, source = method == "screen", None, None, self.layers
        if by_screen:
            if self.screen is None or self.screened is None:
                raise ValueError(
                    "method is 'screen' and these statistics were collected without one, expected those of "
                    f"collect(..., screen=({BITS}, {GROUP})); collect again"
                )
            (bits, group), source = self.screen, self.screened
        layers = {}
        for name, statistics in source.items():
            limit = torch.zeros(()) if target == 0 else _THRESHOLDS[method](statistics, target)
            layers[name] = _layer_plan(Cumulative(statistics), limit, mean, by_screen)
        return Plan(method, float(target), self.fingerprint, layers, self.tokens, bits=bits, group=group)


def _layer_plan(cumulative: Cumulative, threshold: Tensor, mean: bool, by_screen: bool) -> LayerPlan:
    total = cumulative.total
    per_neuron = threshold.double().expand(len(total.tokens))
    skipped_mean = None
    if mean:
        part = cumulative.skipped(per_neuron, mean=True)
        exact = part.sum_h / part.tokens.where(part.tokens > 0, 1.0)
        # Where only exact zeros are skipped every mean is 0: without means they stay skipped at threshold 0 too.
        skipped_mean = exact.float() if bool(exact.any()) else None
    # A score of exactly 0 is no activation of exactly 0: only a threshold above it skips the neuron.
    part = cumulative.skipped(per_neuron, mean=by_screen or skipped_mean is not None)
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
    bits: int | None = None,
    group: int | None = None,
    mean: bool = True,
    progress: bool = True,
) -> Plan:
    """Finds thresholds at which a share `target` of the model's MLP activations can be skipped.

    Equivalent to::

        screen = (bits or 4, group or 32) if method == "screen" else None
        collect(model, batches, screen=screen, progress=progress).plan(target, method, mean=mean)

    Args:
        bits, group: of the low-bit screen, with method "screen" only: 3, 4 (the default) or 8 bits a weight, and 32
            (the default), 64 or 128 weights to a scale.
    Other Args, Returns, Raises: see `collect` and `Statistics.plan`; to compare targets or methods, collect once.
    """
    check_target(target)
    check_method(method)
    screen = None
    if method == "screen":
        screen = check_screen((BITS if bits is None else bits, GROUP if group is None else group))
    elif bits is not None or group is not None:
        raise ValueError(
            f"bits is {bits!r} and group {group!r} with method {method!r}, expected them with 'screen' only; leave "
            "them away"
        )
    return collect(model, batches, screen=screen, progress=progress).plan(target, method, mean=mean)


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    screen: tuple[int, int] | None = None,
    progress: bool = True,
) -> Statistics:
    """Runs the model over the batches and gathers the statistics of its MLPs; nothing else is kept.

    The model runs as it is: on its device, in its dtype, in eval mode and without gradients; modes are put back
    afterwards. MLPs that are sparse already run dense meanwhile, so the statistics are always the dense model's.

    Args:
        model: a Hugging Face causal language model, an encoder, a vision model, or any module with
            `SparseGatedMLP`s or `SparseMLP`s inside.
        batches: (B, S) int64 token ids, called as `model(ids)`, or dicts, called as `model(**batch)`. Positions where
            a dict's `attention_mask` (B, S) is 0 are left out. Some ten thousand tokens are plenty.
        screen: (bits, group) to gather the statistics of a low-bit screen as well, which plans of method "screen" need:
            the same sums of the exact h = a·u by the score |m| of copies with 3, 4 or 8 bits a weight and a scale for
            32, 64 or 128. The copies of all layers' gate and up weights live during the call. Gated MLPs only.
        progress: show a bar (needs tqdm; without it there is none).

    Returns:
        Statistics, 2 KiB a neuron (94 MB for a 135 M model, about 1 GB for an 8 B one), in CPU memory; twice as much
        with a screen.

    Raises:
        ValueError: no batch, a batch without tokens or of another type, a model without MLPs of a known form, or
            activations that hold NaN or infinity; the message names the batch or the layer. With a screen also an MLP
            without a gate, or with gate and up layers that are more than their weights (adapters, hooks).
    Numerics: a, u and h are taken as float32 from what the gate and up layers return, or a = h from what an ungated
        MLP's first layer does (u is then 1). The scores are those of `sparsemlp.ops.screen.scores` from what these
        layers take, by which the operator decides as well.
    """
    mlps = mlps_of(model)
    identity = fingerprint(model)
    copies = None if screen is None else layer_screens(mlps, identity, *check_screen(screen))
    layers, screened = _tables(mlps, identity), {} if copies is None else _tables(mlps, identity)

    def visit(call: Call) -> None:
        layer = layers[call.name]
        if copies is None:
            for a, u in call.parts():
                layer.add(a, u)
            return
        for a, u, m in call.parts(copies[call.name].scores(call.x)):
            layer.add(a, u)
            screened[call.name].add(a, u, m)

    recorder.run(model, mlps, identity, batches, visit, progress=progress)
    on_cpu = {name: _on_cpu(layer) for name, layer in layers.items()}
    if copies is None:
        return Statistics(identity, on_cpu)
    return Statistics(identity, on_cpu, screen, {name: _on_cpu(layer) for name, layer in screened.items()})


def _tables(mlps: dict[str, nn.Module], identity: dict[str, Any]) -> dict[str, LayerStatistics]:
    """Empty statistics of every MLP, on its device."""
    return {
        name: LayerStatistics(
            identity["layers"][name]["intermediate_size"], device_of(list(parts_of(module).inputs[:1]))
        )
        for name, module in mlps.items()
    }


def _on_cpu(layer: LayerStatistics) -> LayerStatistics:
    layer.count, layer.sum_u2, layer.sum_h, layer.sum_h2 = (table.cpu() for table in layer.tables())
    return layer
