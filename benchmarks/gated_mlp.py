"""What is timed for `gated_mlp`: layers of random weights, masks that are new on every call, the alternatives.

How masks vary at a wanted density: weights are independent random numbers and every call gets an x never seen before,
so |φ(p)| is random in (x, neuron); a layer's threshold is the exact quantile of |φ(p)| over calibration x's, so each
call has about the wanted density, and which neurons are active is drawn anew for every call and every token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks.shapes import Shape
from sparsemlp import activations

__all__ = ["Call", "Density", "GatedMlp", "Layer", "dense_mlp", "layers_beyond_cache"]

Call = Callable[[int, Tensor], Tensor]
"""(layer, x of shape (T, D)) -> y."""

_CALIBRATION_TOKENS = 64
_CHECKED_TOKENS = 1024
_CHECKED_LAYERS = 4
_BLOCK = 2048


@dataclass(frozen=True)
class Layer:
    """One layer's weights; the down projection in both layouts, because the dense peers want the other one."""

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    w_down_t: Tensor


@dataclass(frozen=True)
class Density:
    """What the masks of the timed calls were.

    `density` is the mean over tokens and neurons; `union` the mean fraction of neurons that some token of a call
    wanted; `overlap` the fraction of a call's union that was also in the same layer's previous call's: `union` again
    for independent masks, 1 for a fixed one.
    """

    density: float
    union: float
    overlap: float


def layers_beyond_cache(bytes_per_layer: int, cache: int) -> int:
    """How many layers a walk needs so that a layer has left the cache when its turn comes again.

    Even a walk that reads the gate alone (a third of the layer) must pass twice the cache; never fewer than three.
    """
    return max(3, math.ceil(6 * cache / bytes_per_layer))


_PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "identity": lambda p: p,
}
"""φ as a model calls it where PyTorch has one function for it; the activation table upcasts half precision."""


def dense_mlp(activation: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(x, w_gate, w_up, w_down) -> y: the dense MLP as a model writes it in PyTorch, W_down as nn.Linear has it."""
    phi = _PHI.get(activation) or functools.partial(activations.apply, name=activation)

    def dense(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(phi(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    return dense


class GatedMlp:
    """The workload of one shape, dtype and token count.

    Args:
        shape: sizes.
        dtype: of x and the weights.
        tokens: rows of x in a call, T.
        activation: a row of `sparsemlp.activations.ACTIVATIONS` without parameters.
        layers: layers to cycle through.
        share: another workload of the same shape, dtype, activation and device whose weights are used.
        device: where weights and inputs are made.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        tokens: int,
        activation: str,
        layers: int,
        *,
        seed: int = 0,
        share: GatedMlp | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not shape.gated:
            raise ValueError(
                f"shape is {shape.name!r}, an MLP without a gate, expected a gated one such as 'llama3-8b'"
            )
        if activations.get(activation).params:
            raise ValueError(f"activation is {activation!r}, which has parameters, expected one without")
        self.shape, self.dtype, self.tokens, self.activation = shape, dtype, tokens, activation
        self.device = torch.device(device)
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        weights = torch.Generator(device).manual_seed(seed)
        made = share.layers if share is not None else [self._layer(weights) for _ in range(layers)]
        self.layers: list[Layer] = made
        self._calibration: dict[int, Tensor] = share._calibration if share is not None else {}

    def _layer(self, generator: torch.Generator) -> Layer:
        d, f = self.shape.d, self.shape.f

        def matrix(inputs: int) -> Tensor:
            bound = (3 / inputs) ** 0.5  # variance 1/inputs: p, u and y are about N(0, 1)
            return torch.empty(f, d, dtype=self.dtype, device=self.device).uniform_(
                -bound, bound, generator=generator
            )

        gate, up, down_t = matrix(d), matrix(d), matrix(f)
        return Layer(gate, up, down_t.t().contiguous(), down_t)

    @property
    def bytes_dense(self) -> int:
        """Weight bytes of a call that reads everything."""
        return 3 * self.shape.f * self.shape.d * self.dtype.itemsize

    def bytes_read(self, union: float) -> float:
        """Weight bytes of a call that reads the gate, and up and down rows of the fraction `union` of the neurons."""
        return self.bytes_dense * (1 + 2 * union) / 3

    def fresh(self) -> list[Tensor]:
        """An x for every layer, never seen before: (T, D) each."""
        size = (len(self.layers), self.tokens, self.shape.d)
        return list(torch.randn(size, generator=self.generator, device=self.device).to(self.dtype).unbind())

    def own(self, sparsity: float, backend: str = "auto") -> Call:
        """This package's kernel with every layer's threshold set for `sparsity` (0: threshold 0)."""
        thresholds = [self.threshold(i, sparsity) for i in range(len(self.layers))]
        layers, activation = self.layers, self.activation

        def call(i: int, x: Tensor) -> Tensor:
            layer = layers[i]
            return sparsemlp.gated_mlp(
                x,
                layer.w_gate,
                layer.w_up,
                layer.w_down_t,
                threshold=thresholds[i],
                activation=activation,
                backend=backend,
            )

        return call

    def preactivation(self, i: int, x: Tensor) -> Tensor:
        """x W_gateᵀ of layer i in float32, (N, F): what the kernel decides on, before rounding."""
        wide = x.float()
        return torch.cat([wide @ rows.float().t() for rows in self.layers[i].w_gate.split(_BLOCK)], dim=1)

    def threshold(self, i: int, sparsity: float) -> Tensor:
        """Layer i's threshold for `sparsity`: a 0-d float32 tensor, the exact quantile over calibration x's."""
        if sparsity <= 0:
            return torch.zeros((), device=self.device)
        if i not in self._calibration:
            generator = torch.Generator(self.device).manual_seed(1_000_003 + i)
            x = torch.randn(_CALIBRATION_TOKENS, self.shape.d, generator=generator, device=self.device).to(
                self.dtype
            )
            a = activations.apply(self.preactivation(i, x), self.activation)
            self._calibration[i] = a.abs().flatten().sort().values
        values = self._calibration[i]
        k = round(sparsity * len(values))  # `k` values are below the k-th: active is not (|a| < t)
        return values[k].clone() if k < len(values) else torch.full((), float("inf"), device=self.device)

    def active(self, i: int, x: Tensor, sparsities: Sequence[float]) -> list[Tensor]:
        """The masks of layer i at each sparsity for x of shape (…, D): (…, F) bool."""
        a = activations.apply(self.preactivation(i, x.reshape(-1, x.shape[-1])), self.activation)
        a = a.reshape(*x.shape[:-1], -1)
        return [~(a.abs() < self.threshold(i, s)) & (a != 0) for s in sparsities]

    def densities(self, seen: dict[float, list[list[Tensor]]]) -> dict[float, Density]:
        """The density, union and overlap of the calls that were timed.

        Args:
            seen: for each sparsity the inputs of its sweeps, `seen[s][round][layer]`. The first rounds and layers are
                evaluated (about 1,000 tokens a layer), not all.
        """
        rounds = max(2, _CHECKED_TOKENS // (self.tokens * max(1, len(seen))))
        sums = {s: [0.0, 0.0, 0.0] for s in seen}
        checked = min(_CHECKED_LAYERS, len(self.layers))
        for i in range(checked):
            xs = {s: torch.stack([sweep[i] for sweep in sweeps[:rounds]]) for s, sweeps in seen.items()}
            for s, x in xs.items():
                (mask,) = self.active(i, x, [s])  # (rounds, T, F)
                union = mask.any(dim=1)
                again = (union[1:] & union[:-1]).sum().item() / max(1, union[:-1].sum().item())
                for j, value in enumerate((mask.float().mean().item(), union.float().mean().item(), again)):
                    sums[s][j] += value / checked
        return {s: Density(*values) for s, values in sums.items()}
