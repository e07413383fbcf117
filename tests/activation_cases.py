"""Samples of `activation`: shapes, strides and values, and the truth computed from them in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations
from tests.cases import PARAMS

SHAPES = (
    (),
    (0,),
    (3, 0),
    (1,),
    (7,),
    (8,),
    (15,),
    (17,),
    (33,),
    (5, 13),
    (2047,),
    (2049,),
    (3, 2048),
    (41, 101),
)
"""Empty, single, odd tails of every vector width, and more than two blocks."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda p: p.t().contiguous().t(),
    "permuted": lambda p: p.reshape(-1, 1, p.shape[-1]).permute(2, 0, 1),
    "rows": lambda p: _among_nans(p, 0),
    "columns": lambda p: _among_nans(p, 1),
    "offset": lambda p: torch.full((p.numel() + 1,), torch.nan, dtype=p.dtype)[1:].copy_(p.flatten()),
    "expanded": lambda p: p[0].expand(5, -1),
    "scalar": lambda p: p[0, 0].expand(3, 4),
    "reversed": lambda p: p.flip(0),
}
"""From a matrix, something of another layout; what lies between its entries is NaN."""

KINKED = ("relu", "relu2", "jsrelu", "weird", "fatrelu", "mix", "identity")
"""Rows whose exact zeros do not depend on how an exponential underflows."""

CANCELLING = ("gelu", "gelu_tanh")
"""Rows of which PyTorch subtracts nearly equal numbers for negative p: no peer for the digits of such results."""


def _among_nans(p: Tensor, dim: int) -> Tensor:
    shape = [2 * n if i == dim else n for i, n in enumerate(p.shape)]
    return torch.full(shape, torch.nan, dtype=p.dtype).unfold(dim, 1, 2)[..., 0].copy_(p)


def params_of(name: str, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return torch.tensor(PARAMS[name], dtype=dtype) if name in PARAMS else None


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values with exact zeros and kinks strewn in."""
    p = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    special = torch.tensor([0.0, -0.0, 0.375, 0.125, 3.125, 1.0])  # 0, τ, and Δx ± w of PARAMS
    where = torch.arange(p.numel()).reshape(shape)
    return torch.where(where % 5 == 2, special[where % len(special)], p).to(dtype)


def truth(p: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """φ(p) and φ'(p) in float64."""
    row, values = activations.get(name), PARAMS.get(name, ())
    wide = tuple(torch.tensor(v, dtype=torch.float64) for v in values)
    return row.forward(p.double(), *wide), row.derivative(p.double(), *wide)


def peer(p: Tensor, name: str, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What PyTorch computes in p's dtype: its own functions and autograd, half precision through float32."""
    q = p.detach().clone().requires_grad_(True)
    own = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}.get(name)
    out = own(q) if own else activations.apply(q, name, params_of(name))
    return out.detach(), torch.autograd.grad(out, q, grad)[0]


def extremes(dtype: torch.dtype) -> Tensor:
    """Zeros, subnormals, the ends of the range, and what lies between by powers of two."""
    info = torch.finfo(dtype)
    powers = 2.0 ** torch.arange(-126, 120, 1, dtype=torch.float64)
    ends = torch.tensor(
        [0.0, info.smallest_normal, info.smallest_normal / 4, info.max, info.max / 4], dtype=torch.float64
    )
    positive = torch.cat([ends, powers[(powers > info.smallest_normal) & (powers < info.max)]])
    return torch.cat([positive, -positive]).to(dtype)


def assert_digits(actual: Tensor, peer: Tensor, truth: Tensor, p: Tensor, name: str) -> None:
    """The budget rule for the relative error, of normal numbers, up to where PyTorch itself keeps no digits of them."""
    info = torch.finfo(actual.dtype)
    judged = (truth.abs() >= info.smallest_normal) & (truth.abs() < info.max * 0.99) & peer.isfinite()
    if name in CANCELLING:
        judged &= p >= -0.125
    error, allowed = (((t.double() - truth) / truth).abs()[judged] for t in (actual, peer))
    bound = 2 * allowed.max() + 2 * info.eps
    assert bound <= 16 * info.eps, "the peer is no measure"
    assert error.max() <= bound, (
        error.max(),
        bound,
        p[judged][error.argmax()],
        actual[judged][error.argmax()],
    )
