"""Sample inputs of `gated_mlp`: what a case says about a call, and the tensors that are built from it.

A case names what is special about it; everything else is the default. Weights are by default slices of larger
buffers filled with NaN (int8: 127), so that a read past a row's tail changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsemlp.quantization import quantize_columns, quantize_rows
from sparsemlp.screen import PackedWeight, pack
from tests.devices import device_of, on
from tests.truth import Truth

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMS = {"weird": (1.625, 1.625, 1.5), "fatrelu": (0.375,), "mix": (0.25,)}
"""Parameters of the activations that have some, exact in every float dtype."""


@dataclass(frozen=True)
class Case:
    """One call. `density` is the wanted fraction of active entries, or how the threshold is chosen; `inputs` likewise
    for the x_k that the gate sees ("": no input threshold)."""

    name: str
    tokens: int = 3
    d: int = 65
    f: int = 100
    activation: str = "silu"
    density: float | str = 0.5
    scale: str = ""
    mean: str = ""
    biases: str = ""
    weights: str = "guarded"
    x: str = "plain"
    indicator: str = "gate"
    inputs: float | str = ""
    int8: bool = False
    screen: str = ""
    """Bits and group of the low-bit copies, "4x32", with the indicator "screen"."""

    def __str__(self) -> str:
        return self.name


@dataclass
class Sample:
    """A case's tensors in one dtype; `call` are the keyword arguments of `sparsemlp.gated_mlp`."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down_t: Tensor
    activation: str
    threshold: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)
    indicator: str = "gate"
    screens: tuple[PackedWeight, PackedWeight] | None = None
    """Of gate and up."""

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_gate, self.w_up, self.w_down_t

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the weights stand for, in float64."""
        scales = (self.options.get(name) for name in ("scale_gate", "scale_up", "scale_down"))
        gate, up, down = (
            w.double() if scale is None else w.double() * scale.double().reshape(shape)
            for w, scale, shape in zip(self.weights, scales, ((-1, 1), (-1, 1), (1, -1)), strict=True)
        )
        return gate, up, down

    def run(self, function: Callable[..., Tensor], **changes: Any) -> Tensor:
        """The function's result; computed where the backend is at home and brought back."""
        call = {"threshold": self.threshold, "activation": self.activation, **self.options, **changes}
        if self.indicator != "gate":
            call.setdefault("indicator", self.indicator)
        device = device_of(call.get("backend", "auto"))
        call = {k: on(device, v) if isinstance(v, Tensor) else v for k, v in call.items()}
        if self.screens is not None:
            gate, up = (PackedWeight(*(on(device, t) for t in packed)) for packed in self.screens)
            call = {"screen_gate": gate, "screen_up": up, **call}
        return function(*(on(device, t) for t in (self.x, *self.weights)), **call).to(self.x.device)

    def token(self, i: int) -> Sample:
        """The same call for one token alone, its memory copied."""
        options = dict(self.options)
        if "token_scale" in options:
            options["token_scale"] = options["token_scale"].reshape(-1)[i : i + 1]
        x = self.x.reshape(-1, self.x.shape[-1])[i : i + 1].clone()
        return replace(self, x=x, options=options)


def rows(values: Tensor, layout: str) -> Tensor:
    """`values` (N, D) stored as the layout says, NaN (of integers 127) in every gap."""
    n, d = values.shape
    gap = torch.nan if values.is_floating_point() else 127
    if layout == "plain":
        return values.contiguous()
    if layout == "end":  # the last row ends where its storage ends
        buffer = values.new_full((n * (d + 3) + 5,), gap)
        view = buffer[5 + 3 :].as_strided((n, d), (d + 3, 1))
    elif layout == "guarded":
        view = values.new_full((n + 2, d + 7), gap)[1 : 1 + n, 3 : 3 + d]
    elif layout == "columns":
        view = values.new_full((d + 1, n + 1), gap)[:d, :n].t()
    elif layout == "strided":
        view = values.new_full((n, 2 * d + 1), gap)[:, 1::2]
    elif layout == "repeated":  # row stride 0: every row is the first
        return values[:1].clone().expand(n, d) if n else values
    else:
        raise ValueError(f"no layout {layout!r}")
    return view.copy_(values)


def _weights(
    layout: str, gate: Tensor, up: Tensor, down: Tensor, by_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if by_input:  # the gate input by input
        return rows(gate.t(), layout if layout in ("plain", "end", "repeated") else "guarded").t(), *(
            rows(w, "guarded" if layout in ("interleaved", "triple") else layout) for w in (up, down)
        )
    if layout not in ("interleaved", "triple"):
        return rows(gate, layout), rows(up, layout), rows(down, layout)
    together = (gate, up) if layout == "interleaved" else (gate, up, down)
    pack = torch.stack(together, dim=1)
    views = [pack[:, i] for i in range(len(together))]
    return views[0], views[1], views[2] if len(views) == 3 else rows(down, "guarded")


def _x(layout: str, values: Tensor) -> Tensor:
    tokens, d = values.shape
    if layout == "leading":
        return values.reshape(1, tokens, 1, d)
    if layout == "vector":
        return values[0].clone()
    if layout == "swapped":  # (B, S, D) seen from (S, B, D) memory: cannot be flattened without a copy
        return values.reshape(-1, 2, d).clone().transpose(0, 1)
    return rows(values, layout)


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> Sample:
    """The case's tensors, the same for the same seed."""
    g = torch.Generator().manual_seed(1000 * seed + sum(map(ord, case.name)))

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * size).to(dtype)

    spread = max(case.d, 1) ** -0.5
    matrices = [
        normal(case.f, case.d, size=1.5 * spread),
        normal(case.f, case.d, size=1.5 * spread),
        normal(case.f, case.d, size=max(case.f, 1) ** -0.5),
    ]
    options: dict[str, Tensor] = {}
    if case.int8:
        for i, (name, quantize) in enumerate(
            (("scale_gate", quantize_rows), ("scale_up", quantize_rows), ("scale_down", quantize_columns))
        ):
            matrices[i], options[name] = quantize(matrices[i])
    screens = None
    if case.screen:
        size, group = map(int, case.screen.split("x"))
        values = [
            m * options[name][:, None] if case.int8 else m
            for m, name in zip(matrices, ("scale_gate", "scale_up"), strict=False)
        ]
        screens = pack(values[0], size, group), pack(values[1], size, group)
    w_gate, w_up, w_down_t = _weights(case.weights, *matrices, by_input=case.inputs != "")
    if case.activation in PARAMS:
        options["activation_params"] = torch.tensor(PARAMS[case.activation])
    for letter, size in (("gate", case.f), ("up", case.f), ("down", case.d)):
        if letter[0] in case.biases:
            options[f"b_{letter}"] = normal(size, size=0.5)
    x = _x(case.x, normal(case.tokens, case.d))
    sample = Sample(
        x, w_gate, w_up, w_down_t, case.activation, torch.zeros(()), options, case.indicator, screens
    )
    tokens = x.numel() // case.d if case.d else case.tokens
    if case.scale:
        options["token_scale"] = _scale(case.scale, tokens, g)
    if case.mean:
        options["skipped_mean"] = torch.randn(case.f, generator=g) * 0.2
        if "out" in case.mean:
            options["skipped_out"] = (options["skipped_mean"].double() @ sample.values[2]).float()
    if case.inputs != "":
        options["input_threshold"] = _input_threshold(case.inputs, x.reshape(tokens, case.d), g)
    sample.threshold = _threshold(case.density, Truth(sample), g)
    return sample


def _scale(kind: str, tokens: int, g: torch.Generator) -> Tensor:
    if kind == "varied":
        return torch.rand(tokens, generator=g) * 1.5 + 0.25
    scale = torch.ones(tokens)
    if kind == "one_zero":
        scale[tokens // 2 : tokens // 2 + 1] = 0
        return scale
    scale[::2] = 0  # "alternate"
    return scale


def _input_threshold(kind: float | str, x: Tensor, g: torch.Generator) -> Tensor:
    if kind == 0:
        return torch.tensor(torch.inf)
    if kind == 1 or x.numel() == 0:
        return torch.zeros(())
    size = x.float().abs()
    if kind == "channels":
        limit = torch.rand(x.shape[1], generator=g) * 2 * size.median()
        limit[::5] = 0
        limit[1::7] = torch.inf
        return limit
    assert isinstance(kind, float)
    return size.flatten().quantile(1 - kind)


def _threshold(density: float | str, truth: Truth, g: torch.Generator) -> Tensor:
    magnitude = truth.m.abs()
    f = magnitude.shape[1]
    if density == 0:
        return torch.tensor(torch.inf)
    if density == 1 or magnitude.numel() == 0:
        return torch.zeros(()) if density == 1 else torch.zeros(f)
    if density == "one_column":
        limit = torch.full((f,), torch.inf)
        limit[f // 2] = 0
        return limit
    if density in ("neurons", "some_inf"):
        limit = torch.rand(f, generator=g) * 2 * magnitude.median().float()
        limit[::5] = 0
        if density == "some_inf":
            limit[1::3] = torch.inf
        return limit
    assert isinstance(density, float)
    return magnitude.flatten().quantile(1 - density).float()
