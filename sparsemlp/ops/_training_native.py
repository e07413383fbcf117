"""Launches the compiled training kernels: by lists of what is not zero, or by PyTorch's products of living neurons.

Every call counts the entries that are not zero and takes the way that is faster at that density.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import _native, activations
from sparsemlp._layout import float32_run, in_memory, with_rows
from sparsemlp.ops._products import hidden
from sparsemlp.reference.gated_mlp import gemm_bias, kept_entries
from sparsemlp.reference.training import GATED_WANTED, WANTED, names_of
from sparsemlp.router import training

__all__ = ["break_even", "forced", "gated_mlp_bwd", "gated_mlp_fwd", "mlp_bwd", "mlp_fwd", "output"]

_forced: list[float] = []

_LIVING = 0.9
"""Share of neurons that must live for the others to be worth no copy of the weights without them."""

_MOST_ENTRIES = 2**31
_SURELY = 1.25
"""Times the break-even that some of the tokens must show for the others not to be counted."""

_INDICATORS = {"gate": 0, "up": 1, "product": 2}

_RULE = (
    "Tensor pre, Tensor? up, Tensor threshold, Tensor? token_scale, Tensor? skipped_mean, Tensor? activation_params, "
    "int activation, int indicator"
)
_lib = torch.library.Library("sparsemlp", "FRAGMENT")
_lib.define("_finite_native(Tensor t) -> bool")
_lib.define(f"_train_masks_native({_RULE}, float enough, int isa) -> (Tensor, Tensor, Tensor)")
_lib.define(
    f"_train_forward_native(Tensor bits, {_RULE}, Tensor w_out_t, Tensor? b_out, Tensor? skipped_out, int isa) "
    "-> Tensor"
)
_lib.define(
    "_train_backward_native(Tensor bits, bool same, Tensor grad, Tensor x, Tensor w_gate, Tensor? w_up, "
    f"Tensor w_out_t, {_RULE}, int wanted, int isa) -> ({', '.join(['Tensor'] * 7)})"
)
_lib.define(f"_train_entries_native(Tensor(a!) grad_hidden, {_RULE}, int isa) -> Tensor")
_all_finite = torch.ops.sparsemlp._finite_native.default
_masks = torch.ops.sparsemlp._train_masks_native.default
_by_lists = torch.ops.sparsemlp._train_forward_native.default
_by_lists_bwd = torch.ops.sparsemlp._train_backward_native.default
_entries = torch.ops.sparsemlp._train_entries_native.default


@contextlib.contextmanager
def forced(break_even: float) -> Iterator[None]:
    """In the block every call goes by lists below this density, whatever the machine is: inf always, 0 never."""
    _forced.append(break_even)
    try:
        yield
    finally:
        _forced.pop()


def break_even(dtype: torch.dtype) -> float:
    """Density of entries below which products by lists are faster than PyTorch's."""
    return _forced[-1] if _forced else training.break_even(dtype)


class Stored(NamedTuple):
    """What patterns are made from, in the order of the compiled operators' arguments; the last is an id."""

    pre: Tensor
    up: Tensor | None
    threshold: Tensor
    token_scale: Tensor | None
    skipped_mean: Tensor | None
    params: Tensor | None
    activation: int
    indicator: int

    def among(self, neurons: Tensor) -> Stored:
        """Of these neurons only, in a copy."""

        def chosen(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.dim() == 0 else t.index_select(t.dim() - 1, neurons)

        pre, threshold = chosen(self.pre), chosen(self.threshold)
        assert pre is not None
        assert threshold is not None
        return self._replace(
            pre=pre, threshold=threshold, up=chosen(self.up), skipped_mean=chosen(self.skipped_mean)
        )


class Pattern(NamedTuple):
    """Which entries of a call are active, and which are kept with φ'(p) ≠ 0: as bits, and how many.

    Where some of the tokens showed that lists do not pay, the bits are empty, and the counts are estimates.
    """

    bits: Tensor
    size: int
    living: Tensor
    active: int
    moving: int
    both: int

    @property
    def same(self) -> bool:
        return self.active == self.both == self.moving

    def neurons(self) -> Tensor:
        """Which neurons have any entry, (F,) bool."""
        return self.living[0] | self.living[1]

    def by_lists(self, entries: int, living: Tensor, dtype: torch.dtype) -> bool:
        """Whether products by lists of `entries` are faster than dense ones of the living neurons."""
        if self.bits.numel() == 0 < self.size or entries >= _MOST_ENTRIES:
            return False
        limit = break_even(dtype)
        return limit == math.inf or entries * living.numel() < limit * self.size * int(living.sum())


def _pattern(stored: Stored, *, whole: bool = False) -> Pattern:
    """The pattern of what is stored; with `whole`, its bits whatever the density."""
    enough = math.inf if whole else _SURELY * break_even(stored.pre.dtype)
    bits, counts, living = _masks(*stored, enough, _native.isa())
    active, moving, both = counts.tolist()
    return Pattern(bits, stored.pre.numel(), living, active, moving, both)


def _stored(
    pre: Tensor,
    up: Tensor | None,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    params: Tensor | None,
    activation: str,
    indicator: str,
) -> Stored:
    limit = float32_run(threshold)
    assert limit is not None
    scale, mean, values = (float32_run(t) for t in (token_scale, skipped_mean, params))
    return Stored(pre, up, limit, scale, mean, values, activations.IDS[activation], _INDICATORS[indicator])


def mlp_fwd(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """The operator's arguments in order."""
    pre = F.linear(x, w_in, b_in)
    stored = _stored(pre, None, threshold, token_scale, skipped_mean, activation_params, activation, "gate")
    return _output(stored, w_out_t, b_out, skipped_out), pre


def output(pre: Tensor, w_out_t: Tensor, threshold: Tensor, activation: str) -> Tensor:
    """What `mlp_fwd` does after its dense product, without what is optional."""
    return _output(_stored(pre, None, threshold, None, None, None, activation, "gate"), w_out_t, None, None)


def gated_mlp_fwd(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's arguments in order."""
    pre, up = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    stored = _stored(pre, up, threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    return _output(stored, w_down_t, b_down, skipped_out), pre, up


def _output(stored: Stored, w_t: Tensor, b: Tensor | None, skipped_out: Tensor | None) -> Tensor:
    if stored.pre.numel() == 0 or w_t.numel() == 0:
        bias = gemm_bias(b, skipped_out, w_t.dtype)
        return F.linear(stored.pre, w_t.t(), bias)
    pattern = _pattern(stored)
    if not pattern.by_lists(pattern.active, pattern.living[0], w_t.dtype):
        h, w = _hidden(stored), w_t
        neurons = _few(pattern.living[0])
        if neurons is not None:
            h, w = h.index_select(1, neurons), w_t.index_select(0, neurons)
        out = F.linear(h, w.t(), gemm_bias(b, skipped_out, w.dtype))
        if _finite(out):
            return out
        pattern = _pattern(stored, whole=True)  # an inf or NaN, perhaps times the 0 of a skipped neuron
    return _by_lists(pattern.bits, *stored, w_t, float32_run(b), float32_run(skipped_out), _native.isa())


def _hidden(stored: Stored) -> Tensor:
    return hidden(*stored, _native.isa())


def _few(living: Tensor) -> Tensor | None:
    """The living neurons where they are so few that a copy without the others pays."""
    neurons = living.nonzero().flatten()
    return neurons if neurons.numel() <= _LIVING * living.numel() else None


def _finite(*products: Tensor) -> bool:
    return all(_all_finite(t) for t in products)


def mlp_bwd(
    grad: Tensor,
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    pre: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    """The operator's arguments in order."""
    stored = _stored(pre, None, threshold, token_scale, skipped_mean, activation_params, activation, "gate")
    names = {_AS_GATED.get(name, name) for name in names_of(wanted)}
    found = _backward(stored, Operands(with_rows(in_memory(grad)), with_rows(x), w_in, None, w_out_t), names)
    return _results(x, skipped_mean, found, tuple(_AS_GATED.get(name, name) for name in WANTED))


_AS_GATED = {"w_in": "w_gate", "b_in": "b_gate", "w_out_t": "w_down_t"}


def gated_mlp_bwd(
    grad: Tensor,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    pre: Tensor,
    up: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    """The operator's arguments in order."""
    stored = _stored(pre, up, threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    operands = Operands(with_rows(in_memory(grad)), with_rows(x), w_gate, w_up, w_down_t)
    found = _backward(stored, operands, set(names_of(wanted)))
    return _results(x, skipped_mean, found, GATED_WANTED)


def _results(
    x: Tensor, skipped_mean: Tensor | None, found: dict[str, Tensor], names: tuple[str, ...]
) -> tuple[Tensor, ...]:
    mean = x.new_empty((0,), dtype=torch.float32 if skipped_mean is None else skipped_mean.dtype)
    none = {name: x.new_empty((0,)) for name in names} | {"skipped_mean": mean}
    return tuple(found[name].to(none[name].dtype) if name in found else none[name] for name in names)


class Operands(NamedTuple):
    """What a backward pass multiplies besides what is stored."""

    grad: Tensor
    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down_t: Tensor

    def among(self, neurons: Tensor) -> Operands:
        """With the rows of these neurons only, in copies."""
        weights = (w if w is None else w.index_select(0, neurons) for w in self[2:])
        return Operands(self.grad, self.x, *weights)  # type: ignore[arg-type] # two of the three are never None


def _backward(stored: Stored, operands: Operands, names: set[str]) -> dict[str, Tensor]:
    """The gradients of `names`, each by what is faster at the density of the pattern that it follows."""
    if stored.pre.numel() == 0 or operands.x.numel() == 0:
        return _dense_products(stored, operands, names)
    pattern, dtype = _pattern(stored), operands.x.dtype
    active = pattern.by_lists(pattern.active, pattern.living[0], dtype)
    moving = pattern.by_lists(pattern.moving, pattern.living[1], dtype)
    sparse = {"w_down_t", "w_up", "b_up", "skipped_mean"} if active else set()
    if moving:
        sparse |= {"w_gate", "b_gate"} | ({"x"} if active or stored.up is None else set())
    dense = names - sparse
    found = _dense_backward(stored, operands, dense, pattern.neurons()) if dense else {}
    if not _finite(*found.values()):  # perhaps an inf or NaN times the 0 of what is masked
        found, dense, pattern = {}, set(), _pattern(stored, whole=True)
    return found | _sparse_backward(stored, operands, names - dense, pattern)


def _sparse_backward(
    stored: Stored, operands: Operands, names: set[str], pattern: Pattern
) -> dict[str, Tensor]:
    if not names:
        return {}
    wanted = sum(1 << i for i, name in enumerate(_ORDER) if name in names)
    grads = _by_lists_bwd(pattern.bits, pattern.same, *operands, *stored, wanted, _native.isa())
    return {name: g for name, g in zip(_ORDER, grads, strict=True) if name in names}


_ORDER = ("x", "w_gate", "w_up", "w_down_t", "b_gate", "b_up", "skipped_mean")


def _dense_backward(stored: Stored, operands: Operands, names: set[str], living: Tensor) -> dict[str, Tensor]:
    neurons = _few(living)
    if neurons is None:
        return _dense_products(stored, operands, names)
    found = _dense_products(stored.among(neurons), operands.among(neurons), names)
    for name, g in found.items():
        if name != "x":
            found[name] = g.new_zeros((living.numel(), *g.shape[1:])).index_copy_(0, neurons, g)
    return found


def _dense_products(stored: Stored, operands: Operands, names: set[str]) -> dict[str, Tensor]:
    grad, x, w_gate, w_up, w_down_t = operands
    found: dict[str, Tensor] = {}
    if (
        "w_down_t" in names
    ):  # before there is a second (T, F): h and ∂ℓ/∂h in one pass saved 0.3 % of a step's time
        found["w_down_t"] = _hidden(stored).t() @ grad
    if names == {"w_down_t"}:
        return found
    step = grad @ w_down_t.t()  # ∂ℓ/∂h, and from `_entries` on ∂ℓ/∂p
    if "skipped_mean" in names:
        found["skipped_mean"] = _grad_mean(stored, step)
    grad_up = _entries(step, *stored, _native.isa())
    if "w_gate" in names:
        found["w_gate"] = step.t() @ x
    if "b_gate" in names:
        found["b_gate"] = step.sum(dim=0)
    if "x" in names:
        found["x"] = step @ w_gate
    if w_up is None:
        return found
    if "x" in names:
        found["x"] = found["x"].addmm_(grad_up, w_up)
    if "w_up" in names:
        found["w_up"] = grad_up.t() @ x
    if "b_up" in names:
        found["b_up"] = grad_up.sum(dim=0)
    return found


def _grad_mean(stored: Stored, grad_hidden: Tensor) -> Tensor:
    """−Σ ∂ℓ/∂h over kept entries, (F,) float32."""
    names = {i: name for name, i in activations.IDS.items()}
    a = activations.apply(stored.pre.float(), names[stored.activation], stored.params)
    u = a.new_ones(()) if stored.up is None else stored.up.float()
    indicator = next(name for name, i in _INDICATORS.items() if i == stored.indicator)
    kept = kept_entries(a, u, stored.threshold, stored.token_scale, indicator)
    return -torch.where(kept, grad_hidden.float(), 0).sum(dim=0)
