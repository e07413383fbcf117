"""Training whole models: sparsified ones match their dense twins step by step, with the optimizer nobody told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sparsemlp import _native
from sparsemlp.integrations.transformers import find_mlps, sparsify
from sparsemlp.nn import SparseGatedMLP, SparseMLP
from sparsemlp.ops import _training_native as native
from sparsemlp.ops import mlp_training
from sparsemlp.testing import assert_within_budget
from tests import tiny_models
from tests.tiny_ungated_models import make, run

STEPS = 20
Model = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], tuple[str, str]]


def _tokens(count: int) -> Tensor:
    return torch.randint(3, 64, (2, count), generator=torch.Generator().manual_seed(1))


def _llama(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(_tokens(13)[:, :-1])[0].flatten(0, 1), _tokens(13)[:, 1:].flatten())


def _t5(model: nn.Module) -> Tensor:
    return F.cross_entropy(run("T5", model).flatten(0, 1), _tokens(12).flatten())


def _vit(model: nn.Module) -> Tensor:
    out = run("ViT", model)
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return (out - target.to(out.dtype)).square().mean()


MODELS: dict[str, Model] = {
    "ViT": (lambda: make("ViT", hidden_act="relu"), _vit, ("fc1", "fc2")),
    "T5": (lambda: make("T5", dropout_rate=0.0), _t5, ("wi", "wo")),
    "Llama": (
        lambda: tiny_models.make("Llama", hidden_act="relu"),
        _llama,
        ("gate_proj up_proj", "down_proj"),
    ),
}


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    torch.set_num_threads(1)


def trained(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Losses and parameters after some steps of SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **{n: p.detach().clone() for n, p in model.named_parameters()}}


def _members(mlp: nn.Module, names: tuple[str, str]) -> tuple[list[nn.Linear], nn.Linear]:
    return [getattr(mlp, n) for n in names[0].split()], getattr(mlp, names[1])


def reordered(model: nn.Module, names: tuple[str, str], seed: int, *, back: bool = False) -> nn.Module:
    """The same model, dense, with the neurons of its MLPs in another order, or in the first one again."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mlp in find_mlps(model).values():
            rows, columns = _members(mlp, names)
            order = torch.randperm(columns.in_features, generator=g)
            order = order.argsort() if back else order
            for linear in rows:
                linear.weight.copy_(linear.weight[order])
                if linear.bias is not None:
                    linear.bias.copy_(linear.bias[order])
            columns.weight.copy_(columns.weight[:, order])
    return model


class Counts(TorchDispatchMode):
    """How often the operators of training were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["reference", "lists", "dense"])
@pytest.mark.parametrize("name", list(MODELS))
def test_it_matches_its_dense_twin(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and parameters after every step, within the budget of dense twins whose neurons are in another order."""
    if way != "reference" and _native.problem() is not None:
        pytest.skip(f"native: {_native.problem()}")
    make_model, loss_of, names = MODELS[name]
    dense = make_model()
    truth = trained(copy.deepcopy(dense).double(), loss_of)
    assert truth["losses"][-1] < truth["losses"][0]
    peers = [trained(copy.deepcopy(dense), loss_of)]
    for seed in range(3):
        twin = reordered(copy.deepcopy(dense), names, seed)
        losses = trained(twin, loss_of)["losses"]
        again = reordered(twin, names, seed, back=True)
        peers.append({"losses": losses, **{n: p.detach() for n, p in again.named_parameters()}})

    monkeypatch.setattr(mlp_training, "is_small", lambda tokens, w: False)
    sparse = sparsify(dense)
    layers = [m for m in sparse.modules() if isinstance(m, SparseMLP | SparseGatedMLP)]
    for layer in layers:
        layer.backend = "reference" if way == "reference" else "native"
    context: AbstractContextManager[Any] = {
        "reference": nullcontext, "lists": lambda: native.forced(torch.inf), "dense": lambda: native.forced(0.0)
    }[way]()  # fmt: skip
    with Counts() as counted, context:
        found = trained(sparse, loss_of)
    kind = "gated_mlp" if name == "Llama" else "mlp"
    for what in ("fwd", "bwd"):
        assert counted.calls[f"sparsemlp::{kind}_{what}"] == STEPS * len(layers)
    assert found.keys() == truth.keys()
    for n, expected in truth.items():
        assert_within_budget(found[n], [p[n] for p in peers], expected, what=n)
