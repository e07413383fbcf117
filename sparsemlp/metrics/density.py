"""Densities of activations and derivatives, layer by layer, while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import sparsemlp
from sparsemlp.metrics._stored import Stored, sparse_modules, stored
from sparsemlp.reference import training as reference

__all__ = ["Densities", "DensityRecorder", "LayerDensity", "densities"]


@dataclass(frozen=True)
class LayerDensity:
    """One sparse MLP: the fractions of its (token, neuron) entries, 0 to 1, and how many entries there were."""

    name: str
    activation_density: float
    derivative_density: float
    entries: int

    @property
    def activation_sparsity(self) -> float:
        """1 − `activation_density`."""
        return 1 - self.activation_density

    @property
    def derivative_sparsity(self) -> float:
        """1 − `derivative_density`."""
        return 1 - self.derivative_density


@dataclass(frozen=True)
class Densities:
    """The densities of every layer that ran, in the model's order; the model's own are means over layers."""

    layers: tuple[LayerDensity, ...]

    @property
    def activation_density(self) -> float:
        """The mean over layers."""
        return sum(layer.activation_density for layer in self.layers) / len(self.layers)

    @property
    def derivative_density(self) -> float:
        """The mean over layers."""
        return sum(layer.derivative_density for layer in self.layers) / len(self.layers)


class DensityRecorder:
    """Counts, inside a `with` block, the entries that every sparse MLP of a model finds active and with φ'(p) ≠ 0.

    A hook on each `SparseMLP` and `SparseGatedMLP` computes p (and u, where a threshold looks at it) once more from the
    module's input: one dense product a layer and call. Record some steps of a training run, not all. A graph that was
    compiled before the block does not see the hooks.

    Args:
        model: holds at least one sparse module.
    Raises:
        ValueError: it holds none; in the block, a module whose low-bit screen or input threshold decides.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = sparse_modules(model)
        self._counts: dict[str, Tensor] = {}
        self._entries: dict[str, int] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> DensityRecorder:
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def reset(self) -> None:
        """Forgets what was counted."""
        self._counts.clear()
        self._entries.clear()

    def result(self) -> Densities:
        """What was counted since the start or the last `reset`; calls of one layer are pooled.

        Raises:
            ValueError: no sparse module ran.
        """
        if not any(self._entries.values()):
            raise ValueError(
                "no sparse MLP of the model ran on any token, expected a call inside the `with` block; a compiled "
                "model must run uncompiled there"
            )
        layers = []
        for name, counts in self._counts.items():
            active, moving = counts.tolist()
            n = self._entries[name]
            if n:
                layers.append(LayerDensity(name, active / n, moving / n, n))
        order = list(self._modules)
        return Densities(tuple(sorted(layers, key=lambda layer: order.index(layer.name))))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            x = args[0] if args else kwargs["x"]
            with torch.no_grad():
                found = stored(module, x, kwargs.get("token_scale"))
                counts = _counts(found)
            old = self._counts.get(name)
            self._counts[name] = counts if old is None else old + counts
            self._entries[name] = self._entries.get(name, 0) + found.pre.numel()

        return hook


def _counts(s: Stored) -> Tensor:
    """(2,) int64: how many entries are active, and how many are kept with φ'(p) ≠ 0, as the backward decides."""
    if s.skipped_mean is None and not s.threshold.any():
        _, counts = sparsemlp.activation(s.pre, s.activation, params=s.activation_params, counts=True)
        return counts
    e = reference.entries(torch.zeros_like(s.pre), *s)
    return torch.stack([e.active.sum(), e.moving.sum()])


def densities(model: nn.Module, batch: Any) -> Densities:
    """The densities of one batch: `model` runs on it once, without gradients, in the mode it is in.

    Equivalent to::

        with torch.no_grad(), DensityRecorder(model) as recorder:
            model(batch)
        recorder.result()

    Args:
        model: holds at least one `SparseMLP` or `SparseGatedMLP`.
        batch: a tensor, a mapping of keyword arguments, or a tuple or list of arguments.

    Returns:
        `Densities`: of each layer `activation_density`, the fraction of (token, neuron) entries that are active, and
        `derivative_density`, the fraction that is kept and has φ'(p) ≠ 0: the patterns that forward and backward
        follow, of p as it is stored. Active is kept and φ(p) ≠ 0; with a `skipped_mean` just kept. NaN counts as not 0.
    Raises:
        ValueError: no sparse module, or one that ran, is in the model, or a screen or input threshold decides.
    Source: Peng et al., "A Theoretical Explanation of Activation Sparsity through Flat Minima and Adversarial
        Robustness", which calls these densities sparsity.
    """
    with torch.no_grad(), DensityRecorder(model) as recorder:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)
    return recorder.result()
