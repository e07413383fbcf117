"""Chooses the route of a call: the model of this machine, and the density that the kernels saw on recent calls.

A choice is made once for every size and kept; per call it is one look-up, and where the density matters a second one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsemlp import _native
from sparsemlp.router import host, profile
from sparsemlp.router.model import CHUNK, Choice, Problem, choose, few_tokens, kind_of, most_screened
from sparsemlp.router.profile import Profile

__all__ = [
    "MODES", "Decision", "Router", "forget", "fused_tokens", "mode", "observed_density", "screened_tokens",
    "set_router",
]  # fmt: skip

MODES = ("auto", "frozen", "off")

_lib = torch.library.Library("sparsemlp", "FRAGMENT")
# The mean fraction of active entries a token on recent calls with this down projection (by address), NaN for none.
_lib.define("_density_native(Tensor weight) -> float")
_density = torch.ops.sparsemlp._density_native.default

_MOST = 2**16
"""Remembered choices; then all are forgotten and made again."""

_threads = torch.get_num_threads
_mode = "auto"
_profiles: dict[tuple[int, int], Profile | None] = {}
_choices: dict[tuple[Any, ...], Choice] = {}
_few: dict[tuple[Any, ...], int] = {}
_frozen: dict[tuple[Any, ...], str] = {}


class set_router:
    """Switches how `backend="auto"` chooses on a CPU, for the whole process; as a context manager, for a while.

    Equivalent to::

        sparsemlp.set_router("frozen")           # from here on
        with sparsemlp.set_router("off"): ...    # in the block, whatever thread calls

    Args:
        mode: "auto", the fastest route by the model of this machine and the density seen on recent calls of a layer;
            "frozen", the same for the first call of each layer (its down weight, by address) and number of tokens, and
            from then on that route for good, so that equal calls give equal bits; "off", what depends on nothing but
            the number of tokens, as backend="native".

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, mode: str) -> None:
        global _mode
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of: {', '.join(MODES)}")
        self._before = _mode
        _mode = mode

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        global _mode
        _mode = self._before


def mode() -> str:
    """The mode that `set_router` set, at first "auto"."""
    return _mode


def forget() -> None:
    """Reads profiles again and makes choices anew; frozen ones stay."""
    for table in (_profiles, _choices, _few):
        table.clear()


def current_profile() -> Profile | None:
    """The measured times that choices are made from, for the instruction set and thread count in use."""
    key = _native.isa(), torch.get_num_threads()
    if key not in _profiles:
        _profiles[key] = profile.find(host.this(*key))
    return _profiles[key]


def fused_tokens(x: torch.dtype, int8: bool) -> int:
    """Up to how many tokens no choice is to be made: rows are skipped, at every size and density."""
    key = _mode, x, int8, torch.get_num_threads()
    found = _few.get(key)
    if found is None:
        found = CHUNK if _mode == "off" else few_tokens(current_profile(), kind_of(x, int8))
        _few[key] = found
    return found


def screened_tokens(x: torch.dtype, int8: bool, d: int, f: int, sparsity: float) -> int:
    """Up to how many tokens in a call the screen is predicted to pay, against a dense MLP without it; at most 512.

    Args:
        x: dtype of x. int8: whether the full rows are int8. d, f: D and F.
        sparsity: share of neurons that a token skips.

    Returns:
        The largest T such that it pays for 1 to T tokens (by the times of this machine, `sparsemlp tune`; without any,
        by the bytes); 0: not even for one.
    """
    return most_screened(current_profile(), kind_of(x, int8), d, f, 1 - sparsity)


def observed_density(weight: Tensor) -> float:
    """The mean fraction of active entries on recent calls of the layer with this down projection; NaN: none seen."""
    try:
        return _density(weight)
    except NotImplementedError:  # a compiled library that does not count
        return math.nan


@dataclass(frozen=True)
class Decision:
    """A choice and what it was made from.

    Args:
        route: of `sparsemlp.router.model.ROUTES`.
        problem, choice: what was asked, and the model's answer; None with the router off.
        density: seen on recent calls; NaN: none seen.
        frozen: the route is that of an earlier call.
    """

    route: str
    problem: Problem
    choice: Choice | None
    density: float
    frozen: bool


class Router:
    """An operator's `route`: from its arguments to the function that computes them fastest.

    Args:
        routes: the functions, by name.
        weight: the position of the down projection, (F, D).
        gated: whether the operator has a gate; its last argument is then the indicator.
    """

    def __init__(self, routes: Mapping[str, Callable[..., Tensor]], *, weight: int, gated: bool) -> None:
        self.routes = routes
        self._weight = weight
        self._gated = gated

    def __call__(self, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
        """The function for a call whose x is (T, D); None where the backend itself chooses."""
        if _mode == "off":
            return None
        key = self._key(args)
        choice = _choices.get(key)
        if choice is None:
            if 0 in key[0] or 0 in key[1]:
                return None
            choice = self._choose(key)
        if _mode == "frozen":
            return self.routes[self._freeze(args[self._weight], key, choice)]
        limit = choice.break_even
        skips = limit > 1 or (limit > 0 and observed_density(args[self._weight]) < limit)
        return self.routes["sparse" if skips else choice.otherwise]

    def decision(self, args: tuple[Any, ...]) -> Decision:
        """What a call would be given; nothing is frozen by asking. T, D and F are not 0."""
        key, weight = self._key(args), args[self._weight]
        problem, density = self._problem(key), observed_density(weight)
        if _mode == "off":
            return Decision("sparse" if problem.tokens <= CHUNK else "dense", problem, None, density, False)
        choice = _choices.get(key) or self._choose(key)
        earlier = _frozen.get(_frozen_key(weight, key)) if _mode == "frozen" else None
        return Decision(earlier or choice.route(density), problem, choice, density, earlier is not None)

    def _key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, w = args[0], args[self._weight]
        form = args[-1] if self._gated else "ungated"
        return x.shape, w.shape, x.dtype, w.dtype, form, _threads()

    def _problem(self, key: tuple[Any, ...]) -> Problem:
        (tokens, d), (f, _), x, w, form, _ = key
        form = form if form in ("product", "screen", "ungated") else "gated"
        return Problem(tokens, d, f, kind_of(x, w == torch.int8), form)

    def _choose(self, key: tuple[Any, ...]) -> Choice:
        if len(_choices) >= _MOST:
            _choices.clear()
        choice = choose(current_profile(), self._problem(key))
        _choices[key] = choice
        return choice

    def _freeze(self, weight: Tensor, key: tuple[Any, ...], choice: Choice) -> str:
        layer = _frozen_key(weight, key)
        found = _frozen.get(layer)
        if found is None:
            found = _frozen.setdefault(layer, choice.route(observed_density(weight)))
        return found


def _frozen_key(weight: Tensor, key: tuple[Any, ...]) -> tuple[Any, ...]:
    return weight.data_ptr(), *key[:-1]
