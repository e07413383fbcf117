"""Cases of `gated_mlp`, one declarative list; `tests.samples` says what they mean and builds their tensors."""

from __future__ import annotations

from sparsemlp import activations
from tests.samples import DTYPES, PARAMS, Case, Sample, _scale, _x, build, rows
from tests.truth import Truth

__all__ = [
    "CASES",
    "DTYPES",
    "PARAMS",
    "Case",
    "Sample",
    "Truth",
    "_scale",
    "_x",
    "build",
    "rows",
]

TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100)
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 100, 576)
WIDTHS = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 100, 257)


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


def _inputs() -> list[Case]:
    """A threshold on what the gate sees, with every indicator and beside everything else."""
    kinds = (
        ("gate", 0.5, 0.5, "silu", "", ""),
        ("gate", 1, "channels", "silu", "", "gud"),
        ("gate", "neurons", 0.25, "relu", "mean+out", "g"),
        ("gate", 0.5, 0, "gelu", "", "gu"),
        ("gate", 0.5, 1, "silu", "", ""),
        ("up", 0.5, "channels", "silu", "mean", "gud"),
        ("product", "some_inf", 0.5, "jsrelu", "", "gud"),
        ("product", 0.5, 0.5, "weird", "", ""),
    )
    cases = [
        Case(
            f"inputs-{inputs}-{indicator}-{density}-{activation}-{mean}-T{tokens}",
            tokens=tokens, density=density, activation=activation, mean=mean, biases=biases, indicator=indicator,
            inputs=inputs,
        )
        for indicator, density, inputs, activation, mean, biases in kinds
        for tokens in (1, 5, 36, 130)
    ]  # fmt: skip
    sizes = [(0, 5, 7), (1, 0, 9), (3, 1, 5), (2, 9, 0), (1, 33, 1), (7, 130, 31), (32, 17, 65)]
    cases += [Case(f"inputs-size-{t}-{d}-{f}", tokens=t, d=d, f=f, inputs=0.5) for t, d, f in sizes]
    cases += [
        Case(f"inputs-w-{w}-x-{x}", tokens=6, weights=w, x=x, inputs="channels", scale="varied")
        for w, x in (
            ("plain", "strided"),
            ("end", "end"),
            ("repeated", "columns"),
            ("interleaved", "leading"),
        )
    ]
    return cases


def _int8() -> list[Case]:
    """int8 weights, with everything that float weights are tested with."""
    kinds = (
        ("gate", 0.5, "silu", "", "", ""),
        ("gate", 1, "relu", "", "", "gud"),
        ("gate", "neurons", "gelu", "mean+out", "varied", "g"),
        ("gate", 0, "silu", "mean", "one_zero", ""),
        ("up", 0.5, "silu", "", "", "gud"),
        ("product", "some_inf", "jsrelu", "mean", "alternate", "ud"),
    )
    cases = [
        Case(
            f"int8-{indicator}-{density}-{activation}-{mean}-{scale}-T{tokens}",
            tokens=tokens, density=density, activation=activation, mean=mean, scale=scale, biases=biases,
            indicator=indicator, int8=True,
        )
        for indicator, density, activation, mean, scale, biases in kinds
        for tokens in (1, 4, 32, 36, 130)
    ]  # fmt: skip
    for i, (d, f) in enumerate(zip(SIZES, reversed(WIDTHS[1:]), strict=True)):
        tokens = TOKENS[(3 * i) % len(TOKENS)]
        cases.append(Case(f"int8-size-{tokens}-{d}-{f}", tokens=tokens, d=d, f=f, int8=True))
    layouts = ("plain", "end", "interleaved", "triple", "repeated")
    cases += [Case(f"int8-w-{w}", tokens=5, weights=w, density="neurons", int8=True) for w in layouts]
    cases += [
        Case(f"int8-x-{x}", tokens=6, x=x, int8=True) for x in ("strided", "columns", "leading", "swapped")
    ]
    cases += [
        Case(f"int8-wide-{t}-{d}-{f}", tokens=t, d=d, f=f, int8=True)
        for t, d, f in ((1, 576, 1536), (2, 4096, 60), (32, 130, 700), (40, 2100, 70))
    ]
    cases += [
        Case(f"int8-inputs-{inputs}-{indicator}-T{tokens}", tokens=tokens, inputs=inputs, indicator=indicator,
             biases="gud", int8=True)
        for inputs, indicator in ((0.5, "gate"), ("channels", "product"))
        for tokens in (1, 6, 40, 130)
    ]  # fmt: skip
    return cases


def _screens() -> list[Case]:
    """The indicator `screen`: bits and groups, and beside everything else."""
    kinds = (
        ("4x32", 0.5, "silu", "", "", False),
        ("4x32", "neurons", "relu", "mean+out", "", False),
        ("3x32", 0.25, "silu", "", "one_zero", False),
        ("8x64", "some_inf", "gelu", "mean", "varied", False),
        ("3x128", 1, "relu", "", "", False),
        ("4x128", 0, "silu", "mean", "one_zero", False),
        ("4x32", 0.5, "jsrelu", "", "alternate", True),
        ("8x32", 0.5, "weird", "mean+out", "", True),
    )
    cases = [
        Case(
            f"screen-{screen}-{density}-{activation}-{mean}-{scale}-{'int8' if int8 else 'float'}-T{tokens}",
            tokens=tokens, density=density, activation=activation, mean=mean, scale=scale, biases="gud",
            indicator="screen", screen=screen, int8=int8,
        )
        for screen, density, activation, mean, scale, int8 in kinds
        for tokens in (1, 5, 36)
    ]  # fmt: skip
    sizes = (
        (1, 320, 513),
        (2, 1, 1),
        (3, 33, 15),
        (4, 129, 16),
        (8, 64, 17),
        (9, 31, 257),
        (32, 130, 700),
        (130, 70, 40),
    )
    cases += [
        Case(
            f"screen-size-{t}-{d}-{f}",
            tokens=t,
            d=d,
            f=f,
            indicator="screen",
            screen=("4x32", "3x64", "8x128")[i % 3],
        )
        for i, (t, d, f) in enumerate(sizes)
    ]
    cases += [
        Case(f"screen-empty-{t}-{d}-{f}", tokens=t, d=d, f=f, indicator="screen", screen="4x32", biases="gud")
        for t, d, f in ((0, 33, 20), (2, 0, 20), (2, 33, 0))
    ]
    layouts = ("end", "interleaved", "repeated")
    cases += [
        Case(f"screen-w-{w}", tokens=5, weights=w, density="neurons", indicator="screen", screen="4x32")
        for w in layouts
    ]
    cases += [
        Case(f"screen-x-{x}", tokens=6, x=x, indicator="screen", screen="4x32")
        for x in ("strided", "columns", "leading")
    ]
    return cases


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
    *_inputs(),
    *_int8(),
    *_screens(),
]
"""Every case; names are unique."""

assert len({case.name for case in CASES}) == len(CASES), "two cases of one name"
