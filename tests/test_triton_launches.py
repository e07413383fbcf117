"""What the launches of the Triton kernels hand to one another: no precision lost, nothing read that need not be."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import sparsemlp
from sparsemlp.kernels import _channels, gated_mlp, mlp
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._rule import Rule
from sparsemlp.ops.gated_mlp import OP
from tests.backends import backends
from tests.devices import device_of

TRITON = pytest.mark.parametrize("backend", backends(OP, only="triton"))


@TRITON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_gate_by_input_sparsity_is_not_rounded(tokens: int, dtype: torch.dtype, backend: str) -> None:
    """Few tokens decide on float32 there too: p = t = 1 + ε/4, which the dtype rounds to 1, is kept."""
    device, small = device_of(backend), torch.finfo(dtype).eps / 4
    x = torch.tensor([1.0, small], device=device).to(dtype).expand(tokens, 2)
    ones = torch.ones(8, 2, dtype=dtype, device=device)
    up = torch.tensor([1.0, 0.0], device=device).to(dtype).repeat(8, 1)
    out = sparsemlp.gated_mlp(
        x, ones.t().contiguous().t(), up, ones, threshold=1 + small, input_threshold=small / 2,
        activation="identity", backend=backend,
    )  # fmt: skip
    assert (out == 8).all()


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _read(launch: Launch) -> set[str]:
    """The tensors that a launch is given, by name."""
    return {name for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}


def test_what_each_launch_is_given() -> None:
    """A gate given by input sparsity is not read again, an MLP without a gate has no up rows, x is its own gate."""
    limit = torch.empty((), device="meta")
    w, gate = _meta(640, 96), _meta(96, 640).t()
    nothing = (None,) * 7
    _, launches = gated_mlp.decode(_meta(4, 96), gate, w, w, limit, limit, *nothing, "silu", "gate")
    lists = "threshold", "neurons", "tokens", "hidden", "counts", "arrived"
    given = [_read(launch) for launch in launches]
    assert given[0] == {"pre", *lists}
    assert given[2] == {"x", "w_up", "pre", *lists}
    pre = launches[2].arguments["pre"]
    assert launches[0].arguments["pre"].shape == (4, 96)
    assert (pre.shape, pre.dtype) == ((4, 640), torch.float32)
    assert launches[1].arguments["out"] is pre
    assert launches[1].arguments["weight_t"].stride() == (640, 1)  # the gate, input by input
    rule = Rule(limit, None, None, None, "relu", "ungated")
    _, (select, _) = mlp.decode(_meta(4, 96), w, w, rule, None, None, None)
    assert _read(select) == {"x", "w_gate", *lists}
    _, (select, rows) = _channels.few(_meta(4, 96), _meta(96, 640), limit, None, None, torch.bfloat16)
    assert _read(select) == {"pre", *lists}
    assert [rows.arguments[name] for name in ("T", "D", "segments")] == [4, 640, select.grid[0]]
