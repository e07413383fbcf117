"""Times a cell of the guarantee: `auto` at one sparsity beside the dense alternatives, for one shape, dtype and T."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import alternatives, bandwidth, machine
from benchmarks.alternatives import Alternative
from benchmarks.measure import DTYPES
from benchmarks.registry import ENTRIES, Entry
from benchmarks.shapes import Shape
from benchmarks.timing import Interval, interleave, quantile, trial
from benchmarks.verdict import LEAST_ROUNDS, Comparison, compare, verdict
from benchmarks.workload import Workload, layers_beyond_cache

__all__ = ["AUTO", "OWN_DENSE", "Bench", "Budget", "Group", "Outcome", "again", "build", "groups"]

AUTO, OWN_DENSE = "auto", "own_dense"
MOST_ROUNDS = 120
_HOPELESS = 1.2
"""A dense alternative that takes this many times the fastest one's time in the trial is not timed in the cells."""
_DENSITY_TOKENS = 64


@dataclass(frozen=True)
class Group:
    """Cells that share weights and compiled peers."""

    shape: Shape
    dtype: str
    tokens: int

    @property
    def entry(self) -> Entry:
        """The operator that computes this shape."""
        return next(entry for entry in ENTRIES.values() if entry.workload.kind == self.shape.kind)


@dataclass(frozen=True)
class Budget:
    """How long it may take. `seconds` of timing a cell; `rounds` fixes their number instead; `compile`: "no", "default"
    (only Inductor's default) or "best"; `layers`: None for as many as leave the cache."""

    seconds: float = 4.0
    rounds: int | None = None
    compile: str = "best"
    layers: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A cell: times in ms (medians), and the dense alternative's time over auto's with its 95 % interval.

    `sparsity` is in percent. `compared` are the dense alternatives timed in the cell; the others' times are the
    trial's. `route` and `profile` are what `sparsemlp.explain` says of auto. What ends in `_2` is of the second run,
    which a cell has that fell below in its first.
    """

    op: str
    shape: str
    D: int
    F: int
    dtype: str
    tokens: int
    sparsity: float
    density: float
    layers: int
    rounds: int
    verdict: str
    best_dense: str
    ratio: float
    ratio_low: float
    ratio_high: float
    auto_ms: float
    eager_ms: float
    compile_ms: float | None
    own_dense_ms: float | None
    compile_setting: str
    compile_s: float | None
    compared: str
    route: str
    profile: str
    others_cpu: float
    time: str
    best_dense_2: str = ""
    ratio_2: float | None = None
    ratio_2_low: float | None = None
    ratio_2_high: float | None = None

    @property
    def key(self) -> tuple[str, str, int, float]:
        """What makes it another cell."""
        return self.shape, self.dtype, self.tokens, self.sparsity

    @property
    def first(self) -> Comparison:
        """The first run's comparison."""
        return Comparison(self.best_dense, Interval(self.ratio, self.ratio_low, self.ratio_high))


def again(old: Outcome, new: Outcome) -> Outcome:
    """The cell after its second run."""
    second = new.first
    return replace(
        old,
        verdict=verdict([old.first, second]),
        best_dense_2=second.best,
        ratio_2=second.ratio.median,
        ratio_2_low=second.ratio.low,
        ratio_2_high=second.ratio.high,
    )


def build(group: Group, budget: Budget, share: Workload | None) -> Workload:
    """The group's workload. A layer whose gate alone passes twice the cache needs no second one to leave it."""
    dtype, kind = DTYPES[group.dtype], group.entry.workload
    size = kind.layer_bytes(group.shape, dtype.itemsize)
    layers = budget.layers or layers_beyond_cache(size, bandwidth.last_level_cache(), least=1)
    return kind(group.shape, dtype, group.tokens, group.shape.activation, layers, share=share)


class Bench:
    """The dense alternatives of a group, compiled and tried once; `cell` times one sparsity beside them."""

    def __init__(self, group: Group, work: Workload, budget: Budget, say: Callable[[str], None]) -> None:
        self.group, self.work, self.budget = group, work, budget
        entry = group.entry
        baseline = entry.dense[0].name
        self.dense: dict[str, Alternative] = {baseline: alternatives.eager(entry, work)[baseline]}
        if budget.compile != "no":
            self.dense |= alternatives.compiled(entry, work, say, tuned=budget.compile == "best")
        if machine.isa() != "none":
            self.dense[OWN_DENSE] = replace(alternatives.own(work, 0.0, "native"), sparsity=None)
        timed = [alternatives.timed(name, a, work) for name, a in self.dense.items()]
        self.trial = trial(timed, budget.seconds)
        fastest = min(self.trial.values())
        self.candidates = [name for name, s in self.trial.items() if s <= _HOPELESS * fastest]

    def _settle(self, own: Alternative) -> float:
        """Two walks, so that a router has seen every layer's density; seconds per call of the second."""
        for _ in range(2):
            xs = self.work.fresh()
            start = time.perf_counter()
            own.sweep(xs)
            seconds = time.perf_counter() - start
        return seconds / len(self.work.layers)

    def _rounds(self, own_s: float) -> int:
        """As many as the budget allows, a multiple of four (`verdict.halves`)."""
        if self.budget.rounds is not None:
            return self.budget.rounds
        a_round = len(self.work.layers) * (own_s + sum(self.trial[name] for name in self.candidates))
        wanted = int(self.budget.seconds / max(a_round, 1e-9))
        return max(LEAST_ROUNDS, min(MOST_ROUNDS, wanted // 4 * 4))

    def _density(self, sparsity: float) -> float:
        """The fraction of active neurons on fresh tokens of the first layer."""
        work = self.work
        size = _DENSITY_TOKENS, work.shape.d
        x = torch.randn(size, generator=work.generator, device=work.device).to(work.dtype)
        key = f"density {sparsity}"
        return work.derived(key, 0, lambda: work.active(0, x, [sparsity])[0].float().mean().item())

    def cell(self, sparsity: float) -> Outcome:
        """Times auto at a sparsity (a fraction) in turn with the dense alternatives."""
        group, work = self.group, self.work
        own = alternatives.own(work, sparsity, apart=f"auto {sparsity:g}")  # own_dense has the layers' own
        density = self._density(sparsity)
        rounds = self._rounds(self._settle(own))
        own.sparsity = None  # its inputs need not be kept
        timed = [
            alternatives.timed(AUTO, own, work),
            *(alternatives.timed(name, self.dense[name], work) for name in self.candidates),
        ]
        neighbours = machine.Neighbours()
        samples = interleave(timed, rounds, warmup=1)
        assert own.call is not None
        explained = alternatives.explained(own.call, work)
        found = compare(samples, AUTO)
        ms = {name: 1e3 * quantile(values, 0.5) for name, values in samples.items()}
        for name, seconds in self.trial.items():
            ms.setdefault(name, 1e3 * seconds)
        compiled = self.dense.get("compile")
        return Outcome(
            op=group.entry.name,
            shape=group.shape.name,
            D=group.shape.d,
            F=group.shape.f,
            dtype=group.dtype,
            tokens=group.tokens,
            sparsity=100 * sparsity,
            density=density,
            layers=len(work.layers),
            rounds=rounds,
            verdict=verdict([found]),
            best_dense=found.best,
            ratio=found.ratio.median,
            ratio_low=found.ratio.low,
            ratio_high=found.ratio.high,
            auto_ms=ms[AUTO],
            eager_ms=ms[group.entry.dense[0].name],
            compile_ms=ms.get("compile"),
            own_dense_ms=ms.get(OWN_DENSE),
            compile_setting="" if compiled is None else compiled.label,
            compile_s=None if compiled is None else compiled.compile_s,
            compared="+".join(self.candidates),
            route=explained.route,
            profile=explained.profile,
            others_cpu=neighbours.share(),
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )


def groups(shapes: Sequence[Shape], dtypes: Sequence[str], tokens: Sequence[int]) -> list[Group]:
    """The grid without its sparsities, ordered so that weights are made once for a shape and dtype."""
    return [Group(shape, dtype, t) for shape in shapes for dtype in dtypes for t in tokens]
