"""Small dense gated MLPs, and what they compute with thresholds: the truth in float64 and the same-dtype peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, N = 24, 40


class Separate(nn.Module):
    def __init__(self, bias: bool = False, act: nn.Module | None = None, d: int = D, f: int = N):
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=bias)
        self.up_proj = nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Merged(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.gate_up_proj = nn.Linear(D, 2 * N, bias=bias)
        self.down_proj = nn.Linear(N, D, bias=bias)
        self.activation_fn = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


KINDS = {"separate": Separate, "merged": Merged}


class Thresholded:
    """A dense MLP's thresholded output by SPEC's formula, in any dtype and order of summation.

    Args:
        dense: a module of `KINDS`, or one with the same members.
        threshold: () or (F,).
        mean: (F,) or None.
    """

    def __init__(self, dense: nn.Module, threshold: Tensor, mean: Tensor | None = None):
        self.dense, self.threshold, self.mean = dense, threshold, mean
        self.act = dense.activation_fn if hasattr(dense, "activation_fn") else dense.act_fn
        if hasattr(dense, "gate_up_proj"):
            weights, biases = dense.gate_up_proj.weight.chunk(2), (None, None)
            if dense.gate_up_proj.bias is not None:
                biases = dense.gate_up_proj.bias.chunk(2)
            self.gate, self.up = zip(weights, biases, strict=True)
        else:
            self.gate, self.up = ((layer.weight, layer.bias) for layer in (dense.gate_proj, dense.up_proj))
        self.down = dense.down_proj.weight, dense.down_proj.bias

    def magnitude(self, x: Tensor) -> Tensor:
        """|a| in float64."""
        return self.act(F.linear(x.double(), *(t if t is None else t.double() for t in self.gate))).abs()

    def out(self, x: Tensor, dtype: torch.dtype, orders: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The output in `dtype`, with the mask of float64; `orders` permute D and F."""
        d, f = (torch.arange(n) for n in reversed(self.gate[0].shape)) if orders is None else orders

        def linear(w: Tensor, b: Tensor | None) -> Tensor:
            return F.linear(x.to(dtype)[..., d], w.to(dtype)[f][:, d], None if b is None else b.to(dtype)[f])

        kept = ~(self.magnitude(x) < self.threshold.double())[..., f]
        hidden = self.act(linear(*self.gate)) * linear(*self.up)
        replaced = torch.zeros(()) if self.mean is None else self.mean[f]
        w, b = self.down
        hidden = torch.where(kept, hidden, replaced.to(dtype))
        return F.linear(hidden, w.to(dtype)[:, f], None if b is None else b.to(dtype))

    def truth(self, x: Tensor) -> Tensor:
        return self.out(x, torch.float64)

    def peers(self, x: Tensor) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        f, d = self.gate[0].shape
        orders = [None] + [(torch.randperm(d, generator=g), torch.randperm(f, generator=g)) for _ in range(2)]
        return [self.out(x, self.gate[0].dtype, order) for order in orders]


def away_from_band(dense: nn.Module, x: Tensor, wanted: float) -> Tensor:
    """A threshold near `wanted`, in the middle of the widest gap between values of |a| there: none is borderline."""
    values = Thresholded(dense, torch.zeros(())).magnitude(x).detach().flatten().sort().values
    values = values[(values > wanted * 0.7) & (values < wanted * 1.4)]
    i = (values[1:] - values[:-1]).argmax()
    return ((values[i] + values[i + 1]) / 2).float()
