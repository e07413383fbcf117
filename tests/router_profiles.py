"""Made-up profiles: measured times with which a chosen route of every call is the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from sparsemlp import _native
from sparsemlp.router import decide, host, profile
from sparsemlp.router.profile import Profile, Times

__all__ = ["FEW", "KINDS", "MANY", "flat", "forced", "using"]

FEW, MANY = (1, 2, 4, 8, 16, 32), (33, 64, 256)
KINDS = ("bfloat16", "float32", "float16", "bfloat16/int8", "float32/int8")


def flat(
    *,
    sparse: tuple[float, float, float] = (100.0, 200.0, 300.0),
    dense: float = 10.0,
    pytorch: float = 10.0,
    pytorch_few: float = 1000.0,
    screen: float = 5.0,
    sizes: tuple[tuple[int, int], ...] = ((64, 100),),
    kinds: tuple[str, ...] = KINDS,
) -> Profile:
    """µs: `sparse` of up to 32 tokens when none, half and all of the rows are wanted; the others a token, or of up to
    32 tokens; the ungated MLP takes two thirds; `screen` a token. Larger sizes take proportionally more."""

    def pairs(values: Mapping[int, float], scale: float) -> dict[int, tuple[float, ...]]:
        return {t: (v * scale, v * scale * 2 / 3) for t, v in values.items()}

    times = []
    for kind in kinds:
        for d, f in sizes:
            scale = d * f / 6400
            times.append(
                Times(
                    kind,
                    d,
                    f,
                    {t: tuple(v * scale for v in sparse) for t in FEW},
                    pairs({t: dense * t for t in MANY}, scale),
                    pairs({**dict.fromkeys(FEW, pytorch_few), **{t: pytorch * t for t in MANY}}, scale),
                    {t: (screen * t * scale,) for t in (*FEW, *MANY)},
                )
            )
    machine = host.Host("a CPU", "portable", 1, str(torch.__version__)) if _native.problem() else host.this()
    return Profile(machine, "2026-01-01", 40.0, tuple(times), {"float32": 0.4, "bfloat16": 0.3}, "made up")


def forced(route: str) -> Profile:
    """A profile in which this route is by far the fastest, whatever the density, wherever it exists."""
    slow, fast = 1e6, 1e-3
    return {
        "sparse": flat(sparse=(fast, fast, fast), dense=slow, pytorch=slow, pytorch_few=slow),
        "dense": flat(sparse=(1.0, 1.0, 1.0), dense=fast, pytorch=slow, pytorch_few=slow),
        "pytorch": flat(sparse=(slow, slow, slow), dense=slow, pytorch=fast, pytorch_few=fast),
    }[route]


@contextmanager
def using(found: Profile | None, mode: str = "auto") -> Iterator[None]:
    """The router in a mode, with this profile as what is found for every machine."""
    before = profile.find
    profile.find = lambda _: found  # type: ignore[assignment]
    decide.forget()
    try:
        with decide.set_router(mode):
            yield
    finally:
        profile.find = before
        decide.forget()
