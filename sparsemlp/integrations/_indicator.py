"""What decides in a model's MLPs: the indicator that the caller or the plan asks for, and whether every MLP has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsemlp.integrations._mlps import parts_of
from sparsemlp.nn import Int8Linear, SparseGatedMLP, _screens
from sparsemlp.router.decide import screened_tokens

if TYPE_CHECKING:
    from sparsemlp.calibration import Plan

__all__ = ["Indicator", "asked_for"]


@dataclass(frozen=True)
class Indicator:
    """Of `SparseGatedMLP`: the indicator, and with "screen" its options."""

    indicator: str
    bits: int
    group: int
    tokens: int | None
    predicted: bool = False
    """Whether `tokens` is to be what the router predicts for each MLP."""

    def at(self, name: str, module: nn.Module, plan: Plan | None, quantize: str | None) -> Indicator:
        """For one MLP: `tokens` becomes up to how many the screen is predicted to pay there, where that is wanted."""
        parts = parts_of(module)
        if not self.predicted or plan is None or parts.hidden_size is None or parts.neurons is None:
            return self
        last = parts.last
        is_int8 = isinstance(last, Int8Linear)
        dtype = last.dtype if isinstance(last, Int8Linear) else next(last.parameters()).dtype
        found = screened_tokens(
            dtype,
            is_int8 or quantize is not None,
            parts.hidden_size,
            parts.neurons,
            plan.layers[name].sparsity,
        )
        return replace(self, tokens=found)

    def check(self, mlps: dict[str, nn.Module]) -> None:
        """ValueError where one of the MLPs, by name, cannot have it."""
        for name, module in mlps.items():
            if self.indicator != "gate" and not parts_of(module).gated:
                raise ValueError(
                    f"indicator is {self.indicator!r} and the MLP of {name} has no gate, expected gated MLPs only; "
                    "leave indicator away, or calibrate with another method"
                )
            if isinstance(module, SparseGatedMLP):
                try:
                    _screens.check(self.indicator, self.bits, self.group, None, module.input_threshold)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None


def asked_for(
    plan: Plan | None,
    indicator: str | None,
    bits: int | None,
    group: int | None,
    tokens: int | str | None,
) -> Indicator:
    """The arguments of `sparsify`, checked; the plan's, or what is usual, where they are None."""
    asked: dict[str, Any] = {"indicator": indicator, "screen_bits": bits, "screen_group": group}
    usual: dict[str, Any] = {"indicator": "gate", "screen_bits": 4, "screen_group": 32}
    if getattr(plan, "bits", None) is not None:
        screen: Any = plan
        usual = {"indicator": "screen", "screen_bits": screen.bits, "screen_group": screen.group}
    for name, value in asked.items():
        if plan is not None and value not in (None, usual[name]):
            raise ValueError(
                f"{name} is {value!r} together with a plan for {usual[name]!r}, expected the plan's; leave {name} away"
            )
    wanted = {name: usual[name] if value is None else value for name, value in asked.items()}
    auto = tokens == "auto"
    number = tokens if isinstance(tokens, int) else None
    found = Indicator(wanted["indicator"], wanted["screen_bits"], wanted["screen_group"], number, auto)
    _screens.check(found.indicator, found.bits, found.group, 0 if auto else tokens, None)
    if auto and plan is None:
        raise ValueError(
            "screen_tokens is 'auto' without a plan, expected a number or None: a plan's sparsity decides; give one"
        )
    for name in ("screen_bits", "screen_group"):
        if found.indicator != "screen" and asked[name] is not None:
            raise ValueError(
                f"{name} is given with indicator {found.indicator!r}, expected it with 'screen' only; leave it None"
            )
    return found
