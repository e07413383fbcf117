"""How well plans choose neurons: recall against an oracle that knows every |h| and keeps as many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp.calibration import recorder
from sparsemlp.calibration.fingerprints import fingerprint, mlps_of
from sparsemlp.calibration.plan import Plan
from sparsemlp.calibration.recorder import Batch, Call
from sparsemlp.calibration.screen import LayerScreen, layer_screens
from sparsemlp.integrations._mlps import parts_of
from sparsemlp.nn._projections import device_of

__all__ = ["LayerRecall", "Recall", "recall"]

_SHIFT = 16  # a key: exponent and 7 bits of the mantissa of a float32 magnitude, 128 an octave
_KEYS = (0x7F800000 >> _SHIFT) + 1


@dataclass(frozen=True)
class LayerRecall:
    """One MLP, one plan.

    Args:
        recall: of the neurons that the oracle keeps, the share that the plan keeps; 1 where the oracle keeps none.
        sparsity: share of neurons that the plan skips on these tokens. Who chooses blindly has recall 1 − sparsity.
    """

    recall: float
    sparsity: float


@dataclass(frozen=True)
class Recall:
    """What `recall` found; `str` makes a table of it.

    Args:
        plans: by the plan's label, then by the MLP's name.
        tokens: how many tokens it rests on.
    """

    plans: dict[str, dict[str, LayerRecall]]
    tokens: int

    def mean(self, label: str) -> LayerRecall:
        """Means over the MLPs."""
        layers = list(self.plans[label].values())
        return LayerRecall(
            sum(layer.recall for layer in layers) / len(layers),
            sum(layer.sparsity for layer in layers) / len(layers),
        )

    def __str__(self) -> str:
        """A row per MLP and the mean, a column per plan: recall, and in brackets sparsity, in percent."""
        names = list(next(iter(self.plans.values())))
        rows = [["recall (sparsity)", *self.plans]]
        for name in names:
            rows.append([name, *(_cell(layers[name]) for layers in self.plans.values())])
        rows.append(["mean", *(_cell(self.mean(label)) for label in self.plans)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        )


def _cell(layer: LayerRecall) -> str:
    return f"{100 * layer.recall:.1f} ({100 * layer.sparsity:.1f})"


def recall(
    model: nn.Module, batches: Iterable[Batch], plans: Mapping[str, Plan], *, progress: bool = True
) -> Recall:
    """How many of the neurons with the largest |h| plans keep, at equal sparsity.

    On these tokens a plan keeps, in each MLP, n (token, neuron) pairs of all. The oracle keeps the n pairs with the
    largest exact |h| = |a·u|, one threshold for the MLP. Both keep as many, so this is the plan's precision as well.

    Args:
        model: the model that the plans are of; it is run as `collect` runs it.
        batches: as for `collect`; other text than the calibration's shows how thresholds carry over.
        plans: by labels of your choice; any methods and targets, screens of any bits.
        progress: show a bar (needs tqdm).

    Returns:
        Recall and sparsity by plan and MLP. The oracle keeps no pair whose h is 0: where fewer than n are not 0, as of
        ReLU, its share is of those.
    Raises:
        ValueError: no plan, one of another model, or what `collect` raises.
    Numerics: a, u, h and scores as in `collect`, decided in float32 as the operators do. The oracle's threshold is read
        off a histogram of |h| with 128 bins an octave, 0.8 % wide or less; inside its bin pairs count as spread evenly,
        so the recall is off by at most the share of the kept pairs that lie in that bin. Memory: 0.26 MB for each MLP
        and plan, and the copies of the screens' weights.
    """
    if not isinstance(plans, Mapping) or not plans:
        what = "empty" if isinstance(plans, Mapping) else type(plans).__name__
        raise ValueError(f"plans is {what}, expected a dict of label to sparsemlp.Plan; pass at least one")
    for label, plan in plans.items():
        if not isinstance(plan, Plan):
            raise ValueError(f"plans[{label!r}] is {type(plan).__name__}, expected a sparsemlp.Plan; load it")
        try:
            plan.check(model)
        except ValueError as error:
            raise ValueError(f"plans[{label!r}]: {error}") from None
    mlps = mlps_of(model)
    identity = fingerprint(model)
    kinds = {(p.bits, p.group) for p in plans.values() if p.bits is not None and p.group is not None}
    screens = {kind: layer_screens(mlps, identity, *kind) for kind in kinds}
    tallies = {
        name: _Tally(name, plans, device_of(list(parts_of(module).inputs[:1])))
        for name, module in mlps.items()
    }

    def visit(call: Call) -> None:
        tallies[call.name].add(call, {kind: layers[call.name] for kind, layers in screens.items()})

    recorder.run(model, mlps, identity, batches, visit, progress=progress)
    found = {label: {name: tally.result(label) for name, tally in tallies.items()} for label in plans}
    return Recall(found, max(tally.tokens for tally in tallies.values()))


class _Tally:
    """Histograms of one MLP's |h|: of all pairs, and of those that each plan keeps."""

    def __init__(self, name: str, plans: Mapping[str, Plan], device: torch.device) -> None:
        self.plans = plans
        self.tokens = 0
        self._limits = {label: plan.layers[name].threshold.to(device) for label, plan in plans.items()}
        self._all = torch.zeros(_KEYS, dtype=torch.int64, device=device)
        self._kept = {label: torch.zeros_like(self._all) for label in plans}

    def add(self, call: Call, screens: Mapping[Any, LayerScreen]) -> None:
        """Counts one call's tokens."""
        scores = {kind: screen.scores(call.x) for kind, screen in screens.items()}
        for a, u, *parts in call.parts(*scores.values()):
            h = (a * u.float()).abs()
            if not bool(h.isfinite().all()):
                raise ValueError("h holds NaN or infinity")
            keys = (h.view(torch.int32) >> _SHIFT).long()
            self._all += torch.bincount(keys.flatten(), minlength=_KEYS)
            by_kind: dict[Any, Tensor] = dict(zip(scores, parts, strict=True))
            for label, plan in self.plans.items():
                decides = a if plan.bits is None else by_kind[plan.bits, plan.group]
                kept = ~(decides.abs() < self._limits[label])
                self._kept[label] += torch.bincount(keys[kept], minlength=_KEYS)
            self.tokens += len(a)

    def result(self, label: str) -> LayerRecall:
        """The plan's recall of what the oracle keeps."""
        pairs, kept = self._all.cpu(), self._kept[label].cpu()
        n, total = int(kept.sum()), int(pairs.sum())
        wanted = min(n, int(pairs[1:].sum()))
        sparsity = 1 - n / total if total else 0.0
        if wanted == 0:
            return LayerRecall(1.0, sparsity)
        above = pairs.flip(0).cumsum(0).flip(0)  # pairs of this key or a larger one
        last = int((above >= wanted).nonzero()[-1])  # the oracle keeps part of it and all above
        all_above = int(above[last + 1]) if last + 1 < _KEYS else 0
        share = (wanted - all_above) / int(pairs[last])
        return LayerRecall((int(kept[last + 1 :].sum()) + share * int(kept[last])) / wanted, sparsity)
