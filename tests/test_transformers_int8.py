"""`sparsify(model, plan, quantize="int8")`: quality, memory, generation, saving, loading, undoing, measuring."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import load_model as load_tensors
from torch import nn

from sparsemlp import cli
from sparsemlp.demo import evaluate
from sparsemlp.integrations.transformers import densify, find_mlps, sparsify
from sparsemlp.nn import Int8Linear
from tests import model_folders, tiny_models
from tests.test_demo_evaluate import windows
from tests.tiny_models import Layer, StandInPlan

FAMILIES = ("Llama", "Gemma2", "Phi3")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def plan_of(model: nn.Module, threshold: float, mean: bool = False) -> StandInPlan:
    neurons = tiny_models.SIZES["intermediate_size"]
    return StandInPlan(
        {
            name: Layer(torch.full((neurons,), threshold), torch.full((neurons,), 0.01) if mean else None)
            for name in find_mlps(model)
        }
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perplexity_stays_within_one_percent(family: str, dtype: torch.dtype) -> None:
    """Of the float model's, dense and sparse. Random weights predict nothing, so the logits are looked at, too."""
    model = tiny_models.make(family).to(dtype)
    texts = windows(6, 48)
    for plan in (None, plan_of(model, 0.05, mean=True)):
        plain = sparsify(copy.deepcopy(model), plan)
        rounded = sparsify(copy.deepcopy(model), plan, quantize="int8")
        expected, found = evaluate.quality(plain, texts), evaluate.quality(rounded, texts)
        assert found.perplexity == pytest.approx(expected.perplexity, rel=0.01)
        assert found.sparsity == pytest.approx(expected.sparsity, abs=0.02)
        with torch.inference_mode():
            wanted = plain(texts[0]).logits.float()
            error = (rounded(texts[0]).logits - wanted).norm() / wanted.norm()
            for layer in rounded.modules():
                if isinstance(layer, Int8Linear):  # 15 steps a row instead of 255
                    layer.qweight.copy_((layer.qweight.float() / 18).round() * 18)
            coarse = (rounded(texts[0]).logits - wanted).norm() / wanted.norm()
        assert error < 0.03
        assert coarse > 0.06


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mlp_layer_is_int8_and_nothing_else(family: str) -> None:
    model = tiny_models.make(family)
    before = {name: type(module) for name, module in model.named_modules()}
    floats = sum(p.nbytes for name, p in model.named_parameters() if ".mlp." in name)
    others = sum(p.nbytes for name, p in model.named_parameters() if ".mlp." not in name)
    sparsify(model, quantize="int8")
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            assert ".mlp." in name
            assert before[name] is nn.Linear
        elif not name.endswith("mlp"):
            assert type(module) is before[name]
    assert sum(p.nbytes for p in model.parameters()) == others
    integers = [b for name, b in model.named_buffers() if name.endswith("qweight")]
    assert sum(b.nbytes for b in integers) == floats // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_is_that_of_the_dequantised_model(family: str) -> None:
    """Greedy decoding with int8 layers and with float layers of the same values gives the same tokens."""
    model = sparsify(tiny_models.make(family), quantize="int8")
    prompt = windows(1, 8)[0]
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
    with torch.inference_mode():
        tokens = model.generate(prompt, **options)
        logits = model(prompt).logits
    densify(model)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt, **options), tokens)
        torch.testing.assert_close(model(prompt).logits, logits)


def test_plans_change_and_weights_stay() -> None:
    """A second `sparsify` sets thresholds; quantize=None leaves int8 weights, "int8" rounds float ones later."""
    model = tiny_models.make()
    twin = copy.deepcopy(model)
    sparsify(model, plan_of(model, 0.05), quantize="int8")
    integers = {name: b.data_ptr() for name, b in model.named_buffers() if name.endswith("qweight")}
    sparsify(model, plan_of(model, 0.1))
    assert {name: b.data_ptr() for name, b in model.named_buffers() if name.endswith("qweight")} == integers
    sparsify(twin, plan_of(twin, 0.05))
    sparsify(twin, plan_of(twin, 0.1), quantize="int8")
    ids = windows(1)[0]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, twin(ids).logits)


def test_save_pretrained_and_loading_again(tmp_path: Path) -> None:
    """Into a model built from the config and made int8; the float class finds no weight under the name it looks for."""
    model = sparsify(tiny_models.make(), quantize="int8", threshold=0.05)
    ids = windows(1)[0]
    with torch.inference_mode():
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["model.layers.0.mlp.down_proj.qweight"].dtype == torch.int8
    assert not any(".mlp." in name and name.endswith(".weight") for name in saved)
    fresh = type(model)(model.config).eval()
    sparsify(fresh, quantize="int8", threshold=0.05)
    load_tensors(fresh, tmp_path / "model.safetensors")
    with torch.inference_mode():
        assert torch.equal(fresh(ids).logits, expected)
    with pytest.raises(RuntimeError, match="qweight"):
        type(model)(model.config).load_state_dict(saved, strict=True)


def test_densify_and_save_loads_anywhere(tmp_path: Path) -> None:
    model = sparsify(tiny_models.make(), quantize="int8")
    ids = windows(1)[0]
    densify(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_nothing_is_changed_when_a_layer_cannot_be_rounded() -> None:
    model = tiny_models.make()
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight.data[3, 0] = torch.inf
    before = {name: (type(m), id(m)) for name, m in model.named_modules()}
    strides = [p.stride() for p in model.parameters()]
    message = (
        r"^model\.layers\.1\.mlp\.up_proj\.weight holds NaN, inf or .* in row 3, expected finite values; .*"
    )
    with pytest.raises(ValueError, match=message):
        sparsify(model, quantize="int8")
    mlp.up_proj.weight.data[3, 0] = 0
    mlp.down_proj.register_forward_hook(lambda module, args, out: out)
    message = (
        r"^quantize is 'int8' and model\.layers\.1\.mlp\.down_proj has forward or backward hooks, expected .*"
    )
    with pytest.raises(ValueError, match=message):
        sparsify(model, quantize="int8")
    with pytest.raises(ValueError, match=r"^quantize is 'fp4', expected None or 'int8'$"):
        sparsify(model, quantize="fp4")
    assert {name: (type(m), id(m)) for name, m in model.named_modules()} == before
    assert [p.stride() for p in model.parameters()] == strides


def test_gradients_reach_the_embeddings() -> None:
    """Training what is float around int8 MLPs: the loss falls."""
    model = sparsify(tiny_models.make(), quantize="int8").train()
    ids = windows(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model.model.embed_tokens.weight.grad.abs().max() > 0
    assert losses[-1] < losses[0]


def test_bench_compares_with_the_float_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folders.save(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(model_folders.text(2000))
    fast = ["--tokens", "128", "--window", "64", "--decode", "1", "--rounds", "1", "--quantize", "int8"]
    assert cli.main(["bench", str(folder), "--text", str(text), "--json", *fast]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["quantize"] == "int8"
    dense, rounded = document["results"]
    assert rounded["perplexity"] == pytest.approx(dense["perplexity"], rel=0.01)
    assert rounded["perplexity"] != dense["perplexity"]
    assert cli.main(["bench", str(folder), *fast]) == 0
    assert "bf16, sparse MLPs int8;" in capsys.readouterr().out
