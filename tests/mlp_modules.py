"""Small dense ungated MLPs, and what they compute with thresholds: the truth in float64 and the same-dtype peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, N = 24, 40


class Conv1D(nn.Module):
    """x @ weight + bias with weight (inputs, outputs), as GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * nx**-0.5)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Plain(nn.Module):
    """ViT's, CLIP's and Phi's."""

    names = "fc1", "fc2"

    def __init__(self, bias: bool = True, act: nn.Module | None = None, d: int = D, f: int = N) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, f, bias=bias), nn.Linear(f, d, bias=bias)
        self.activation_fn = nn.GELU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class HiddenDropout(nn.Module):
    """T5's."""

    names = "wi", "wo"

    def __init__(self, bias: bool = False, p: float = 0.1) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(D, N, bias=bias), nn.Linear(N, D, bias=bias)
        self.dropout, self.act = nn.Dropout(p), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.act(self.wi(x)))
        return self.wo(hidden.to(self.wo.weight.dtype))


class Conv(nn.Module):
    """GPT-2's."""

    names = "c_fc", "c_proj"

    def __init__(self, bias: bool = True, p: float = 0.0) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(N, D), Conv1D(D, N)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class TwoDropouts(nn.Module):
    """DistilBERT's names, wav2vec 2.0's dropouts."""

    names = "lin1", "lin2"

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.late, self.early = nn.Dropout(0.2), nn.Dropout(0.1)
        self.lin1, self.lin2 = nn.Linear(D, N, bias=bias), nn.Linear(N, D, bias=bias)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.lin2(self.early(self.activation(self.lin1(x)))))


KINDS = {"plain": Plain, "hidden_dropout": HiddenDropout, "conv": Conv, "two_dropouts": TwoDropouts}


class Thresholded:
    """A dense MLP's thresholded output by SPEC's formula, in any dtype and order of summation.

    Args:
        dense: a module of `KINDS`, or one with the same members.
        threshold: () or (F,).
        mean: (F,) or None.
    """

    def __init__(self, dense: nn.Module, threshold: Tensor, mean: Tensor | None = None) -> None:
        self.threshold, self.mean = threshold, mean
        self.act = next(
            m for n, m in dense.named_children() if n in ("act", "activation", "activation_fn", "act_fn")
        )
        first, last = (getattr(dense, name) for name in dense.names)
        by_input = isinstance(first, Conv1D)
        self.first = (first.weight.t() if by_input else first.weight), first.bias
        self.last = (last.weight.t() if by_input else last.weight), last.bias

    def magnitude(self, x: Tensor) -> Tensor:
        """|a| in float64."""
        return self.act(F.linear(x.double(), *(t if t is None else t.double() for t in self.first))).abs()

    def out(self, x: Tensor, dtype: torch.dtype, orders: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The output in `dtype`, with the mask of float64; `orders` permute D and F."""
        (w, b), (w_out, b_out) = self.first, self.last
        d, f = (torch.arange(n) for n in reversed(w.shape)) if orders is None else orders
        kept = ~(self.magnitude(x) < self.threshold.double())[..., f]
        hidden = self.act(
            F.linear(x.to(dtype)[..., d], w.to(dtype)[f][:, d], None if b is None else b.to(dtype)[f])
        )
        replaced = torch.zeros(()) if self.mean is None else self.mean[f]
        hidden = torch.where(kept, hidden, replaced.to(dtype))
        return F.linear(hidden, w_out.to(dtype)[:, f], None if b_out is None else b_out.to(dtype))

    def truth(self, x: Tensor) -> Tensor:
        return self.out(x, torch.float64)

    def peers(self, x: Tensor) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        f, d = self.first[0].shape
        orders = [None] + [(torch.randperm(d, generator=g), torch.randperm(f, generator=g)) for _ in range(2)]
        return [self.out(x, self.first[0].dtype, order) for order in orders]


def away_from_band(dense: nn.Module, x: Tensor, wanted: float) -> Tensor:
    """A threshold near `wanted`, in the middle of the widest gap between values of |a| there: none is borderline."""
    values = Thresholded(dense, torch.zeros(())).magnitude(x).detach().flatten().sort().values
    values = values[(values > wanted * 0.5) & (values < wanted * 2)]
    if len(values) < 2:
        return torch.tensor(wanted)
    i = (values[1:] - values[:-1]).argmax()
    return ((values[i] + values[i + 1]) / 2).float()
