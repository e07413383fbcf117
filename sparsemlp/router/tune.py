"""Measures this machine for the router: `sparsemlp tune`. Every route of a gated and an ungated MLP, interleaved.

Weights are cycled through more memory than the last-level cache holds, so that they come from where a model's do. The
routes of one size and dtype take turns, with different numbers of tokens, until the time is up; medians are kept.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsemlp import _native
from sparsemlp.activations import IDS
from sparsemlp.router import host, training
from sparsemlp.router.model import CHUNK, Problem, choose, few_tokens, kind_of
from sparsemlp.router.profile import Profile, Times
from sparsemlp.screen import sizes_of

__all__ = ["KINDS", "SECONDS", "SHAPES", "busy", "summary", "tune"]

SECONDS = 16.0
"""Of measuring, about."""

SHAPES = ((576, 1536), (2048, 4096))
"""D and F: of a small model, where a call costs more than its weights, and one whose weights leave every cache."""

KINDS = (
    (torch.bfloat16, False),
    (torch.float32, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    (torch.float32, True),
)
"""Dtype of x, and whether the weights are int8; the first two get half of the time."""

_FEW = (1, 2, 4, 8, 16, CHUNK)
_MANY = (CHUNK + 1, 64, 512)
_SOME = (1, 2, 8, CHUNK, CHUNK + 1, 512)  # of the kinds that get less time
_SCREENED = (1, 8, CHUNK, 512)
_HOPELESS = 10.0
_SHARES = (0.0, 0.5, 1.0)  # of neurons that some token wants
_LEAST_ROUNDS = 2
_MOST_WEIGHTS = 2**29

_clock = time.perf_counter
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Cell:
    """One thing to time: a route with the arguments of a call, but for the layer's weights."""

    route: str
    tokens: int
    column: int
    gated: bool
    x: Tensor
    threshold: Tensor
    samples: list[float]


class _Layers:
    """Equal weights in different memory, enough to leave the cache, handed out in turn."""

    def __init__(self, dtype: torch.dtype, int8: bool, d: int, f: int) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(f, d, generator=generator) / math.sqrt(d) for _ in range(3)]
        self.scales: tuple[Tensor | None, ...] = (None, None, None)
        if int8:
            from sparsemlp.quantization import quantize_columns, quantize_rows

            pairs = [quantize_rows(w) for w in weights[:2]] + [quantize_columns(weights[2])]
            weights, self.scales = [q for q, _ in pairs], tuple(s for _, s in pairs)
        else:
            weights = [w.to(dtype) for w in weights]
        size = 3 * d * f * weights[0].element_size()
        count = max(2, -(-min(_MOST_WEIGHTS, 2 * host.last_level_cache()) // size))
        self._layers = [weights, *([w.clone() for w in weights] for _ in range(count - 1))]
        self._screens = [_random_screen(d, f) for _ in range(count)]
        self._next = 0

    def next(self) -> list[Tensor]:
        self._next = (self._next + 1) % len(self._layers)
        return self._layers[self._next]

    def screen(self) -> tuple[Tensor, ...]:
        """Codes of gate and up, and their scales, of another layer every time."""
        self._next = (self._next + 1) % len(self._layers)
        return self._screens[self._next]


def _random_screen(d: int, f: int) -> tuple[Tensor, ...]:
    codes, scales = sizes_of(f, d, 4, 32)
    made = [torch.randint(256, codes, dtype=torch.uint8) for _ in range(2)]
    return (*made, *(torch.full(scales, 1 / 64, dtype=torch.bfloat16) for _ in range(2)))


def tune(
    seconds: float = SECONDS, shapes: Sequence[tuple[int, int]] = SHAPES, say: Say = lambda line: None
) -> Profile:
    """The times of this machine with the threads and instruction set in use.

    Args:
        seconds: of measuring; a slow machine takes longer, everything is timed at least twice.
        shapes: (D, F) to measure; a call takes the nearest ones' times.
        say: gets a line of progress for each dtype.

    Raises:
        RuntimeError: there are no compiled kernels here, with the reason.
    """
    problem = _native.problem()
    if problem is not None:
        raise RuntimeError(f"there is nothing to choose between without compiled kernels ({problem})")
    times: list[Times] = []
    weights = [d * f * (2.5 if i < 2 else 1.0) for d, f in shapes for i, _ in enumerate(KINDS)]
    shares = iter([w / sum(weights) for w in weights])
    with torch.inference_mode():
        bandwidth = _read_bandwidth()
        for d, f in shapes:
            for dtype, int8 in KINDS:
                start = time.perf_counter()
                times.append(_measure(dtype, int8, d, f, seconds * next(shares)))
                say(f"D {d}, F {f}, {kind_of(dtype, int8)}: {time.perf_counter() - start:.1f} s")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    start = time.perf_counter()
    limits = training.measured(*shapes[0])
    say(f"training: {time.perf_counter() - start:.1f} s")
    return Profile(host.this(), date, bandwidth, tuple(times), limits, "measured just now")


def summary(profile: Profile) -> str:
    """What follows from the times: for each kind and size, which route is fastest."""
    lines = [
        f"{profile.host}; reads {profile.read_gb_per_s:.3g} GB/s",
        f"{'':<16} {'D':>5} {'F':>6}  skips rows always  below this density at 64, 512 tokens  else",
    ]
    for t in profile.times:
        one = replace(profile, times=(t,))
        many = [choose(one, Problem(tokens, t.d, t.f, t.kind, "gated")) for tokens in (64, 512)]
        densities = ", ".join("always" if c.break_even > 1 else f"{c.break_even:.1%}" for c in many)
        fastest = " and ".join(dict.fromkeys(c.otherwise for c in many))
        few = few_tokens(one, t.kind)
        lines.append(f"{t.kind:<16} {t.d:>5} {t.f:>6}  up to {few:>2} tokens     {densities:<35}  {fastest}")
    limits = ", ".join(
        f"{v:.0%} ({dtype})" if v < 1 else f"100% ({dtype})" for dtype, v in profile.training.items()
    )
    return "\n".join([*lines, f"training by lists below a density of {limits}"])


def busy() -> float | None:
    """How many CPUs other programs keep busy (the load average, before measuring); None where it is not known."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _read_bandwidth() -> float:
    """GB/s that all threads read together, from memory."""
    size = max(2**28, min(2**30, 4 * host.last_level_cache()))
    words = torch.empty(size // 8, dtype=torch.int64).fill_(
        1
    )  # written: untouched pages are one page of zeros
    best = math.inf
    for _ in range(5):
        start = _clock()
        torch.ops.sparsemlp._read_native(words)
        best = min(best, _clock() - start)
    return size / best / 1e9


def _measure(dtype: torch.dtype, int8: bool, d: int, f: int, seconds: float) -> Times:
    """All routes of one kind and size."""
    layers = _Layers(dtype, int8, d, f)
    cells = list(_cells(dtype, d, full=not int8 and dtype != torch.float16))
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        stop = time.perf_counter() + seconds
        cells = _first_round(cells, layers)
        done, spent = 0, 0.0
        while done < _LEAST_ROUNDS or time.perf_counter() + spent < stop:
            begun = time.perf_counter()
            for cell in cells if done % 2 else cells[::-1]:
                _time(cell, layers)
            done, spent = done + 1, time.perf_counter() - begun
    finally:
        if was_enabled:
            gc.enable()
    tables: dict[str, dict[int, tuple[float, ...]]] = {"sparse": {}, "dense": {}, "pytorch": {}, "screen": {}}
    for cell in cells:
        column = tables[cell.route].setdefault(cell.tokens, ())
        assert len(column) == cell.column
        tables[cell.route][cell.tokens] = (*column, 1e6 * statistics.median(cell.samples[1:]))
    return Times(kind_of(dtype, int8), d, f, **tables)


def _first_round(cells: list[_Cell], layers: _Layers) -> list[_Cell]:
    """Warms up: pages, PyTorch's own caches of compiled products. Returns the cells worth timing.

    PyTorch multiplies float16 a hundred times slower than its other dtypes on most CPUs. A route that is hopeless and
    takes time in proportion to the tokens is not timed with more of them: a proportional time is what is predicted.
    """
    worth: list[_Cell] = []
    before: dict[str, tuple[int, float]] = {}
    for tokens, group in itertools.groupby(cells, key=lambda cell: cell.tokens):
        timed = [cell for cell in group if cell.route not in before or before[cell.route][0] > 0]
        for cell in timed:
            _time(cell, layers)
        worth += timed
        routes = [cell for cell in timed if cell.gated and cell.route != "screen"]
        took = {cell.route: cell.samples[0] for cell in routes}  # sparse: with all of the rows
        for route, seconds in took.items():
            fewer, less = before.get(route, (tokens, seconds))
            proportional = fewer < tokens and seconds > 0.7 * less * tokens / fewer
            hopeless = seconds > _HOPELESS * min(took.values())
            before[route] = (0 if hopeless and proportional else tokens), seconds
    return worth


def _cells(dtype: torch.dtype, d: int, *, full: bool) -> Iterator[_Cell]:
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.nn.functional.silu(torch.randn(2**18, generator=generator)).abs().sort().values
    for tokens in (*_FEW, *_MANY) if full else _SOME:
        x = torch.randn(tokens, d, generator=generator).to(dtype)
        if tokens <= CHUNK:
            for column, share in enumerate(_SHARES):
                yield _Cell("sparse", tokens, column, True, x, _threshold(magnitudes, share, tokens), [])
        for route in ("pytorch",) if tokens <= CHUNK else ("dense", "pytorch"):
            for column, gated in enumerate((True, False)):
                yield _Cell(route, tokens, column, gated, x, torch.zeros(()), [])
        if tokens in _SCREENED:
            yield _Cell("screen", tokens, 0, True, x, torch.zeros(()), [])


def _threshold(magnitudes: Tensor, share: float, tokens: int) -> Tensor:
    """The threshold at which some token wants this share of the neurons, each as many."""
    density = 1 - (1 - share) ** (1 / tokens)
    if density in (0, 1):
        return torch.tensor(math.inf if density == 0 else 0.0)
    return magnitudes[round((1 - density) * (len(magnitudes) - 1))].clone()


def _time(cell: _Cell, layers: _Layers) -> None:
    if cell.route == "screen":
        route, args = _screen_call(cell, layers)
    else:
        gate, up, down = layers.next()
        route, args = _call(cell, gate, up, down, layers.scales)
    start = _clock()
    route(*args)
    cell.samples.append(_clock() - start)


def _screen_call(cell: _Cell, layers: _Layers) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The pass over the copies, and its arguments."""
    codes = layers.screen()
    neurons = layers.next()[0].shape[0]
    rest = (None, None, None, neurons, IDS["silu"], _native.isa())
    return torch.ops.sparsemlp._screen_native.default, (cell.x, *codes, *rest)


def _call(
    cell: _Cell, gate: Tensor, up: Tensor, down: Tensor, scales: tuple[Tensor | None, ...]
) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A route's function and the operator's arguments in order."""
    from sparsemlp.ops import _gated_mlp_native, _mlp_native  # these import this package

    if cell.gated:
        rest = (*(None,) * 7, *scales, *(None,) * 5, "silu", "gate")
        return _gated_mlp_native.ROUTES[cell.route], (cell.x, gate, up, down, cell.threshold, *rest)
    rest = (*(None,) * 6, scales[0], scales[2], None, None, None, "silu")
    return _mlp_native.ROUTES[cell.route], (cell.x, gate, down, cell.threshold, *rest)
