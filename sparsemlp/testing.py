"""Tolerances by measurement: how much a result may differ from the truth is computed, never picked by hand.

The rule, for a result and a peer of one dtype and a truth in float64::

    |actual − truth| ≤ 2·max|peer − truth| + eps·max|truth| (+ flips)

`peer` is what plain PyTorch computes in the same dtype with the truth's mask, several of them where one evaluation
could be lucky (other summation orders). `flips` is for operators that compare with a threshold: entries whose
indicator lies within rounding error of it may go either way, and what such an entry carries is added.

Typical use, for a kernel that skips by threshold::

    band = threshold_band(act, pre, linear_error(x, w_gate, b_gate, decided_from=torch.float32), limit)
    assert_within_budget(out, peers, truth, flips=flip_budget(band, hidden, w_down_t))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["assert_within_budget", "budget", "flip_budget", "linear_error", "threshold_band"]

_FLOAT32_EPS = torch.finfo(torch.float32).eps


def budget(peers: Tensor | Sequence[Tensor], truth: Tensor, dtype: torch.dtype) -> float:
    """The error allowed everywhere: 2·max|peer − truth| + eps·max|truth|.

    Args:
        peers: one or more same-dtype PyTorch results, any float dtype, truth's shape.
        truth: float64.
        dtype: the dtype of the result that is judged; eps is its spacing at 1.

    Returns:
        A finite number ≥ 0. Entries that are not finite in the truth, in `dtype` or in the peer are left out of the
        maxima.
    """
    in_range = truth.isfinite() & (truth.abs() <= torch.finfo(dtype).max)
    if not bool(in_range.any()):
        return 0.0
    worst = 0.0
    for peer in [peers] if isinstance(peers, Tensor) else peers:
        error = (peer.double() - truth).abs()[in_range & peer.isfinite()]
        worst = max(worst, error.max().item() if error.numel() else 0.0)
    return 2 * worst + torch.finfo(dtype).eps * truth[in_range].abs().max().item()


def assert_within_budget(
    actual: Tensor,
    peers: Tensor | Sequence[Tensor],
    truth: Tensor,
    *,
    flips: Tensor | None = None,
    what: str = "out",
) -> None:
    """Raises AssertionError, naming the worst entry, unless `actual` is within the budget of `truth` everywhere.

    NaN must be where the truth has NaN and nowhere else. Infinity must be where the truth is infinite or beyond the
    dtype's range, with its sign; within the budget of the range's end either is accepted.

    Args:
        actual: the result to judge; its dtype is the one of the budget.
        peers: same-dtype PyTorch results, see `budget`.
        truth: float64, actual's shape.
        flips: what entries at the threshold may add, float64, broadcastable to truth; see `flip_budget`.
        what: the result's name in the message.
    """
    assert actual.shape == truth.shape, (
        f"{what} has shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    )
    if truth.numel() == 0:
        return
    allowed = torch.full_like(truth, budget(peers, truth, actual.dtype))
    if flips is not None:
        allowed = allowed + flips * (1 + torch.finfo(actual.dtype).eps)  # a flipped output is rounded too
    wide = actual.double()
    limit = torch.finfo(actual.dtype).max
    close = (wide - truth).abs() <= allowed
    overflowed = wide.isinf() & (wide.sign() == truth.sign()) & (truth.abs() + allowed >= limit)
    good = close | overflowed | (wide.isnan() & truth.isnan())
    if bool(good.all()):
        return
    excess = torch.where(
        good, torch.zeros_like(truth), ((wide - truth).abs() - allowed).nan_to_num(torch.inf)
    )
    where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), truth.shape))
    raise AssertionError(
        f"{what}: {int((~good).sum())} of {good.numel()} entries outside the budget; worst at {where}: "
        f"{wide[where].item():.9g}, truth {truth[where].item():.9g}, allowed error {allowed[where].item():.3g}"
    )


def linear_error(x: Tensor, w: Tensor, bias: Tensor | None, *, decided_from: torch.dtype) -> Tensor:
    """A bound on the error of x @ w.T + bias, accumulated in float32 and then rounded once to `decided_from`.

    Args:
        x: (T, D), w: (N, D), bias: (N,) or None, any float dtype.
        decided_from: float32 for kernels that decide on unrounded accumulators, else the dtype they round to;
            float64 for a float64 computation.

    Returns:
        (T, N) float64: 2·(sqrt(D) + 1) float32 roundings of Σ|x||w| for the summation, since independent roundings
        grow with the square root of their number, and half a spacing of `decided_from` for the final rounding.
    """
    x, w = x.double(), w.double()
    exact = x @ w.T
    size = x.abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    unit = torch.finfo(torch.float64).eps if decided_from == torch.float64 else _FLOAT32_EPS
    bound = unit * (x.shape[1] ** 0.5 + 1) * size
    if decided_from not in (torch.float32, torch.float64):
        info = torch.finfo(decided_from)
        bound = bound + 0.5 * info.eps * exact.abs() + info.smallest_normal * info.eps
    return bound


def threshold_band(
    indicator: Callable[..., Tensor],
    pre: Tensor | tuple[Tensor, ...],
    error: Tensor | tuple[Tensor, ...],
    limit: Tensor,
) -> Tensor:
    """Which entries may fall on either side of the threshold when pre is known up to `error`.

    Args:
        indicator: m as a function of pre, e.g. the activation.
        pre: (T, F) float64, or several, each an argument of `indicator`. error: likewise, see `linear_error`.
        limit: s·t, float64, broadcastable to (T, F).

    Returns:
        (T, F) bool: |m| passes the limit, or m becomes or stops being 0, within pre ± error.
    """
    values = pre if isinstance(pre, tuple) else (pre,)
    errors = error if isinstance(error, tuple) else (error,)
    steps = itertools.product((-1, 0, 1), repeat=len(values))
    around = torch.stack(
        [indicator(*(v + k * e for v, k, e in zip(values, ks, errors, strict=True))) for ks in steps]
    )
    slack = 4 * _FLOAT32_EPS * around.abs().amax(0)
    low, high = around.abs().amin(0) - slack, around.abs().amax(0) + slack
    low = torch.where(around.amin(0).sign() * around.amax(0).sign() < 0, torch.zeros_like(low), low)
    zero = around == 0
    return ((low < limit) & (limit <= high)) | (zero.any(0) & ~zero.all(0))


def flip_budget(band: Tensor, hidden: Tensor, w_down_t: Tensor) -> Tensor:
    """What the entries of the band may add to the error of the output: Σ_band |h|·|w_down|.

    Args:
        band: (T, F) bool.
        hidden: (T, F), the most that an entry may carry on either side.
        w_down_t: (F, D).

    Returns:
        (T, D) float64.
    """
    carried = torch.where(band, hidden.double().abs(), 0)
    used = band.any(dim=0)
    return carried[:, used] @ w_down_t[used].double().abs()
