"""Errors of `gated_mlp`'s input threshold and int8 weights: one sentence each, as `test_errors` demands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsemlp.quantization import check_rows, dequantize_rows, quantize_columns, quantize_rows
from tests.test_errors import D, F, T, arguments, meta, raises


def int8(**changes: Any) -> dict[str, Any]:
    """A valid call with int8 weights, some arguments replaced."""
    made: dict[str, Any] = {}
    for name, scale in (("w_gate", "scale_gate"), ("w_up", "scale_up"), ("w_down_t", "scale_down")):
        quantize = quantize_columns if name.endswith("_t") else quantize_rows
        made[name], made[scale] = quantize(arguments()[name])
    return {**made, **changes}


BAD = {
    # input_threshold
    "input-size": (
        dict(input_threshold=torch.ones(F)),
        r"input_threshold is shape \(4\), expected \(D,\) = \(6,\)",
    ),
    "input-dtype": (
        dict(input_threshold=torch.ones(D).bfloat16()),
        r"input_threshold is bfloat16, expected float32; .*",
    ),
    "input-0d-dtype": (
        dict(input_threshold=torch.ones((), dtype=torch.int32)),
        r"input_threshold is int32 on cpu, expected float32 on x's device cpu",
    ),
    "input-device": (
        dict(input_threshold=meta(D)),
        r"input_threshold is on meta, expected x's device cpu; .*",
    ),
    "input-negative": (dict(input_threshold=-0.5), r"input_threshold is -0\.5, expected a number ≥ 0 .*"),
    "input-nan": (dict(input_threshold=torch.nan), r"input_threshold is nan, expected a number ≥ 0 .*"),
    "input-text": (
        dict(input_threshold="0.1"),
        r"input_threshold is str, expected a number ≥ 0 or a float32 tensor of shape \(\) or \(D,\)",
    ),
    "input-bool": (dict(input_threshold=True), r"input_threshold is bool, expected a number ≥ 0 or .*"),
    "input-values": (
        dict(input_threshold=torch.tensor([0.0, 1, 1, -1, 1, 1]), w_gate=torch.randn(D, F).t()),
        r"input_threshold holds a negative or NaN value, expected values (>=|≥) 0 \(inf: never active\)",
    ),
    "gate-by-input-without": (
        dict(w_gate=torch.randn(D, F).t()),
        r"w_gate has strides \(1, 4\), expected unit stride inside a row; .*",
    ),
    "gate-neither": (
        dict(w_gate=torch.randn(2 * F, 2 * D)[::2, ::2], input_threshold=0.5),
        r"w_gate has strides \(24, 2\), expected unit stride inside a row \(or, .* inside a column\); .*",
    ),
    "up-by-input": (
        dict(w_up=torch.randn(D, F).t(), input_threshold=0.5),
        r"w_up has strides \(1, 4\), expected unit stride inside a row; .*w_up\.contiguous\(\)",
    ),
    # int8
    "scale-gate-missing": (
        int8(scale_gate=None),
        r"scale_gate is None, expected \(F,\) = \(4,\) float32 beside an int8 w_gate; .*quantize_rows",
    ),
    "scale-up-missing": (
        int8(scale_up=None),
        r"scale_up is None, expected \(F,\) = \(4,\) float32 beside .*",
    ),
    "scale-down-missing": (
        int8(scale_down=None),
        r"scale_down is None, expected \(D,\) = \(6,\) float32 beside an int8 w_down_t; .*quantize_columns",
    ),
    "scale-size": (int8(scale_down=torch.ones(F)), r"scale_down is shape \(4\), expected \(D,\) = \(6,\)"),
    "scale-number": (int8(scale_up=1.0), r"scale_up is float, expected \(F,\) = \(4,\)"),
    "scale-half": (int8(scale_gate=torch.ones(F).half()), r"scale_gate is float16, expected float32; .*"),
    "scale-device": (int8(scale_gate=meta(F)), r"scale_gate is on meta, expected x's device cpu; .*"),
    "scale-without": (
        dict(scale_gate=torch.ones(F)),
        r"scale_gate is given with a w_gate of float32, expected it beside int8 weights; leave it None",
    ),
    "scale-down-without": (
        dict(scale_down=torch.ones(F)),
        r"scale_down is given with a w_down_t of float32, expected it beside int8 weights; leave it None",
    ),
    "up-float": (
        int8(w_up=torch.randn(F, D), scale_up=None),
        r"w_up is float32 beside an int8 w_gate, expected three int8 weights or none; quantise it with .*",
    ),
    "down-uint8": (
        int8(w_down_t=torch.ones(F, D, dtype=torch.uint8)),
        r"w_down_t is uint8 beside an int8 w_gate, expected three int8 weights or none; .*",
    ),
    "gate-float": (
        int8(w_gate=torch.randn(F, D), scale_gate=None),
        r"w_up is int8, expected x's dtype float32; .*",
    ),
    "weight-device": (
        int8(w_up=torch.ones(F, D, dtype=torch.int8, device="meta")),
        r"w_up is torch\.strided on meta, expected torch\.strided on x's device cpu; .*",
    ),
    "weight-stride": (
        int8(w_down_t=torch.ones(D, F, dtype=torch.int8).t()),
        r"w_down_t has strides \(1, 4\), expected unit stride inside a row; .*",
    ),
    "x-int8": (int8(x=torch.ones(T, D, dtype=torch.int8)), r"x is int8, expected float32, bfloat16, .*"),
    "bias-int8": (
        int8(b_up=torch.ones(F, dtype=torch.int8)),
        r"b_up is int8, expected x's dtype float32; .*",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_message(changes: dict[str, Any], message: str) -> None:
    raises(message, **changes)


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_the_same_message_when_gradients_are_wanted(changes: dict[str, Any], message: str) -> None:
    """The differentiable path checks before it computes; only values inside a tensor are not looked at there."""
    if "holds a negative" in message:
        return
    x = changes.get("x", arguments()["x"])
    raises(message, **{**changes, "x": x.requires_grad_() if x.is_floating_point() else x})


def test_quantize_rows_says_what_it_cannot_round() -> None:
    bad = torch.randn(2000, 3)
    bad[1500, 1] = torch.nan
    for weight, message in (
        (bad, "weight holds NaN, inf or a value beyond float32 in row 1500, expected finite values; .*"),
        (torch.full((2, 2), -torch.inf), "weight holds NaN, inf or .* in row 0, .*"),
        (torch.full((2, 2), 1e300, dtype=torch.float64), "weight holds .* beyond float32 in row 0, .*"),
        (
            torch.randn(3),
            r"weight is float32 of shape \(3,\), expected a floating-point matrix \(N, K\); pass one",
        ),
        (
            torch.ones(2, 2, dtype=torch.int8),
            r"weight is int8 of shape \(2, 2\), expected a floating-point .*",
        ),
        ([1.0], r"weight is list, expected a floating-point matrix \(N, K\); pass one"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            quantize_rows(weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^layer\.weight holds NaN"):
        check_rows(bad, "layer.weight")


def test_dequantize_rows_says_what_it_cannot_widen() -> None:
    q, scale = quantize_rows(torch.randn(4, 6))
    with pytest.raises(
        ValueError, match=r"^q is int8 of shape \(4, 6\) with scales \(6,\), expected int8 .*"
    ):
        dequantize_rows(q, torch.ones(6))
    with pytest.raises(
        ValueError, match=r"^q is float32 of shape \(4, 6\) with scales \(4,\), expected int8 .*"
    ):
        dequantize_rows(q.float(), scale)
