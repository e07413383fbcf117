"""MLPs inside a larger layer: what is recognised, what is not bypassed, what the parts keep."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp.integrations.transformers import densify, find_mlps, sparsify
from sparsemlp.nn import SparseMLP, _dense_inline_mlp
from sparsemlp.nn._inline_mlp import InlineMLP

D, N = 12, 20


class Layer(nn.Module):
    """OPT's: a norm, something before, the MLP, a residual."""

    def __init__(self, d: int = D, f: int = N, act: Any = None) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(d, d), nn.LayerNorm(d)
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(d, f), act or nn.ReLU(), nn.Linear(f, d)

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))

    def forward(self, x: Tensor, mask: Tensor | None, *, scale: Tensor | None) -> tuple[Tensor, None]:
        x = x + torch.tanh(self.mix(x))
        return x + self.mlp(self.norm(x)), None


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Layer, **options: Any) -> None:
        super().__init__()
        self.first, self.second = kind(**options), kind(**options)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x, None, scale=None)[0]
        return x


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, D)


@pytest.mark.parametrize("f", [N, D], ids=["wider", "as wide"])
def test_the_layer_is_patched_and_given_back(f: int, x: Tensor):
    model = Model(f=f).eval()
    layer = model.first
    children, state = dict(layer.named_children()), copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        dense = model(x)
        assert list(find_mlps(model)) == ["first", "second"]
        assert find_mlps(model)["first"] is layer
        sparsify(model, threshold=torch.inf)
        found = find_mlps(model)
        assert list(found) == ["first", "second"]
        assert found["first"] is layer.fc1.mlp
        assert isinstance(found["first"], SparseMLP)
        assert model.first is layer
        assert list(layer.state_dict()) == list(state)
        assert layer.fc1.weight is children["fc1"].weight
        assert isinstance(layer.fc1, nn.Linear)
        assert isinstance(layer.fc2, nn.Linear)
        assert layer.fc2.weight.stride() == (1, D)
        before = x + torch.tanh(layer.mix(x))
        assert torch.allclose(layer(x, None, scale=None)[0], before + layer.fc2.bias)
        sparsify(model)
        assert torch.allclose(model(x), dense, rtol=1e-5, atol=1e-5)
        densify(model)
        assert dict(layer.named_children()) == children
        assert list(layer._modules) == list(children)
        assert layer.fc2.weight.is_contiguous()
        assert torch.equal(model(x), dense)
    assert densify(model) is model


def test_a_root_that_is_the_layer_itself(x: Tensor):
    layer = Layer().eval()
    with torch.no_grad():
        dense = layer(x, None, scale=None)[0]
        assert list(find_mlps(layer)) == [""]
        sparsify(layer)
        assert list(find_mlps(layer)) == [""]
        assert torch.allclose(layer(x, None, scale=None)[0], dense, rtol=1e-5, atol=1e-6)
        densify(layer)
        assert torch.equal(layer(x, None, scale=None)[0], dense)


class Clamped(Layer):
    """A fused MLP's output would be clamped as well, and that is the same."""

    def mlp(self, x: Tensor) -> Tensor:
        return super().mlp(x).clamp(-1, 1)


class HiddenNorm(Layer):
    """The hidden values are changed between the two layers."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(F.normalize(self.activation_fn(self.fc1(x)), dim=-1))


class Unused(Layer):
    def mlp(self, x: Tensor) -> Tensor:
        self.fc2(self.activation_fn(self.fc1(x)))
        return x


class Peeks(Layer):
    """The first layer's output is used twice."""

    def mlp(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(self.activation_fn(hidden)) + hidden.mean(-1, keepdim=True)


class OtherAct(Layer):
    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(x)))


class Needs(Layer):
    def forward(self, x: Tensor, mask: dict[str, Tensor], *, scale: Tensor | None) -> tuple[Tensor, None]:
        return super().forward(x + mask["bias"], None, scale=scale)


def test_what_the_layer_computes_decides(x: Tensor):
    assert list(find_mlps(Model(Clamped))) == ["first", "second"]
    for kind in (HiddenNorm, Unused, Peeks, OtherAct):
        assert find_mlps(Model(kind)) == {}, kind
        with pytest.raises(
            ValueError, match=rf"saw {kind.__name__}, where first computes something else than"
        ):
            sparsify(Model(kind))
    with pytest.raises(ValueError, match=r"where first could not be evaluated on a small probe"):
        sparsify(Model(Needs))
    mixed = nn.ModuleDict({"one": Layer(), "two": HiddenNorm()})
    with pytest.warns(UserWarning, match=r"^two stays dense: HiddenNorm computes something else than"):
        sparsify(mixed)


def test_the_look_at_a_layer_changes_nothing_and_is_remembered(x: Tensor, monkeypatch: pytest.MonkeyPatch):
    model, seen = Model().train(), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: seen.append(args))
    for name in ("fc1", "fc2"):
        getattr(model.first, name)._forward_hooks.clear()
        getattr(model.second, name)._forward_hooks.clear()
    state, values = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    calls = []
    plain = _dense_inline_mlp._outputs
    monkeypatch.setattr(_dense_inline_mlp, "_outputs", lambda *args: calls.append(1) or plain(*args))
    assert len(find_mlps(model)) == 2
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    count = len(calls)
    assert count == 6  # as it is, moved, and moved with another last layer, twice
    find_mlps(model)
    assert len(calls) == count
    model.first.norm = nn.Identity()
    find_mlps(model)
    assert len(calls) == count + 3


def _hook_first(layer: Layer) -> None:
    layer.fc1.register_forward_hook(lambda m, args, out: out + 1)


def _hook_last(layer: Layer) -> None:
    layer.fc2.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


def _hook_act(layer: Layer) -> None:
    layer.activation_fn.register_forward_hook(lambda m, args, out: out + 1)


class Added(nn.Module):
    """An adapter around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1


def _wrap_first(layer: Layer) -> None:
    layer.fc1 = Added(layer.fc1)


def _wrap_last(layer: Layer) -> None:
    layer.fc2 = Added(layer.fc2)


def _exchange_act(layer: Layer) -> None:
    layer.activation_fn = nn.SiLU()


CHANGES = {
    _hook_first: "fc1 has forward or backward hooks",
    _hook_last: "fc2 has forward or backward hooks",
    _hook_act: "activation_fn has forward or backward hooks",
    _wrap_first: "one of fc1, activation_fn and fc2 was replaced",
    _wrap_last: "one of fc1, activation_fn and fc2 was replaced",
    _exchange_act: "one of fc1, activation_fn and fc2 was replaced",
}


@pytest.mark.parametrize("f", [N, D], ids=["wider", "as wide"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_changed_part_is_not_bypassed(change: Any, f: int, x: Tensor):
    """It runs as the dense layer with the same change does, with one warning."""
    model = Model(f=f).eval()
    changed = copy.deepcopy(model)
    change(changed.first)
    sparsify(model, threshold=torch.inf)
    densify_second = model.second
    with torch.no_grad():
        change(model.first)
        with pytest.warns(UserWarning, match=rf"^first runs dense .*: {CHANGES[change]}"):
            out = model.first(x, None, scale=None)[0]
        assert torch.allclose(out, changed.first(x, None, scale=None)[0], rtol=1e-6, atol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(model.first(x, None, scale=None)[0], out)
        assert densify_second.fc1.mlp._fusable()


def test_a_changed_part_survives_densify(x: Tensor):
    model = Model().eval()
    sparsify(model, threshold=torch.inf)
    _wrap_last(model.first)
    adapter = model.first.fc2
    densify(model)
    assert model.first.fc2 is adapter
    assert type(model.first.fc1) is nn.Linear


def test_hooks_on_dense_parts_at_first_keep_it_dense(x: Tensor):
    model = Model()
    _hook_first(model.first)
    with pytest.warns(UserWarning, match=r"^first stays dense: Layer has a layer fc1 that has forward or"):
        sparsify(model)
    assert list(find_mlps(model)) == ["second"]


def test_lora_after_sparsify(x: Tensor):
    peft = pytest.importorskip("peft")
    model = sparsify(Model().eval(), threshold=torch.inf)
    dense = copy.deepcopy(densify(copy.deepcopy(model)))
    config = peft.LoraConfig(r=4, target_modules=["fc1", "fc2"], init_lora_weights=False)
    torch.manual_seed(1)
    ours = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    theirs = peft.get_peft_model(dense, config).eval()
    with torch.no_grad():
        with pytest.warns(UserWarning, match="runs dense"):
            assert torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
        assert list(find_mlps(ours.get_base_model())) == ["first", "second"]
        merged = ours.merge_and_unload()
        assert isinstance(find_mlps(merged)["first"], InlineMLP)
        out = merged.first(x, None, scale=None)[0]
        before = x + torch.tanh(merged.first.mix(x))
        assert torch.allclose(out, before + merged.first.fc2.bias)  # all skipped: the sparse path is back


def test_deepcopy_pickle_and_moves(x: Tensor):
    model = sparsify(Model().eval(), threshold=0.1)
    with torch.no_grad():
        expected = model(x)
        memory = io.BytesIO()
        torch.save(model, memory)
        memory.seek(0)
        for twin in (copy.deepcopy(model), torch.load(memory, weights_only=False)):
            assert torch.equal(twin(x), expected)
            for p in twin.parameters():
                p.zero_()
            assert torch.equal(model(x), expected)
            assert twin(x).abs().sum() == x.abs().sum()
            assert twin.first.fc1.mlp._layer[0] is twin.first
        for move in (nn.Module.half, nn.Module.double, nn.Module.float):
            move(model)
            assert model.first.fc1.mlp.threshold.dtype == torch.float32
            assert model.first.fc2.weight.stride() == (1, D)
        model._apply(lambda t: t.clone(memory_format=torch.contiguous_format))
        assert model.first.fc2.weight.stride() == (1, D)
        other = Model()
        for assign in (False, True):
            model.load_state_dict(other.state_dict(), assign=assign)
            assert model.first.fc2.weight.stride() == (1, D)
            assert torch.allclose(densify(copy.deepcopy(model))(x), other(x))


def test_means_and_thresholds_per_neuron(x: Tensor):
    model = Model(act=nn.GELU()).eval()
    dense = copy.deepcopy(model)
    sparsify(model)
    mlp = model.first.fc1.mlp
    limit, mean = torch.rand(N) * 0.5, torch.randn(N) * 0.1
    mlp.set_thresholds(limit, mean)
    with torch.no_grad():
        h = x + torch.tanh(dense.first.mix(x))
        a = F.gelu(dense.first.fc1(dense.first.norm(h)))
        assert 0.2 < (a.abs() < limit).float().mean() < 0.8
        expected = h + dense.first.fc2(torch.where(a.abs() < limit, mean, a))
        assert torch.allclose(model.first(x, None, scale=None)[0], expected, rtol=1e-5, atol=1e-5)
        model.first.fc2.weight.mul_(2)
        dense.first.fc2.weight.mul_(2)
        expected = h + dense.first.fc2(torch.where(a.abs() < limit, mean, a))
        assert torch.allclose(model.first(x, None, scale=None)[0], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"^threshold has shape \(21,\)"):
        mlp.set_thresholds(torch.zeros(N + 1))
    with pytest.raises(ValueError, match="quantize is 'int8' and first has the MLP's layers inside a larger"):
        mlp.quantize()


class HiddenDropout(Layer):
    """BART's activation_dropout."""

    p = 0.5

    def mlp(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.activation_fn(self.fc1(x)), self.p, training=self.training)
        return F.dropout(self.fc2(hidden), 0.1, training=self.training)


class OutputDropout(HiddenDropout):
    p = 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "fused"), [(HiddenDropout, False), (OutputDropout, True)])
def test_dropout_in_training(kind: type[Layer], fused: bool, x: Tensor):
    """On the hidden values it needs the dense layers; after the last layer it is the larger layer's own."""
    model = Model(kind).train()
    dense = copy.deepcopy(model)
    sparsify(model)
    with torch.no_grad():
        for m in (model, dense):
            m.eval()
        assert torch.allclose(model(x), dense(x), rtol=1e-5, atol=1e-5)
        for m in (model, dense):
            m.train()
        torch.manual_seed(3)
        expected = dense(x)
        torch.manual_seed(3)
        assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-5)
        assert model.first.fc1.mlp._fusable() is fused


@pytest.mark.parametrize("f", [N, D], ids=["wider", "as wide"])
def test_compile(f: int, x: Tensor):
    model = sparsify(Model(f=f).eval(), threshold=0.1)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    grads = []
    for call in (run, model):
        model.zero_grad()
        call(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_activation_that_is_a_function(x: Tensor):
    model = Model(act=F.silu).eval()
    with torch.no_grad():
        dense = model(x)
        sparsify(model)
        assert torch.allclose(model(x), dense, rtol=1e-5, atol=1e-5)
        densify(model)
        assert model.first.activation_fn is F.silu
        assert "activation_fn" not in model.first._modules
        assert torch.equal(model(x), dense)
