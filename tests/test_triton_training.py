"""The ways of the Triton training kernels that the default configuration does not take, and small blocks in all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sparsemlp.kernels import _configs, _training_lists, training
from tests import test_conformance_training as conformance
from tests.backends import backends
from tests.blocks import TRAINING_BLOCKS, training_path
from tests.devices import device_of
from tests.training_calls import dead, padded, plateau, sparse
from tests.training_cases import GATED, KINDS, UNGATED, Kind, check, grad_of, gradients, stored

TRITON = pytest.mark.parametrize("backend", backends(UNGATED.forward, only="triton"))
EVERY_PATH = pytest.mark.parametrize(
    "path", [pytest.param("dense", marks=pytest.mark.slow), "compact", "lists"]
)  # dense is the default of the conformance tests
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


def _sizes(**options: Any) -> dict[str, Any]:
    return {"tokens": 10, "d": 18, "f": 35, **options}


CALLS = (
    (UNGATED, UNGATED.case("dead", **_sizes(activation="relu")), dead, torch.float32),
    (UNGATED, UNGATED.case("plateau", **_sizes(activation="weird")), plateau, torch.bfloat16),
    (UNGATED, UNGATED.case("padded", **_sizes(activation="silu")), padded, torch.float16),
    (
        UNGATED,
        UNGATED.case("mean", **_sizes(mean="mean+out", density="some_inf", scale="one_zero")),
        None,
        torch.float32,
    ),
    (GATED, GATED.case("dead", **_sizes(activation="relu", x="strided", weights="interleaved")), dead, torch.bfloat16),
    (GATED, GATED.case("sparse", **_sizes(activation="jsrelu")), sparse, torch.float32),
    (GATED, GATED.case("padded", **_sizes(density="neurons", indicator="up")), padded, torch.float32),
    (
        GATED,
        GATED.case("mean", **_sizes(mean="mean+out", density="some_inf", scale="alternate", indicator="product")),
        None,
        torch.float16,
    ),
)  # fmt: skip


@TRITON
@EVERY_PATH
@pytest.mark.parametrize(
    ("kind", "case", "change", "dtype"),
    CALLS,
    ids=lambda v: getattr(v, "__name__", str(v).removeprefix("torch.")),
)
def test_gradients(kind: Kind, case: Any, change: Any, dtype: torch.dtype, path: str, backend: str) -> None:
    sample = kind.cases.build(case, dtype)
    with training_path(path):
        check(kind, sample if change is None else change(sample), backend)


@TRITON
@pytest.mark.parametrize(
    ("kind", "dtype", "path"),
    [(UNGATED, torch.float32, "lists"), (GATED, torch.bfloat16, "compact")],
    ids=str,
)
def test_inf_and_nan(kind: Kind, dtype: torch.dtype, path: str, backend: str) -> None:
    """What reaches which gradient, as in the conformance test of every backend's default."""
    with training_path(path):
        conformance.test_inf_and_nan_reach_what_they_belong_to(kind, torch.inf, dtype, backend)


@TRITON
@pytest.mark.parametrize(("kind", "path"), [(UNGATED, "lists"), (GATED, "compact")], ids=str)
def test_a_skipped_row_counts_as_not_read(kind: Kind, path: str, backend: str) -> None:
    """Of a neuron that no token wants; it may hold anything."""
    sample = dead(kind.cases.build(kind.case("unread", **_sizes(activation="relu")), torch.float32))
    with training_path(path):
        before = stored(kind, sample, backend)[0], gradients(kind, sample, grad_of(sample), backend)
        for name in kind.weights[1:]:
            getattr(sample, name)[::3] = torch.nan
        after = stored(kind, sample, backend)[0], gradients(kind, sample, grad_of(sample), backend)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(g, after[1][name]) for name, g in before[1].items())


@TRITON
@EVERY_PATH
def test_only_what_is_asked_for(path: str, backend: str) -> None:
    """Each gradient alone has the bits that it has among all; of an expanded ∂ℓ/∂y too."""
    sample = sparse(GATED.cases.build(GATED.case("asked", **_sizes(activation="relu")), torch.float32))
    grad = torch.ones(()).expand(sample.x.shape)
    with training_path(path):
        everything = check(GATED, sample, backend, grad=grad, found=gradients(GATED, sample, grad, backend))
        for name in ("x", *GATED.weights, "b_up"):
            assert torch.equal(gradients(GATED, sample, grad, backend, [name])[name], everything[name]), name


@TRITON
@EVERY_KIND
def test_lists_below_the_configured_density(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Counted in each direction: forward the active entries, backward the moving ones too. By default nobody looks."""
    made: list[int] = []

    def filled(*args: Any, **options: Any) -> Any:
        made.append(args[2])
        return real(*args, **options)

    real = _training_lists.filled
    monkeypatch.setattr(_training_lists, "filled", filled)
    sample = sparse(kind.cases.build(kind.case("counted", **_sizes(activation="relu")), torch.float32))
    (out, pre, *_), grad = stored(kind, sample, backend), grad_of(sample)
    entries = int((pre > 0).sum())
    assert made == []
    assert 0 < entries < 0.2 * pre.numel()
    for share, calls in ((1.0, []), (1.01, [entries] * 2)):
        made.clear()
        with _configs.use("training", {**TRAINING_BLOCKS, "gather_below": share * entries / pre.numel()}):
            gradients(kind, sample, grad, backend)
        assert made == calls
    assert training.default(torch.float32)["gather_below"] == 0
    assert out.device == pre.device


@TRITON
def test_lists_are_exact_at_any_density(backend: str) -> None:
    """By token and by neuron, nothing left out, nothing twice, in order; also of no entries and of all."""
    from sparsemlp.kernels._launch import run
    from sparsemlp.kernels._rule import Rule
    from sparsemlp.kernels._training_entries import Stored

    g, device = torch.Generator().manual_seed(0), device_of(backend)
    for bias in (-9.0, -1.0, 9.0):
        pre = (torch.randn(7, 70, generator=g) + bias).to(device)
        stored = Stored(pre, None, Rule(torch.zeros((), device=device), None, None, None, "relu", "ungated"))
        counts, launch = _training_lists.counts(
            stored, {**_training_lists.DEFAULT, **TRAINING_BLOCKS}, both=True
        )
        run([launch])
        wanted = (pre > 0).nonzero()
        assert counts.tolist() == (pre > 0).sum(1).tolist()
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        lists, launch = _training_lists.filled(
            stored, starts, len(wanted), {**_training_lists.DEFAULT, **TRAINING_BLOCKS}, both=True
        )
        run([launch])
        assert torch.equal(torch.stack([lists.tokens, lists.neurons], 1).long(), wanted)
        turned = _training_lists.by_neuron(lists, 70)
        assert turned.places is not None
        by_neuron = torch.stack([turned.neurons, turned.tokens], 1)[turned.places].long()
        assert torch.equal(by_neuron, (pre.t() > 0).nonzero())
        assert turned.starts.diff().tolist() == (pre > 0).sum(0).tolist()
