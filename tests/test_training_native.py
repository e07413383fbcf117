"""What the compiled training kernels alone can get wrong: calls judged by a sample of their tokens, sums of many equal
numbers, gradients without memory, and bits that belong to another pattern."""

from __future__ import annotations

import math

import pytest
import torch

from sparsemlp import _native, activations
from sparsemlp.ops import _training_native as native
from tests.training_cases import KINDS, Kind, check, gradients, stored

pytestmark = pytest.mark.skipif(_native.problem() is not None, reason=str(_native.problem()))
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
EVERY_LIMIT = pytest.mark.parametrize("limit", [0.0, math.inf], ids=["dense", "lists"])


@EVERY_LIMIT
@EVERY_KIND
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_token_that_is_not_finite_in_a_dense_call(kind: Kind, value: float, limit: float) -> None:
    """So many tokens are judged by a sample of them, which leaves no bits for the lists that do the call again."""
    case = kind.case("dense", activation="gelu", tokens=144, d=24, f=40)
    sample = kind.cases.build(case, torch.float32)
    with native.forced(limit):
        clean = stored(kind, sample, "native")[0]
        sample.x[5, 3] = value
        out = stored(kind, sample, "native")[0]
        grads = gradients(kind, sample, torch.ones(()).expand(out.shape), "native", ["x"])
    others = torch.arange(144) != 5
    assert not out[5].isfinite().all()
    assert torch.allclose(out[others], clean[others], rtol=1e-4, atol=1e-5)
    assert grads["x"][others].isfinite().all()


@EVERY_LIMIT
@EVERY_KIND
def test_many_equal_numbers(kind: Kind, limit: float) -> None:
    """As `.sum().backward()` adds them: in float32, one after another, every addition would round the same way."""
    case = kind.case("equal", activation="relu", tokens=2049, d=3, f=5, scale="alternate", mean="mean+out")
    sample = kind.cases.build(case, torch.float32)
    grad = torch.tensor(0.1).expand(sample.x.shape)
    with native.forced(limit):
        check(kind, sample, "native", grad=grad)


@EVERY_LIMIT
@EVERY_KIND
def test_a_gradient_without_memory(kind: Kind, limit: float) -> None:
    sample = kind.cases.build(kind.case("zero", activation="relu", tokens=5, d=24, f=40), torch.float32)
    with native.forced(limit):
        found = gradients(kind, sample, torch._efficientzerotensor(sample.x.shape), "native")
    assert all(g.count_nonzero() == 0 for g in found.values())


def test_bits_of_neurons_that_are_not_there() -> None:
    """They would be read behind the last neuron."""
    pre, w = torch.randn(3, 65), torch.randn(65, 8)
    bits = torch.full((2, 3, 2), -1)
    rule = (pre, None, torch.tensor(0.0), None, None, None, activations.IDS["relu"], 0)
    with pytest.raises(RuntimeError, match="bits name neurons that pre lacks"):
        native._by_lists(bits, *rule, w, None, None, _native.isa())
    bits[..., 1] = 1
    assert native._by_lists(bits, *rule, w, None, None, _native.isa()).shape == (3, 8)
