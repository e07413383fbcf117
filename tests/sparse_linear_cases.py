"""Sample inputs of `sparse_linear`, one declarative list, with the truth in float64 and the peers.

As in `tests.cases`: a case names what is special about it, and weights are slices of larger buffers of poison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.devices import device_of, on
from tests.samples import _scale, _x, rows

TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 129, 300)
CHANNELS = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 100, 300)
OUTPUTS = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 100, 257, 600)


@dataclass(frozen=True)
class Case:
    """One call. `density` is the wanted fraction of kept entries, or how the threshold is chosen."""

    name: str
    tokens: int = 3
    k: int = 65
    n: int = 100
    density: float | str = 0.5
    scale: str = ""
    bias: bool = False
    weights: str = "guarded"
    x: str = "plain"
    int8: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass
class Sample:
    """A case's tensors in one dtype; `options` are further keyword arguments of `sparse_linear`."""

    x: Tensor
    weight_t: Tensor
    threshold: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)

    def run(self, function: Callable[..., Tensor], **changes: Any) -> Tensor:
        """The function's result; computed where the backend is at home and brought back."""
        call = {"threshold": self.threshold, **self.options, **changes}
        device = device_of(call.get("backend", "auto"))
        call = {k: on(device, v) if isinstance(v, Tensor) else v for k, v in call.items()}
        return function(on(device, self.x), on(device, self.weight_t), **call).to(self.x.device)

    def token(self, i: int) -> Sample:
        """The same call for one token alone, its memory copied."""
        options = dict(self.options)
        if "token_scale" in options:
            options["token_scale"] = options["token_scale"].reshape(-1)[i : i + 1]
        x = self.x.reshape(-1, self.x.shape[-1])[i : i + 1].clone()
        return replace(self, x=x, options=options)

    def with_weights(self, weight_t: Tensor) -> Sample:
        return replace(self, weight_t=weight_t)


class Truth:
    """What a sample's output is, in float64 and written independently of the package's reference.

    The decision is exact: s·t is rounded to float32 (to float64 for float64 x) and x is compared as it is.

    Attributes: `x`, `kept`, `active` (T, K); `weight_t` (K, N), dequantised; `out` (T, N).
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        k = sample.x.shape[-1]
        self.x = sample.x.double().reshape(sample.x.shape[:-1].numel(), k)
        decides = torch.float64 if sample.x.dtype == torch.float64 else torch.float32
        limit = sample.threshold.to(decides).expand(self.x.shape)
        if "token_scale" in sample.options:
            column = sample.options["token_scale"].to(decides).reshape(-1, 1)
            limit = torch.where(column == 0, 0.0, column * limit)
        self.kept = ~(self.x.abs() < limit.double())
        self.active = self.kept & (self.x != 0)
        self.weight_t = sample.weight_t.double()
        if "scale" in sample.options:
            self.weight_t = self.weight_t * sample.options["scale"].double()
        self.out = self._masked(self.x) @ self._read(self.weight_t)
        if "bias" in sample.options:
            self.out = self.out + sample.options["bias"].double()

    def _masked(self, x: Tensor) -> Tensor:
        return torch.where(self.active, x, 0)

    def _read(self, weight_t: Tensor) -> Tensor:
        return torch.where(self.active.any(0)[:, None], weight_t, 0)

    def peers(self) -> list[Tensor]:
        """The masked layer by plain PyTorch in x's dtype, in several orders of summation; int8 weights dequantised.

        Of few outputs more orders: the largest error of one or two numbers may by luck be next to nothing. Likewise
        where all rows are one: every output of a token then has the error of the same sum.
        """
        dtype, g = self.sample.x.dtype, torch.Generator().manual_seed(0)
        h, w = self._masked(self.x).to(dtype), self._read(self.weight_t).to(dtype)
        bias, out = self.sample.options.get("bias"), []
        few = self.out.numel() < 64 or self.sample.weight_t.stride(0) == 0
        for _ in range(12 if few else 3):
            order = torch.randperm(w.shape[0], generator=g)
            out.append(F.linear(h[:, order], w[order].t(), bias))
        return out


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> Sample:
    """The case's tensors, the same for the same seed. Some entries of x are 0 and −0."""
    g = torch.Generator().manual_seed(1000 * seed + sum(map(ord, case.name)))
    weight = torch.randn(case.k, case.n, generator=g) * max(case.k, 1) ** -0.5
    values = torch.randn(case.tokens, case.k, generator=g)
    values.view(-1)[3::7], values.view(-1)[5::19] = 0.0, -0.0
    options: dict[str, Tensor] = {}
    if case.int8:
        options["scale"] = (weight.abs().amax(0) / 127 if case.k else torch.ones(case.n)).contiguous()
        weight_t = _int8(rows((weight / options["scale"]).round().nan_to_num(0), case.weights))
    else:
        weight_t = rows(weight.to(dtype), case.weights)
    if case.bias:
        options["bias"] = (torch.randn(case.n, generator=g) * 0.5).to(dtype)
    sample = Sample(_x(case.x, values.to(dtype)), weight_t, torch.zeros(()), options)
    if case.scale:
        options["token_scale"] = _scale(case.scale, sample.x.shape[:-1].numel(), g)
    sample.threshold = _threshold(case.density, Truth(sample).x.abs().float(), g)
    return sample


def _int8(t: Tensor) -> Tensor:
    """t as int8 of the same strides, the largest number in every gap."""
    whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return whole.nan_to_num(127).to(torch.int8).as_strided(t.shape, t.stride(), t.storage_offset())


def _threshold(density: float | str, magnitude: Tensor, g: torch.Generator) -> Tensor:
    k = magnitude.shape[1]
    if density == 0:
        return torch.tensor(torch.inf)
    if density == 1 or magnitude.numel() == 0:
        return torch.zeros(()) if density == 1 else torch.zeros(k)
    if density == "one_channel":
        limit = torch.full((k,), torch.inf)
        limit[k // 2] = 0
        return limit
    if density in ("channels", "some_inf"):
        limit = torch.rand(k, generator=g) * 2 * magnitude.median()
        limit[::5] = 0
        if density == "some_inf":
            limit[1::3] = torch.inf
        return limit
    assert isinstance(density, float)
    return magnitude.flatten().quantile(1 - density)


def small_blocks(sample: Sample, backend: str) -> contextlib.AbstractContextManager[None]:
    """Blocks of a GPU kernel that make several of everything out of small sizes, larger ones where K is large.

    As `tests.blocks.small_blocks`; Triton's interpreter runs programs one by one.
    """
    if backend != "triton":
        return contextlib.nullcontext()
    from sparsemlp.kernels import _configs

    large = sample.weight_t.shape[0] >= 1000
    config = {
        "splits": 3,
        "block_f": 256 if large else 16,
        "block_i": 64 if large else 16,
        "down_block_d": 64,
    }
    return _configs.use("sparse_linear", {**config, "last_sums": sample.weight_t.shape[1] % 2 == 1})


def _sizes() -> list[Case]:
    """Every size of every axis at least twice, with changing partners."""
    out = []
    for i in range(2 * len(TOKENS)):
        t, k, n = (
            TOKENS[i % len(TOKENS)],
            CHANNELS[(3 * i + 1) % len(CHANNELS)],
            OUTPUTS[(7 * i + 2) % len(OUTPUTS)],
        )
        density = (0.5, "channels", 1)[i % 3]
        out.append(Case(f"size-{t}-{k}-{n}", tokens=t, k=k, n=n, density=density, bias=i % 2 == 1))
    return out


def _densities() -> list[Case]:
    return [
        Case(f"density-{density}-T{tokens}", tokens=tokens, density=density, k=131, bias=True)
        for density in (0, 0.1, 0.5, 1, "one_channel", "channels", "some_inf")
        for tokens in (1, 6, 36)
    ]


def _routing() -> list[Case]:
    return [
        Case(f"scale-{scale}-{density}-T{tokens}", tokens=tokens, scale=scale, density=density)
        for scale in ("varied", "one_zero", "alternate")
        for density in (0.5, 0, "some_inf")
        for tokens in (1, 5, 35)
    ]


def _layouts() -> list[Case]:
    kinds = ("plain", "guarded", "end", "repeated")
    weights = [
        Case(f"w-{w}-T{t}", tokens=t, weights=w, density="channels") for w in kinds for t in (1, 5, 33)
    ]
    xs = [
        Case(f"x-{x}-T{t}", tokens=t, x=x, scale="varied")
        for x in ("guarded", "end", "columns", "strided", "repeated", "leading", "swapped")
        for t in (2, 6, 34)
    ]
    return [*weights, *xs, Case("x-vector", tokens=1, x="vector", bias=True)]


def _large() -> list[Case]:
    """Several shares of channels, long lists of active ones, and more tokens than any kernel takes at once."""
    sizes = (
        (1, 4000, 96),
        (1, 96, 4000),
        (9, 600, 257),
        (32, 700, 130),
        (1, 35000, 2),
        (32, 3000, 48),
        (130, 200, 100),
        (300, 65, 33),
    )
    return [
        Case(f"large-{t}-{k}-{n}-{density}", tokens=t, k=k, n=n, density=density, bias=density == 1)
        for t, k, n in sizes
        for density in (0.5, 1)
    ]


def _int8_cases() -> list[Case]:
    sizes = ((0, 5, 3), (1, 65, 100), (1, 3000, 257), (4, 33, 17), (32, 131, 64), (40, 65, 33), (200, 65, 33))
    plain = [
        Case(f"int8-{t}-{k}-{n}-{density}", tokens=t, k=k, n=n, density=density, bias=t % 2 == 1, int8=True)
        for t, k, n in sizes
        for density in (0.5, 1, "channels")
    ]
    more = [
        Case(f"int8-{weights}-{x}-T{t}", tokens=t, weights=weights, x=x, scale="one_zero", int8=True)
        for weights, x in (("end", "strided"), ("plain", "swapped"), ("repeated", "plain"))
        for t in (2, 34)
    ]
    empty = [Case("int8-no-channels", k=0, int8=True, bias=True), Case("int8-no-outputs", n=0, int8=True)]
    return [*plain, *more, *empty]


CASES = [*_sizes(), *_densities(), *_routing(), *_layouts(), *_large(), *_int8_cases()]
"""Every case; names are unique."""

assert len({case.name for case in CASES}) == len(CASES), "two cases of one name"
