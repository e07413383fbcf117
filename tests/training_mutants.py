"""Rows of `tests.mutants` for training: changes that break its Triton kernels, and what must notice each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sparsemlp.ops import gated_mlp_training, mlp_training
from tests.blocks import training_path
from tests.training_calls import dead, plateau
from tests.training_cases import GATED, UNGATED, Kind, check, grad_of, gradients

__all__ = ["OPS", "rows"]

OPS = (mlp_training.FORWARD, mlp_training.BACKWARD, gated_mlp_training.FORWARD, gated_mlp_training.BACKWARD)
"""Whose backends are all changed."""

Row = tuple[str, str, str, Callable[[], object]]


def _nothing(sample: Any) -> Any:
    """All tokens are 0, and nothing is added: p = 0, where silu is 0 and its derivative is not."""
    sample.x.zero_()
    sample.options.clear()
    return sample


def _run(kind: Kind, path: str, change: Callable[[Any], Any], **options: Any) -> None:
    sample = kind.cases.build(kind.case("mutant", tokens=9, d=18, f=35, **options), torch.float32)
    with training_path(path):
        check(kind, change(sample), "triton")


def _unread() -> None:
    """NaN in rows of dead neurons reaches no gradient, through dense products."""
    case = GATED.case("mutant", tokens=9, d=18, f=35, activation="relu")
    sample = dead(GATED.cases.build(case, torch.float32))
    for name in GATED.weights[1:]:
        getattr(sample, name)[::3] = torch.nan
    with training_path("dense"):
        found = gradients(GATED, sample, grad_of(sample), "triton")
    assert all(g.isfinite().all() for g in found.values())


def rows() -> list[Row]:
    """(file, old, new, check)."""
    dead_gated, dead_ungated = (
        {path: functools.partial(_run, kind, path, dead, activation="relu") for path in ("dense", "compact", "lists")}
        for kind in (GATED, UNGATED)
    )  # fmt: skip
    flat, still = (
        {
            path: functools.partial(_run, kind, path, plateau, activation="weird")
            for path in ("dense", "lists")
        }
        for kind in (GATED, UNGATED)
    )
    zero = {path: functools.partial(_run, UNGATED, path, _nothing) for path in ("dense", "compact")}
    zero = {path: functools.partial(run, activation="silu") for path, run in zero.items()}
    mean = functools.partial(
        _run, UNGATED, "dense", lambda sample: sample, mean="mean+out", density="some_inf"
    )
    lists, living = "_training_lists.py", "_training_living.py"
    entries: list[Row] = [("_training_entries.py", old, new, noticed) for old, new, noticed in (
        ("slope, active, kept & (slope != 0)", "slope, active, active", zero["dense"]),
        ("tl.where(moving, g * u * slope, 0.0).to", "(g * u * slope).to", mean),
        ("tl.where(active, g * act, 0.0).to", "tl.where(moving, g * act, 0.0).to", flat["dense"]),
        ("tl.where(active, h, 0.0).to", "tl.where(moving, h, 0.0).to", still["dense"]),
        ("total_mean -= tl.where(active, g, 0.0)", "total_mean -= g", mean),
        ("total_pre += value", "total_pre = value", dead_ungated["dense"]),
        ("if wrong != 0", "if wrong == 2", _unread),
        ("mask=active & inside", "mask=mask & inside", _unread),
    )]  # fmt: skip
    return [
        *entries,
        (living, "active = active | moving", "active = active", zero["compact"]),
        (living, "place = tl.load(neurons + m, mask=m < last_m, other=0)", "place = m", dead_ungated["compact"]),
        (living, "column = tl.load(neurons + n, mask=n < last_n, other=0)", "column = n", dead_ungated["compact"]),
        (living, "range(0, last_k, TILE_K)", "range(0, last_k - TILE_K, TILE_K)", dead_ungated["compact"]),
        (living, "torch.argsort(neurons), alive", "neurons, alive", dead_ungated["compact"]),
        (living, "acc += tl.load(added", "acc -= tl.load(added", dead_gated["compact"]),
        (lists, "bits += tl.where(moving, _MOVING, 0)", "bits += 0", dead_ungated["lists"]),
        (lists, "searchsorted(ordered, ids)", "searchsorted(ordered, ids, right=True)", dead_ungated["lists"]),
        (lists, "e = tl.load(places + e, mask=mask, other=0)", "e = e + 0", dead_ungated["lists"]),
        (lists, "range(first, last, BLOCK_E)", "range(first, last - 1, BLOCK_E)", dead_ungated["lists"]),
        (lists, "lanes += left", "lanes = left", dead_ungated["lists"]),
        (lists, "tl.where(active, g * act, 0.0), mask", "tl.where(moving, g * act, 0.0), mask", flat["lists"]),
        ("training.py", "torch.addmm(added, values, w)", "added", dead_gated["dense"]),
    ]  # fmt: skip
