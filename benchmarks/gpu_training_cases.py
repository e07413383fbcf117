"""The launches of a training step that are compiled without a GPU: the plans "training …" of `benchmarks.gpu_cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.gpu_cases import Case
    from sparsemlp.kernels._launch import Launch
    from sparsemlp.kernels._training_entries import Stored
    from sparsemlp.kernels._training_lists import Lists

__all__ = ["PLANS"]

_ENTRIES = 100_000
_NAMES = {"x", "w_gate", "w_up", "w_down_t", "b_gate", "b_up"}


class _Call:
    """A case's tensors, on the meta device; its option "ungated" leaves out the up rows."""

    def __init__(self, case: Case) -> None:
        from benchmarks.gpu_cases import DTYPES, rule_of
        from sparsemlp.kernels import training

        self.dtype = DTYPES[case.dtype]
        ungated = "ungated" in case.options
        rule = rule_of(case, "ungated" if ungated else None)
        self.config = training.default(self.dtype)
        self.pre, self.x = self.meta(case.tokens, case.f), self.meta(case.tokens, case.d)
        self.w = self.meta(case.f, case.d)
        self.rule, self.up = rule, None if ungated else self.meta(case.tokens, case.f)
        self.names = _NAMES | ({"skipped_mean"} if rule.skipped_mean is not None else set())
        self.bias = self.meta(case.d) if "biases" in case.options else None
        self.shift = None if rule.skipped_mean is None else self.meta(case.d, dtype=torch.float32)

    def meta(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=self.dtype if dtype is None else dtype, device="meta")

    @property
    def stored(self) -> Stored:
        from sparsemlp.kernels._training_entries import Stored

        return Stored(self.pre, self.up, self.rule)


def _entries(case: Case) -> list[Launch]:
    from sparsemlp.kernels import _training_entries

    call = _Call(case)
    return [_training_entries.gradients(call.pre, call.stored, call.names, call.config)[1]]


def _repair(case: Case, *, by_neuron: bool) -> list[Launch]:
    from sparsemlp.kernels import _training_entries

    call = _Call(case)
    out, factor = (call.w, call.x) if by_neuron else (call.x, call.w)
    more = None if by_neuron or call.up is None else (call.pre, call.w)
    return [
        _training_entries.repair(
            out, call.pre, factor, call.stored, call.config, by_neuron=by_neuron, moving=True, more=more
        )
    ]


def _living(case: Case, part: str) -> list[Launch]:
    from sparsemlp.kernels import _training_living

    call = _Call(case)
    flags, launch = _training_living.flags(call.stored, call.config, both=True)
    order = _training_living.ordered(flags)
    if part == "rows":
        biases = {"bias": call.bias, "skipped_out": call.shift}
        return [_training_living.rows_product(call.pre, call.w, order, call.config, **biases)[1]]
    if part == "hidden":
        return [_training_living.hidden_product(call.x, call.w, order, call.config)[1]]
    if part == "weights":
        return [_training_living.weight_product(call.pre, call.x, order, call.config)[1]]
    return [launch]


def _lists(case: Case, part: str) -> list[Launch]:
    from sparsemlp.kernels import _training_lists

    call = _Call(case)
    _, count = _training_lists.counts(call.stored, call.config, both=True)
    starts = call.meta(case.tokens + 1, dtype=torch.int64)
    lists, fill = _training_lists.filled(call.stored, starts, _ENTRIES, call.config, both=True)
    values, launch = _training_lists.values(call.stored, lists, call.names, call.config, call.x, call.w)
    if part == "lists":
        return [count, fill, launch]
    assert values.grad_pre is not None
    if part == "neurons":
        turned: Lists = _training_lists.by_neuron(lists, case.f)
        return [
            _training_lists.product(turned, values.grad_pre, call.x, call.dtype, call.config, moving=True)[1]
        ]
    more = None if values.grad_up is None else (values.grad_up, call.w)
    options = {"more": more, "bias": call.bias, "skipped_out": call.shift}
    return [
        _training_lists.product(
            lists, values.grad_pre, call.w, call.dtype, call.config, moving=True, **options
        )[1]
    ]


PLANS: dict[str, Callable[[Case], list[Launch]]] = {
    "training entries": _entries,
    "training repair_x": lambda case: _repair(case, by_neuron=False),
    "training repair_w": lambda case: _repair(case, by_neuron=True),
    "training living": lambda case: _living(case, "flags"),
    "training living_rows": lambda case: _living(case, "rows"),
    "training living_hidden": lambda case: _living(case, "hidden"),
    "training living_weights": lambda case: _living(case, "weights"),
    "training lists": lambda case: _lists(case, "lists"),
    "training gather_rows": lambda case: _lists(case, "rows"),
    "training gather_weights": lambda case: _lists(case, "neurons"),
}
"""A case's launches, by name."""
