"""Low-bit copies of a gated MLP's gate and up weights, from which `indicator="screen"` decides who is computed.

A copy has `bits` bits a weight and one bfloat16 scale for every `group` neighbours of a row. It is stored for kernels
that compute 16 neurons side by side, four inputs at a time: a *quad* is four neighbouring inputs of 16 neurons, 64
values, and a group of 32 inputs is 8 quads. Of codes (value + 2^(bits − 1), never negative), byte b of

* 8 bits: quad c is 64 bytes, its byte b that of neuron b // 4, input 4c + b % 4;
* 4 bits: quads 2s (low halves) and 2s + 1 (high halves) share 64 bytes;
* 3 bits: for 32 inputs three times 64 bytes: the low two bits of quads 0 to 3 (quad i at bit 2i), those of quads 4 to
  7, and the third bit of all eight (quad i at bit i).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "GROUPS",
    "ROWS",
    "PackedWeight",
    "check_sizes",
    "pack",
    "sizes_of",
    "unpack",
    "why_not_of",
]

BITS = (3, 4, 8)
GROUPS = (32, 64, 128)
ROWS = 16
"""Neurons side by side."""
_CHUNK = 1024
"""Rows worked on at a time: no wide copy of a matrix."""


class PackedWeight(NamedTuple):
    """A low-bit copy of a weight (F, D), made by `pack`.

    Attributes:
        codes: (⌈F / 16⌉, ⌈D / group⌉, bits, 2 · group) uint8, contiguous.
        scale: (⌈F / 16⌉, ⌈D / group⌉, 16) bfloat16, contiguous; NaN for a group that holds NaN or inf.
    """

    codes: Tensor
    scale: Tensor

    @property
    def bits(self) -> int:
        """Bits a weight, without scales."""
        return self.codes.shape[2]

    @property
    def group(self) -> int:
        """Neighbours of a row that share a scale."""
        return self.codes.shape[3] // 2

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + 2 * self.scale.numel()


def sizes_of(neurons: int, width: int, bits: int, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and the scales of a weight (neurons, width)."""
    blocks, groups = -(-neurons // ROWS), -(-width // group)
    return (blocks, groups, bits, 2 * group), (blocks, groups, ROWS)


def pack(weight: Tensor, bits: int = 4, group: int = 32) -> PackedWeight:
    """A low-bit copy of a weight; the same bits from the same weight on every machine.

    A group's scale is its entry of largest magnitude / −2^(bits − 1), rounded to bfloat16 (as that entry's value is
    −2^(bits − 1), the whole range is used; the scale's sign is opposite to the entry's). A value is the weight / scale,
    rounded half to even and held within −2^(bits − 1) … 2^(bits − 1) − 1. Normal weights are off by 8.6 % (root mean
    square, 4 bits, groups of 32; 17 % with 3 bits); a scale from ±(2^(bits − 1) − 1) leaves 9.7 % (23 %).

    Args:
        weight: (F, D), any floating dtype and strides; it is not changed.
        bits: 3, 4 or 8.
        group: 32, 64 or 128 neighbours of a row to a scale.

    Returns:
        The copy, on the weight's device: bits + 16 / group bits a weight (4.5 by default). A group with NaN or inf has
        the scale NaN: `indicator="screen"` then keeps the neuron.
    Raises:
        ValueError: not a floating-point matrix, or bits or a group that is not offered.
    """
    _check(weight, bits, group)
    f, d = weight.shape
    shape, scales = sizes_of(f, d, bits, group)
    codes = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(scales, dtype=torch.bfloat16, device=weight.device)
    if weight.device.type == "meta":
        return PackedWeight(codes, scale)
    blocks = _CHUNK // ROWS
    with torch.no_grad():
        for i, rows in enumerate(weight.split(_CHUNK)):
            part = slice(i * blocks, (i + 1) * blocks)
            _pack_rows(rows.float(), bits, group, codes[part], scale[part])
    return PackedWeight(codes, scale)


def why_not_of(packed: PackedWeight, neurons: int, width: int) -> str | None:
    """Why it is not what `pack` makes of a weight (neurons, width), in words, or None."""
    codes, scale = packed
    for name, size in (("neurons", neurons), ("width", width)):
        if not isinstance(size, (int, torch.SymInt)) or size < 0:
            return f"is for {name} {size!r}, expected a whole number ≥ 0"
    if not isinstance(codes, Tensor) or not isinstance(scale, Tensor):
        return f"holds {type(codes).__name__} and {type(scale).__name__}, expected tensors"
    if codes.dtype != torch.uint8 or scale.dtype != torch.bfloat16:
        return f"has codes of {codes.dtype} and scales of {scale.dtype}, expected uint8 and bfloat16"
    if codes.dim() != 4 or packed.bits not in BITS or packed.group not in GROUPS or codes.shape[3] % 2:
        return f"has codes of shape {tuple(codes.shape)}, expected (F / 16, D / group, bits, 2 · group)"
    expected = sizes_of(neurons, width, packed.bits, packed.group)
    if (tuple(codes.shape), tuple(scale.shape)) != expected:
        return (
            f"has codes {tuple(codes.shape)} and scales {tuple(scale.shape)}, expected those of ({neurons}, {width}): "
            f"{expected[0]} and {expected[1]}"
        )
    if codes.device != scale.device or not codes.is_contiguous() or not scale.is_contiguous():
        return "has codes and scales on two devices or not contiguous"
    return None


def unpack(packed: PackedWeight, neurons: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that a copy stands for.

    Args:
        packed: what `pack` made of a (neurons, width) weight.
        neurons, width: F and D, which the copy rounds up.
        dtype: of the result; float32 holds every value exactly.

    Returns:
        (F, D); rows of NaN where a group's scale is NaN, at least in that group.
    """
    why = why_not_of(packed, neurons, width)
    if why is not None:
        raise ValueError(f"packed {why}; pass what pack made, and that weight's sizes")
    codes, scale = packed
    out = torch.empty(neurons, width, dtype=dtype, device=codes.device)
    blocks = _CHUNK // ROWS
    for i, rows in enumerate(out.split(_CHUNK)):
        part = slice(i * blocks, (i + 1) * blocks)
        values = _quads(codes[part], packed.bits, packed.group).float() - (1 << (packed.bits - 1))
        # (blocks, groups, quads, 16, 4): neuron by neuron, input by input
        values = values.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2) * _by_neuron(scale[part])[..., None]
        rows.copy_(values.flatten(1)[: rows.shape[0], :width])
    return out


def _by_neuron(scale: Tensor) -> Tensor:
    """(blocks, groups, 16) as float32 (neurons, groups)."""
    return scale.float().transpose(1, 2).flatten(0, 1)


def _pack_rows(rows: Tensor, bits: int, group: int, codes: Tensor, scale: Tensor) -> None:
    """The codes and scales of some rows (n, D) float32; what lies past the last row and column counts as 0."""
    blocks, groups = scale.shape[:2]
    wide = rows.new_zeros(blocks * ROWS, groups * group)
    wide[: rows.shape[0], : rows.shape[1]] = rows
    wide = wide.view(blocks, ROWS, groups, group)
    levels = 1 << (bits - 1)
    low, high = wide.aminmax(dim=3)  # NaN where there is one
    size = (torch.where(high >= -low, high, low) / -levels).to(torch.bfloat16)
    size = torch.where(size.isfinite(), size, torch.nan)
    scale.copy_(size.transpose(1, 2))
    divisor = torch.where(size == 0, torch.inf, size).float()[..., None]
    values = (
        (wide / divisor).nan_to_num_(0.0).round_().clamp_(-levels, levels - 1).add_(levels).to(torch.uint8)
    )
    quads = values.view(blocks, ROWS, groups, group // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 8:
        packed = quads
    elif bits == 4:
        pairs = quads.unflatten(2, (-1, 2))
        packed = pairs[:, :, :, 0] | (pairs[:, :, :, 1] << 4)
    else:
        octets = quads.unflatten(2, (-1, 8))
        packed = quads.new_zeros(*octets.shape[:3], 3, ROWS, 4)
        for i in range(8):
            code = octets[:, :, :, i]
            packed[:, :, :, i // 4] |= (code & 3) << 2 * (i % 4)
            packed[:, :, :, 2] |= (code >> 2) << i
    codes.copy_(packed.reshape(codes.shape))


def _quads(codes: Tensor, bits: int, group: int) -> Tensor:
    """The codes one a byte, (blocks, groups, group / 4, 16, 4)."""
    words = codes.flatten(2).unflatten(2, (-1, ROWS, 4))  # 64 bytes each
    if bits == 8:
        return words
    if bits == 4:
        return torch.stack([words & 15, words >> 4], dim=3).flatten(2, 3)
    words = words.unflatten(2, (-1, 3))
    octets = [
        ((words[:, :, :, i // 4] >> 2 * (i % 4)) & 3) | (((words[:, :, :, 2] >> i) & 1) << 2)
        for i in range(8)
    ]
    return torch.stack(octets, dim=3).flatten(2, 3)


def _check(weight: Tensor, bits: int, group: int) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        what = (
            f"{str(weight.dtype).removeprefix('torch.')} of shape {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else type(weight).__name__
        )
        raise ValueError(f"weight is {what}, expected a floating-point matrix (F, D); pass one")
    check_sizes(bits, group)


def check_sizes(bits: object, group: object) -> None:
    """ValueError unless copies of so many bits in such groups are offered."""
    for name, value, offered in (("bits", bits, BITS), ("group", group, GROUPS)):
        if type(value) is not int or value not in offered:
            raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(map(str, offered))}")
