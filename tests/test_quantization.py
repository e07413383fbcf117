"""Rounding to int8: the grid, its error, its extremes; no wide copy of a matrix."""

from __future__ import annotations

import pytest
import torch

from sparsemlp.quantization import dequantize_rows, quantize_columns, quantize_rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 2, max(rows, 1))[:rows, None]
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (1025, 7), (2500, 3), (0, 5), (5, 0)], ids=str)
def test_every_entry_is_the_nearest_of_the_grid(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = normal(*shape, dtype)
    before = weight.clone()
    q, scale = quantize_rows(weight)
    assert torch.equal(weight, before)
    assert (q.dtype, q.shape, q.is_contiguous()) == (torch.int8, weight.shape, True)
    assert (scale.dtype, scale.shape) == (torch.float32, weight.shape[:1])
    if weight.numel() == 0:
        assert (scale == 0).all()
        return
    assert q.abs().amax(dim=1).eq(127).all()  # a row's largest entry fills the range
    assert q.abs().max() <= 127
    error = (weight.double() - q.double() * scale.double()[:, None]).abs()
    slack = 1 + 1e-5  # the scale itself is rounded to float32: 127 steps of 2⁻²⁴ each
    assert (error <= slack * scale.double()[:, None] / 2).all()


def test_halves_are_rounded_to_even_and_signs_are_kept() -> None:
    q, scale = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 0.0]]))
    assert scale.item() == 1
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -127, 0]]


def test_rows_of_zeros_and_of_the_smallest_and_largest_numbers() -> None:
    tiny, huge = torch.finfo(torch.float32).smallest_normal * 2**-23, torch.finfo(torch.float32).max / 2
    weight = torch.tensor([[0.0, -0.0], [tiny, -tiny], [190 * tiny, tiny], [huge, -huge]])
    q, scale = quantize_rows(weight)
    assert scale[0] == 0
    assert q[0].tolist() == [0, 0]
    assert q.abs().max() <= 127
    assert scale.isfinite().all()
    assert dequantize_rows(q, scale).isfinite().all()
    assert q[3].tolist() == [127, -127]


@pytest.mark.parametrize("layout", ["transposed", "strided", "rows"])
def test_any_strides(layout: str) -> None:
    weight = normal(40, 30)
    view = {
        "transposed": lambda: weight.t().contiguous().t(),
        "strided": lambda: torch.full((40, 60), torch.nan)[:, ::2].copy_(weight),
        "rows": lambda: torch.full((80, 30), torch.nan)[::2].copy_(weight),
    }[layout]()
    for ours, plain in zip(quantize_rows(view), quantize_rows(weight), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_back_to_floats_rounds_once(dtype: torch.dtype) -> None:
    q, scale = quantize_rows(normal(1100, 9))
    back = dequantize_rows(q.t().contiguous().t(), scale, dtype)
    assert torch.equal(back, (q.double() * scale.double()[:, None]).to(dtype))
    assert back.is_contiguous()


def test_a_second_rounding_changes_nothing() -> None:
    q, scale = quantize_rows(normal(50, 60))
    again, scale_again = quantize_rows(dequantize_rows(q, scale))
    assert torch.equal(q, again)
    torch.testing.assert_close(scale, scale_again)


def test_gradients_stop_and_meta_is_not_read() -> None:
    q, scale = quantize_rows(normal(4, 5).requires_grad_())
    assert not scale.requires_grad
    q, scale = quantize_rows(torch.empty(4, 5, device="meta"))
    assert (q.device.type, q.dtype, q.shape, scale.shape) == ("meta", torch.int8, (4, 5), (4,))


@pytest.mark.parametrize("shape", [(30, 40), (1100, 7), (0, 5), (5, 0)], ids=str)
def test_columns_are_the_rows_of_the_transpose(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    q, scale = quantize_columns(weight)
    expected, factors = quantize_rows(weight.t())
    assert torch.equal(q, expected.t())
    assert torch.equal(scale, factors)
    assert q.is_contiguous()


def test_columns_of_what_cannot_be_rounded() -> None:
    weight = normal(4, 6)
    weight[2, 5] = torch.nan
    with pytest.raises(ValueError, match=r"^weight holds NaN, inf or .* in row 2, expected finite values"):
        quantize_columns(weight)
    with pytest.raises(ValueError, match=r"^weight is list, expected a floating-point matrix"):
        quantize_columns([[1.0]])  # type: ignore[arg-type] # on purpose
