"""Low-bit copies of weights: their values, their layout, what they refuse, and tokens in int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsemlp.reference.screen import quantize_tokens
from sparsemlp.screen import BITS, GROUPS, PackedWeight, pack, unpack, why_not_of

EVERY_KIND = pytest.mark.parametrize(("bits", "group"), [(b, g) for b in BITS for g in GROUPS])


def weight(f: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(f, d, generator=torch.Generator().manual_seed(f * d)) / 8).to(dtype)


def value(w: Tensor, bits: int, group: int) -> Tensor:
    """What a copy of w stands for, one entry at a time."""
    levels, out = 1 << (bits - 1), torch.zeros(w.shape)
    for j in range(w.shape[0]):
        for k in range(0, w.shape[1], group):
            part = [float(v) for v in w[j, k : k + group].float()]
            most = max(part, key=abs)
            scale = float(torch.tensor(most / -levels, dtype=torch.float32).bfloat16())
            for i, v in enumerate(part):
                ratio = torch.tensor(v) / torch.tensor(scale) if scale else torch.tensor(0.0)
                out[j, k + i] = min(max(round(float(ratio)), -levels), levels - 1) * scale
    return out


@EVERY_KIND
@pytest.mark.parametrize(("f", "d"), [(1, 1), (16, 32), (17, 33), (5, 300), (40, 129)])
def test_values(f: int, d: int, bits: int, group: int) -> None:
    w = weight(f, d)
    packed = pack(w, bits, group)
    assert (packed.bits, packed.group) == (bits, group)
    assert packed.codes.dtype == torch.uint8
    assert packed.scale.dtype == torch.bfloat16
    assert torch.equal(unpack(packed, f, d), value(w, bits, group))


@pytest.mark.parametrize("bits", BITS)
def test_an_entry_lies_where_the_layout_says(bits: int) -> None:
    """One code is changed: it is that of the neuron and the input that the module's docstring gives."""
    f, d = 32, 64
    packed = pack(
        torch.full((f, d), -1.0), bits
    )  # every code is 2^(bits − 1) − 1 above … the largest: all alike
    before = unpack(packed, f, d)
    block, group, quad, lane, i = 1, 1, 5, 7, 2
    at = {8: (64 * quad, 1), 4: (64 * (quad // 2), 16 if quad % 2 else 1), 3: (64, 1 << 2 * (quad - 4))}[bits]
    codes = packed.codes.clone()
    flat = codes[block, group].view(-1)
    flat[at[0] + 4 * lane + i] ^= at[1]
    changed = (unpack(PackedWeight(codes, packed.scale), f, d) != before).nonzero().tolist()
    assert changed == [[16 * block + lane, 32 * group + 4 * quad + i]]
    if bits == 3:  # the third bit
        flat[at[0] + 4 * lane + i] ^= at[1]
        flat[128 + 4 * lane + i] ^= 1 << quad
        changed = (unpack(PackedWeight(codes, packed.scale), f, d) != before).nonzero().tolist()
        assert changed == [[16 * block + lane, 32 * group + 4 * quad + i]]


@pytest.mark.parametrize(("bits", "most"), [(3, 0.18), (4, 0.088), (8, 0.0056)])
def test_error_of_normal_weights(bits: int, most: float) -> None:
    """What the docstring says of groups of 32."""
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = float((unpack(pack(w, bits), 256, 1024) - w).norm() / w.norm())
    assert most * 0.9 < error < most


def test_size() -> None:
    assert pack(torch.zeros(1024, 4096)).nbytes == 1024 * 4096 * 4.5 / 8
    assert pack(torch.zeros(1024, 4096), 3, 128).nbytes == 1024 * 4096 * 3.125 / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    w = weight(50, 70, dtype)
    expected = pack(w.float())
    for layout in (w, w.t().contiguous().t(), torch.stack([w, w], 2)[:, :, 1]):
        found = pack(layout)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e39], ids=str)
def test_what_is_not_finite_makes_its_group_nan(number: float) -> None:
    w = weight(20, 70).double()
    clean = unpack(pack(w), 20, 70)
    w[3, 40] = number
    found = unpack(pack(w), 20, 70)
    assert found[3, 32:64].isnan().all()
    found[3, 32:64] = clean[3, 32:64]
    assert torch.equal(found, clean)


@pytest.mark.parametrize(("f", "d"), [(0, 33), (33, 0), (0, 0)])
def test_empty(f: int, d: int) -> None:
    assert unpack(pack(torch.zeros(f, d)), f, d).shape == (f, d)


def test_meta() -> None:
    packed = pack(torch.empty(30, 50, device="meta"), 3, 64)
    assert packed.codes.is_meta
    assert why_not_of(packed, 30, 50) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 4), 5), "bits is 5, expected one of: 3, 4, 8"),
        ((torch.zeros(3, 4), True), "bits is True, expected"),
        ((torch.zeros(3, 4), 4, 48), "group is 48, expected one of: 32, 64, 128"),
        ((torch.zeros(3),), r"weight is float32 of shape \(3,\), expected a floating-point matrix"),
        ((torch.zeros(3, 4, dtype=torch.int8),), "weight is int8"),
        (("weights",), "weight is str"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(*arguments)


def test_a_copy_of_another_size_is_refused() -> None:
    packed = pack(torch.zeros(30, 50))
    with pytest.raises(ValueError, match=r"has codes \(2, 2, 4, 64\) .* expected those of \(33, 50\)"):
        unpack(packed, 33, 50)
    with pytest.raises(ValueError, match="uint8 and bfloat16"):
        unpack(PackedWeight(packed.codes, packed.scale.float()), 30, 50)


@pytest.mark.parametrize("group", GROUPS)
def test_tokens(group: int) -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e-29  # a group's largest is still above 2^-100
    x[2, :40] = 2.0**-101
    x[3, 150] = torch.nan
    x[4, 3] = -torch.inf
    q, scale = quantize_tokens(x, group)
    assert q.shape == (5, -(-200 // group), group)
    assert q.dtype == torch.int8
    assert q.abs().max() == 127
    seen = (q * scale[..., None]).flatten(1)[:, :200]
    step = scale.repeat_interleave(group, 1)[:, :200]
    good = step.isfinite() & (step > 0)
    assert ((seen - x).abs()[good] <= 0.5001 * step[good]).all()
    assert (seen[2, :32] == 0).all()
    assert seen[3, 150 // group * group :][: min(group, 200 - 150 // group * group)].isnan().all()
    assert seen[4, :group].isnan().all()
    assert int(seen.isnan().sum()) == min(group, 200 - 150 // group * group) + group
