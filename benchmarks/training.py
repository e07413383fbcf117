"""What is timed for training: forward and backward of one MLP, by PyTorch and by this package.

Weights are independent uniform numbers of variance 1/inputs and x is from N(0, 1), so p is about N(0, 1) before its
bias; one number b, with Φ(b) the wanted density, is every neuron's bias of p. φ is relu, so activation and derivative
have one pattern. Every call gets an x and a gradient never seen before: which entries are active is drawn anew.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks.compiled import QUIET
from benchmarks.shapes import Shape
from benchmarks.timing import Timed, trial

__all__ = ["OPS", "SETTINGS", "Leaves", "Step", "Training", "bias_for", "compiled", "step_of"]

OPS = ("mlp", "gated_mlp")
_ALL = 9.0
"""A bias so many deviations up that no p is negative."""

SETTINGS: dict[str, dict[str, bool]] = {"default": {}, "max-autotune": {"max_autotune": True}}
"""Inductor's settings for training: weights that change cannot be frozen."""

Forward = Callable[..., Tensor]
Step = Callable[[tuple[Tensor, Tensor]], list[Tensor]]
"""(x, ∂ℓ/∂y) -> y, ∂ℓ/∂x and the gradients of `Leaves`, in their order."""


@dataclass(frozen=True)
class Leaves:
    """One MLP's parameters, each of which gets a gradient; `last` as the alternative stores it.

    `firsts` are (w_in,) or (w_gate, w_up); `b_first` is the bias of p, which sets the density; `b_last` None: none.
    """

    firsts: tuple[Tensor, ...]
    last: Tensor
    b_first: Tensor
    b_last: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [t for t in (*self.firsts, self.last, self.b_first, self.b_last) if t is not None]


def bias_for(density: float) -> float:
    """What is added to a p from N(0, 1) so that this fraction of them is positive."""
    if density >= 1:
        return _ALL
    return float(torch.special.ndtri(torch.tensor(density, dtype=torch.float64)))


def step_of(forward: Forward, leaves: Leaves) -> Step:
    """Forward and backward: y and all gradients, none of them added to others."""
    tensors = leaves.tensors()

    def step(inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        x, grad = inputs
        out = forward(x, *leaves.firsts, leaves.last, leaves.b_first, leaves.b_last)
        return [out.detach(), *torch.autograd.grad(out, [x, *tensors], grad)]

    return step


class Training:
    """The weights and inputs of one shape, dtype and token count.

    Args:
        op: of `OPS`.
        shape: sizes; its activation is relu.
        dtype: of x and the weights.
        tokens: rows of x in a call, T.
    """

    def __init__(self, op: str, shape: Shape, dtype: torch.dtype, tokens: int, seed: int = 0) -> None:
        self.op, self.shape, self.dtype, self.tokens = op, shape, dtype, tokens
        self._generator = torch.Generator().manual_seed(seed)
        d, f = shape.d, shape.f
        firsts = tuple(self._matrix(f, d, d) for _ in range(1 if op == "mlp" else 2))
        last_t = self._matrix(f, d, f)
        b_last = None
        if op == "mlp":  # as ViT and OPT; gated MLPs have none
            b_last = self._leaf(0.1 * torch.randn(d, generator=self._generator))
        self._own = Leaves(firsts, last_t, last_t.new_zeros(f), b_last)
        self._dense = dataclasses.replace(self._own, last=self._leaf(last_t.detach().t().contiguous()))

    def _leaf(self, t: Tensor) -> Tensor:
        return t.to(self.dtype).requires_grad_()

    def _matrix(self, rows: int, columns: int, inputs: int) -> Tensor:
        bound = (3 / inputs) ** 0.5
        return self._leaf(torch.empty(rows, columns).uniform_(-bound, bound, generator=self._generator))

    def _with(self, leaves: Leaves, density: float) -> Leaves:
        return dataclasses.replace(leaves, b_first=self._leaf(torch.full((self.shape.f,), bias_for(density))))

    def fresh(self) -> tuple[Tensor, Tensor]:
        """An x that wants a gradient, and a ∂ℓ/∂y, never seen before: (T, D) each."""
        x, grad = torch.randn(2, self.tokens, self.shape.d, generator=self._generator).to(self.dtype).unbind()
        return x.clone().requires_grad_(), grad

    def dense_leaves(self, density: float = 0.5) -> Leaves:
        """Parameters as `nn.Linear` stores them. A dense MLP takes as long at every density."""
        return self._with(self._dense, density)

    def own_leaves(self, density: float) -> Leaves:
        """Parameters with the last weight neuron by neuron."""
        return self._with(self._own, density)

    @property
    def dense(self) -> Forward:
        """The dense MLP in plain PyTorch, of x and what `Leaves` has in its order."""
        return _dense_mlp if self.op == "mlp" else _dense_gated_mlp

    def own(self, backend: str = "auto") -> Forward:
        """This package's operator, likewise."""
        operator = getattr(sparsemlp, self.op)
        first, last = ("b_in", "b_out") if self.op == "mlp" else ("b_gate", "b_down")

        def forward(x: Tensor, *leaves: Tensor | None) -> Tensor:
            *weights, b_first, b_last = leaves
            biases = {first: b_first, last: b_last}
            return operator(x, *weights, threshold=0.0, activation="relu", backend=backend, **biases)

        return forward

    def density(self, x: Tensor, leaves: Leaves) -> float:
        """The fraction of entries with p > 0, as the forward pass rounds p."""
        with torch.no_grad():
            return (F.linear(x, leaves.firsts[0], leaves.b_first) > 0).double().mean().item()

    def timed(self, name: str, step: Step, seen: list[Tensor] | None = None) -> Timed:
        """For `benchmarks.timing.interleave`; the inputs go into `seen`."""

        def prepare() -> tuple[Tensor, Tensor]:
            inputs = self.fresh()
            if seen is not None:
                seen.append(inputs[0].detach())
            return inputs

        return Timed(name, prepare, step, calls=1)


def _dense_mlp(x: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor, b_out: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, w_in, b_in)), w_out, b_out)


def _dense_gated_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_gate: Tensor, b_down: Tensor | None
) -> Tensor:
    return F.linear(F.relu(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up), w_down, b_down)


def compiled(
    work: Training, settings: dict[str, dict[str, bool]] | None = None
) -> tuple[str, Step, dict[str, float]]:
    """The dense MLP compiled, forward and backward, at the fastest setting in a short trial.

    Returns:
        The setting's name, the step, and each setting's seconds of compilation.
    Raises:
        RuntimeError: no setting compiles; one sentence.
    """
    leaves = work.dense_leaves()
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    problem = ""
    for name, setting in (SETTINGS if settings is None else settings).items():
        start = time.perf_counter()
        try:
            with torch._inductor.config.patch(QUIET):
                forward = torch.compile(work.dense, dynamic=False, options=setting or None)
                step = step_of(forward, leaves)
                step(work.fresh())  # the backward is compiled in here too
        except Exception as error:  # the compiler raises whatever its back end raises
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        steps[name], seconds[name] = step, time.perf_counter() - start
    if not steps:
        raise RuntimeError(f"torch.compile is left out because no setting compiled here ({problem})")
    best = next(iter(steps))
    if len(steps) > 1:
        tried = trial([work.timed(name, step) for name, step in steps.items()])
        best = min(tried, key=lambda name: tried[name])
    return best, steps[best], seconds
