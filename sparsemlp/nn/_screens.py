"""The low-bit copies of a gated MLP's gate and up weights, by which `indicator="screen"` decides: four of its buffers.

A module that runs dense, because one of its layers may not be read past, has none: they are made when it can skip
neurons again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsemlp.nn._thresholded import absent_last, put
from sparsemlp.ops import screen as operator
from sparsemlp.ops.gated_mlp import check_indicator
from sparsemlp.quantization import dequantize_rows
from sparsemlp.screen import BITS, GROUPS, PackedWeight, pack

if TYPE_CHECKING:
    from sparsemlp.nn.gated_mlp import SparseGatedMLP

__all__ = [
    "BUFFERS",
    "check",
    "check_tokens",
    "copies",
    "drop",
    "drop_from_meta",
    "drop_while_dense",
    "ensure",
    "renew",
    "renew_after_load",
    "repack",
    "scores",
]

BUFFERS = ("screen_gate", "screen_scale_gate", "screen_up", "screen_scale_up")
_CHUNK = 1024
"""int8 rows widened at a time: a multiple of the rows that a copy keeps together."""


def check(indicator: str, bits: int, group: int, tokens: object, input_threshold: object) -> None:
    """ValueError unless a module may have such an indicator, with these options of the screen."""
    check_indicator(indicator)
    for name, value, offered in (("screen_bits", bits, BITS), ("screen_group", group, GROUPS)):
        if type(value) is not int or value not in offered:
            raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(map(str, offered))}")
    check_tokens(tokens)
    if tokens is not None and indicator != "screen":
        raise ValueError(
            f"screen_tokens is given with indicator {indicator!r}, expected it with 'screen' only; leave it None"
        )
    if indicator == "screen" and input_threshold is not None:
        raise ValueError(
            "input_threshold is given with indicator 'screen', expected None: the gate's rows are read for kept "
            "neurons only; leave one of the two away"
        )


def check_tokens(tokens: object) -> None:
    """ValueError unless it may be a module's `screen_tokens`."""
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        raise ValueError(f"screen_tokens is {tokens!r}, expected None or a whole number ≥ 0")


def copies(module: SparseGatedMLP) -> tuple[PackedWeight, PackedWeight]:
    """The gate's and the up projection's copies, of a module that has them."""
    found: dict[str, Any] = module._buffers
    gate, scale_gate, up, scale_up = (found[name] for name in BUFFERS)
    return PackedWeight(gate, scale_gate), PackedWeight(up, scale_up)


def ensure(module: SparseGatedMLP) -> None:
    """Makes the copies where there are none and the module does not run dense anyway."""
    if module._buffers[BUFFERS[0]] is None and module._disturbance() is None:
        _build(module)


# As `warn`: torch.compile runs it while tracing, so that the copies are there when the graph reads them.
ensure._dynamo_marked_constant = True  # type: ignore[attr-defined] # functions have no such attribute for mypy


def renew(module: SparseGatedMLP) -> None:
    """Copies of the weights of now, or none where the module does without."""
    if module.indicator == "screen" and module._disturbance() is None:
        _build(module)
    else:
        drop(module)


def repack(module: SparseGatedMLP) -> None:
    """`renew`, for who asks for it: ValueError where no screen decides."""
    if module.indicator != "screen":
        raise ValueError(
            f"indicator is {module.indicator!r}, expected 'screen': there are no copies to make anew; call "
            "set_indicator('screen'), or sparsify with a screen's plan, which make them"
        )
    renew(module)


def renew_after_load(module: Any, incompatible: Any) -> None:
    """`load_state_dict` brings other weights."""
    renew(module)


def drop(module: SparseGatedMLP) -> None:
    """Frees the copies; `ensure` makes new ones."""
    for name in BUFFERS:
        module._buffers[name] = None
    absent_last(module)


def drop_while_dense(module: SparseGatedMLP) -> None:
    """Frees the copies of a module that runs dense: its weights may be others when it can skip neurons again."""
    if module._buffers[BUFFERS[0]] is not None:
        drop(module)


# As `ensure`: nothing of it belongs into a graph.
drop_while_dense._dynamo_marked_constant = True  # type: ignore[attr-defined]


def drop_from_meta(module: SparseGatedMLP) -> None:
    """Frees copies without values: the weights they are to be made of are about to get memory."""
    held = module._buffers[BUFFERS[0]]
    if held is not None and held.device.type == "meta":
        drop(module)


def scores(module: SparseGatedMLP, x: Tensor) -> Tensor:
    """By what the module's screen decides, (..., F) float32, for x of shape (..., D)."""
    gate, up, down = module._operands()
    neurons = down[0].shape[1]
    params, name = module.activation_params, module.activation
    return operator.scores(x, *copies(module), neurons, gate[1], up[1], name, params)


def _build(module: SparseGatedMLP) -> None:
    """Writes the copies into the former ones' memory where the sizes stay: captured graphs hold it."""
    gate, up, _ = module._operands()
    if not all(type(half[0]) in (Tensor, nn.Parameter) for half in (gate, up)):
        return  # stands for a weight while torch.export traces, and would outlive that
    for name, (weight, _, scale) in (("gate", gate), ("up", up)):
        packed = _packed(weight, scale, module.screen_bits, module.screen_group)
        put(module, f"screen_{name}", packed.codes, packed.codes.device)
        put(module, f"screen_scale_{name}", packed.scale, packed.scale.device)


def _packed(weight: Tensor, scale: Tensor | None, bits: int, group: int) -> PackedWeight:
    """The copy of a weight (F, D), or of the values of an int8 one; no wide copy of the matrix."""
    if scale is None:
        return pack(weight, bits, group)
    rows = zip(weight.split(_CHUNK), scale.split(_CHUNK), strict=True)
    parts = [pack(dequantize_rows(q, s), bits, group) for q, s in rows]
    return PackedWeight(torch.cat([p.codes for p in parts]), torch.cat([p.scale for p in parts]))
