"""Below which density a training step's products are faster by lists of entries than by PyTorch: measured, or shipped.

It is counted in every call, so nothing here depends on earlier ones; docs/training.md.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from sparsemlp.router import decide

__all__ = ["break_even", "measured"]

_UNKNOWN = 0.05
"""Where nothing was measured: the portable kernels' in bfloat16."""

_TOKENS = 512
_DENSITIES = (0.05, 0.2, 0.35)
_ROUNDS = 5
_ALWAYS = 1e6
_HOPELESS = 20.0
"""Times as long as the other way takes: timed once is enough (float16 products on most CPUs)."""


def break_even(dtype: torch.dtype) -> float:
    """The density, in entries of all entries, for an x of this dtype; above 1 where lists are always faster."""
    profile = decide.current_profile()
    limits = {} if profile is None else profile.training
    return limits.get(str(dtype).removeprefix("torch."), _UNKNOWN)


def measured(d: int, f: int) -> dict[str, float]:
    """`break_even` of this machine by dtype: where the line through the times by lists meets PyTorch's time.

    Args:
        d, f: D and F of the MLP that is timed.
    """
    return {
        str(dtype).removeprefix("torch."): _meeting(dtype, d, f)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }


def _meeting(dtype: torch.dtype, d: int, f: int) -> float:
    generator = torch.Generator().manual_seed(0)
    w_in, w_out = (torch.randn(f, d, generator=generator).mul_(d**-0.5).to(dtype) for _ in range(2))
    x, grad = (torch.randn(_TOKENS, d, generator=generator).to(dtype) for _ in range(2))
    normal = torch.distributions.Normal(0.0, 1.0)
    biases = [torch.full((f,), float(normal.icdf(torch.tensor(p))), dtype=dtype) for p in _DENSITIES]
    lists: list[list[float]] = [[] for _ in biases]
    dense: list[float] = []
    for i in range(_ROUNDS):
        for b, samples in zip(biases, lists, strict=True):
            samples.append(_step(x, grad, w_in, w_out, b, by_lists=True))
        if i < 1 or dense[0] < _HOPELESS * lists[-1][0]:
            dense.append(_step(x, grad, w_in, w_out, biases[-1], by_lists=False))
    own = [statistics.median(samples) for samples in lists]
    least = statistics.median(dense)
    if least >= _HOPELESS * own[-1]:
        return _ALWAYS
    slope = (own[-1] - own[0]) / (_DENSITIES[-1] - _DENSITIES[0])
    meets = _DENSITIES[0] + (least - own[0]) / max(slope, 1e-9)
    return min(max(meets, 1e-3), _ALWAYS)


def _step(x: Any, grad: Any, w_in: Any, w_out: Any, b: Any, *, by_lists: bool) -> float:
    """Seconds of what a forward and a backward pass do besides x @ w_in.T, which both ways have."""
    from sparsemlp.ops import _training_native as native  # which imports this module

    pre = torch.nn.functional.linear(x, w_in, b)
    zero = torch.zeros(())
    limit = math.inf if by_lists else 0.0
    with native.forced(limit):
        start = time.perf_counter()
        native.output(pre, w_out, zero, "relu")
        native.mlp_bwd(grad, x, w_in, w_out, pre, zero, None, None, None, "relu", "x,w_in,w_out_t,b_in")
        return time.perf_counter() - start
