"""Training calls of both MLPs: gradients by their formulas in float64, from what the forward stored, and peers.

A forward rounds p, and u of a gated MLP, once to x's dtype and stores them; it and the backward decide from there. So
the truth is that of the stored values, whoever computed them. Formulas: docs/training.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from sparsemlp import activations
from sparsemlp._op import Op
from sparsemlp.ops import gated_mlp_training, mlp_training
from sparsemlp.testing import assert_within_budget, threshold_band
from tests import cases, mlp_cases
from tests.devices import device_of, on

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """One of the two MLPs: its function, its training operators, and where its samples come from."""

    function: Callable[..., Tensor]
    forward: Op
    backward: Op
    cases: ModuleType
    weights: tuple[str, ...]
    biases: tuple[str, ...]

    def __str__(self) -> str:
        return self.function.__name__

    @property
    def gated(self) -> bool:
        return len(self.weights) == 3

    @property
    def letters(self) -> str:
        """A case's `biases`, all of them."""
        return "".join(b[2] for b in self.biases)

    def case(self, name: str, **options: Any) -> Any:
        return self.cases.Case(name, **{"density": 1, "biases": self.letters, **options})

    def leaves(self, sample: Any) -> list[str]:
        """The tensors of a sample that have gradients."""
        some = (*self.biases, "skipped_mean", "skipped_out")
        return ["x", *self.weights, *(n for n in some if n in sample.options)]


UNGATED = Kind(
    sparsemlp.mlp, mlp_training.FORWARD, mlp_training.BACKWARD, mlp_cases, ("w_in", "w_out_t"), ("b_in", "b_out")
)  # fmt: skip
GATED = Kind(
    sparsemlp.gated_mlp, gated_mlp_training.FORWARD, gated_mlp_training.BACKWARD, cases,
    ("w_gate", "w_up", "w_down_t"), ("b_gate", "b_up", "b_down"),
)  # fmt: skip
KINDS = (UNGATED, GATED)


def changed(sample: Any, **tensors: Tensor) -> Any:
    """The sample with these of its tensors, which may be options."""
    own = {k: t for k, t in tensors.items() if k not in sample.options}
    rest = {k: t for k, t in tensors.items() if k in sample.options}
    return replace(sample, **own, options={**sample.options, **rest})


def raw(op: Op, sample: Any, backend: str, **more: Any) -> tuple[Any, ...]:
    """A registered operator's arguments, on the backend's device."""
    given = {**vars(sample), **sample.options, "backend": backend, **more}
    device = device_of(backend)
    return tuple(
        on(device, t) if isinstance(t := given.get(a.name), Tensor) else t
        for a in op.overload._schema.arguments
    )


def stored(kind: Kind, sample: Any, backend: str) -> tuple[Tensor, ...]:
    """out, p, and u of a gated MLP, as the backend's forward has them."""
    with torch.no_grad():
        found = kind.forward.overload(*raw(kind.forward, sample, backend))
    return tuple(t.cpu() for t in found)


def backward(
    kind: Kind, sample: Any, grad: Tensor, saved: tuple[Tensor, ...], backend: str, *wanted: str
) -> Grads:
    """The backward operator itself, of which every tensor may be another than the forward's."""
    more = {"grad": grad, **dict(zip(("pre", "up"), saved, strict=False)), "wanted": ",".join(wanted)}
    found = kind.backward.overload(*raw(kind.backward, sample, backend, **more))
    names = sparsemlp.reference.training.GATED_WANTED if kind.gated else sparsemlp.reference.training.WANTED
    return {name: g.cpu() for name, g in zip(names, found, strict=True)}


def gradients(kind: Kind, sample: Any, grad: Tensor, backend: str, names: list[str] | None = None) -> Grads:
    """By autograd through the public function; `grad` is ∂ℓ/∂y."""
    names = kind.leaves(sample) if names is None else names
    given = {**vars(sample), **sample.options}
    leaves = {n: given[n].detach().requires_grad_(True) for n in names}
    out = changed(sample, **leaves).run(kind.function, backend=backend)
    return dict(zip(names, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))


class Truth:
    """Of a sample, its stored p (and u) and ∂ℓ/∂y: output and gradients in float64, and what at most a flip adds.

    Attributes: `kept`, `active`, `moving` (T, F) bool; `out` (T, D); `grads` and `flips` by name ("out" of the latter
    too).
    """

    def __init__(self, kind: Kind, sample: Any, grad: Tensor, pre: Tensor, up: Tensor | None = None) -> None:
        self.kind, self.sample, self.stored = kind, sample, (pre, up)
        self.grad = grad
        p, u = pre.double(), torch.ones((), dtype=torch.float64) if up is None else up.double()
        params = sample.options.get("activation_params")
        self.params = params
        phi = self.phi = lambda p: activations.apply(p, sample.activation, _wide(params))
        a, slope = phi(p), activations.apply(p, sample.activation, _wide(params), derivative=True)
        indicator = getattr(sample, "indicator", "gate")
        m = {"gate": lambda p, u: phi(p), "up": lambda p, u: u, "product": lambda p, u: phi(p) * u}[indicator]
        limit = sample.threshold.double().expand(p.shape)
        if "token_scale" in sample.options:
            column = sample.options["token_scale"].double().reshape(-1, 1)
            limit = torch.where(column == 0, 0.0, column * limit)
        self.kept = ~(m(p, u.expand(p.shape)).abs() < limit)
        self.active = self.kept if "skipped_mean" in sample.options else self.kept & (a != 0)
        self.moving = self.kept & (slope != 0)
        self.out, self.grads = self._products(torch.float64, None)
        # φ of a stored value is known up to float32 rounding, so that is all that can move an entry.
        errors = tuple(4 * torch.finfo(torch.float32).eps * t.abs() for t in (p, u.expand(p.shape)))
        band = threshold_band(m, (p, u.expand(p.shape)), errors, limit) & (limit > 0)
        out, self.flips = self._products(torch.float64, None, band)
        self.flips["out"] = out

    def peers(self) -> list[tuple[Tensor, Grads]]:
        """Plain PyTorch operations in the sample's dtype with the truth's masks, in several orders of summation.

        So many because a bias's gradient has few numbers, whose largest error may by luck be next to nothing.
        """
        g = torch.Generator().manual_seed(0)
        return [self._products(self.sample.x.dtype, g if i > 0 else None) for i in range(12)]

    def _products(
        self, dtype: torch.dtype, order: torch.Generator | None, band: Tensor | None = None
    ) -> tuple[Tensor, Grads]:
        """Output and gradients; with `band` only its entries, everything by magnitude."""
        s, (pre, up), kind = self.sample, self.stored, self.kind
        magnitude = (lambda t: t.abs()) if band is not None else (lambda t: t)
        kept, active, moving = (self.kept, self.active, self.moving) if band is None else (band,) * 3

        def option(name: str) -> Tensor | None:
            return None if s.options.get(name) is None else magnitude(s.options[name].to(dtype))

        def mm(left: Tensor, right: Tensor) -> Tensor:
            if order is None:
                return left @ right
            among = torch.randperm(right.shape[0], generator=order)
            return left[:, among] @ right[among]

        x, grad = (magnitude(t.to(dtype)) for t in (s.x, self.grad))
        first, *middle, last = (magnitude(getattr(s, w).to(dtype)) for w in kind.weights)
        p, u = pre.to(dtype), magnitude(x.new_ones(()) if up is None else up.to(dtype))
        params = _wide(self.params) if dtype == torch.float64 else self.params
        a = magnitude(activations.apply(p, s.activation, params))
        slope = activations.apply(p, s.activation, params, derivative=True)
        mean, shift = option("skipped_mean"), option("skipped_out")
        hidden = a * u if mean is None else a * u + mean if band is not None else a * u - mean
        hidden = torch.where(active, hidden, 0)
        step = mm(grad, last.t())
        by_pre = torch.where(moving, step * u * magnitude(slope), 0)
        by_up = torch.where(active, step * a, 0)
        out = mm(hidden, torch.where(active.any(0)[:, None], last, 0))
        if band is None:
            for more in (option(kind.biases[-1]), shift):
                out = out if more is None else out + more
        grads = {"x": mm(by_pre, first), kind.weights[0]: mm(by_pre.t(), x)}
        grads[kind.weights[-1]] = mm(hidden.t(), grad)
        grads[kind.biases[0]], grads[kind.biases[-1]] = by_pre.sum(0), grad.sum(0)
        if middle:
            grads["x"] = grads["x"] + mm(by_up, middle[0])
            grads[kind.weights[1]], grads[kind.biases[1]] = mm(by_up.t(), x), by_up.sum(0)
        wide = dtype if dtype == torch.float64 else torch.float32
        total = torch.where(kept, step, 0).to(wide).sum(0)
        grads["skipped_mean"] = total if band is not None else -total
        grads["skipped_out"] = grad.to(wide).sum(0)
        return out, grads


def _wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def grad_of(sample: Any) -> Tensor:
    """Some ∂ℓ/∂y of the sample's output, (T, D)."""
    g = torch.Generator().manual_seed(sample.x.numel() + 1)
    return torch.randn(sample.x.shape, generator=g).to(sample.x.dtype)


def check(
    kind: Kind, sample: Any, backend: str, grad: Tensor | None = None, found: Grads | None = None
) -> Grads:
    """Output and all gradients of a call are within the budget of the truth; returns the gradients."""
    grad = grad_of(sample) if grad is None else grad
    out, *saved = stored(kind, sample, backend)
    truth = Truth(kind, sample, grad, *saved)
    found = gradients(kind, sample, grad, backend) if found is None else found
    peers = truth.peers()
    _check_stored(kind, sample, saved)
    assert_within_budget(out, [p[0] for p in peers], truth.out, flips=truth.flips["out"])
    for name, g in found.items():
        given = {**vars(sample), **sample.options}[name]
        assert g.shape == given.shape, name
        assert g.dtype == given.dtype, name
        own = [p[1][name] for p in peers]
        assert_within_budget(g, own, truth.grads[name], flips=truth.flips[name], what=f"∂ℓ/∂{name}")
    return found


def _check_stored(kind: Kind, sample: Any, saved: list[Tensor]) -> None:
    for t, w, b in zip(saved, kind.weights, kind.biases, strict=False):
        weight, bias = getattr(sample, w), sample.options.get(b)
        truth = F.linear(sample.x.double(), weight.double(), _wide(bias))
        peers = []
        for i in range(4):
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(i))
            peers.append(F.linear(sample.x[:, order], weight[:, order], bias))
        assert_within_budget(t, peers, truth, what=w)
