"""Sample inputs of `mlp`, one declarative list, with the truth in float64 and the peers.

As in `tests.cases`: a case names what is special about it, and weights are slices of larger buffers of NaN (int8: 127).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp import activations
from sparsemlp.quantization import quantize_columns, quantize_rows
from sparsemlp.testing import flip_budget, linear_error, threshold_band
from tests.devices import device_of, on
from tests.samples import PARAMS, _scale, _threshold, _x, rows

TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 129)
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 100, 576)
WIDTHS = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 100, 257)


@dataclass(frozen=True)
class Case:
    """One call. `density` is the wanted fraction of active entries, or how the threshold is chosen; `biases` holds "i"
    (b_in) and "o" (b_out)."""

    name: str
    tokens: int = 3
    d: int = 65
    f: int = 100
    activation: str = "gelu"
    density: float | str = 0.5
    scale: str = ""
    mean: str = ""
    biases: str = ""
    weights: str = "guarded"
    x: str = "plain"
    int8: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass
class Sample:
    """A case's tensors in one dtype; `options` are further keyword arguments of `sparsemlp.mlp`."""

    x: Tensor
    w_in: Tensor
    w_out_t: Tensor
    activation: str
    threshold: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_in, self.w_out_t

    def run(self, function: Callable[..., Tensor], **changes: Any) -> Tensor:
        """The function's result; computed where the backend is at home and brought back."""
        call = {"threshold": self.threshold, "activation": self.activation, **self.options, **changes}
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


class Truth:
    """What a sample's output is, in float64 and written independently of the package's reference.

    Attributes: `pre`, `act`, `m` (T, F); `kept`, `active` (T, F) bool; `out` (T, D).
    """

    def __init__(self, sample: Sample) -> None:
        def wide(name: str) -> Tensor | None:
            value = sample.options.get(name)
            return None if value is None else value.double()

        self.sample = sample
        self.x = sample.x.double().reshape(sample.x.shape[:-1].numel(), sample.x.shape[-1])
        self.w_in, self.w_out_t = sample.w_in.double(), sample.w_out_t.double()
        if "scale_in" in sample.options:
            self.w_in = self.w_in * sample.options["scale_in"].double()[:, None]
            self.w_out_t = self.w_out_t * sample.options["scale_out"].double()
        params = wide("activation_params")
        self.phi = lambda p: activations.apply(p, sample.activation, params)
        self.pre = F.linear(self.x, self.w_in, wide("b_in"))
        self.act = self.m = self.phi(self.pre)
        self.mean, scale = wide("skipped_mean"), wide("token_scale")
        self.limit = sample.threshold.double().expand(self.act.shape)
        if scale is not None:
            column = scale.reshape(-1, 1)
            self.limit = torch.where(column == 0, 0.0, column * self.limit)
        self.kept = ~(self.act.abs() < self.limit)
        self.active = self.kept if self.mean is not None else self.kept & (self.act != 0)
        self.out = self._hidden(self.act, self.mean, self.active) @ self._read(self.w_out_t)
        for name in ("b_out", "skipped_out"):
            value = wide(name)
            if name == "skipped_out" and value is None and self.mean is not None:
                value = self.mean @ self.w_out_t
            if value is not None:
                self.out = self.out + value

    @staticmethod
    def _hidden(act: Tensor, mean: Tensor | None, active: Tensor) -> Tensor:
        return torch.where(active, act if mean is None else act - mean, 0)

    def _read(self, w_out_t: Tensor) -> Tensor:
        return torch.where(self.active.any(0)[:, None], w_out_t, 0)

    def peers(self) -> list[Tensor]:
        """The masked MLP by plain PyTorch in the sample's dtype, in several orders of summation.

        Of few outputs more orders: the largest error of one or two numbers may by luck be next to nothing. Likewise
        where all rows are one: every output of a token then has the error of the same sum.
        """
        s, dtype = self.sample, self.sample.x.dtype
        x, w_in, w_out_t = self.x.to(dtype), self.w_in.to(dtype), self.w_out_t.to(dtype)
        g, out = torch.Generator().manual_seed(0), []
        few = self.out.numel() < 64 or self.sample.w_out_t.stride(0) == 0
        for i in range(12 if few else 4):
            d, f = (torch.randperm(n, generator=g) for n in reversed(w_in.shape))
            b_in = s.options.get("b_in")
            pre = F.linear(x[:, d], w_in[f][:, d], None if b_in is None else b_in[f])
            act = activations.apply(pre, s.activation, s.options.get("activation_params"))
            mean = None if self.mean is None else self.mean.to(dtype)[f]
            hidden = self._hidden(act, mean, self.active[:, f])
            result = F.linear(hidden, self._read(w_out_t)[f].t(), s.options.get("b_out"))
            if self.mean is not None:
                # In the dtype, and rounded to it: of few neurons one alone may cancel exactly, by luck.
                shifts = self.mean.to(dtype)[f] @ w_out_t[f], (self.mean @ self.w_out_t).to(dtype)
                result = result + s.options.get("skipped_out", shifts[i % 2]).to(dtype)
            out.append(result)
        return out

    def flips(self, decided_from: torch.dtype) -> Tensor:
        """What entries at the threshold may add to the output's error, (T, D)."""
        error = linear_error(self.x, self.w_in, self.sample.options.get("b_in"), decided_from=decided_from)
        if "scale_in" in self.sample.options:
            error = error + self._int8_error(decided_from)
        band = threshold_band(self.phi, self.pre, error, self.limit)
        around = torch.stack([self.phi(self.pre + k * error).abs() for k in (-1, 0, 1)]).amax(0)
        return flip_budget(band, around + (0 if self.mean is None else self.mean.abs()), self.w_out_t)

    def _int8_error(self, decided_from: torch.dtype) -> Tensor:
        """What int8 weights add, as in `tests.truth`: x as integers, and rounding before and after the scale."""
        bits = {torch.float32: 29, torch.float64: 60}.get(self.sample.x.dtype, 14)
        largest = self.x.abs().amax(1, keepdim=True) if self.x.shape[1] else self.x.new_zeros(len(self.x), 1)
        product = (self.x @ self.w_in.T).abs()
        return largest * 2.0**-bits * self.w_in.norm(dim=1) + 0.5 * torch.finfo(decided_from).eps * product


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> Sample:
    """The case's tensors, the same for the same seed."""
    g = torch.Generator().manual_seed(1000 * seed + sum(map(ord, case.name)))

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * size).to(dtype)

    w_in = normal(case.f, case.d, size=1.5 * max(case.d, 1) ** -0.5)
    w_out_t = normal(case.f, case.d, size=max(case.f, 1) ** -0.5)
    options: dict[str, Tensor] = {}
    if case.int8:
        w_in, options["scale_in"] = quantize_rows(w_in)
        w_out_t, options["scale_out"] = quantize_columns(w_out_t)
    w_in, w_out_t = _weights(case.weights, w_in, w_out_t)
    if case.activation in PARAMS:
        options["activation_params"] = torch.tensor(PARAMS[case.activation])
    for name, size in (("b_in", case.f), ("b_out", case.d)):
        if name[2] in case.biases:
            options[name] = normal(size, size=0.5)
    x = _x(case.x, normal(case.tokens, case.d))
    sample = Sample(x, w_in, w_out_t, case.activation, torch.zeros(()), options)
    if case.scale:
        options["token_scale"] = _scale(case.scale, x.shape[:-1].numel(), g)
    if case.mean:
        options["skipped_mean"] = torch.randn(case.f, generator=g) * 0.2
        if "out" in case.mean:
            options["skipped_out"] = (options["skipped_mean"].double() @ Truth(sample).w_out_t).float()
    sample.threshold = _threshold(case.density, Truth(sample), g)
    return sample


def _weights(layout: str, w_in: Tensor, w_out_t: Tensor) -> tuple[Tensor, Tensor]:
    if layout == "interleaved":
        pack = torch.stack((w_in, w_out_t), dim=1)
        return pack[:, 0], pack[:, 1]
    return rows(w_in, layout), rows(w_out_t, layout)


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
            tokens=tokens, mean=mean, density=density, scale=scale, biases=b,
        )
        for mean, b in (("mean", ""), ("mean+out", ""), ("mean+out", "io"))
        for density, scale in ((0.5, ""), (0, ""), (0, "one_zero"), ("neurons", "varied"), (1, ""))
        for tokens in (1, 4, 34)
    ]  # fmt: skip


def _layouts() -> list[Case]:
    kinds = ("plain", "guarded", "end", "interleaved", "repeated")
    weights = [Case(f"w-{w}-T{t}", tokens=t, weights=w, density="neurons") for w in kinds for t in (1, 5, 33)]
    xs = ("guarded", "end", "columns", "strided", "repeated", "leading", "swapped")
    return [
        *weights,
        *(Case(f"x-{x}-T{t}", tokens=t, x=x) for x in xs for t in (2, 6, 34)),
        Case("x-vector", tokens=1, x="vector"),
        Case("x-vector-mean", tokens=1, x="vector", mean="mean"),
    ]


def _biases() -> list[Case]:
    return [
        Case(f"bias-{b}-{a}-T{t}", tokens=t, biases=b, activation=a, density=density)
        for b in ("i", "o", "io")
        for a, density in (("gelu", 0.5), ("relu", 1))
        for t in (1, 4, 40)
    ]


def _wide() -> list[Case]:
    """Several slots of neurons, and more active ones than a slot's batch holds."""
    sizes = (
        (1, 320, 513), (9, 576, 257), (32, 130, 700), (1, 2, 35000), (7, 8, 6000), (32, 64, 7000), (33, 200, 400),
    )  # fmt: skip
    return [
        Case(f"wide-{t}-{d}-{f}-{density}", tokens=t, d=d, f=f, density=density, biases=biases)
        for t, d, f in sizes
        for density, biases in ((0.5, ""), (1, "io"))
    ]


def _many() -> list[Case]:
    """More tokens than any fused kernel takes at once, whatever the dtype's limit is."""
    return [
        Case("many-plain", tokens=130, density=0.5),
        Case("many-dense", tokens=130, density=1, biases="io"),
        Case("many-none", tokens=129, density=0),
        Case("many-neurons", tokens=300, density="some_inf", scale="one_zero", biases="i"),
        Case("many-mean", tokens=130, density="neurons", mean="mean", scale="alternate", biases="o"),
        Case("many-mean+out", tokens=130, density=0, mean="mean+out", scale="varied"),
        Case("many-relu2", tokens=257, activation="relu2", density=1, d=31, f=33),
        Case("many-weird", tokens=130, activation="weird", x="strided", weights="interleaved"),
        Case("many-no-neurons", tokens=130, f=0, biases="o"),
        Case("many-no-width", tokens=130, d=0),
    ]


def _int8() -> list[Case]:
    """int8 weights, with everything that float weights are tested with."""
    kinds = (
        (0.5, "gelu", "", "", ""),
        (1, "relu", "", "", "io"),
        ("neurons", "silu", "mean+out", "varied", "i"),
        (0, "gelu", "mean", "one_zero", ""),
        ("some_inf", "jsrelu", "mean", "alternate", "o"),
    )
    cases = [
        Case(
            f"int8-{density}-{activation}-{mean}-{scale}-T{tokens}",
            tokens=tokens, density=density, activation=activation, mean=mean, scale=scale, biases=biases, int8=True,
        )
        for density, activation, mean, scale, biases in kinds
        for tokens in (1, 4, 32, 36, 130)
    ]  # fmt: skip
    for i, (d, f) in enumerate(zip(SIZES, reversed(WIDTHS[1:]), strict=True)):
        tokens = TOKENS[(3 * i) % len(TOKENS)]
        cases.append(Case(f"int8-size-{tokens}-{d}-{f}", tokens=tokens, d=d, f=f, int8=True))
    layouts = ("plain", "end", "interleaved", "repeated")
    cases += [Case(f"int8-w-{w}", tokens=5, weights=w, density="neurons", int8=True) for w in layouts]
    cases += [
        Case(f"int8-wide-{t}-{d}-{f}", tokens=t, d=d, f=f, int8=True)
        for t, d, f in ((1, 576, 1536), (2, 4096, 60), (32, 130, 700), (40, 2100, 70))
    ]
    return cases


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
    *_int8(),
]
"""Every case; names are unique."""

assert len({case.name for case in CASES}) == len(CASES), "two cases of one name"
