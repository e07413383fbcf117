"""`sparsemlp.ops.screen.scores`: against float64 the long way, compiled and not, shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsemlp import _native
from sparsemlp.ops import _gated_mlp_native as native
from sparsemlp.ops.screen import scores
from sparsemlp.screen import PackedWeight, pack
from tests.screen_samples import silu_scores

F, D = 50, 75


def inputs(
    tokens: int = 9, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = ((tokens, D), (F, D), (F, D), (F,), (F,))
    x, w_gate, w_up, b_gate, b_up = (torch.randn(*size, generator=g).to(dtype) for size in sizes)
    return x, w_gate / D**0.5, w_up / D**0.5, b_gate, b_up


@pytest.fixture(params=["native", "reference"])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes, and a proof that it does."""
    calls = []
    kernel = native.screen_scores
    monkeypatch.setattr(native, "screen_scores", lambda *args: calls.append(1) or kernel(*args))
    if request.param == "reference":
        monkeypatch.setattr(_native, "problem", lambda: "switched off")
    elif _native.problem() is not None:
        pytest.skip(str(_native.problem()))
    scores(*packed(*inputs()))
    assert len(calls) == (request.param == "native")
    return request.param


def packed(x: Tensor, w_gate: Tensor, w_up: Tensor, *biases: Tensor, bits: int = 4, group: int = 32) -> tuple:
    return x, pack(w_gate, bits, group), pack(w_up, bits, group), w_up.shape[0], *biases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_scores_are_those_of_the_copies(computed: str, dtype: torch.dtype, bits: int, group: int) -> None:
    x, w_gate, w_up, b_gate, b_up = inputs(dtype=dtype)
    ours = scores(*packed(x, w_gate, w_up, b_gate, b_up, bits=bits, group=group))
    truth, slack = silu_scores(x, w_gate, w_up, bits, group, b_gate, b_up)
    assert ours.dtype == torch.float32
    assert bool(((ours.double() - truth).abs() <= slack).all())
    other, _ = silu_scores(x, w_gate, w_up, bits, group, b_up, b_gate)
    assert bool(((ours.double() - other).abs() > slack).any())


def test_float64_is_summed_in_float64() -> None:
    x, w_gate, w_up, b_gate, b_up = inputs(dtype=torch.float64)
    ours = scores(*packed(x, w_gate, w_up, b_gate, b_up))
    truth, _ = silu_scores(x, w_gate, w_up, 4, 32, b_gate, b_up)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_leading_dimensions_strides_and_gradients(computed: str) -> None:
    x, *rest = inputs(12)
    flat = scores(*packed(x, *rest))
    x.requires_grad_()
    assert not scores(*packed(x, *rest)).requires_grad
    x = x.detach()
    assert torch.equal(scores(*packed(x.view(3, 4, D), *rest)), flat.view(3, 4, F))
    assert scores(*packed(x[0], *rest)).shape == (F,)
    if computed == "native":  # PyTorch's products of one token are another kernel's
        assert torch.equal(scores(*packed(x[0], *rest)), flat[0])
    assert torch.equal(scores(*packed(x.t().contiguous().t(), *rest)), flat)
    assert torch.equal(scores(*packed(torch.cat([x, x], 1)[:, :D], *rest)), flat)
    assert scores(*packed(x[:0], *rest)).shape == (0, F)


def test_other_activations(computed: str) -> None:
    x, w_gate, w_up, _, _ = inputs()
    args = packed(x, w_gate, w_up)
    linear = scores(*args, activation="identity")
    relu, tau = scores(*args, activation="relu"), torch.tensor([0.5])
    assert 0.3 < float((relu == 0).double().mean()) < 0.7
    torch.testing.assert_close(relu, linear.where(relu != 0, 0))
    fatter = scores(*args, activation="fatrelu", activation_params=tau)
    assert float((fatter == 0).double().mean()) > float((relu == 0).double().mean())
    torch.testing.assert_close(fatter, relu.where(fatter != 0, 0))


def test_what_holds_nan_scores_nan(computed: str) -> None:
    x, w_gate, w_up, b_gate, b_up = inputs()
    x[2, 3], w_gate[5, 40] = float("inf"), float("nan")
    ours = scores(*packed(x, w_gate, w_up, b_gate, b_up))
    assert bool(ours[2].isnan().all())
    assert bool(ours[:, 5].isnan().all())
    ours[2], ours[:, 5] = 0, 0
    assert bool(ours.isfinite().all())


def test_wrong_arguments() -> None:
    x, gate, up, n, b_gate, b_up = packed(*inputs())
    with pytest.raises(
        ValueError, match=r"screen_gate is Tensor|screen_gate is shape .* expected a PackedWeight"
    ):
        scores(x, inputs()[1], up, n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"screen_up has codes .*, expected those of \(50, 75\)"):
        scores(x, gate, pack(torch.randn(F, 200)), n)
    with pytest.raises(ValueError, match=r"screen_gate has codes .*, expected those of \(70, 75\)"):
        scores(x, gate, up, 70)
    with pytest.raises(
        ValueError, match="screen_up has 3 bits in groups of 32, expected screen_gate's 4 in groups"
    ):
        scores(x, gate, pack(inputs()[2], 3), n)
    with pytest.raises(ValueError, match=r"b_up is shape \(75\), expected \(F,\) = \(50,\)"):
        scores(x, gate, up, n, b_gate, torch.zeros(D))
    with pytest.raises(ValueError, match="b_gate is float64, expected x's dtype float32"):
        scores(x, gate, up, n, b_gate.double(), b_up)
    with pytest.raises(ValueError, match="x is int64, expected float32, bfloat16, float16 or float64"):
        scores(x.long(), gate, up, n)
    with pytest.raises(ValueError, match="activation"):
        scores(x, gate, up, n, activation="swish")
    with pytest.raises(ValueError, match=r"has codes of torch\.float32"):
        scores(x, PackedWeight(gate.codes.float(), gate.scale), up, n)
