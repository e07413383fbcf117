"""How long each route of a call will take, by the times that were measured on the machine.

A time is proportional to D·F between measured sizes, piecewise linear in the number of tokens, and for the route that
skips rows also in the share of neurons that some of 32 tokens wants. Every token is taken to be active independently,
so that share is 1 − (1 − density)^T; tokens that agree read less than that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sparsemlp.router.profile import Profile, Times

__all__ = [
    "CHUNK",
    "MARGIN",
    "ROUTES",
    "Choice",
    "Problem",
    "choose",
    "few_tokens",
    "kind_of",
    "most_screened",
    "seconds",
    "union",
]

ROUTES = ("sparse", "dense", "pytorch")

CHUNK = 32
"""Tokens in one call of the kernel that skips rows."""

MARGIN = 0.03
"""What another route must promise to save before it replaces the backend's own: measured times are no better."""

_STEPS = 12
_LIKE = {"float16/int8": "float32/int8"}
"""Kinds that are not measured: the compiled kernels compute both in float32, and int8 is widened in both by PyTorch."""


@dataclass(frozen=True)
class Problem:
    """A call, as far as its time depends on it.

    Args:
        tokens, d, f: T ≥ 1, D and F.
        kind: see `kind_of`.
        form: "gated"; "product", a gated one whose gate and up projections are read whole; "screen", one whose rows
            are all read where they are wanted, after the pass over low-bit copies; "ungated".
    """

    tokens: int
    d: int
    f: int
    kind: str
    form: str


@dataclass(frozen=True)
class Choice:
    """What a problem's routes take.

    Args:
        seconds: of the routes that do not depend on the density, and of `sparse` at density 1.
        break_even: below this density rows are skipped; 0: never, above 1: always.
        otherwise: the route at and above it.
        known: whether there are measured times; without, the choice is the backend's own.
    """

    seconds: Mapping[str, float]
    break_even: float
    otherwise: str
    known: bool = True

    def route(self, density: float) -> str:
        """The route at a density (NaN: not known, taken as 1)."""
        return "sparse" if self.break_even > 1 or density < self.break_even else self.otherwise


def kind_of(x: torch.dtype, int8: bool) -> str:
    """The dtype of x, and of the weights where they are int8: "bfloat16", "bfloat16/int8"."""
    return str(x).removeprefix("torch.") + ("/int8" if int8 else "")


def union(density: float, tokens: int) -> float:
    """The share of neurons that some of the tokens wants, each wanting `density` of them independently."""
    return 1 - (1 - density) ** tokens


def seconds(profile: Profile, problem: Problem, route: str, density: float) -> float | None:
    """The time predicted, s; None: nothing was measured for this kind."""
    near = _nearest(profile, problem)
    if not near:
        return None
    total = 0.0
    for weight, times in near:
        total += weight * _measured(times, problem, route, density) / (times.d * times.f)
    return 1e-6 * total * problem.d * problem.f


def choose(profile: Profile | None, problem: Problem) -> Choice:
    """The fastest route by density."""
    few = problem.tokens <= CHUNK
    own = "sparse" if few else "dense"
    if profile is None or not _nearest(profile, problem):
        return Choice({}, math.inf if few else 0.0, "pytorch" if few else "dense", known=False)
    fixed = {r: _known(seconds(profile, problem, r, 1.0)) for r in ROUTES[1:] if not (few and r == "dense")}
    otherwise = "pytorch"
    if not few and fixed["pytorch"] >= (1 - MARGIN) * fixed["dense"]:
        otherwise = "dense"
    limit = fixed[otherwise] / (1 - MARGIN) if own == "sparse" else fixed[otherwise] * (1 - MARGIN)

    def wins(density: float) -> bool:
        return _known(seconds(profile, problem, "sparse", density)) <= limit

    times = {"sparse": _known(seconds(profile, problem, "sparse", 1.0)), **fixed}
    if times["sparse"] <= limit:
        return Choice(times, math.inf, otherwise)
    if not wins(0.0):
        return Choice(times, 0.0, otherwise)
    # In the share of neurons wanted by a chunk, in which the time is nearly linear.
    low, high, most = 0.0, 1.0, min(problem.tokens, CHUNK)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if wins(1 - (1 - middle) ** (1 / most)):
            low = middle
        else:
            high = middle
    return Choice(times, 1 - (1 - low) ** (1 / most), otherwise)


def few_tokens(profile: Profile | None, kind: str) -> int:
    """Up to how many tokens, at most CHUNK, skipping rows is always right, whatever the size, form and density."""
    sizes = () if profile is None else profile.of(_LIKE.get(kind, kind))
    limit = 1 if sizes else CHUNK
    # Times are linear between measured numbers of tokens: what holds at two of them holds between.
    measured = sorted({tokens for t in sizes for tokens in (*t.sparse, *t.pytorch) if tokens <= CHUNK})
    for tokens in measured:
        for t in sizes:
            for form in ("gated", "product", "screen", "ungated"):
                problem = Problem(tokens, t.d, t.f, kind, form)
                sparse = _measured(t, problem, "sparse", 1.0)
                if (1 - MARGIN) * sparse > _measured(t, problem, "pytorch", 1.0):
                    return limit if tokens > measured[0] else 0
        limit = tokens
    return limit


def most_screened(profile: Profile | None, kind: str, d: int, f: int, density: float) -> int:
    """The largest number of tokens, at most 512, up to which the screen is predicted to pay; 0: for none."""
    weight_bits = 8 if kind.endswith("/int8") else 32 if kind.startswith("float32") else 16

    def pays(tokens: int) -> bool:
        screened, dense = (Problem(tokens, d, f, kind, form) for form in ("screen", "gated"))
        if profile is None or not _nearest(profile, dense):
            return 2 * 4.5 / weight_bits + 3 * union(density, tokens) < 3
        routes = ROUTES if tokens > CHUNK else ("sparse", "pytorch")
        ours, theirs = (
            min(_known(seconds(profile, problem, route, share)) for route in routes)
            for problem, share in ((screened, density), (dense, 1.0))
        )
        return ours < theirs

    last = 0
    for tokens in (*range(1, CHUNK + 1), 64, 128, 256, 512):
        if not pays(tokens):
            break
        last = tokens
    return last


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _nearest(profile: Profile, problem: Problem) -> list[tuple[float, Times]]:
    """The nearest measured size and, on the other side of D·F, the next one; with weights that add to 1.

    Near is meant in the logarithms of D and F. Beyond the measured sizes there is only one: its time per weight holds.
    """

    def distance(t: Times) -> float:
        return math.hypot(math.log(t.d / problem.d), math.log(t.f / problem.f))

    sizes = profile.of(_LIKE.get(problem.kind, problem.kind))
    if not sizes:
        return []
    first, size = min(sizes, key=distance), problem.d * problem.f
    beyond = [t for t in sizes if (t.d * t.f - size) * (first.d * first.f - size) < 0]
    if distance(first) == 0 or not beyond:
        return [(1.0, first)]
    second = min(beyond, key=distance)
    near, far = distance(first), distance(second)
    return [(far / (near + far), first), (near / (near + far), second)]


def _measured(times: Times, problem: Problem, route: str, density: float) -> float:
    """µs at the measured size."""
    tokens = problem.tokens
    if route != "sparse":
        column = 1 if problem.form == "ungated" else 0
        whole_time = _between({t: v[column] for t, v in getattr(times, route).items()}, tokens)
        return whole_time + (_screening(times, tokens) if problem.form == "screen" else 0.0)
    whole, rest = divmod(tokens, CHUNK)
    total = whole * _skipping(times, problem.form, CHUNK, density) if whole else 0.0
    return total + (_skipping(times, problem.form, rest, density) if rest else 0.0)


def _skipping(times: Times, form: str, tokens: int, density: float) -> float:
    """One call of the kernel that skips rows: what is read whole, and what is read where it is wanted."""
    share = union(density, tokens)
    none, half, full = (_between({t: v[i] for t, v in times.sparse.items()}, tokens) for i in range(3))
    half, full = max(none, half), max(none, half, full)  # noise may say otherwise
    rows = 2 * share * (half - none) if share <= 0.5 else (half - none) + (2 * share - 1) * (full - half)
    if form == "ungated":
        return none + rows / 2
    if form == "screen":
        return 1.5 * rows + _screening(times, tokens)
    return 2 * none + rows / 2 if form == "product" else none + rows


def _screening(times: Times, tokens: int) -> float:
    """The pass over copies of 4 bits; other bits take as long, where it is the arithmetic that takes it."""
    return _between({t: v[0] for t, v in times.screen.items()}, tokens)


def _between(column: Mapping[int, float], tokens: int) -> float:
    """Linear between measured numbers of tokens, constant below them, proportional above."""
    points = list(column.items())
    if tokens <= points[0][0]:
        return points[0][1]
    for (t0, v0), (t1, v1) in itertools.pairwise(points):
        if tokens <= t1:
            return v0 + (v1 - v0) * (tokens - t0) / (t1 - t0)
    t, v = points[-1]
    return v * tokens / t
