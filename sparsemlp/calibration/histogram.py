"""Streaming statistics of one MLP: per neuron a log-spaced histogram of |a| with sums of u², h and h² per bin.

Of a low-bit screen the histogram is that of its score's magnitude |m|, and the sums are those of the exact u and h;
what is said of |a| here is then true of |m|.

Bin edges come from one fixed list of float32 numbers, the cells: four an octave, eight an octave from 1/32 to 2 where
thresholds usually lie, and finer ones below 0.278 and 0.170, the depths of SiLU's and GELU's negative branch, where
|a| piles up. A value's cell is read off the leading bits of its float32 form, exactly, with no logarithm to round.

A layer's bins are exact zeros (bin 0), the 126 cells that end with the one of the largest |a| shown so far (bins 2 to
127, more than 20 octaves), and everything smaller (bin 1). So they fit layers of any scale, and since their place
depends on that largest value only, neither the order of the batches nor merging changes a bin.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BINS", "Below", "Cumulative", "LayerStatistics", "divide", "float32_at_least"]

BINS = 128
"""Exact zeros, one bin for everything below the window, and the window's keys."""
_WINDOW = BINS - 2
_SHIFT = 16  # keeps the sign, the exponent and 7 bits of the mantissa: a key, 128 an octave
_CHUNK = 1 << 19
"""Entries binned at once: few enough for the temporaries to stay in a cache, enough to hide the calls' cost."""
_LARGEST_COUNT = 2**31 - 1


@functools.cache
def _cells() -> tuple[Tensor, Tensor]:
    """Cell of each key, int32, and the cells' edges, float64: edge c is the lower end of cell c."""
    one, infinity = 127 * 128, 255 * 128
    starts = set(range(0, infinity + 1, 32)) | set(range(one - 5 * 128, one + 128, 16))
    # -silu is at most 0.27846, -gelu 0.16997 (erf) or 0.17004 (tanh), and the density of |a| goes to infinity there,
    # from below, like 1/sqrt of the distance: cells halve their distance to it.
    starts |= {one - 2 * 128 + k for k in (4, 8, 12, 14, 15)}
    starts |= {one - 3 * 128 + k for k in (40, 44, 46, 47)}
    ordered = torch.tensor(sorted(starts), dtype=torch.int32, device="cpu")
    keys = torch.arange(infinity + 1, dtype=torch.int32, device="cpu")
    edges = (ordered << _SHIFT).view(torch.float32).double().clamp_(max=torch.finfo(torch.float32).max)
    return torch.searchsorted(ordered, keys, right=True, out_int32=True) - 1, edges


class LayerStatistics:
    """Histogram of one layer; 16 bytes × 128 bins a neuron.

    Args:
        neurons: F, the layer's MLP width.
        device: where the tables live.

    Attributes:
        count: (128, F) int32, tokens per bin and neuron.
        sum_u2, sum_h, sum_h2: (128, F) float32, sums of u², h = a·u and h² over the tokens of a bin.
        top: cell of the last bin, or None before the first value that is not 0.
        tokens: how many tokens were added.
    """

    def __init__(self, neurons: int, device: torch.device | str = "cpu") -> None:
        self.neurons = neurons
        self.tokens = 0
        self.top: int | None = None
        self._cell_of = _cells()[0].to(device)
        self.count = torch.zeros(BINS, neurons, dtype=torch.int32, device=device)
        self.sum_u2 = torch.zeros(BINS, neurons, device=device)
        self.sum_h = torch.zeros(BINS, neurons, device=device)
        self.sum_h2 = torch.zeros(BINS, neurons, device=device)

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """count, sum_u2, sum_h, sum_h2."""
        return self.count, self.sum_u2, self.sum_h, self.sum_h2

    def add(self, act: Tensor, up: Tensor, score: Tensor | None = None) -> None:
        """Adds tokens.

        Args:
            act: a, (T, F) floating point, read as float32.
            up: u, (T, F) likewise.
            score: m, (T, F) likewise, by whose magnitude entries are binned; None: by |a|.

        Raises:
            ValueError: a NaN, an infinity, or a square beyond float32; the tables then hold part of the tokens.
        """
        rows = max(1, _CHUNK // max(1, self.neurons))
        scores = [None] * len(act.split(rows)) if score is None else score.detach().split(rows)
        for a, u, m in zip(act.split(rows), up.split(rows), scores, strict=True):
            self._add(a.detach().float(), u.detach().float(), None if m is None else m.float())

    def _add(self, act: Tensor, up: Tensor, score: Tensor | None) -> None:
        if act.numel() == 0:
            return
        if self.tokens + act.shape[0] > _LARGEST_COUNT:
            raise ValueError(
                f"more than {_LARGEST_COUNT} tokens were added, expected fewer; calibrate on fewer"
            )
        magnitude, hidden = (act if score is None else score).abs(), act * up
        u2, h2 = up.square(), hidden.square()
        # One look at the values: sums propagate a NaN or an infinity of any entry.
        peak, finite_u, finite_h = torch.stack([magnitude.max(), u2.sum(), h2.sum()]).tolist()
        decides = "a" if score is None else "the screen's score"
        for what, value in ((decides, peak), ("u", finite_u), ("h", finite_h)):
            if not abs(value) < float("inf"):
                raise ValueError(f"{what} holds NaN, infinity or a value too large to square in float32")
        bits = magnitude.view(torch.int32).flatten()
        cells = self._cell_of.index_select(0, bits >> _SHIFT)
        if peak > 0:
            self._raise_top(int(cells.max()))
        bins = cells.sub_((self.top or 0) - BINS + 1).clamp_(min=1).mul_(bits != 0)
        neuron = torch.arange(self.neurons, dtype=torch.int32, device=act.device)
        entry = (bins.view(-1, self.neurons) * self.neurons + neuron).flatten().long()
        self.count.view(-1).scatter_add_(0, entry, torch.ones_like(bins))
        for table, source in zip(self.tables()[1:], (u2, hidden, h2), strict=True):
            table.view(-1).scatter_add_(0, entry, source.flatten())
        self.tokens += act.shape[0]

    def _raise_top(self, top: int) -> None:
        """Moves the window up so that it ends with cell `top`; what leaves it at the low end joins bin 1."""
        if self.top is None:
            self.top = top
        shift = top - self.top
        if shift <= 0:
            return
        leaving = min(shift, _WINDOW)
        for table in self.tables():
            table[1] += table[2 : 2 + leaving].sum(0, dtype=table.dtype)
            kept = table[2 + leaving :].clone()
            table[2 : BINS - leaving] = kept
            table[BINS - leaving :] = 0
        self.top = top

    def clone(self) -> LayerStatistics:
        """A copy that shares nothing."""
        other = LayerStatistics(0, self.count.device)
        other.neurons, other.tokens, other.top = self.neurons, self.tokens, self.top
        other.count, other.sum_u2, other.sum_h, other.sum_h2 = (t.clone() for t in self.tables())
        return other

    def merge(self, other: LayerStatistics) -> LayerStatistics:
        """The statistics of both sets of tokens, as one pass over them gives (sums up to float32 rounding)."""
        if self.neurons != other.neurons:
            raise ValueError(
                f"other has {other.neurons} neurons, expected {self.neurons}; merge the same layer only"
            )
        if self.tokens + other.tokens > _LARGEST_COUNT:
            raise ValueError(
                f"together more than {_LARGEST_COUNT} tokens, expected fewer; calibrate on fewer"
            )
        out, addend = self.clone(), other.clone()
        if out.top is not None or addend.top is not None:
            top = max(s.top for s in (out, addend) if s.top is not None)
            out._raise_top(top)
            addend._raise_top(top)
        for table, more in zip(out.tables(), addend.tables(), strict=True):
            table += more.to(table.device)
        out.tokens += addend.tokens
        return out

    def edges(self) -> Tensor:
        """Lower edges of bins 2 to 127 and the upper edge of the last one, (127,) float64 on the CPU, ascending."""
        top = 0 if self.top is None else self.top
        return _cells()[1][torch.arange(top - _WINDOW + 1, top + 2, device="cpu").clamp_(min=0)]


class Below(NamedTuple):
    """What a threshold skips, per neuron, (F,) float64 each."""

    tokens: Tensor
    sum_u2: Tensor
    sum_h: Tensor
    sum_h2: Tensor


class Cumulative:
    """Cumulative sums of a layer's histogram, with values inside a bin taken as spread evenly over it.

    Below the window (some 20 octaves under the layer's largest |a|) nothing is interpolated: a threshold in (0, edge)
    skips the exact zeros, one at the edge skips all that lies under it.

    Args:
        layer: the statistics.
        pooled: sum over the layer's neurons first; F is then 1.
    """

    def __init__(self, layer: LayerStatistics, *, pooled: bool = False) -> None:
        wide = [t.to("cpu", torch.float64) for t in layer.tables()]
        if pooled:
            wide = [t.sum(1, keepdim=True) for t in wide]
        self.edges = layer.edges()
        self.zeros = wide[0][0]
        """Exact zeros per neuron, (F,) float64."""
        self.total = Below(*(t.sum(0) for t in wide))
        self._zero_part = [t[0] for t in wide]
        self._at_edge = [t.cumsum(0)[1:] for t in wide]  # (127, F): all that is smaller than edge k

    def count_below(self, threshold: Tensor) -> Tensor:
        """Tokens with |a| < threshold per neuron, (F,) float64, for threshold ≥ 0 of shape (F,) float64."""
        return self._below(threshold, 1)[0]

    def below(self, threshold: Tensor) -> Below:
        """Count and sums over the tokens with |a| < threshold, likewise."""
        return Below(*self._below(threshold, 4))

    def _below(self, threshold: Tensor, tables: int) -> list[Tensor]:
        last = len(self.edges) - 1
        after = torch.searchsorted(self.edges, threshold.contiguous(), right=True)
        inside = (after > 0) & (after <= last)
        upper = after.clamp(1, last)
        low, high = self.edges[upper - 1], self.edges[upper]
        share = torch.where(inside, (threshold - low) / (high - low), 1.0)[None]
        out = []
        for at_edge, zero_part in zip(self._at_edge[:tables], self._zero_part, strict=False):
            start, end = at_edge.gather(0, (upper - 1)[None]), at_edge.gather(0, upper[None])
            value = (start + share * (end - start))[0]
            value = torch.where(after == 0, torch.where(threshold > 0, zero_part, 0.0), value)
            out.append(value)
        return out

    def skipped(self, threshold: Tensor, *, mean: bool) -> Below:
        """What the operator skips: |a| < threshold, and without mean compensation every exact zero too."""
        part = self.below(threshold)
        if mean:
            return part
        return part._replace(tokens=torch.maximum(part.tokens, self.zeros))

    def quantile(self, target: float) -> float:
        """Smallest value whose CDF of |a| over all neurons reaches `target`; the layer must be pooled."""
        goal = target * float(self.total.tokens)
        if float(self.zeros) >= goal:
            return 0.0
        at_edge = self._at_edge[0][:, 0]
        k = int(torch.searchsorted(at_edge, torch.tensor(goal, dtype=torch.float64)))
        k = min(k, len(self.edges) - 1)
        if k == 0:
            return float(self.edges[0])
        start, end = float(at_edge[k - 1]), float(at_edge[k])
        low, high = float(self.edges[k - 1]), float(self.edges[k])
        return low + (high - low) * (goal - start) / (end - start)

    def scaled_quantile(self, target: float, scale: Tensor) -> float:
        """Smallest τ such that a share `target` of the entries has |a_j|·scale_j < τ, to a relative 1e-9.

        Args:
            target: in (0, 1).
            scale: (F,) float64 ≥ 0; entries of a neuron with scale 0 are below every τ > 0.
        """
        goal = target * float(self.total.tokens.sum())
        used = scale > 0
        if float(self.zeros.sum()) + float(self.total.tokens[~used].sum() - self.zeros[~used].sum()) >= goal:
            return 0.0
        low = max(float(self.edges[0]), float(self.edges[self.edges > 0][0])) * float(scale[used].min())
        high = float(self.edges[-1]) * float(scale.max())
        while high > low * (1 + 1e-9):
            middle = (low * high) ** 0.5
            if float(self.count_below(divide(middle, scale)).sum()) >= goal:
                high = middle
            else:
                low = middle
        return high


def divide(numerator: float, scale: Tensor) -> Tensor:
    """numerator / scale, and +inf where the scale is 0, whatever the numerator."""
    return torch.where(scale > 0, numerator / scale, float("inf"))


def float32_at_least(value: Tensor) -> Tensor:
    """float64 to float32, rounded up, so that a threshold at an edge still skips what lies below the edge."""
    narrow = value.float()
    return torch.where(
        narrow.double() < value, torch.nextafter(narrow, torch.full_like(narrow, float("inf"))), narrow
    )
