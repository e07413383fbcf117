"""What every backend's training operators must satisfy; the truth is float64 from the stored values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsemlp import _env, _native, _triton, activations
from sparsemlp.testing import assert_within_budget
from tests.samples import DTYPES
from tests.training_calls import (
    CALLS,
    EVERY_WAY,
    EVERY_WAY_AND_DTYPE,
    WAYS,
    Change,
    dead,
    going,
    plateau,
    sparse,
)
from tests.training_cases import (
    KINDS,
    UNGATED,
    Kind,
    Truth,
    backward,
    check,
    grad_of,
    gradients,
    stored,
)

EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
EVERY_ISA = pytest.mark.parametrize("isa", [
    pytest.param(name, marks=[] if _native.problem() or name in _native.isa_names() else
                 [pytest.mark.skip(reason=f"this CPU has no {name}")])
    for name in _env.ISA_NAMES
])  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    """Small calls are quicker with one; several are what `test_threads` is about."""
    torch.set_num_threads(1)


def _every_call() -> Iterator[Any]:
    """Calls × dtypes × ways. By the compiled kernels' lists every dtype, else each call in one of three in turn; of
    Triton's interpreter, which is slow, a fifth of that. The rest in `make test-full`."""
    for param in WAYS:
        way = param.values[0]
        for (i, (kind, case, change)), (j, dtype) in itertools.product(enumerate(CALLS), enumerate(DTYPES)):
            later = way != "native lists" and (i + j) % len(DTYPES) != 0
            later |= way == "triton" and _triton.interpreting() and i // 3 % 5 != 0
            marks = [*param.marks, *([pytest.mark.slow] if later else [])]
            name = f"{kind}-{case}-{str(dtype).removeprefix('torch.')}-{param.id}"
            yield pytest.param(kind, case, change, dtype, way, marks=marks, id=name)


@pytest.mark.parametrize(("kind", "case", "change", "dtype", "way"), list(_every_call()))
def test_gradients(kind: Kind, case: Any, change: Change, dtype: torch.dtype, way: str) -> None:
    sample = change(kind.cases.build(case, dtype))
    backend, context = going(way)
    with context:
        check(kind, sample, backend)


def test_the_cases_are_what_they_say() -> None:
    """Patterns of a and of its derivative that differ, empty rows, dead columns."""
    seen: dict[str, Truth] = {}
    for kind, case, change in CALLS:
        sample = change(kind.cases.build(case, torch.float32))
        if kind is UNGATED:
            seen[case.name] = Truth(kind, sample, grad_of(sample), *stored(kind, sample, "reference")[1:])
    assert (seen["plateau"].active & ~seen["plateau"].moving).double().mean() > 0.5
    assert (~seen["padded-silu"].active & seen["padded-silu"].moving)[::3].all()
    assert not seen["dead"].active[:, ::3].any()
    assert not seen["sparse"].active[0].any()
    assert seen["sparse"].active.double().mean() < 0.15
    assert not seen["density-0"].active.any()
    assert seen["act-silu"].active.all()


@EVERY_WAY
@EVERY_KIND
def test_a_wrong_pattern_is_noticed(kind: Kind, way: str) -> None:
    """The tolerance can tell: gradients of another threshold, or of ∂V by the derivative's pattern, are outside."""
    backend, context = going(way)
    sample = kind.cases.build(
        kind.case("told", activation="silu", tokens=24, density=0.4, f=301), torch.float32
    )
    with context:
        found = check(kind, sample, backend)
        other = gradients(kind, replace(sample, threshold=sample.threshold * 1.01), grad_of(sample), backend)
        for name in ("x", *kind.weights):
            with pytest.raises(AssertionError, match="outside the budget"):
                check(kind, sample, backend, found={**found, name: other[name]})
        sample = plateau(kind.cases.build(kind.case("told", activation="weird", tokens=24), torch.float32))
        found = check(kind, sample, backend)
        grad = grad_of(sample)
        truth = Truth(kind, sample, grad, *stored(kind, sample, backend)[1:])
        truth.active = truth.moving
        wrong = truth.peers()[0][1][kind.weights[-1]]
        with pytest.raises(AssertionError, match="outside the budget"):
            check(kind, sample, backend, found={kind.weights[-1]: wrong})


@EVERY_WAY
@EVERY_KIND
def test_only_what_is_asked_for(kind: Kind, way: str) -> None:
    """Each subset of gradients (of the gated one's, each alone and each left out) is the same as among all."""
    backend, context = going(way)
    case = kind.case("asked", activation="relu", tokens=9, d=21, f=50)
    sample = dead(kind.cases.build(case, torch.float32))
    names, grad = kind.leaves(sample), grad_of(sample)
    subsets = [
        [n for i, n in enumerate(names) if bits >> i & 1]
        for bits in range(1, 2 ** len(names))
        if not kind.gated or bits.bit_count() in (1, len(names) - 1)
    ]
    if way == "triton" and _triton.interpreting():
        subsets = subsets[::5]
    with context:
        everything = check(kind, sample, backend)
        for subset in subsets:
            some = gradients(kind, sample, grad, backend, subset)
            assert list(some) == subset
            assert all(torch.equal(some[n], everything[n]) for n in subset), subset


@EVERY_WAY
@EVERY_KIND
def test_what_is_not_wanted_is_not_computed(kind: Kind, way: str) -> None:
    """The backward operator returns an empty tensor of it."""
    backend, context = going(way)
    sample = kind.cases.build(kind.case("unwanted", tokens=6, mean="mean+out"), torch.bfloat16)
    with context:
        saved = stored(kind, sample, backend)[1:]
        everything = backward(kind, sample, grad_of(sample), saved, backend)
        for name in everything:
            found = backward(kind, sample, grad_of(sample), saved, backend, name)
            assert [n for n, g in found.items() if g.numel() > 0] == [name]
            assert all(g.shape == (0,) and g.dtype == found[n].dtype for n, g in everything.items())


@EVERY_WAY_AND_DTYPE
@EVERY_KIND
def test_two_backward_passes_have_the_same_bits(kind: Kind, dtype: torch.dtype, way: str) -> None:
    backend, context = going(way)
    sample = sparse(kind.cases.build(kind.case("twice", activation="relu", tokens=67, f=200), dtype))
    with context:
        first, second = (gradients(kind, sample, grad_of(sample), backend) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


@EVERY_WAY
@EVERY_KIND
@pytest.mark.parametrize("layout", ["expanded", "columns", "strided", "negated"])
def test_layouts_of_the_output_gradient(kind: Kind, layout: str, way: str) -> None:
    """As `.sum()` makes it, with stride 0, and others: it is what a contiguous one gives."""
    backend, context = going(way)
    sample = kind.cases.build(
        kind.case("grad-layout", activation="relu", tokens=11, d=24, f=40), torch.float32
    )
    grad = grad_of(sample)
    made = {
        "expanded": torch.ones(()).expand(grad.shape),
        "columns": grad.t().contiguous().t(),
        "strided": torch.full((11, 49), torch.nan)[:, 1::2].copy_(grad),
        "negated": torch._neg_view(-grad),
    }[layout]
    with context:
        check(kind, sample, backend, grad=made.contiguous(), found=gradients(kind, sample, made, backend))


PLANTED = ("grad", "x", "first", "last")


@EVERY_WAY_AND_DTYPE
@EVERY_KIND
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_inf_and_nan_reach_what_they_belong_to(
    kind: Kind, value: float, dtype: torch.dtype, way: str
) -> None:
    """One in any operand of the backward reaches every gradient that it is a factor of by an entry of the pattern, and
    no other: masks select, they never multiply."""
    backend, context = going(way)
    case = kind.case(
        "planted", activation="relu", tokens=14, d=20, f=60, scale="alternate", density="neurons"
    )
    sample = kind.cases.build(case, dtype)
    sample.threshold[33] = torch.inf  # only the tokens of scale 0 may want neuron 33
    grad, (i, j, k) = grad_of(sample), (4, 33, 7)
    with context:
        saved = stored(kind, sample, backend)[1:]
        truth = Truth(kind, sample, grad, *saved)
        peers = truth.peers()
        active, moving = truth.active, truth.moving
        assert moving[:, j].any()
        assert not moving[1::2, j].any()
        none = torch.zeros(sample.x.shape, dtype=torch.bool)
        for where in PLANTED:
            bad = {n: torch.zeros_like(g, dtype=torch.bool) for n, g in truth.grads.items()}
            there, this = sample, grad
            first, last = kind.weights[0], kind.weights[-1]
            mid = kind.weights[1] if kind.gated else None
            if where == "grad":
                this = grad.clone()
                this[i, k] = value
                bad["x"][i] = bool(moving[i].any() | (active[i].any() & kind.gated))
                bad[first][moving[i]] = bad[kind.biases[0]][moving[i]] = True
                bad[last][active[i], k] = True
                if mid:
                    bad[mid][active[i]] = bad[kind.biases[1]][active[i]] = True
            elif where == "x":
                there = replace(sample, x=sample.x.clone())
                there.x[i, k] = value
                bad[first][moving[i], k] = True
                if mid:
                    bad[mid][active[i], k] = True
            elif where == "first":
                there = replace(sample, **{first: getattr(sample, first).clone()})
                getattr(there, first)[j, k] = value
                bad["x"][:, k] = moving[:, j]
            else:
                there = replace(sample, **{last: getattr(sample, last).clone()})
                getattr(there, last)[j, k] = value
                bad["x"] = none | (moving[:, j] | (active[:, j] & kind.gated))[:, None]
                bad[first][j] = bad[kind.biases[0]][j] = True
                if mid:
                    bad[mid][j] = bad[kind.biases[1]][j] = True
            names = ("x", *kind.weights, *kind.biases[:-1])
            found = backward(kind, there, this, saved, backend, *names)
            for name in names:
                assert torch.equal(~found[name].isfinite(), bad[name]), f"{where}, {name}"
                rest = (torch.where(bad[name], 0, t) for t in (found[name], truth.grads[name]))
                assert_within_budget(
                    *_first_peers(rest, [p[1][name] for p in peers], bad[name]),
                    flips=truth.flips[name],
                    what=name,
                )


def _first_peers(
    rest: Iterator[torch.Tensor], peers: list[torch.Tensor], bad: torch.Tensor
) -> tuple[Any, Any, Any]:
    found, truth = rest
    return found, [torch.where(bad, 0, p) for p in peers], truth


@EVERY_WAY
@EVERY_KIND
def test_a_skipped_row_counts_as_not_read(kind: Kind, way: str) -> None:
    """Forward and backward, whatever else the row of a neuron that no token wants holds."""
    backend, context = going(way)
    sample = kind.cases.build(kind.case("unread", tokens=13, density="neurons"), torch.float32)
    sample.threshold[33] = torch.inf
    with context:
        clean, grad = stored(kind, sample, backend)[0], grad_of(sample)
        before = gradients(kind, sample, grad, backend)
        getattr(sample, kind.weights[-1])[33] = torch.nan
        assert torch.allclose(stored(kind, sample, backend)[0], clean, rtol=1e-4, atol=1e-5)
        after = gradients(kind, sample, grad, backend)
    for name in before:
        assert after[name].isfinite().all(), name
        assert (after[name] - before[name]).abs().max() <= 1e-5 * before[name].abs().max()


@pytest.mark.parametrize("way", [w for w in WAYS if w.values[0].startswith("native ")])
@EVERY_ISA
def test_every_instruction_set(isa: str, way: str, use_isa: Callable[[str], None]) -> None:
    use_isa(isa)
    backend, context = going(way)
    with context:
        for i, (kind, case, change) in enumerate(CALLS[:: 2 if way.endswith("lists") else 4]):
            try:
                check(kind, change(kind.cases.build(case, DTYPES[i % 3])), backend)
            except Exception as error:
                raise AssertionError(f"{kind}: case {case.name}") from error


@pytest.mark.parametrize("way", [w for w in WAYS if w.values[0].startswith("native ")])
@EVERY_KIND
@EVERY_DTYPE
def test_threads(kind: Kind, dtype: torch.dtype, way: str) -> None:
    """However many compute, and also more than there are rows to share."""
    sample = sparse(kind.cases.build(kind.case("threads", activation="relu", tokens=131, f=300), dtype))
    backend, context = going(way)
    with context:
        for count in (2, 5):
            torch.set_num_threads(count)
            check(kind, sample, backend)


@EVERY_WAY
def test_float64_has_the_reference_only(way: str) -> None:
    backend, _ = going(way)
    for kind in KINDS:
        sample = kind.cases.build(
            kind.case("double", tokens=9, density="neurons", mean="mean+out"), torch.float64
        )
        if backend == "reference":
            check(kind, sample, backend)
            continue
        sample.x.requires_grad_(True)
        with pytest.raises(RuntimeError, match=f"{kind}_fwd: backend '{backend}' cannot compute this call"):
            sample.run(kind.function, backend=backend)


_random = dict(
    name=st.just("random"),
    tokens=st.integers(0, 70),
    d=st.integers(0, 140),
    f=st.integers(0, 140),
    activation=st.sampled_from(list(activations.ACTIVATIONS)),
    density=st.sampled_from([0, 1, 1, "one_column", "neurons", "some_inf"]),
    scale=st.sampled_from(["", "varied", "one_zero", "alternate"]),
    mean=st.sampled_from(["", "", "mean+out"]),
    x=st.sampled_from(["plain", "guarded", "strided", "columns"]),
    weights=st.sampled_from(["plain", "guarded", "end", "interleaved"]),
)


@pytest.mark.parametrize("way", [w for w in WAYS if w.values[0] != "triton"])
@EVERY_KIND
@given(data=st.data())
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_calls(kind: Kind, way: str, data: Any) -> None:
    biases = st.sampled_from(["", kind.letters[0], kind.letters])
    case = data.draw(st.builds(kind.cases.Case, biases=biases, **_random))
    sample = kind.cases.build(case, data.draw(st.sampled_from(DTYPES)))
    backend, context = going(way)
    with context:
        check(kind, sample, backend)
