"""No training time is reported for gradients that are wrong: each is judged against float64 on the workload itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gate import GateError
from benchmarks.training import Leaves, Training, step_of
from sparsemlp.testing import assert_within_budget

__all__ = ["NAMES", "check", "truth"]

_TOKENS = 256
NAMES = {
    "mlp": ("out", "x", "w_in", "w_out", "b_in", "b_out"),
    "gated_mlp": ("out", "x", "w_gate", "w_up", "w_down", "b_gate"),
}
"""What a step returns."""


class _Relu(torch.autograd.Function):
    """relu whose pattern is given: the one that the dtype's own p has, since rounding moves an entry over 0."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, p: Tensor, positive: Tensor) -> Tensor:
        ctx.save_for_backward(positive)
        return torch.where(positive, p, 0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override] # PyTorch's signature is *grads
        (positive,) = ctx.saved_tensors  # type: ignore[attr-defined] # which FunctionCtx has at run time only
        return torch.where(positive, grad, 0), None


def truth(work: Training, x: Tensor, grad: Tensor, leaves: Leaves) -> list[Tensor]:
    """The dense step in float64, with the pattern of the dtype's p."""
    with torch.no_grad():
        positive = F.linear(x, leaves.firsts[0], leaves.b_first) > 0
    firsts = tuple(w.detach().double().requires_grad_() for w in leaves.firsts)
    last, b_first = (t.detach().double().requires_grad_() for t in (leaves.last, leaves.b_first))
    b_last = None if leaves.b_last is None else leaves.b_last.detach().double().requires_grad_()
    wide = Leaves(firsts, last, b_first, b_last)

    def forward(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        *ups, last, b_first, b_last = rest
        h = _Relu.apply(F.linear(x, w, b_first), positive)
        return F.linear(h * F.linear(x, ups[0]) if ups else h, last, b_last)

    return step_of(forward, wide)((x.detach().double().requires_grad_(), grad.double()))


def check(work: Training, densities: Sequence[float], backend: str) -> None:
    """Compares y and every gradient of this package with float64, the same-dtype PyTorch step being the measure.

    Args:
        work: whose weights are used, with fewer tokens.
        densities: all that will be timed.
    Raises:
        GateError: an output lies outside the budget of docs/numerics.md; one sentence.
    """
    for density in densities:
        dense, own = work.dense_leaves(density), work.own_leaves(density)
        x, grad = (t[: min(_TOKENS, work.tokens)].detach() for t in work.fresh())
        found = step_of(work.own(backend), own)((x.clone().requires_grad_(), grad))
        peer = step_of(work.dense, dense)((x.clone().requires_grad_(), grad))
        right = truth(work, x, grad, dense)
        # Only the last weight is stored the other way round, fourth among the gated MLP's and third of the others.
        last = 2 + len(own.firsts)
        found[last] = found[last].t()
        names = NAMES[work.op]
        for name, g, p, t in zip(names, found, peer, right, strict=True):
            try:
                assert_within_budget(g, p, t, what=f"grad {name}" if name != "out" else name)
            except AssertionError as error:
                raise GateError(
                    f"{work.op}: no result is reported because at density {density:.0%} a value is wrong ({error})"
                ) from None
