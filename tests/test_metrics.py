"""Densities against counts by hand, and the L1 term and its gradients against the dense formula in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsemlp import activations
from sparsemlp.integrations.transformers import sparsify
from sparsemlp.metrics import DensityRecorder, densities, l1_penalty
from sparsemlp.nn import SparseGatedMLP, SparseMLP
from sparsemlp.testing import assert_within_budget
from tests.gated_mlp_modules import Separate
from tests.mlp_modules import Conv, D, N, Plain
from tests.test_nn_inline_mlp import Model

WEIGHT = 3.0
WEIRD = torch.tensor([0.2, 0.3, 0.4])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def hidden(dense: nn.Module, x: Tensor, activation: str, params: Tensor | None, threshold: float) -> Tensor:
    """h by the dense module's own layers, its gate the magnitude that is compared."""
    if isinstance(dense, Separate):
        a, u = activations.apply(dense.gate_proj(x), activation, params), dense.up_proj(x)
        return torch.where(a.abs() < threshold, 0, a * u)
    first = dense.c_fc if isinstance(dense, Conv) else dense.fc1
    a = activations.apply(first(x), activation, params)
    return torch.where(a.abs() < threshold, 0, a)


def last(dense: nn.Module) -> nn.Module:
    return next(getattr(dense, name) for name in ("fc2", "c_proj", "down_proj") if hasattr(dense, name))


# Densities


def test_densities_are_counts_of_both_patterns():
    """weird tells them apart: active almost everywhere, its derivative 0 on the plateau; per layer, not pooled."""
    first = SparseMLP.from_dense(Plain(), activation="weird", activation_params=WEIRD)
    second = SparseMLP.from_dense(Plain(), activation="relu")
    x = torch.randn(3, 5, D)
    found = densities(nn.Sequential(first, second), x)
    pre = first.fc1(x)
    q = pre - WEIRD[0]
    assert [layer.name for layer in found.layers] == ["0", "1"]
    one, two = found.layers
    assert one.activation_density == 1.0
    assert one.derivative_density == pytest.approx((q.abs() > WEIRD[2]).float().mean().item())
    assert 0.2 < one.derivative_density < 0.9
    positive = (second.fc1(first(x)) > 0).float().mean().item()
    assert two.activation_density == pytest.approx(positive)
    assert two.derivative_sparsity == pytest.approx(1 - positive)
    assert two.entries == 15 * N
    assert found.derivative_density == pytest.approx((one.derivative_density + positive) / 2)


@pytest.mark.parametrize("indicator", ["gate", "up", "product"])
def test_densities_are_after_the_threshold(indicator: str):
    module = SparseGatedMLP.from_dense(Separate(), threshold=0.2, indicator=indicator)
    x, scale = torch.randn(7, D), torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 0.5, 1.0])
    a, u = nn.functional.silu(module.gate_proj(x)), module.up_proj(x)
    m = {"gate": a, "up": u, "product": a * u}[indicator].abs()
    with DensityRecorder(module) as recorder:
        module(x, token_scale=scale)
    (layer,) = recorder.result().layers
    kept = ~(m < scale[:, None] * 0.2)
    assert layer.activation_density == pytest.approx(kept.float().mean().item())
    assert layer.derivative_density == layer.activation_density


def test_a_recorder_pools_calls_and_leaves_no_hook():
    module = SparseMLP.from_dense(Plain(), activation="relu")
    with DensityRecorder(module) as recorder:
        with pytest.raises(ValueError, match="no sparse MLP of the model ran"):
            recorder.result()
        few, many = torch.randn(2, D), torch.randn(6, D)
        module(few)
        module(many)
        pooled = recorder.result().activation_density
        recorder.reset()
        module(many)
        assert recorder.result().layers[0].entries == 6 * N
    module(few)
    assert recorder.result().layers[0].entries == 6 * N
    both = module.fc1(torch.cat([few, many])) > 0
    assert pooled == pytest.approx(both.float().mean().item())


def test_models_that_have_no_figures_are_refused():
    with pytest.raises(ValueError, match="without a SparseMLP"):
        densities(Plain(), torch.randn(2, D))
    with pytest.raises(ValueError, match="without a SparseMLP"):
        l1_penalty(Plain())
    screened = SparseGatedMLP.from_dense(Separate(d=64, f=64), threshold=0.1, indicator="screen")
    with pytest.raises(ValueError, match="indicator 'screen'"):
        densities(screened, torch.randn(2, 64))


# L1

CASES = {
    "relu": (Plain, "relu", None, 0.0),
    "jsrelu, threshold": (Plain, "jsrelu", None, 0.4),
    "input-major weights": (Conv, "relu2", None, 0.0),
    "mix": (Plain, "mix", torch.tensor([0.3]), 0.0),
    "mix that turns negative": (Plain, "mix", torch.tensor([-3.0]), 0.0),
    "weird": (Plain, "weird", WEIRD, 0.0),
    "silu, threshold": (Plain, "silu", None, 0.1),
    "gated": (Separate, "relu", None, 0.3),
}


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_the_term_and_its_gradients(case: str, backend: str):
    kind, activation, params, threshold = CASES[case]
    peer = kind(bias=True)
    if kind is Plain:
        nn.init.normal_(peer.fc1.bias)
    truth = copy.deepcopy(peer).double()
    dense = copy.deepcopy(peer)
    options = {} if params is None else {"activation_params": params}
    maker = SparseGatedMLP if kind is Separate else SparseMLP
    sparse = maker.from_dense(dense, activation=activation, threshold=threshold, backend=backend, **options)
    x, grad = torch.randn(2, 9, D), torch.randn(2, 9, D)

    def by_formula(module: nn.Module) -> tuple[Tensor, list[Tensor]]:
        dtype = next(module.parameters()).dtype
        inputs = x.to(dtype).requires_grad_()
        wide = None if params is None else params.to(dtype)
        h = hidden(module, inputs, activation, wide, threshold)
        term = h.abs().mean()
        loss = (last(module)(h) * grad.to(dtype)).mean() + WEIGHT * term
        return term, list(torch.autograd.grad(loss, [inputs, *module.parameters()]))

    inputs = x.clone().requires_grad_()
    with l1_penalty(sparse) as penalty:
        out = sparse(inputs)
        term = penalty()
        loss = (out * grad).mean() + WEIGHT * term
        found = torch.autograd.grad(loss, [inputs, *sparse.parameters()])
    (want, gradients), (near, peers) = by_formula(truth), by_formula(peer)
    assert_within_budget(term[None].detach(), near[None].detach(), want[None].detach(), what="term")
    names = ["x", *(name for name, _ in truth.named_parameters())]
    assert names[1:] == [name for name, _ in sparse.named_parameters()]
    for name, g, p, t in zip(names, found, peers, gradients, strict=True):
        assert_within_budget(g, p, t, what=f"grad {name}")
    assert torch.equal(sparse(x), type(sparse).forward(sparse, x))


def test_the_sum_is_part_of_the_operator(monkeypatch: pytest.MonkeyPatch):
    """One dense product in the forward, not two: the layer's own call, which the second path makes, is not made."""
    module = SparseMLP.from_dense(Plain(), activation="relu")
    monkeypatch.setattr(type(module.fc1), "forward", lambda *_: pytest.fail("computed p again"))
    with l1_penalty(module) as penalty:
        module(torch.randn(4, D))
        assert penalty() > 0


def test_the_mean_is_over_calls_and_is_forgotten():
    module = SparseMLP.from_dense(Plain(), activation="relu")
    one, two = torch.randn(2, D), torch.randn(8, D)
    means = [module.fc1(x).relu().mean().item() for x in (one, two)]
    with l1_penalty(module) as penalty:
        module(one)
        module(two)
        assert penalty().item() == pytest.approx(sum(means) / 2)
        module(two)
        assert penalty().item() == pytest.approx(means[1])
        with pytest.raises(ValueError, match="no sparse MLP ran"):
            penalty()
    assert "_forward_fused" not in vars(module)
    assert not module._forward_hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_gradient(dtype: torch.dtype):
    """1/(T·F) alone would be no number of float16's; the column carries 1/F of it."""
    module = SparseMLP.from_dense(Plain(f=1024).to(dtype), activation="relu")
    x = torch.randn(512, D, dtype=dtype)
    with l1_penalty(module) as penalty:
        module(x)
        term = penalty()
        term.backward()
    pre = module.fc1(x).detach()
    eps = torch.finfo(dtype).eps
    assert term.item() == pytest.approx(pre.float().relu().mean().item(), rel=eps)
    want = (pre > 0).double().sum(0) / pre.numel()
    assert module.fc1.bias.grad is not None
    worst = (module.fc1.bias.grad.double() - want).abs().max().item()
    assert worst <= 2 * eps * want.max().item() + torch.finfo(dtype).smallest_normal


def test_a_module_that_runs_dense_counts_too():
    module = SparseMLP.from_dense(Plain(), activation="relu", threshold=9.0)
    module.fc1.register_forward_hook(lambda *_: None)
    x = torch.randn(4, D)
    with l1_penalty(module) as penalty:
        with pytest.warns(UserWarning, match="runs dense"):
            module(x)
        assert penalty().item() == pytest.approx(module.fc1(x).relu().mean().item())


def test_it_drives_the_density_down():
    x = torch.randn(256, D)
    y = torch.randn(256, D)
    reached = []
    for weight in (0.0, 5.0):
        torch.manual_seed(1)
        module = SparseMLP.from_dense(Plain(), activation="relu")
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        with l1_penalty(module) as penalty:
            for _ in range(60):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(module(x), y) + weight * penalty()
                loss.backward()
                optimizer.step()
        reached.append(densities(module, x).activation_density)
    assert reached[1] < 0.5 * reached[0]


@pytest.mark.parametrize("f", [20, 12], ids=["wider", "as wide"])
def test_an_mlp_inside_a_larger_layer(f: int):
    model = Model(f=f)
    sparsify(model, threshold=0.0)
    x = torch.randn(2, 3, 12)
    seen = [layer.fc1.mlp for layer in (model.first, model.second)]
    pre: list[Tensor] = []
    for mlp in seen:
        first = mlp._replaced[0]
        mlp.register_forward_pre_hook(lambda _, args, first=first: pre.append(first(args[0]).detach()))
    with l1_penalty(model) as penalty, DensityRecorder(model) as recorder:
        out = model(x)
        term = penalty().item()
    assert term == pytest.approx(sum(p.relu().mean().item() for p in pre) / 2)
    found = [layer.activation_density for layer in recorder.result().layers]
    assert found == pytest.approx([(p > 0).float().mean().item() for p in pre])
    assert_within_budget(model(x).detach(), out.detach(), out.detach().double())


def _two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(SparseMLP.from_dense(Plain(act=nn.ReLU())) for _ in range(2)))


def _terms(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """The term of two steps of a loop, and the gradients after them."""
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    found = []
    with l1_penalty(model) as penalty:
        for _ in range(2):
            loss = run(model, x).square().mean()
            term = penalty()
            (loss + term).backward()
            found.append(term.detach())
    return [*found, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_checkpoint_counts_a_call_once() -> None:
    plain = _terms(_two(), lambda model, x: model(x))
    again = _terms(_two(), lambda model, x: checkpoint(model, x, use_reentrant=False))
    assert len(plain) == len(again) == 2 + 8
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_a_term_without_gradients_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"ran without gradients, .* use checkpoint\(..., use_reentrant=False\)"
    ):
        _terms(_two(), lambda model, x: checkpoint(model, x, use_reentrant=True))
    model = _two()
    with torch.no_grad(), l1_penalty(model) as penalty:
        model(torch.randn(6, D))
        assert penalty() > 0


def test_a_copy_made_inside_a_block_is_on_its_own() -> None:
    model, x = _two(), torch.randn(6, D)
    with l1_penalty(model) as penalty:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert twin(x).count_nonzero() == 0
        with pytest.raises(ValueError, match="no sparse MLP ran"):
            penalty()
        model(x)
        assert penalty() > 0
    assert twin(x).count_nonzero() == 0
