"""Which launches are compiled without a GPU: a case is a call, made of meta tensors.

A new operator is one entry of `PLANS` and one line of `DEFAULT`; its kernels have one each of `gpu_proof.INTENDED`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import gpu_training_cases

if TYPE_CHECKING:
    from sparsemlp.kernels._launch import Launch
    from sparsemlp.kernels._rule import Rule
    from sparsemlp.kernels._screen import Screen

__all__ = ["DEFAULT", "DTYPES", "FAMILIES", "ODD", "PLANS", "Case", "full", "rule_of"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FAMILIES = ("jsrelu", "silu", "weird")
"""An activation of the ReLU family, a smooth one, one with parameters."""
OPTIONS = ("token_scale", "skipped_mean", "biases", "per_neuron")
D, F = 4096, 14336
ODD = 577, 1537
"""Sizes at which no row but the first is aligned."""


@dataclass(frozen=True)
class Case:
    """A call: launches of the plan `plan`.

    `options`: of `OPTIONS`, or "up" or "product", or "input" (input sparsity of the gate), or "screen4/32" (a screen
    of 4 bits in groups of 32); `config`: (name, value) pairs over the default's. For `sparse_linear` f is the columns N
    and d the channels K.
    """

    plan: str
    dtype: str
    activation: str
    tokens: int = 1
    d: int = D
    f: int = F
    options: tuple[str, ...] = ()
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        parts = [self.plan, f"t{self.tokens}"]
        if (self.d, self.f) != (D, F):
            parts.append(f"{self.d}x{self.f}")
        return " ".join([*parts, *self.options, *(f"{k}={v}" for k, v in self.config)])

    def launches(self) -> list[Launch]:
        """From meta tensors: nothing is computed."""
        from sparsemlp.kernels import _configs

        if not self.config:
            return PLANS[self.plan](self)
        op, part = self.plan.split()
        if op != "activation" and part != "decode":
            op = f"{op}_prefill"
        with _configs.use(op, dict(self.config)):
            return PLANS[self.plan](self)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _params(activation: str) -> Tensor | None:
    from sparsemlp import activations

    count = len(activations.get(activation).params)
    return _meta(count) if count else None


def _arguments(case: Case) -> dict[str, Any]:
    """The arguments of the gated MLP's launchers, by name."""
    dtype, has = DTYPES[case.dtype], case.options.__contains__
    d, f, biases, mean = case.d, case.f, has("biases"), has("skipped_mean")
    return {
        "x": _meta(case.tokens, d, dtype=dtype),
        "w_gate": _meta(d, f, dtype=dtype).t() if has("input") else _meta(f, d, dtype=dtype),
        "w_up": _meta(f, d, dtype=dtype),
        "w_down_t": _meta(f, d, dtype=dtype),
        "threshold": _meta(f) if has("per_neuron") else _meta(),
        "input_threshold": (_meta(d) if has("per_neuron") else _meta()) if has("input") else None,
        "token_scale": _meta(case.tokens) if has("token_scale") else None,
        "skipped_mean": _meta(f) if mean else None,
        "skipped_out": _meta(d) if mean else None,
        "b_gate": _meta(f, dtype=dtype) if biases else None,
        "b_up": _meta(f, dtype=dtype) if biases else None,
        "b_down": _meta(d, dtype=dtype) if biases else None,
        "activation_params": _params(case.activation),
        "activation": case.activation,
        "indicator": "screen" if _screen(case) else next(filter(has, ("up", "product")), "gate"),
    }


def _screen(case: Case) -> Screen | None:
    """The low-bit copies of a case that has some."""
    from sparsemlp.kernels._screen import Screen
    from sparsemlp.screen import sizes_of

    option = next((option for option in case.options if option.startswith("screen")), None)
    if option is None:
        return None
    codes, scales = sizes_of(case.f, case.d, *map(int, option.removeprefix("screen").split("/")))
    return Screen(
        *(_meta(*codes, dtype=torch.uint8) for _ in range(2)),
        *(_meta(*scales, dtype=torch.bfloat16) for _ in range(2)),
    )


def _decode(case: Case) -> list[Launch]:
    from sparsemlp.kernels import gated_mlp

    return gated_mlp.decode(**_arguments(case), screen=_screen(case))[1]


def _sum(case: Case) -> list[Launch]:
    from sparsemlp.kernels import _configs, gated_mlp

    with _configs.use("gated_mlp", {"last_sums": False}):
        return gated_mlp.decode(**_arguments(case))[1][2:]


def rule_of(case: Case, indicator: str | None = None) -> Rule:
    """Who is active in a case, by its own indicator or another."""
    from sparsemlp.kernels._rule import Rule

    a = _arguments(case)
    rule = Rule(**{name: a[name] for name in Rule._fields})
    return rule if indicator is None else rule._replace(indicator=indicator)


def _mlp(case: Case) -> list[Launch]:
    from sparsemlp.kernels import mlp

    a = _arguments(case)
    args = (
        a["x"],
        a["w_gate"],
        a["w_down_t"],
        rule_of(case, "ungated"),
        a["skipped_out"],
        a["b_gate"],
        a["b_down"],
    )
    return mlp.decode(*args)[1]


def _sparse_linear(case: Case) -> list[Launch]:
    from sparsemlp.kernels import _channels

    dtype, has = DTYPES[case.dtype], case.options.__contains__
    return _channels.few(
        _meta(case.tokens, case.d, dtype=dtype),
        _meta(case.d, case.f, dtype=dtype),
        _meta(case.d) if has("per_neuron") else _meta(),
        _meta(case.tokens) if has("token_scale") else None,
        _meta(case.f, dtype=dtype) if has("biases") else None,
        dtype,
    )[1]


def _masked(case: Case, part: str) -> list[Launch]:
    """`mlp`'s mask and repair; `sparse_linear`'s are these for stored values that are its input."""
    from sparsemlp.kernels import _configs, _masked

    a, op = _arguments(case), case.plan.split()[0]
    linear = op == "sparse_linear"
    rule = rule_of(case, "ungated")
    config = _configs.find(f"{op}_prefill", torch.device("meta"), {"dtype": case.dtype}, _masked.DEFAULT)
    pre = _meta(case.tokens, case.d if linear else case.f, dtype=DTYPES[case.dtype])
    if part == "hidden":
        return [_masked.hidden(pre, None, rule, config)[1]]
    weight_t = _meta(case.d, case.f, dtype=pre.dtype) if linear else a["w_down_t"]
    bias = a["b_gate"] if linear else a["b_down"]
    out = _meta(case.tokens, weight_t.shape[1], dtype=pre.dtype)
    return [_masked.repair(pre, None, pre, weight_t, bias, a["skipped_out"], out, rule, config)]


def _prefill(case: Case, part: str) -> list[Launch]:
    from sparsemlp.kernels import _configs, _masked, gated_mlp_screen, gated_mlp_tiles
    from sparsemlp.kernels import gated_mlp_prefill as prefill

    a, rule, dtype = _arguments(case), rule_of(case), DTYPES[case.dtype]
    key = {"tokens": case.tokens, "d": case.d, "f": case.f, "dtype": case.dtype}
    default = prefill.default(case.tokens, case.d, case.f, dtype)
    config = _configs.find("gated_mlp_prefill", torch.device("meta"), key, default)
    pre, out = _meta(case.tokens, case.f, dtype=dtype), _meta(case.tokens, case.d, dtype=dtype)
    screen, m = _screen(case), None
    if screen is not None:
        m, launches = gated_mlp_screen.scores(a["x"], screen, a["b_gate"], a["b_up"], case.f, rule, config)
        if part == "screen":
            return launches
    if part == "hidden":
        return [_masked.hidden(pre, pre, rule, config, m)[1]]
    if part == "repair":
        down = a["w_down_t"], a["b_down"], a["skipped_out"]
        return [_masked.repair(pre, pre, pre, *down, out, rule, config, m)]
    flags, listed, counts, launches = gated_mlp_tiles.tile_list(pre, rule, config)
    products = gated_mlp_tiles.tile_products(
        a["x"], a["w_up"], a["w_down_t"], a["b_up"], a["b_down"], a["skipped_out"],
        pre, flags, listed, counts, rule, config,
    )  # fmt: skip
    return [*launches, *products[2]]


def _activation(case: Case, part: str) -> list[Launch]:
    from sparsemlp.kernels import activation

    p, params = _meta(case.tokens, case.f, dtype=DTYPES[case.dtype]), _params(case.activation)
    if part == "backward":
        return activation.backward_launches(p, p, params, case.activation)[-1]
    return activation.forward_launches(p, params, case.activation, counts=part == "counted")[-1]


PLANS: dict[str, Callable[[Case], list[Launch]]] = {
    "gated_mlp decode": _decode,
    "gated_mlp sum": _sum,
    "gated_mlp hidden": lambda case: _prefill(case, "hidden"),
    "gated_mlp repair": lambda case: _prefill(case, "repair"),
    "gated_mlp tiles": lambda case: _prefill(case, "tiles"),
    "gated_mlp screen": lambda case: _prefill(case, "screen"),
    "mlp decode": _mlp,
    "mlp hidden": lambda case: _masked(case, "hidden"),
    "mlp repair": lambda case: _masked(case, "repair"),
    "sparse_linear decode": _sparse_linear,
    "sparse_linear hidden": lambda case: _masked(case, "hidden"),
    "sparse_linear repair": lambda case: _masked(case, "repair"),
    **gpu_training_cases.PLANS,
    "activation forward": lambda case: _activation(case, "forward"),
    "activation counted": lambda case: _activation(case, "counted"),
    "activation backward": lambda case: _activation(case, "backward"),
}
"""A case's launches, by name."""


def _cases(plan: str, dtypes: Iterable[str], names: Iterable[str], **sizes: Any) -> tuple[Case, ...]:
    return tuple(Case(plan, dtype, name, **sizes) for dtype, name in itertools.product(dtypes, names))


DEFAULT: tuple[Case, ...] = (
    *_cases("gated_mlp decode", DTYPES, FAMILIES),
    *_cases("gated_mlp decode", ("bf16", "fp32"), ("silu",), tokens=8),
    *_cases("gated_mlp decode", ("fp16",), ("silu",), tokens=16),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), tokens=8, options=("up",)),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), tokens=8, options=("product",)),
    *_cases("sparse_linear decode", ("bf16", "fp32"), ("identity",)),
    *_cases("sparse_linear decode", ("bf16",), ("identity",), tokens=8),
    *_cases("gated_mlp decode", ("bf16", "fp32"), ("silu",), options=("input",)),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), tokens=8, options=("input",)),
    *_cases("gated_mlp decode", ("bf16", "fp32"), ("silu",), options=("screen4/32",)),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), options=("screen3/32",)),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), options=("screen8/32",)),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), tokens=8, options=("screen4/32",)),
    *_cases("gated_mlp screen", ("bf16",), ("silu",), tokens=512, options=("screen4/32",)),
    *_cases("gated_mlp hidden", ("bf16",), ("silu",), tokens=512, options=("screen4/32",)),
    *_cases("gated_mlp repair", ("bf16",), ("silu",), tokens=512, options=("screen4/32",)),
    *_cases("gated_mlp hidden", ("bf16",), FAMILIES, tokens=512),
    *_cases("gated_mlp sum", ("bf16",), ("silu",), tokens=8),
    *_cases("gated_mlp repair", ("bf16",), ("silu",), tokens=512),
    *_cases("gated_mlp tiles", ("bf16",), ("silu",), tokens=512),
    *_cases("mlp decode", ("bf16", "fp32"), ("silu",)),
    *_cases("mlp decode", ("bf16",), ("silu",), tokens=8),
    *_cases("mlp hidden", ("bf16",), ("silu",), tokens=512),
    *_cases("mlp repair", ("bf16",), ("silu",), tokens=512),
    *_cases("sparse_linear hidden", ("bf16",), ("identity",), tokens=512),
    *_cases("sparse_linear repair", ("bf16",), ("identity",), tokens=512),
    *_cases("training entries", ("bf16",), FAMILIES, tokens=512),
    *(
        Case(plan, dtype, "silu", 512)
        for plan in gpu_training_cases.PLANS
        for dtype in (("bf16", "fp32") if plan == "training living_rows" else ("bf16",))
        if plan != "training entries"
    ),
    *_cases("activation forward", DTYPES, FAMILIES, tokens=512),
    *_cases("activation backward", DTYPES, FAMILIES, tokens=512),
    *_cases("activation counted", ("bf16",), ("jsrelu",), tokens=512),
)
"""What `make test` compiles, in the default configuration."""


def full() -> Iterator[Case]:
    """The matrix of `make test-full`, beside `DEFAULT`."""
    from sparsemlp import activations

    names = [*activations.ACTIVATIONS]
    for plan, tokens in (("gated_mlp decode", 1), ("gated_mlp hidden", 512), ("activation backward", 512)):
        yield from _cases(plan, ("bf16",), names, tokens=tokens)
    yield from _cases("activation counted", DTYPES, names, tokens=512)
    for tokens in (1, 2, 4, 5, 16):
        yield from _cases("gated_mlp decode", DTYPES, ("weird",), tokens=tokens, options=OPTIONS)
    for plan in ("gated_mlp hidden", "gated_mlp tiles"):
        yield Case(plan, "fp32", "silu", 512)
    for tokens in (1, 8):
        yield from _cases("gated_mlp sum", DTYPES, ("silu",), tokens=tokens, options=OPTIONS)
    for tokens, option in itertools.product((1, 8), OPTIONS):
        yield Case("gated_mlp decode", "bf16", "silu", tokens, options=(option,))
    plans = (
        ("decode", DTYPES, 1),
        ("decode", DTYPES, 8),
        ("hidden", ("bf16",), 512),
        ("repair", ("bf16",), 512),
    )
    for indicator, (plan, dtypes, tokens) in itertools.product(("up", "product"), plans):
        options = (*OPTIONS, indicator)
        yield from _cases(f"gated_mlp {plan}", dtypes, ("weird",), tokens=tokens, options=options)
    for plan in ("gated_mlp hidden", "gated_mlp repair", "gated_mlp tiles"):
        yield from _cases(plan, DTYPES, ("weird",), tokens=512, options=OPTIONS)
    for tokens, dtype in itertools.product((1, 8), DTYPES):
        yield Case("gated_mlp decode", dtype, "silu", tokens, 8192, 28672)
        yield Case("gated_mlp decode", dtype, "silu", tokens, *ODD)
    for tokens in (1, 8):  # the first two launches of the next ones, under the operator's name
        yield from _cases(
            "sparse_linear decode", DTYPES, ("identity",), tokens=tokens, options=("per_neuron",)
        )
    for option, tokens in itertools.product(("gate", "up", "product"), (1, 8)):
        options = (*OPTIONS, "input", option)
        yield from _cases("gated_mlp decode", DTYPES, ("weird",), tokens=tokens, options=options)
    yield from _screens()
    for tokens in (1, 5, 8, 16):
        yield from _cases("mlp decode", DTYPES, ("weird",), tokens=tokens, options=OPTIONS)
        yield from _cases("sparse_linear decode", DTYPES, ("identity",), tokens=tokens, options=OPTIONS)
        yield from _cases("sparse_linear decode", DTYPES, ("identity",), tokens=tokens, d=F, f=D)
    for plan in ("mlp", "sparse_linear"):
        activation = "weird" if plan == "mlp" else "identity"
        for part in ("hidden", "repair"):
            yield from _cases(f"{plan} {part}", DTYPES, (activation,), tokens=512, options=OPTIONS)
        yield Case(f"{plan} decode", "bf16", activation, 8, *ODD)
    for plan in gpu_training_cases.PLANS:
        yield from _cases(plan, DTYPES, ("weird",), tokens=512, options=OPTIONS)
        yield Case(plan, "bf16", "silu", 512, options=("ungated",))
        yield Case(plan, "bf16", "silu", 77, *ODD)
    yield Case("gated_mlp tiles", "bf16", "silu", 77, *ODD)
    yield Case("activation forward", "bf16", "silu", 3, *ODD)
    yield from _configured()


def _screens() -> Iterator[Case]:
    """Screens of all sizes beside the other options."""
    for screen, tokens in itertools.product(("screen3/32", "screen4/64", "screen8/32"), (1, 2, 8)):
        yield from _cases("gated_mlp decode", DTYPES, ("weird",), tokens=tokens, options=(*OPTIONS, screen))
    for screen in ("screen3/32", "screen4/64", "screen8/128"):
        for part in ("screen", "hidden", "repair"):
            yield from _cases(f"gated_mlp {part}", DTYPES, ("weird",), tokens=512, options=(*OPTIONS, screen))
    for tokens in (1, 8):
        yield Case("gated_mlp decode", "bf16", "silu", tokens, *ODD, options=("screen4/32",))
    yield Case("gated_mlp decode", "bf16", "silu", 16, options=("screen4/32",))


def _configured() -> Iterator[Case]:
    """Every configuration that is committed, or that the tuner tries first."""
    from benchmarks.tune_spaces import SPACES, candidates
    from sparsemlp.kernels import _configs

    plans = {
        "gated_mlp": "gated_mlp decode",
        "gated_mlp_prefill": "gated_mlp tiles",
        "mlp": "mlp decode",
        "mlp_prefill": "mlp hidden",
        "sparse_linear": "sparse_linear decode",
        "sparse_linear_prefill": "sparse_linear hidden",
    }
    found = []
    for op in plans:
        for file in sorted(_configs.FOLDER.glob(f"{op}/*.json")):
            entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
            found += [(op, entry["key"], entry["config"]) for entry in entries]
        sizes = {"k": D, "n": F} if op.startswith("sparse_linear") else {"d": D, "f": F}
        for tokens in (512,) if op.endswith("prefill") else (1, 8):
            key = {"tokens": tokens, **sizes, "dtype": "bf16"}
            found += [(op, key, config) for config in candidates(op, key)]
    for op, key, config in found:
        default = SPACES[op].default(key)
        changed = tuple((name, value) for name, value in config.items() if default.get(name) != value)
        activation = "identity" if "k" in key else "silu"
        d, f = (key["k"], key["n"]) if "k" in key else (key["d"], key["f"])
        yield Case(plans[op], key["dtype"], activation, key["tokens"], d, f, config=changed)
