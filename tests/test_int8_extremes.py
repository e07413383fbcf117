"""int8 weights where integers, halves or the surroundings are at their limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsemlp
from sparsemlp import _native
from sparsemlp.ops import _gated_mlp_native, _mlp_native
from sparsemlp.quantization import quantize_columns, quantize_rows

ROUTES = ("sparse", "dense", "pytorch")
NEEDS_LIBRARY = pytest.mark.skipif(_native.problem() is not None, reason=f"native: {_native.problem()}")


def weights(count: int, f: int, d: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    made = [quantize_rows(torch.randn(f, d) / d**0.5) for _ in range(count - 1)]
    made.append(quantize_columns(torch.randn(f, d) / d**0.5))
    return [q for q, _ in made], [s for _, s in made]


def double(q: list[Tensor], scale: list[Tensor]) -> list[Tensor]:
    """The weights' values; the last one has a scale for each column."""
    rows = [w.double() * s.double()[:, None] for w, s in zip(q[:-1], scale[:-1], strict=True)]
    return [*rows, q[-1].double() * scale[-1].double()]


@NEEDS_LIBRARY
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_sums_of_integers_are_beyond_float16(tokens: int, route: str) -> None:
    """Σ x·q reaches 10⁶ here, the outputs 10: nothing may be held unscaled in half precision."""
    q, s = weights(3, 64, 4096)
    x = (10 * torch.randn(tokens, 4096)).half()
    wide = double(q, s)
    args = (x, *q, torch.tensor(0.0), *[None] * 7, *s, *[None] * 5, "relu", "gate")
    with torch.inference_mode():
        found = _gated_mlp_native.ROUTES[route](*args)
    p, u = x.double() @ wide[0].t(), x.double() @ wide[1].t()
    expected = (p.relu() * u) @ wide[2]
    assert (found.double() - expected).abs().max() <= 4e-3 * expected.abs().max()

    args = (x, q[0], q[2], torch.tensor(0.0), *[None] * 6, s[0], s[2], *[None] * 3, "relu")
    with torch.inference_mode():
        found = _mlp_native.ROUTES[route](*args)
    expected = p.relu() @ wide[2]
    assert (found.double() - expected).abs().max() <= 4e-3 * expected.abs().max()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("largest", [1e-32, 1e-34, 1e-36])  # bf16 products take subnormal numbers for 0
@pytest.mark.parametrize("tokens", [1, 4, 9, 40])
def test_tokens_of_tiny_entries(tokens: int, largest: float, dtype: torch.dtype, backend: str) -> None:
    """The step of a 16-bit token would be subnormal: it keeps its precision all the same, and its mates theirs."""
    q, s = weights(2, 100, 65)
    x = torch.randn(tokens, 65)
    x[0] *= largest / x[0].abs().max()
    x = x.to(dtype)
    s = [s[0] * 1e10, s[1] * 1e10]  # outputs that are normal numbers
    with torch.inference_mode():
        found = sparsemlp.mlp(x, q[0], q[1], scale_in=s[0], scale_out=s[1], backend=backend)
    wide = double(q, s)
    expected = (x.double() @ wide[0].t()).relu() @ wide[1]
    error = (found.double() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    assert error.max() <= (1e-6 if dtype == torch.float32 else 8e-3)


def test_the_default_dtype_is_not_asked() -> None:
    q, s = weights(3, 50, 33)
    q[0] = q[0].t().contiguous().t()
    x = torch.randn(3, 33)

    def call() -> Tensor:
        return sparsemlp.gated_mlp(
            x, *q, scale_gate=s[0], scale_up=s[1], scale_down=s[2], threshold=0.1, input_threshold=0.5
        )

    with torch.inference_mode():
        expected = call()
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                assert torch.equal(call(), expected)
            finally:
                torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert torch.equal(call(), expected)
