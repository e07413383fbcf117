"""Arguments of the wrong kind that every operator can be given: one sentence that names them, never an inner error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsemlp


def one_sentence(message: str) -> bool:
    return "\n" not in message and ". " not in message and not message.endswith(".")


X, W = torch.randn(3, 64), torch.randn(96, 64)
SQUARE = torch.randn(64, 96)
CALLS: dict[str, Callable[..., Any]] = {
    "mlp": lambda **more: sparsemlp.mlp(X, W, W, **more),
    "gated_mlp": lambda **more: sparsemlp.gated_mlp(X, W, W, W, **more),
    "sparse_linear": lambda **more: sparsemlp.sparse_linear(X, SQUARE, **more),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


@EVERY_CALL
@BACKENDS
@pytest.mark.parametrize(
    "number",
    [10**20, 10**30, 10**38, 3 * 10**38, 4 * 10**38, 10**300],
    ids=["20", "30", "38", "38+", "39", "300"],
)
def test_large_integers_are_thresholds(number: int, backend: str, name: str) -> None:
    assert torch.equal(
        CALLS[name](threshold=number, backend=backend), CALLS[name](threshold=float(number), backend=backend)
    )


@EVERY_CALL
@BACKENDS
@pytest.mark.parametrize(
    "number", [10**400, -(10**400), 10**5000, -(10**5000)], ids=["400", "-400", "5000", "-5000"]
)
def test_integers_beyond_floats(number: int, backend: str, name: str) -> None:
    sign = "a negative integer" if number < 0 else "an integer"
    with pytest.raises(ValueError, match=f"^threshold is {sign} beyond every float, expected") as caught:
        CALLS[name](threshold=number, backend=backend)
    assert one_sentence(str(caught.value))


@EVERY_CALL
@BACKENDS
@pytest.mark.parametrize("argument", ["threshold", "token_scale"])
def test_sparse_layouts(argument: str, backend: str, name: str) -> None:
    size = {"threshold": 64 if name == "sparse_linear" else 96, "token_scale": 3}[argument]
    with pytest.raises(ValueError, match=f"^{argument} has layout torch.sparse_coo, expected torch.strided"):
        CALLS[name](**{argument: torch.ones(size).to_sparse()}, backend=backend)


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, "backend") for name in CALLS]
    + [("mlp", "activation"), ("gated_mlp", "activation"), ("gated_mlp", "indicator")],
)
def test_tensors_for_names(argument: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} is Tensor, expected") as caught:
        CALLS[name](**{argument: torch.ones(2, 2)})
    assert one_sentence(str(caught.value))
