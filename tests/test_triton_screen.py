"""The screen in Triton: the bits of rounded tokens, every place of every code, which tensors each launch is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import sparsemlp
from sparsemlp.kernels import gated_mlp
from sparsemlp.kernels._screen import Screen
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.screen import PackedWeight, pack, sizes_of
from tests import screen_cases
from tests.backends import backends
from tests.devices import device_of

TRITON = pytest.mark.parametrize("backend", backends(OP, only="triton"))


@TRITON
@pytest.mark.parametrize(("d", "group", "dtype"), screen_cases.TOKENS)
def test_tokens_have_the_reference_s_bits(d: int, group: int, dtype: torch.dtype, backend: str) -> None:
    screen_cases.check_tokens(d, group, dtype)


@TRITON
@pytest.mark.parametrize(("tokens", "bits", "group"), screen_cases.PLACES)
def test_every_code_counts_in_its_place(tokens: int, bits: int, group: int, backend: str) -> None:
    screen_cases.check_places(tokens, bits, group)


@TRITON
@pytest.mark.parametrize("tokens", [2, 20])
def test_codes_anywhere_in_memory(tokens: int, backend: str) -> None:
    """Codes are read as words, also where they do not begin at one."""
    device, g = device_of(backend), torch.Generator().manual_seed(1)
    x, gate, up, down = (torch.randn(n, 40, generator=g).to(device) for n in (tokens, 20, 20, 20))
    results = []
    for offset in (0, 1, 4):
        copies = []
        for w in (gate, up):
            codes, scale = pack(w)
            moved = torch.empty(codes.numel() + offset, dtype=torch.uint8, device=device)[offset:].view(
                codes.shape
            )
            copies.append(PackedWeight(moved.copy_(codes), scale))
        results.append(
            sparsemlp.gated_mlp(
                x, gate, up, down, threshold=0.4, indicator="screen", screen_gate=copies[0], screen_up=copies[1],
                backend=backend,
            )
        )  # fmt: skip
    assert bool((results[0] != 0).any())
    assert all(torch.equal(r, results[0]) for r in results)


@TRITON
@pytest.mark.parametrize("tokens", [1, 20])
def test_an_overflowing_scale_of_a_sum_of_zero(tokens: int, backend: str) -> None:
    """x̂ and ŵ that are orthogonal give 0, so skipped, although the product of their scales is beyond float32."""
    device = device_of(backend)
    x, w, down = torch.zeros(tokens, 32), torch.zeros(1, 32), torch.ones(1, 32)
    x[:, 0] = w[0, 1] = 3e38
    copy = PackedWeight(*(t.to(device) for t in pack(w)))
    mean, shift = torch.ones(1, device=device), torch.zeros(32, device=device)
    for threshold, expected in ((1e-30, 0.0), (0.0, -1.0)):
        out = sparsemlp.gated_mlp(
            *(t.to(device) for t in (x, w, w, down)), threshold=threshold, skipped_mean=mean, skipped_out=shift,
            indicator="screen", screen_gate=copy, screen_up=copy, backend=backend,
        )  # fmt: skip
        assert (out == expected).all()


def test_what_each_launch_is_given() -> None:
    """The copies and the rounded tokens besides x and the full rows; the list is of blocks of 16 neurons or more."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    codes, scales = sizes_of(640, 96, 4, 32)
    screen = Screen(
        meta(*codes, dtype=torch.uint8), meta(*codes, dtype=torch.uint8), meta(*scales), meta(*scales)
    )
    w, limit = meta(640, 96), meta(dtype=torch.float32)
    for tokens in (1, 7):
        _, launches = gated_mlp.decode(
            meta(tokens, 96), w, w, w, limit, *(None,) * 8, "silu", "screen", screen
        )
        quantize, select, rows = launches
        given = [{k for k, v in launch.arguments.items() if isinstance(v, Tensor)} for launch in launches]
        lists = {"neurons", "tokens", "hidden", "counts", "arrived"}
        copies = {"codes_gate", "codes_up", "scales_gate", "scales_up", "x8", "units"}
        assert given == [{"x", "x8", "units"}, {"x", "w_gate", "w_up", "threshold", *copies, *lists},
                         {"weight_t", "partial", "out", *lists}]  # fmt: skip
        x8 = quantize.arguments["x8"]
        assert (x8.shape, x8.dtype, select.arguments["x8"].dtype) == ((tokens, 96), torch.int8, torch.int32)
        assert select.constants["BLOCK_F"] % 16 == 0
        assert select.constants["BLOCK_F"] == rows.constants["BLOCK_F"]
        assert not quantize.fp_fusion
        assert select.constants_for("hip")["BLOCK_G"] >= select.constants["BLOCK_G"]
