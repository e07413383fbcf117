"""The training calls that every backend is judged by, one declarative list, and the ways in which they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsemlp import _triton, activations
from sparsemlp.ops import _training_native as native
from sparsemlp.ops.mlp_training import FORWARD
from tests.backends import backends
from tests.samples import DTYPES
from tests.training_cases import GATED, KINDS, Kind

LISTS = {"lists": torch.inf, "dense": 0.0}
"""Break-even densities that send every call of the compiled kernels one way."""


def _ways() -> Iterator[Any]:
    """Every backend, the compiled one also by lists always and never."""
    for param in backends(FORWARD):
        name = param.values[0]
        if name == "auto":
            continue  # on a CPU the compiled one; which calls get here: test_training_torch.py
        yield pytest.param(name, id=name, marks=param.marks)
        if name == "native":
            yield from (pytest.param(f"native {how}", id=f"native-{how}", marks=param.marks) for how in LISTS)


WAYS = list(_ways())
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


EVERY_WAY_AND_DTYPE = pytest.mark.parametrize(("way", "dtype"), [
    pytest.param(
        p.values[0], dtype, id=f"{p.id}-{str(dtype).removeprefix('torch.')}",
        marks=[*p.marks, *([pytest.mark.slow] if p.values[0] == "triton" and _triton.interpreting() and i > 0 else [])],
    )
    for p in WAYS
    for i, dtype in enumerate(DTYPES)
])  # fmt: skip
"""In Triton's interpreter, which is slow, float32; the rest in `make test-full`."""
EVERY_BACKEND = pytest.mark.parametrize(
    "backend", [p for p in WAYS if " " not in p.values[0]], ids=lambda b: b
)
"""Without the compiled one's ways."""


def going(way: str) -> tuple[str, Any]:
    """The backend, and the context in which it goes the way."""
    backend, _, how = way.partition(" ")
    return backend, native.forced(LISTS[how]) if how else nullcontext()


def dead(sample: Any) -> Any:
    """A third of the neurons is far below 0 for every token."""
    sample.options[f"b_{'gate' if hasattr(sample, 'w_gate') else 'in'}"][::3] = -500
    return sample


def sparse(sample: Any) -> Any:
    """Most entries are below 0, of token 0 all."""
    bias = sample.options[f"b_{'gate' if hasattr(sample, 'w_gate') else 'in'}"]
    bias -= 2.25
    sample.x[:1] = 0
    return sample


def padded(sample: Any) -> Any:
    """Some tokens are all 0, and nothing is added: p = 0."""
    sample.x[::3] = 0
    return replace(sample, options={k: t for k, t in sample.options.items() if not k.startswith("b_")})


def plateau(sample: Any) -> Any:
    """`weird` with p on its plateau, mostly: a is not 0 there, its derivative is."""
    bias = sample.options[f"b_{'gate' if hasattr(sample, 'w_gate') else 'in'}"]
    bias.copy_(torch.full_like(bias, 1.5))
    return sample


Change = Callable[[Any], Any]


def _calls() -> Iterator[tuple[Kind, Any, Change]]:
    for kind in KINDS:
        case = kind.case
        for i, name in enumerate(activations.ACTIVATIONS):
            yield kind, case(f"act-{name}", activation=name, tokens=33, d=31, f=67), lambda s: s
            yield (
                kind,
                case(f"act-{name}-neurons", activation=name, tokens=18, density="neurons", d=17 + i),
                lambda s: s,
            )
        yield kind, case("plateau", activation="weird", tokens=37, f=65), plateau
        for name in ("silu", "gelu", "relu"):
            yield kind, case(f"padded-{name}", activation=name, tokens=10, d=20, f=40), padded
        for density in (0, 0.1, 0.5, "one_column", "some_inf"):
            yield kind, case(f"density-{density}", tokens=40, density=density, scale="varied"), lambda s: s
        yield (
            kind,
            case("scale-zero", activation="relu", tokens=21, density=0, scale="alternate"),
            lambda s: s,
        )
        for density, mean in ((1, "mean+out"), ("some_inf", "mean+out"), (0, "mean+out")):
            yield (
                kind,
                case(
                    f"mean-{density}",
                    tokens=19,
                    mean=mean,
                    density=density,
                    scale="one_zero",
                    activation="relu",
                ),
                lambda s: s,
            )
        yield kind, case("dead", activation="relu", tokens=50, d=40, f=130), dead
        yield kind, case("sparse", activation="relu", tokens=70, d=50, f=260), sparse
        yield kind, case("sparse-relu2", activation="relu2", tokens=29, d=33, f=140), sparse
        for t, d, f in (
            (1, 1, 1),
            (2, 65, 3),
            (1, 100, 257),
            (129, 3, 70),
            (5, 260, 9),
            (0, 8, 9),
            (7, 0, 9),
            (7, 8, 0),
        ):
            yield kind, case(f"size-{t}-{d}-{f}", activation="jsrelu", tokens=t, d=d, f=f), lambda s: s
        for x, weights in (("strided", "interleaved"), ("columns", "end"), ("repeated", "repeated")):
            yield (
                kind,
                case(f"layout-{x}-{weights}", activation="relu", tokens=12, x=x, weights=weights),
                lambda s: s,
            )
    for indicator in ("up", "product"):
        for mean in ("", "mean+out"):
            options = dict(tokens=26, density="some_inf", mean=mean, scale="alternate", indicator=indicator)
            yield GATED, GATED.case(f"indicator-{indicator}-{mean}", **options), lambda s: s


CALLS = list(_calls())
