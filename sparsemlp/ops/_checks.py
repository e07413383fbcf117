"""Checks of arguments that several operators share; each error is one sentence that names the argument."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from sparsemlp import activations
from sparsemlp._op import autocasts

__all__ = [
    "as_threshold",
    "check_activation",
    "check_float32",
    "check_like",
    "check_token_scale",
    "describe",
    "dtype_text",
    "number_tensor",
    "shape_text",
]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MOST_NUMBERS = 1024
_numbers: dict[float, Tensor] = {}


def shape_text(t: Tensor) -> str:
    return f"({', '.join(map(str, t.shape))})"


def dtype_text(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def describe(t: object) -> str:
    return f"shape {shape_text(t)}" if isinstance(t, Tensor) else type(t).__name__


def check_like(name: str, t: Tensor, x: Tensor) -> None:
    """t's layout, dtype and device are x's; under autocast the dtypes may differ, the operator converts them."""
    if t.layout != torch.strided:
        raise ValueError(f"{name} has layout {t.layout}, expected torch.strided; call {name}.to_dense()")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, expected x's device {x.device}; move one of them")
    if t.dtype == x.dtype:
        return
    if autocasts(x.device.type) and {t.dtype, x.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return  # autocast leaves float64 alone
    raise ValueError(f"{name} is {dtype_text(t)}, expected x's dtype {dtype_text(x)}; convert one of them")


def check_float32(name: str, t: Tensor, shape: tuple[int, ...], letters: str, x: Tensor) -> None:
    if not isinstance(t, Tensor) or tuple(t.shape) != shape:
        raise ValueError(f"{name} is {describe(t)}, expected ({letters},) = ({', '.join(map(str, shape))},)")
    if t.dtype != torch.float32 and not (x.dtype == torch.float64 and t.dtype == torch.float64):
        raise ValueError(f"{name} is {dtype_text(t)}, expected float32; convert it")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, expected x's device {x.device}; move one of them")


def check_activation(x: Tensor, activation: str, params: Tensor | None) -> Tensor | None:
    names = activations.get(activation).params
    if params is None:
        if names:
            raise ValueError(
                f"activation_params is None, expected a tensor of {len(names)} for activation {activation!r}: "
                f"({', '.join(names)})"
            )
        return None
    if not isinstance(params, Tensor) or tuple(params.shape) != (len(names),) or not names:
        wanted = f"({len(names)},): ({', '.join(names)})" if names else "None"
        raise ValueError(
            f"activation_params is {describe(params)}, expected {wanted} for activation {activation!r}"
        )
    if params.dtype not in (torch.float32, torch.float64) or params.device != x.device:
        raise ValueError(
            f"activation_params is {dtype_text(params)} on {params.device}, expected float32 on x's device {x.device}"
        )
    return params


def as_threshold(
    threshold: float | Tensor, x: Tensor, size: int, name: str = "threshold", letter: str = "F"
) -> Tensor:
    """The threshold as a tensor; numbers become float32 (float64 beside float64 x), beyond its range infinite."""
    if isinstance(threshold, Tensor):
        if threshold.dim() != 0:
            check_float32(name, threshold, (size,), letter, x)
        elif threshold.dtype not in (torch.float32, torch.float64) or threshold.device != x.device:
            raise ValueError(
                f"{name} is {dtype_text(threshold)} on {threshold.device}, expected float32 on x's device {x.device}"
            )
        return threshold
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise ValueError(
            f"{name} is {describe(threshold)}, expected a number ≥ 0 or a float32 tensor of shape () or ({letter},)"
        )
    try:
        number = float(threshold)
    except OverflowError:  # an integer beyond the floats
        number = math.nan
    if not number >= 0:
        raise ValueError(f"{name} is {threshold}, expected a number ≥ 0 (inf: never active)")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if number > torch.finfo(dtype).max:
        number = math.inf
    return torch.full((), number, dtype=dtype, device=x.device)


def number_tensor(number: float | Tensor) -> Tensor | None:
    """A threshold that is a number as a CPU float32 tensor, made once and kept; None where it has to be checked first.

    Making and checking one takes 18 µs, twice as long as a small call. For plain eager calls.
    """
    if isinstance(number, Tensor):
        return number
    if type(number) is not float and type(number) is not int:
        return None
    found = _numbers.get(number)
    if found is None:
        if not (0 <= number <= _FLOAT32_MAX or number == math.inf):
            return None
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        with torch.inference_mode(False):
            found = _numbers[number] = torch.full((), number, dtype=torch.float32, device="cpu")
    return found


def check_token_scale(scale: Tensor, x: Tensor, tokens: int) -> Tensor:
    if not isinstance(scale, Tensor) or (scale.shape != x.shape[:-1] and tuple(scale.shape) != (tokens,)):
        raise ValueError(
            f"token_scale is {describe(scale)}, expected (T,) = ({tokens},) or x's leading shape"
        )
    flat = scale.reshape(tokens)
    check_float32("token_scale", flat, (tokens,), "T", x)
    return flat
