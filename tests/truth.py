"""What a sample of `gated_mlp` should give, in float64, and how far from it a result may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations
from sparsemlp.screen import unpack
from sparsemlp.testing import flip_budget, linear_error, threshold_band

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.samples import Sample


def _int8_groups(x: Tensor, group: int) -> Tensor:
    """Tokens (T, D) float32 as the screen sees them, float64: 127 steps up to each group's largest magnitude."""
    out = x.double()
    for k in range(0, x.shape[1], group):
        part = x[:, k : k + group]
        most = part.abs().amax(dim=1, keepdim=True)
        steps = (part * (torch.full_like(most, 127) / most)).round()
        seen = steps.double() * (most / torch.full_like(most, 127)).double()
        seen = torch.where(most < 2.0**-100, 0.0, seen)
        out[:, k : k + group] = torch.where(most.isfinite(), seen, torch.nan)
    return out


class Truth:
    """What a sample's output is, in float64 and written independently of the package's reference.

    Attributes: `pre`, `act`, `up` (T, F); `kept`, `active` (T, F) bool; `out` (T, D).
    """

    def __init__(self, sample: Sample) -> None:
        def wide(name: str) -> Tensor | None:
            value = sample.options.get(name)
            return None if value is None else value.double()

        self.sample = sample
        d = sample.x.shape[-1]
        self.x = (
            sample.x.double().reshape(-1, d)
            if d
            else sample.x.double().reshape(sample.x.shape[:-1].numel(), 0)
        )
        self.w_gate, self.w_up, self.w_down_t = sample.values
        self.seen, limit = self.x, wide("input_threshold")
        if limit is not None:
            self.seen = torch.where(self.x.abs() < limit, 0.0, self.x)
            self.w_gate = torch.where((self.seen != 0).any(0), self.w_gate, 0.0)
        self.pre = F.linear(self.seen, self.w_gate, wide("b_gate"))
        self.up = F.linear(self.x, self.w_up, wide("b_up"))
        params = wide("activation_params")
        self.phi = lambda p: activations.apply(p, sample.activation, params)
        self.act = self.phi(self.pre)
        if sample.indicator == "screen":
            self._screen(wide)
        else:
            self.m = {"gate": self.act, "up": self.up, "product": self.act * self.up}[sample.indicator]
        self.mean = wide("skipped_mean")
        scale = wide("token_scale")
        limit = sample.threshold.double().expand(self.act.shape)
        if scale is not None:
            column = scale.reshape(-1, 1)
            limit = torch.where(column == 0, 0.0, column * limit)
        self.limit = limit
        self.kept = ~(self.m.abs() < limit)
        self.active = self.kept if self.mean is not None else self.kept & (self.act != 0)
        self.hidden = torch.where(
            self.active, self.act * self.up - (0 if self.mean is None else self.mean), 0.0
        )
        down = torch.where(self.active.any(0)[:, None], self.w_down_t, 0.0)
        self.out = self.hidden @ down
        for name in ("b_down", "skipped_out"):
            value = wide(name)
            if name == "skipped_out" and value is None and self.mean is not None:
                value = self.mean @ self.w_down_t
            if value is not None:
                self.out = self.out + value

    def _screen(self, wide: Callable[[str], Tensor | None]) -> None:
        """What is compared comes from low-bit copies of the weights and from x in int8, a step for each group."""
        assert self.sample.screens is not None
        gate, up = self.sample.screens
        f, d = self.sample.w_gate.shape
        self.rounded = _int8_groups(self.x.float(), gate.group)
        self.low_gate, self.low_up = (unpack(packed, f, d, torch.float64) for packed in (gate, up))
        self.screen_pre = F.linear(self.rounded, self.low_gate, wide("b_gate"))
        self.screen_up = F.linear(self.rounded, self.low_up, wide("b_up"))
        self.m = self.phi(self.screen_pre) * self.screen_up

    def peers(self, count: int | None = None) -> list[Tensor]:
        """The masked MLP by plain PyTorch operations in the sample's dtype, in several orders of summation.

        Of few outputs more orders: the largest error of one or two numbers may by luck be next to nothing. Likewise
        where all rows are one: every output of a token then has the error of the same sum.
        """
        if count is None:
            count = 12 if self.out.numel() < 64 or self.sample.w_down_t.stride(0) == 0 else 3
        s, dtype = self.sample, self.sample.x.dtype
        gate, up_rows, down_rows = (w.to(dtype) for w in (self.w_gate, self.w_up, self.w_down_t))
        g = torch.Generator().manual_seed(0)
        out = []
        for _ in range(count):
            d, f = (
                torch.randperm(s.w_gate.shape[1], generator=g),
                torch.randperm(s.w_gate.shape[0], generator=g),
            )
            x, seen = self.x.to(dtype)[:, d], self.seen.to(dtype)[:, d]

            def bias(name: str, order: Tensor | None) -> Tensor | None:
                value = self.sample.options.get(name)
                return value if value is None or order is None else value[order]

            pre = F.linear(seen, gate[f][:, d], bias("b_gate", f))
            up = F.linear(x, up_rows[f][:, d], bias("b_up", f))
            act = activations.apply(pre, s.activation, s.options.get("activation_params"))
            product = act * up if self.mean is None else act * up - self.mean.to(dtype)[f]
            hidden = torch.where(self.active[:, f], product, 0)
            down = torch.where(self.active.any(0)[:, None], down_rows, 0)[f]
            result = F.linear(hidden, down.t(), bias("b_down", None))
            if self.mean is not None:
                shift = s.options.get("skipped_out")
                result = result + (self.mean.to(dtype) @ down_rows if shift is None else shift.to(dtype))
            out.append(result)
        return out

    def flips(self, decided_from: torch.dtype) -> Tensor:
        """What entries at the threshold may add to the output's error, (T, D)."""
        s = self.sample

        def error(x: Tensor, w: Tensor, b: str) -> Tensor:
            bound = linear_error(x, w, s.options.get(b), decided_from=decided_from)
            return bound + self._int8_error(x, w, decided_from) if "scale_gate" in s.options else bound

        error_gate = error(self.seen, self.w_gate, "b_gate")
        band = self._band(error_gate, error(self.x, self.w_up, "b_up"))
        around = torch.stack([self.phi(self.pre + k * error_gate).abs() for k in (-1, 0, 1)]).amax(0)
        most = around * self.up.abs() + (0 if self.mean is None else self.mean.abs())
        return flip_budget(band, most, self.w_down_t)

    def _int8_error(self, x: Tensor, w: Tensor, decided_from: torch.dtype) -> Tensor:
        """What int8 weights add: x as integers of 16 bits (float32: twice that), and rounding before and after the
        scale. Roundings are independent: a step of the integers times the row's norm is 3.5 of their deviations."""
        bits = {torch.float32: 29, torch.float64: 60}.get(self.sample.x.dtype, 14)
        step = x.abs().amax(dim=1, keepdim=True) * 2.0**-bits if x.shape[1] else x.new_zeros(x.shape[0], 1)
        return step * w.norm(dim=1) + 0.5 * torch.finfo(decided_from).eps * (x @ w.T).abs()

    def _screen_band(self) -> Tensor:
        """Who may be on either side by the screen: its sums are never rounded to x's dtype."""
        decides = torch.float64 if self.sample.x.dtype == torch.float64 else torch.float32
        options = self.sample.options
        errors = (
            linear_error(self.rounded, self.low_gate, options.get("b_gate"), decided_from=decides),
            linear_error(self.rounded, self.low_up, options.get("b_up"), decided_from=decides),
        )
        both = self.screen_pre, self.screen_up
        return threshold_band(lambda p, u: self.phi(p) * u, both, errors, self.limit)

    def _band(self, pre_error: Tensor, up_error: Tensor) -> Tensor:
        if self.sample.indicator == "gate":
            return threshold_band(self.phi, self.pre, pre_error, self.limit)
        zero = threshold_band(self.phi, self.pre, pre_error, torch.zeros_like(self.limit))  # a ≠ 0
        if self.sample.indicator == "screen":
            return zero | self._screen_band()
        if self.sample.indicator == "up":
            return zero | threshold_band(lambda u: u, self.up, up_error, self.limit)
        both = (self.pre, self.up), (pre_error, up_error)
        return zero | threshold_band(lambda p, u: self.phi(p) * u, *both, self.limit)
