"""What the screen's Triton kernels must have to the bit: rounded tokens, every code in its place; without pytest."""

from __future__ import annotations

import torch
from torch import Tensor

import sparsemlp
from sparsemlp.reference.screen import SMALLEST, quantize_tokens
from sparsemlp.screen import BITS, GROUPS, PackedWeight, pack
from tests.cases import DTYPES
from tests.devices import device_of

__all__ = ["PLACES", "TOKENS", "check_places", "check_tokens"]

TOKENS = [(d, group, dtype) for d in (1, 97, 512, 1100) for group in GROUPS for dtype in DTYPES]
"""Arguments of `check_tokens`."""
PLACES = [
    (tokens, bits, group)
    for bits in BITS
    for group in GROUPS
    for tokens in ((1, 3, 16, 20) if group == 32 else (1, 20))
]
"""Arguments of `check_places`."""


def _special_tokens(d: int, dtype: torch.dtype) -> Tensor:
    """Tokens whose groups are hard to round: ties, subnormal numbers, what counts as 0, what is not a number."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, d, generator=g)
    x[1] = torch.randint(-126, 127, (d,), generator=g) + 0.5
    x[1, ::32] = 127  # x / scale is x: every other number is half way
    x[2] *= 2.0**-120
    x[3] *= 2.0**-99
    x[4] = SMALLEST * torch.rand(d, generator=g)
    x[4, ::64] = SMALLEST
    x[5] = 0
    x[6] *= 1e38
    x[7, d // 3] = torch.nan
    x[8, d // 2] = torch.inf
    x[9, -1] = -torch.inf
    x[10] *= torch.logspace(-40, 30, d)
    x[11] = -0.0
    return x.to(dtype)


def check_tokens(d: int, group: int, dtype: torch.dtype) -> None:
    """Tokens rounded to int8 and their scales have the reference's bits."""
    from sparsemlp.kernels._launch import run
    from sparsemlp.kernels._screen import Screen
    from sparsemlp.kernels._screen import quantize_tokens as launched

    device = device_of("triton")
    codes, scale = (t.to(device) for t in pack(torch.zeros(1, d), 4, group))
    x = _special_tokens(d, dtype)
    wide = torch.full((12, d + 5), torch.nan, dtype=dtype)
    wide[:, 3 : 3 + d] = x
    for tokens in (x, wide[:, 3 : 3 + d], x[1:2]):
        memory = wide.to(device)[:, 3 : 3 + d] if tokens.stride(0) == d + 5 else tokens.to(device)
        seen, launch = launched(memory, Screen(codes, codes, scale, scale))
        run([launch])
        q, unit = quantize_tokens(tokens, group)
        wrong = seen.x8.cpu() != q.flatten(1)
        assert not wrong.any(), f"{int(wrong.sum())} of {q.numel()} int8 differ from the reference's"
        found, known = seen.units.cpu(), ~unit.isnan()
        assert torch.equal(found.isnan(), unit.isnan()), "NaN scales are not where the reference has them"
        same = found[known].view(torch.int32) == unit[known].view(torch.int32)
        assert same.all(), f"{int((~same).sum())} scales differ from the reference's"


def _whole_numbers(f: int, d: int, bits: int, group: int, g: torch.Generator) -> Tensor:
    """A weight (F, D) that its copy holds exactly: whole numbers within the codes' range, the lowest in every group."""
    levels = 1 << (bits - 1)
    w = torch.randint(-levels, levels, (f, d), generator=g).float()
    w[:, ::group] = -levels
    return w


def check_places(tokens: int, bits: int, group: int) -> None:
    """Of whole numbers sums are exact, so every code must count in its place: a neuron with |m| = t is kept, and with
    the next number above for t it is not."""
    device, g = device_of("triton"), torch.Generator().manual_seed(bits)
    d, f = (34 if group == 32 else 2) * group + 33, 35  # of 32: more groups than a program takes at a time
    gate, up = (_whole_numbers(f, d, bits, group, g) for _ in range(2))
    x = torch.randint(-9, 10, (d,), generator=g).float() * (torch.rand(d, generator=g) < 0.3)
    x[::group] = 127  # a scale of 1
    x[d // 2] = 0.5  # its int8 is 0

    def products(tokens: Tensor) -> Tensor:
        a, u = (tokens.double() @ w.double().t() for w in (gate, up))
        assert ((a != 0) & (u != 0) & (a.abs() < 2**23) & (u.abs() < 2**23)).all()
        return a.float() * u.float()

    screened, exact = products(x.round()).abs(), products(x)
    copies = [PackedWeight(*(t.to(device) for t in pack(w, bits, group))) for w in (gate, up)]
    tensors = [t.to(device) for t in (x.expand(tokens, d), gate, up, torch.eye(f, d))]

    def out(threshold: Tensor) -> Tensor:
        return sparsemlp.gated_mlp(
            *tensors, threshold=threshold.to(device), activation="identity", indicator="screen",
            screen_gate=copies[0], screen_up=copies[1], backend="triton",
        ).cpu()[:, :f]  # fmt: skip

    kept, skipped = out(screened), out(torch.nextafter(screened, torch.tensor(torch.inf)))
    assert (kept == exact).all(), f"{int((kept != exact).sum())} of {kept.numel()} are wrong at |m| = t"
    assert (skipped == 0).all(), f"{int((skipped != 0).sum())} of {kept.numel()} are kept below t"
