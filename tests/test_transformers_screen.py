"""`sparsify` with a screen, from a plan and without: what every MLP gets, switching, adapters, saving, decoding."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from sparsemlp.calibration import Plan, calibrate
from sparsemlp.demo import evaluate
from sparsemlp.integrations import _indicator
from sparsemlp.integrations.transformers import densify, find_mlps, sparsify
from sparsemlp.nn import SparseGatedMLP
from tests import tiny_models
from tests.screen_modules import Screened, held, same
from tests.test_demo_evaluate import windows
from tests.tiny_models import Layer, StandInPlan

FAMILIES = ("Llama", "Gemma2", "Phi3")
NONE = [None, None]

# `past_key_values` and what PEFT asks for have newer names in newer versions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@dataclass
class ScreenPlan(StandInPlan):
    """A stand-in for a plan whose thresholds are of a screen's scores, if `bits` is given."""

    bits: int | None = None
    group: int | None = None


def plan_of(
    model: nn.Module, threshold: float, bits: int | None = 4, group: int | None = 32, mean: bool = True
) -> ScreenPlan:
    layers = {
        name: Layer(torch.full((48,), threshold), torch.full((48,), 0.01) if mean else None)
        for name in find_mlps(model)
    }
    return ScreenPlan(layers, bits=bits, group=group)


def mlps(model: nn.Module) -> list[SparseGatedMLP]:
    found = list(find_mlps(model).values())
    assert all(isinstance(module, SparseGatedMLP) for module in found)
    return found


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits


def is_screened(model: nn.Module, bits: int = 4, group: int = 32) -> bool:
    return all(
        (m.indicator, m.screen_bits, m.screen_group) == ("screen", bits, group)
        and same(held(m), Screened(m, bits, group).copies)
        for m in mlps(model)
    )


class Composed(nn.Module):
    """What a screened MLP computes, by the children's own products and a mask from copies made here."""

    def __init__(self, dense: nn.Module, plan: Layer, bits: int, group: int):
        super().__init__()
        self.dense, self.plan = dense, plan
        self.screened = Screened(dense, bits, group)

    def forward(self, x: Tensor) -> Tensor:
        kept = ~(self.screened.scores(x.flatten(0, -2)).abs() < self.plan.threshold.double())
        if hasattr(self.dense, "gate_up_proj"):
            gate, up = self.dense.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.dense.gate_proj(x), self.dense.up_proj(x)
        hidden = self.screened.act(gate) * up
        return self.dense.down_proj(torch.where(kept.reshape(hidden.shape), hidden, self.plan.skipped_mean))


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64)])
def test_a_plan_of_a_screen(family: str, bits: int, group: int) -> None:
    """The logits are those of the model whose MLP is written out (one: both then choose from the same inputs)."""
    model = tiny_models.make(family, num_hidden_layers=1)
    plan = plan_of(model, 0.25, bits, group)
    written = copy.deepcopy(model)
    for name, dense in find_mlps(written).items():
        written.set_submodule(name, Composed(dense, plan.layers[name], bits, group))
    ids = windows(1)[0]
    before = logits(model, ids)
    sparsify(model, plan)
    assert is_screened(model, bits, group)
    assert all(m.screen_tokens is None for m in mlps(model))
    torch.testing.assert_close(logits(model, ids), logits(written, ids), rtol=1e-4, atol=1e-4)
    assert (logits(model, ids) - before).norm() / before.norm() > 0.03  # the plan matters here
    assert 0.2 < evaluate.mlp_sparsity(model, [ids]) < 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_at_threshold_0(family: str) -> None:
    model = tiny_models.make(family)
    prompt = windows(1, 6)[0]
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
    dense = model.generate(prompt, **options)
    sparsify(model, indicator="screen")
    assert is_screened(model)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt, **options), dense)
    modules = mlps(model)
    densify(model)
    assert not any(isinstance(m, SparseGatedMLP) for m in model.modules())
    assert torch.equal(model.generate(prompt, **options), dense)
    assert len(modules) == 2


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_another_plan_switches_the_indicator(quantize: str | None) -> None:
    """The same modules; what they give is that of a model made for the plan at once."""
    model = sparsify(tiny_models.make(), plan_of(tiny_models.make(), 0.05, bits=None), quantize=quantize)
    modules, ids = mlps(model), windows(1)[0]
    for bits, group in ((4, 32), (3, 64), (None, None), (8, 128), (4, 32)):
        plan = plan_of(model, 0.1, bits, group)
        at_once = sparsify(tiny_models.make(), plan, quantize=quantize)
        sparsify(model, plan)
        assert all(a is b for a, b in zip(mlps(model), modules, strict=True))
        if bits is None:
            assert all((m.indicator, held(m)) == ("gate", NONE) for m in modules)
        else:
            assert is_screened(model, bits, group)
        assert torch.equal(logits(model, ids), logits(at_once, ids))
    sparsify(model, threshold=0.1)
    assert all((m.indicator, held(m)) == ("gate", NONE) for m in modules)


def test_a_calibrated_plan(tmp_path: Path) -> None:
    """The module skips what the calibration said of the first layer, whose inputs sparsity does not change."""
    model, texts = tiny_models.make(), windows(6, 48)
    calibrate(model, texts, target=0.5, method="screen", bits=3, group=64, progress=False).save(tmp_path)
    plan = Plan.load(tmp_path)
    sparsify(model, plan)
    assert is_screened(model, 3, 64)
    with evaluate.sparsity_meter(model) as meter, torch.inference_mode():
        for ids in texts:
            model(ids)
    name = "model.layers.0.mlp"
    assert meter.skipped[name] / meter.entries[name] == pytest.approx(plan.layers[name].sparsity, abs=0.02)
    assert meter.sparsity == pytest.approx(0.5, abs=0.05)
    again = calibrate(model, texts, target=0.5, method="screen", bits=3, group=64, progress=False)
    for name, layer in again.layers.items():  # measured on the dense model, whatever the thresholds are now
        torch.testing.assert_close(layer.threshold, plan.layers[name].threshold)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_up_to_as_many_tokens_as_it_pays(quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the router, once a layer, with the layer's sizes and sparsity."""
    model = tiny_models.make().bfloat16()
    plan = plan_of(model, 0.15)
    for i, layer in enumerate(plan.layers.values()):
        layer.sparsity = 0.4 + 0.3 * i
    asked = []
    monkeypatch.setattr(_indicator, "screened_tokens", lambda *args: asked.append(args) or 5 * len(asked) - 5)
    for _ in range(2):
        asked.clear()
        sparsify(model, plan, screen_tokens="auto", quantize=quantize)
        assert asked == [(torch.bfloat16, quantize == "int8", 32, 48, sparsity) for sparsity in (0.4, 0.7)]
        assert [m.screen_tokens for m in mlps(model)] == [0, 5]
    sparsify(model, plan)
    assert [m.screen_tokens for m in mlps(model)] == [None, None]


@pytest.mark.parametrize("indicator", ["up", "product", "screen"])
def test_without_a_plan(indicator: str) -> None:
    """Set on new modules and on those that are there; the modules' own from_dense gives the same."""
    ids = windows(1)[0]
    options = dict(screen_bits=3, screen_group=64, screen_tokens=9) if indicator == "screen" else {}
    model = sparsify(tiny_models.make(), threshold=0.2, indicator=indicator, **options)
    again = sparsify(sparsify(tiny_models.make()), threshold=0.2, indicator=indicator, **options)
    by_hand = tiny_models.make()
    for layer in by_hand.model.layers:
        layer.mlp = SparseGatedMLP.from_dense(layer.mlp, threshold=0.2, indicator=indicator, **options)
    for part in (ids[:, :9], ids[:, :10]):
        expected = logits(by_hand, part)
        assert torch.equal(logits(model, part), expected)
        assert torch.equal(logits(again, part), expected)
    if indicator == "screen":
        assert is_screened(model, 3, 64)
        torch.testing.assert_close(logits(model, ids), logits(tiny_models.make(), ids), rtol=1e-4, atol=1e-4)
        sparsify(model, threshold=0.2, indicator="screen")
        assert all(m.screen_tokens is None for m in mlps(model))


def test_int8_rows_and_a_screen_of_their_values() -> None:
    model = tiny_models.make()
    plan = plan_of(model, 0.15)
    sparsify(model, plan, quantize="int8")
    assert is_screened(model)
    later = sparsify(sparsify(tiny_models.make(), plan), plan, quantize="int8")
    ids = windows(1)[0]
    assert torch.equal(logits(later, ids), logits(model, ids))
    plain = logits(sparsify(tiny_models.make(), plan), ids)
    assert (logits(model, ids) - plain).norm() / plain.norm() < 0.1


# Adapters, offloading, saving, decoding, training


@pytest.mark.parametrize("target", ["gate_proj", "up_proj"])
def test_lora_gets_no_copies_until_it_is_merged(target: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False)
    model = peft.get_peft_model(tiny_models.make(), config).eval()
    with pytest.warns(UserWarning, match=rf"1 more run dense .* {target} is peft"):
        sparsify(model, threshold=0.15, indicator="screen")
    assert all(held(m) == NONE for m in mlps(model))
    ids = windows(1)[0]
    logits(model, ids)
    assert all(held(m) == NONE for m in mlps(model))
    merged = model.merge_and_unload()
    found = logits(merged, ids)
    assert is_screened(merged)
    by_hand = sparsify(densify(copy.deepcopy(merged)), threshold=0.15, indicator="screen")
    assert torch.equal(found, logits(by_hand, ids))


def test_adapters_later() -> None:
    """The copies of a gate that is wrapped are freed, and made of what was merged."""
    peft = pytest.importorskip("peft")
    model = sparsify(tiny_models.make(), threshold=0.15, indicator="screen")
    before = copy.deepcopy([held(m) for m in mlps(model)])
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    ids = windows(1)[0]
    with pytest.warns(UserWarning, match="gate_proj is peft"):
        logits(adapted, ids)
    assert all(held(m) == NONE for m in mlps(adapted))
    merged = adapted.merge_and_unload()
    logits(merged, ids)
    assert is_screened(merged)
    assert not any(same(held(m), old) for m, old in zip(mlps(merged), before, strict=True))


@pytest.mark.parametrize("order", ["hooks first", "sparsify first"])
def test_offloaded_layers_are_not_bypassed(order: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_models.make(), windows(1)[0]
    dense = logits(model, ids)
    if order == "sparsify first":
        sparsify(model, threshold=torch.inf, indicator="screen")
    accelerate.cpu_offload(model, torch.device("cpu"))
    match = "_proj has a replaced forward"
    if order == "hooks first":
        with pytest.warns(UserWarning, match=match):
            sparsify(model, threshold=torch.inf, indicator="screen")
        found = logits(model, ids)
        assert all(held(m) == NONE for m in mlps(model))
    else:
        with pytest.warns(UserWarning, match=match):
            found = logits(model, ids)
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-4)


def test_saving_writes_the_dense_model_and_loading_makes_the_copies(tmp_path: Path) -> None:
    model = tiny_models.make()
    names, ids = set(model.state_dict()), windows(1)[0]
    plan = plan_of(model, 0.15)
    before = logits(model, ids)
    sparsify(model, plan).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert set(loaded.state_dict()) == names
    assert torch.equal(logits(loaded, ids), before)
    fresh = type(model)(model.config).eval()
    sparsify(fresh, plan)
    assert not same(held(mlps(fresh)[0]), held(mlps(model)[0]))
    fresh.load_state_dict(model.state_dict())
    assert all(same(held(a), held(b)) for a, b in zip(mlps(fresh), mlps(model), strict=True))
    assert torch.equal(logits(fresh, ids), logits(model, ids))


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_static_cache_and_compile(family: str) -> None:
    """The prompt is longer than `screen_tokens` and runs dense, the tokens after it are screened."""
    model = tiny_models.make(family)
    sparsify(model, plan_of(model, 0.15), screen_tokens=4)
    ids = windows(1, 12)[0]

    def decode(step) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        parts = (ids[:, :6], *(ids[:, i : i + 1] for i in range(6, 9)))
        return torch.cat(
            [step(input_ids=p, past_key_values=cache, use_cache=True).logits for p in parts], dim=1
        )

    with torch.no_grad():
        eager = decode(model)
        compiled = decode(torch.compile(model.forward, fullgraph=True, backend="aot_eager"))
        dense = decode(densify(copy.deepcopy(model)))
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager[:, :6], dense[:, :6], rtol=1e-4, atol=1e-4)
    assert (eager[:, 6:] - dense[:, 6:]).abs().max() > 0.01


def test_training_step() -> None:
    model = sparsify(tiny_models.make(), threshold=0.1, indicator="screen").train()
    ids = windows(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(ids, labels=ids).loss
    before.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert model(ids, labels=ids).loss < before
    for module in mlps(model):
        module.repack_screen()
    assert is_screened(model)
