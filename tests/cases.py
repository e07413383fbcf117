"""Sample inputs of `gated_mlp`, one declarative list, and how the truth and the peers are computed from them.

A case names what is special about it; everything else is the default. Weights are by default slices of larger
buffers filled with NaN, so that a read past a row's tail changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsemlp import activations
from tests.devices import device_of, on
from tests.truth import Truth

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMS = {"weird": (1.625, 1.625, 1.5), "fatrelu": (0.375,), "mix": (0.25,)}
"""Parameters of the activations that have some, exact in every float dtype."""
TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100)
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 100, 576)
WIDTHS = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 100, 257)


@dataclass(frozen=True)
class Case:
    """One call. `density` is the wanted fraction of active entries, or how the threshold is chosen."""

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

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_gate, self.w_up, self.w_down_t

    def run(self, function: Callable[..., Tensor], **changes: Any) -> Tensor:
        """The function's result; computed where the backend is at home and brought back."""
        call = {"threshold": self.threshold, "activation": self.activation, **self.options, **changes}
        if self.indicator != "gate":
            call["indicator"] = self.indicator
        device = device_of(call.get("backend", "auto"))
        call = {k: on(device, v) if isinstance(v, Tensor) else v for k, v in call.items()}
        return function(*(on(device, t) for t in (self.x, *self.weights)), **call).to(self.x.device)

    def token(self, i: int) -> Sample:
        """The same call for one token alone, its memory copied."""
        options = dict(self.options)
        if "token_scale" in options:
            options["token_scale"] = options["token_scale"].reshape(-1)[i : i + 1]
        x = self.x.reshape(-1, self.x.shape[-1])[i : i + 1].clone()
        return replace(self, x=x, options=options)


def rows(values: Tensor, layout: str) -> Tensor:
    """`values` (N, D) stored as the layout says, NaN in every gap."""
    n, d = values.shape
    if layout == "plain":
        return values.contiguous()
    if layout == "end":  # the last row ends where its storage ends
        buffer = values.new_full((n * (d + 3) + 5,), torch.nan)
        view = buffer[5 + 3 :].as_strided((n, d), (d + 3, 1))
    elif layout == "guarded":
        view = values.new_full((n + 2, d + 7), torch.nan)[1 : 1 + n, 3 : 3 + d]
    elif layout == "columns":
        view = values.new_full((d + 1, n + 1), torch.nan)[:d, :n].t()
    elif layout == "strided":
        view = values.new_full((n, 2 * d + 1), torch.nan)[:, 1::2]
    elif layout == "repeated":  # row stride 0: every row is the first
        return values[:1].clone().expand(n, d) if n else values
    else:
        raise ValueError(f"no layout {layout!r}")
    return view.copy_(values)


def _weights(layout: str, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    w_gate, w_up, w_down_t = _weights(
        case.weights,
        normal(case.f, case.d, size=1.5 * spread),
        normal(case.f, case.d, size=1.5 * spread),
        normal(case.f, case.d, size=max(case.f, 1) ** -0.5),
    )
    options: dict[str, Tensor] = {}
    if case.activation in PARAMS:
        options["activation_params"] = torch.tensor(PARAMS[case.activation])
    for letter, size in (("gate", case.f), ("up", case.f), ("down", case.d)):
        if letter[0] in case.biases:
            options[f"b_{letter}"] = normal(size, size=0.5)
    x = _x(case.x, normal(case.tokens, case.d))
    sample = Sample(x, w_gate, w_up, w_down_t, case.activation, torch.zeros(()), options, case.indicator)
    tokens = x.numel() // case.d if case.d else case.tokens
    if case.scale:
        options["token_scale"] = _scale(case.scale, tokens, g)
    if case.mean:
        options["skipped_mean"] = torch.randn(case.f, generator=g) * 0.2
        if "out" in case.mean:
            options["skipped_out"] = (options["skipped_mean"].double() @ w_down_t.double()).float()
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


def _sizes() -> list[Case]:
    """Every size of every axis at least twice, with changing partners."""
    out = []
    for i in range(2 * len(TOKENS)):
        t, d, f = TOKENS[i % len(TOKENS)], SIZES[(3 * i + 1) % len(SIZES)], WIDTHS[(5 * i + 2) % len(WIDTHS)]
        out.append(Case(f"size-{t}-{d}-{f}", tokens=t, d=d, f=f, density=(0.5, "neurons", 1)[i % 3]))
    return out


def _activations() -> list[Case]:
    return [
        Case(f"act-{name}-{density}", activation=name, density=density, tokens=tokens)
        for name in activations.ACTIVATIONS
        for density, tokens in ((1, 4), (0.5, 5), ("neurons", 40))
    ]


def _densities() -> list[Case]:
    return [
        Case(f"density-{density}-T{tokens}", tokens=tokens, density=density, f=131)
        for density in (0, 0.1, 0.5, 1, "one_column", "neurons", "some_inf")
        for tokens in (1, 6, 36)
    ]


def _routing() -> list[Case]:
    return [
        Case(f"scale-{scale}-{density}-T{tokens}", tokens=tokens, scale=scale, density=density)
        for scale in ("varied", "one_zero", "alternate")
        for density in (0.5, 0, "some_inf")
        for tokens in (1, 5, 35)
    ]


def _means() -> list[Case]:
    return [
        Case(
            f"{mean}-{b}-{density}-{scale}-T{tokens}",
            tokens=tokens,
            mean=mean,
            density=density,
            scale=scale,
            biases=b,
        )
        for mean, b in (("mean", ""), ("mean+out", ""), ("mean+out", "gud"))
        for density, scale in ((0.5, ""), (0, ""), (0, "one_zero"), ("neurons", "varied"), (1, ""))
        for tokens in (1, 4, 34)
    ]


def _layouts() -> list[Case]:
    kinds = ("plain", "guarded", "end", "interleaved", "triple", "repeated")
    weights = [Case(f"w-{w}-T{t}", tokens=t, weights=w, density="neurons") for w in kinds for t in (1, 5, 33)]
    xs = [
        Case(f"x-{x}-T{t}", tokens=t, x=x)
        for x in ("guarded", "end", "columns", "strided", "repeated", "leading", "swapped")
        for t in (2, 6, 34)
    ]
    return [
        *weights,
        *xs,
        Case("x-vector", tokens=1, x="vector"),
        Case("x-vector-mean", tokens=1, x="vector", mean="mean"),
    ]


def _indicators() -> list[Case]:
    kinds = (
        ("silu", 0.5, "", ""),
        ("relu", "neurons", "", ""),
        ("silu", 0, "", "one_zero"),
        ("weird", 0.5, "mean+out", ""),
        ("jsrelu", "some_inf", "mean", "varied"),
    )
    return [
        Case(
            f"{indicator}-{activation}-{density}-{mean}-{scale}-T{tokens}",
            tokens=tokens, activation=activation, density=density, mean=mean, scale=scale, biases="gud",
            indicator=indicator,
        )
        for indicator in ("up", "product")
        for activation, density, mean, scale in kinds
        for tokens in (1, 5, 36)
    ]  # fmt: skip


def _biases() -> list[Case]:
    return [
        Case(f"bias-{b}-{a}-T{t}", tokens=t, biases=b, activation=a)
        for b in ("g", "u", "d", "gud")
        for a in ("silu", "relu")
        for t in (1, 4, 40)
    ]


def _wide() -> list[Case]:
    """Several slots of neurons, and more active ones than a slot's batch holds."""
    sizes = (
        (1, 320, 513),
        (9, 576, 257),
        (32, 130, 700),
        (1, 2, 35000),
        (7, 8, 6000),
        (32, 48, 1500),
        (32, 64, 7000),
        (33, 200, 400),
    )
    return [
        Case(f"wide-{t}-{d}-{f}-{density}", tokens=t, d=d, f=f, density=density, biases=biases)
        for t, d, f in sizes
        for density, biases in ((0.5, ""), (1, "gud"))
    ]


def _many() -> list[Case]:
    """More tokens than any fused kernel takes at once, whatever the dtype's limit is."""
    return [
        Case("many-plain", tokens=130, density=0.5),
        Case("many-dense", tokens=130, density=1, biases="gud"),
        Case("many-none", tokens=129, density=0),
        Case("many-neurons", tokens=300, density="some_inf", scale="one_zero", biases="gu"),
        Case("many-mean", tokens=130, density="neurons", mean="mean", scale="alternate", biases="d"),
        Case("many-mean+out", tokens=130, density=0, mean="mean+out", scale="varied"),
        Case("many-relu2", tokens=257, activation="relu2", density=1, d=31, f=33),
        Case("many-weird", tokens=130, activation="weird", x="strided", weights="interleaved"),
        Case("many-columns", tokens=130, x="columns", weights="triple"),
        Case("many-no-neurons", tokens=130, f=0, biases="d"),
        Case("many-no-width", tokens=130, d=0),
    ]


CASES = [
    *_sizes(),
    *_wide(),
    *_many(),
    *_activations(),
    *_densities(),
    *_routing(),
    *_means(),
    *_layouts(),
    *_biases(),
    *_indicators(),
]
"""Every case; names are unique."""

assert len({case.name for case in CASES}) == len(CASES), "two cases of one name"
