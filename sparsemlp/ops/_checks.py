"""Checks of arguments that several operators share; each error is one sentence that names the argument."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from sparsemlp import activations
from sparsemlp._op import autocasts
from sparsemlp.reference.gated_mlp import skipped_out as reference_skipped_out
from sparsemlp.screen import PackedWeight, why_not_of

__all__ = [
    "as_threshold",
    "check_activation",
    "check_bias",
    "check_differentiable",
    "check_float32",
    "check_int8",
    "check_int8_place",
    "check_like",
    "check_screen",
    "check_token_scale",
    "check_x",
    "checked_skipped_out",
    "describe",
    "dtype_text",
    "number_tensor",
    "number_text",
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


def number_text(number: object) -> str:
    """A number for a message; Python refuses to write integers of thousands of digits."""
    if isinstance(number, int) and number.bit_length() > 1024:
        return "an integer beyond every float" if number > 0 else "a negative integer beyond every float"
    return str(number)


def check_strided(name: str, t: Tensor) -> None:
    if t.layout != torch.strided:
        raise ValueError(f"{name} has layout {t.layout}, expected torch.strided; call {name}.to_dense()")


def check_like(name: str, t: Tensor, x: Tensor) -> None:
    """t's layout, dtype and device are x's; under autocast the dtypes may differ, the operator converts them."""
    check_strided(name, t)
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, expected x's device {x.device}; move one of them")
    if t.dtype == x.dtype:
        return
    if autocasts(x.device.type) and {t.dtype, x.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return  # autocast leaves float64 alone
    raise ValueError(f"{name} is {dtype_text(t)}, expected x's dtype {dtype_text(x)}; convert one of them")


def check_x(x: Tensor, letter: str = "D") -> int:
    """Checks x; returns the number of tokens."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise ValueError(f"x is {describe(x)}, expected a tensor of shape (..., {letter}); add a dimension")
    check_like("x", x, x)
    if not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(f"x is {dtype_text(x)}, expected float32, bfloat16, float16 or float64; convert it")
    width = x.shape[-1]
    return x.numel() // width if width else math.prod(x.shape[:-1])


def check_bias(name: str, b: Tensor | None, size: int, letter: str, x: Tensor) -> None:
    if b is None:
        return
    if not isinstance(b, Tensor) or b.dim() != 1 or b.shape[0] != size:
        raise ValueError(f"{name} is {describe(b)}, expected ({letter},) = ({size},)")
    check_like(name, b, x)


def check_int8_place(name: str, w: Tensor, x: Tensor) -> None:
    if w.layout != torch.strided or w.device != x.device:
        raise ValueError(
            f"{name} is {w.layout} on {w.device}, expected torch.strided on x's device {x.device}; convert it"
        )


def check_int8(
    name: str, w: Tensor, scale_name: str, scale: Tensor | None, x: Tensor, first: str, count: str
) -> None:
    """w (F, D), one of `count` weights of which `first` is int8, is so too, and has a scale for each of its outputs."""
    by_column = name.endswith("_t")
    letter, size = ("D", w.shape[1]) if by_column else ("F", w.shape[0])
    function = f"sparsemlp.quantization.quantize_{'columns' if by_column else 'rows'}"
    if w.dtype != torch.int8:
        raise ValueError(
            f"{name} is {dtype_text(w)} beside an int8 {first}, expected {count} int8 weights or none; quantise it "
            f"with {function}"
        )
    check_int8_place(name, w, x)
    if scale is None:
        raise ValueError(
            f"{scale_name} is None, expected ({letter},) = ({size},) float32 beside an int8 {name}; pass the scales of "
            f"{function}"
        )
    check_float32(scale_name, scale, (size,), letter, x)


def check_float32(name: str, t: Tensor, shape: tuple[int, ...], letters: str, x: Tensor) -> None:
    if not isinstance(t, Tensor) or tuple(t.shape) != shape:
        raise ValueError(f"{name} is {describe(t)}, expected ({letters},) = ({', '.join(map(str, shape))},)")
    check_strided(name, t)
    if t.dtype != torch.float32 and not (x.dtype == torch.float64 and t.dtype == torch.float64):
        raise ValueError(f"{name} is {dtype_text(t)}, expected float32; convert it")
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, expected x's device {x.device}; move one of them")


Screens = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Codes of gate and up, then their scales."""


def check_screen(
    indicator: str, gate: PackedWeight | None, up: PackedWeight | None, x: Tensor, neurons: int
) -> Screens:
    """The tensors of the low-bit copies, which there are by the indicator "screen" and only then."""
    copies = (("screen_gate", gate, "w_gate"), ("screen_up", up, "w_up"))
    for name, packed, weight in copies:
        if indicator != "screen":
            if packed is not None:
                raise ValueError(
                    f"{name} is given with indicator {indicator!r}, expected it with 'screen' only; leave it None"
                )
            continue
        if not isinstance(packed, PackedWeight):
            raise ValueError(
                f"{name} is {type(packed).__name__}, expected a PackedWeight with indicator 'screen'; make it with "
                f"sparsemlp.screen.pack({weight})"
            )
        why = why_not_of(packed, neurons, x.shape[-1])
        if why is not None:
            raise ValueError(f"{name} {why}; make it with sparsemlp.screen.pack({weight})")
        if packed.codes.device != x.device:
            raise ValueError(
                f"{name} is on {packed.codes.device}, expected x's device {x.device}; move one of them"
            )
    if gate is None or up is None:
        return None, None, None, None
    if (gate.bits, gate.group) != (up.bits, up.group):
        raise ValueError(
            f"screen_up has {up.bits} bits in groups of {up.group}, expected screen_gate's {gate.bits} in groups of "
            f"{gate.group}; pack both alike"
        )
    return gate.codes, up.codes, gate.scale.detach(), up.scale.detach()  # they decide; there is no derivative


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
        check_strided(name, threshold)
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
        raise ValueError(f"{name} is {number_text(threshold)}, expected a number ≥ 0 (inf: never active)")
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
            found = _numbers[number] = torch.full((), float(number), dtype=torch.float32, device="cpu")
    return found


def check_token_scale(scale: Tensor, x: Tensor, tokens: int) -> Tensor:
    if not isinstance(scale, Tensor) or (scale.shape != x.shape[:-1] and tuple(scale.shape) != (tokens,)):
        raise ValueError(
            f"token_scale is {describe(scale)}, expected (T,) = ({tokens},) or x's leading shape"
        )
    check_strided("token_scale", scale)
    flat = scale.reshape(tokens)
    check_float32("token_scale", flat, (tokens,), "T", x)
    return flat


def checked_skipped_out(
    x: Tensor, skipped_mean: Tensor | None, skipped_out: Tensor | None, w_t: Tensor, scale: Tensor | None
) -> Tensor | None:
    """μ @ w_t where only the mean μ is given; both checked."""
    if skipped_mean is None:
        if skipped_out is not None:
            raise ValueError(
                "skipped_out is given without skipped_mean, expected both or the mean alone; pass the mean"
            )
        return None
    check_float32("skipped_mean", skipped_mean, (w_t.shape[0],), "F", x)
    if skipped_out is None:
        mean = skipped_mean.double() if x.dtype == torch.float64 else skipped_mean
        skipped_out = reference_skipped_out(mean, w_t, scale)
    check_float32("skipped_out", skipped_out, (x.shape[-1],), "D", x)
    return skipped_out


def check_differentiable(backend: str) -> None:
    """Raises for a backend that cannot compute a call whose gradients are wanted."""
    if backend not in ("auto", "reference"):
        raise ValueError(
            f"backend is {backend!r}, which has no derivative, and an input requires grad (or torch.func transforms "
            "it); use backend='auto', or call it under torch.no_grad()"
        )
