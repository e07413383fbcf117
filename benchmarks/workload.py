"""What every operator's workload shares: random layers, inputs that are new on every call, thresholds, densities.

How masks vary at a wanted density: weights are independent random numbers and every call gets an x never seen before,
so the magnitude that an operator compares with its threshold is random in (x, entry); a layer's threshold is the exact
quantile of it over calibration x's, so each call has about the wanted density, and which entries are active is drawn
anew for every call and every token.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.shapes import KINDS, Shape
from benchmarks.weight_bytes import share_read
from sparsemlp import activations

__all__ = ["Call", "Density", "Workload", "layers_beyond_cache", "phi", "threshold_at"]

Call = Callable[[int, Tensor], Tensor]
"""(layer, x of shape (T, D)) -> y."""

_CALIBRATION_TOKENS = 64
_CHECKED_TOKENS = 1024
_CHECKED_LAYERS = 4
_BLOCK = 2048


@dataclass(frozen=True)
class Density:
    """What the masks of the timed calls were.

    `density` is the mean over tokens and entries (neurons; for a linear layer input channels); `union` the mean
    fraction of entries that some token of a call wanted; `overlap` the fraction of a call's union that was also in the
    same layer's previous call's: `union` again for independent masks, 1 for a fixed one. `channels` is the union of the
    input channels that the gate reads under input sparsity.
    """

    density: float
    union: float
    overlap: float
    channels: float = 1.0


def layers_beyond_cache(bytes_per_layer: int, cache: int, least: int = 3) -> int:
    """How many layers a walk needs so that a layer has left the cache when its turn comes again.

    Even a walk that reads a third of the layers (the gates alone) must pass twice the cache; never fewer than `least`.
    """
    return max(least, math.ceil(6 * cache / bytes_per_layer))


_PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "identity": lambda p: p,
}


def phi(activation: str) -> Callable[[Tensor], Tensor]:
    """φ as a model calls it where PyTorch has one function for it; the activation table upcasts half precision."""
    return _PHI.get(activation) or functools.partial(activations.apply, name=activation)


class Workload(abc.ABC):
    """The layers, inputs and thresholds of one shape, dtype and token count.

    Args:
        shape: sizes.
        dtype: of x and the weights.
        tokens: rows of x in a call, T.
        activation: a row of `sparsemlp.activations.ACTIVATIONS` without parameters.
        layers: layers to cycle through.
        share: another workload of the same shape, dtype, activation and device, whose weights are used.
        device: where weights and inputs are made.
    """

    op: str
    """The operator."""
    kind: str
    """The kind of shape (of `benchmarks.shapes.KINDS`) that this workload can have."""
    compares: str = ""
    """A name for what is thresholded, where workloads that share weights differ in it."""
    matrices: int
    """Weight matrices of a layer, of shape.d · shape.f elements each."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        tokens: int,
        activation: str,
        layers: int,
        *,
        seed: int = 0,
        share: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if shape.kind != self.kind:
            raise ValueError(
                f"shape is {shape.name!r}, {shape.what}, expected {KINDS[self.kind]}; see shapes.py"
            )
        if activations.get(activation).params:
            raise ValueError(f"activation is {activation!r}, which has parameters, expected one without")
        self.shape, self.dtype, self.tokens, self.activation = shape, dtype, tokens, activation
        self.device = torch.device(device)
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        weights = torch.Generator(device).manual_seed(seed)
        made = share.layers if share is not None else [self._layer(weights) for _ in range(layers)]
        self.layers: list[Any] = made
        self._calibration: dict[tuple[str, int], Tensor] = share._calibration if share is not None else {}
        self._derived: dict[tuple[str, int], Any] = share._derived if share is not None else {}

    @abc.abstractmethod
    def _layer(self, generator: torch.Generator) -> Any:
        """One layer's random weights."""

    @abc.abstractmethod
    def own(self, sparsity: float, backend: str = "auto", weights: str = "float", apart: str = "") -> Call:
        """This package's operator with every layer's threshold set for `sparsity` (0: threshold 0).

        Args:
            weights: "float" for x's dtype, or "int8".
            apart: a name for copies of the matrices whose rows are skipped, "" for the layers' own. The router
                remembers how dense a layer's calls were by that matrix's address: sparsities that are timed in turn
                would each see the others' density, which no model does.
        """

    @abc.abstractmethod
    def compared(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """For x (N, D): the magnitudes that layer i compares with its threshold, and which entries are not exactly 0.

        Float32 and bool, (N, entries): what the kernels decide on, before rounding.
        """

    @classmethod
    def layer_bytes(cls, shape: Shape, itemsize: int) -> int:
        """Weight bytes of a layer."""
        return cls.matrices * shape.f * shape.d * itemsize

    @property
    def bytes_dense(self) -> int:
        """Weight bytes of a call that reads everything."""
        return self.layer_bytes(self.shape, self.dtype.itemsize)

    def itemsize(self, weights: str) -> int:
        """Bytes of a weight's entry."""
        return self.dtype.itemsize if weights == "float" else 1

    def bytes_read(self, union: float, channels: float = 1.0, weights: str = "float") -> float:
        """Weight bytes of a call that wants the fractions `union` of the entries and `channels` of the gate's input."""
        return self.layer_bytes(self.shape, self.itemsize(weights)) * share_read(self.op, union, channels)

    def channels(self, i: int, x: Tensor) -> Tensor | None:
        """The input channels of x (…, D) that the gate reads, bool; None: all."""
        return None

    def _matrix(self, rows: int, columns: int, inputs: int, generator: torch.Generator) -> Tensor:
        """Uniform weights of variance 1/inputs, so that what comes out is about N(0, 1)."""
        bound = (3 / inputs) ** 0.5
        empty = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return empty.uniform_(-bound, bound, generator=generator)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T in float32, without a wide copy of the weight."""
        wide = x.float()
        return torch.cat([wide @ rows.float().t() for rows in weight.split(_BLOCK)], dim=1)

    def derived(self, what: str, i: int, make: Callable[[], Any]) -> Any:
        """Something made once from layer i's weights (int8 weights, another layout), kept for all token counts."""
        if (what, i) not in self._derived:
            self._derived[what, i] = make()
        return self._derived[what, i]

    def apart(self, name: str, i: int, matrix: Tensor) -> Tensor:
        """Layer i's copy of the matrix under that name; itself without a name."""
        return self.derived(f"{name} {matrix.dtype}", i, matrix.clone) if name else matrix

    def fresh(self) -> list[Tensor]:
        """An x for every layer, never seen before: (T, D) each."""
        size = (len(self.layers), self.tokens, self.shape.d)
        return list(torch.randn(size, generator=self.generator, device=self.device).to(self.dtype).unbind())

    def _calibration_input(self, i: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1_000_003 + i)
        size = _CALIBRATION_TOKENS, self.shape.d
        return torch.randn(size, generator=generator, device=self.device).to(self.dtype)

    def threshold(self, i: int, sparsity: float) -> Tensor:
        """Layer i's threshold for `sparsity`: a 0-d float32 tensor, the exact quantile over calibration x's."""
        if sparsity <= 0:
            return torch.zeros((), device=self.device)
        key = self.compares, i
        if key not in self._calibration:
            self._calibration[key] = self.compared(i, self._calibration_input(i))[0].flatten().sort().values
        return threshold_at(self._calibration[key], sparsity)

    def active(self, i: int, x: Tensor, sparsities: Sequence[float]) -> list[Tensor]:
        """The masks of layer i at each sparsity for x of shape (…, D): (…, entries) bool."""
        found = self.compared(i, x.reshape(-1, x.shape[-1]))
        magnitude, nonzero = (t.reshape(*x.shape[:-1], -1) for t in found)
        return [~(magnitude < self.threshold(i, s)) & nonzero for s in sparsities]

    def densities(self, seen: dict[float, list[list[Tensor]]]) -> dict[float, Density]:
        """The density, unions and overlap of the calls that were timed.

        Args:
            seen: for each sparsity the inputs of its sweeps, `seen[s][round][layer]`. The first rounds and layers are
                evaluated (about 1,000 tokens a layer), not all.
        """
        rounds = max(2, _CHECKED_TOKENS // (self.tokens * max(1, len(seen))))
        sums = {s: [0.0, 0.0, 0.0, 0.0] for s in seen}
        checked = min(_CHECKED_LAYERS, len(self.layers))
        for i in range(checked):
            xs = {s: torch.stack([sweep[i] for sweep in sweeps[:rounds]]) for s, sweeps in seen.items()}
            for s, x in xs.items():
                (mask,) = self.active(i, x, [s])  # (rounds, T, entries)
                union = mask.any(dim=1)
                again = (union[1:] & union[:-1]).sum().item() / max(1, union[:-1].sum().item())
                read = self.channels(i, x)
                channels = 1.0 if read is None else read.any(dim=1).float().mean().item()
                values = mask.float().mean().item(), union.float().mean().item(), again, channels
                for j, value in enumerate(values):
                    sums[s][j] += value / checked
        return {s: Density(*values) for s, values in sums.items()}


def threshold_at(ordered: Tensor, sparsity: float) -> Tensor:
    """`ordered`'s value that the fraction `sparsity` lies below: active is not (m < t)."""
    k = round(sparsity * len(ordered))
    return ordered[k].clone() if k < len(ordered) else torch.full_like(ordered[0], float("inf"))
