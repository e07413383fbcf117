"""Hugging Face models with ungated MLPs: every listed family, losslessness of ReLU, plans, saving, training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from sparsemlp.calibration import Plan, calibrate, collect
from sparsemlp.integrations.transformers import activation_of, densify, find_mlps, sparsify
from sparsemlp.nn import SparseGatedMLP, SparseMLP
from sparsemlp.testing import assert_within_budget
from tests import tiny_models
from tests.tiny_models import Layer, StandInPlan
from tests.tiny_ungated_models import FAMILIES, MORE, make, run

# `past_key_values` and what PEFT asks for have newer names in newer versions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def peers(family: str, model: nn.Module) -> list[Tensor]:
    """The model's output as it is, and row by row: another order of summation."""
    parts = [run(family, model, slice(i, i + 1)) for i in range(2)]
    if (FAMILIES | MORE)[family].takes == "both":
        parts = [part[i] for i in range(2) for part in parts]
        return [run(family, model), torch.stack(parts)]
    return [run(family, model), torch.cat(parts)]


@pytest.mark.parametrize(("family", "dtype"), [
    *((family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)),
    *((family, torch.float32) for family in MORE),
])  # fmt: skip
def test_dense_outputs_at_threshold_0(family: str, dtype: torch.dtype):
    model = make(family).to(dtype)
    wide = copy.deepcopy(model).double()
    expected = (FAMILIES | MORE)[family]
    found = find_mlps(model)
    assert tuple(found) == expected.names
    if expected.kind:
        assert {type(m).__name__ for m in found.values()} == {expected.kind}
    assert {activation_of(m, model) for m in found.values()} == {expected.activation}
    with torch.no_grad():
        truth, dense = run(family, wide), peers(family, model)
        assert sparsify(model) is model
        sparse = find_mlps(model)
        assert tuple(sparse) == expected.names
        assert all(isinstance(m, SparseMLP) and m.activation == expected.activation for m in sparse.values())
        assert sum(isinstance(m, SparseMLP) for m in model.modules()) == len(sparse)
        assert_within_budget(run(family, model), dense, truth)


@EVERY_FAMILY
def test_thresholds_act(family: str):
    model = sparsify(make(family), threshold=0.3)
    reference = sparsify(make(family), threshold=0.3, backend="reference")
    wide = sparsify(make(family).double(), threshold=0.3)
    with torch.no_grad():
        truth = run(family, wide)
        assert (truth - run(family, make(family).double())).abs().max() > 1e-2  # the threshold matters here
        assert_within_budget(run(family, model), peers(family, reference), truth)
        sparsify(model, threshold=torch.inf)
        assert (run(family, model) - truth).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["OPT", "T5", "Nemotron"])
def test_relu_models_are_lossless_at_threshold_0(family: str, dtype: torch.dtype):
    """Neurons are skipped, in every layer, and the outputs are the dense model's."""
    model = make(family).to(dtype)
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        truth, dense = run(family, wide), peers(family, model)
        sparsify(model)
        skipped: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(
                lambda m, args, name=name: skipped.__setitem__(name, m.skipped(args[0]))
            )
            for name, module in find_mlps(model).items()
        ]
        assert_within_budget(run(family, model), dense, truth)
        assert list(skipped) == list(FAMILIES[family].names)
        for mask in skipped.values():
            assert 0.2 < mask.float().mean() < 0.8  # the density observed is well below 1
        for hook in hooks:
            hook.remove()
        # What is skipped is not read: poison in the output weights of dead neurons reaches no output.
        for name, module in find_mlps(model).items():
            first, last, _ = module._layers()
            dead = torch.arange(0, skipped[name].shape[-1], 3)
            if first.bias is None:
                first.weight[dead] = 0
            else:
                first.bias[dead] = -1e4
        without = run(family, model)
        for module in find_mlps(model).values():
            _, last, _ = module._layers()
            last.weight[:, dead[dead < last.weight.shape[1]]] = torch.nan
        assert torch.equal(run(family, model), without)


@pytest.mark.parametrize("family", ["OPT", "GPT2", "Phi", "Bloom", "Nemotron"])
def test_decoding(family: str):
    model = make(family)
    prompt = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(2))
    dense = model.generate(prompt, max_new_tokens=16, do_sample=False)
    sparsify(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=16, do_sample=False), dense)
    densify(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=16, do_sample=False), dense)


@pytest.mark.parametrize("family", FAMILIES | MORE)
def test_densify_gives_the_same_objects_back(family: str):
    model = make(family)
    modules = dict(model.named_modules())
    parameters = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    with torch.no_grad():
        before = run(family, model)
        sparsify(model, threshold=0.5)
        assert list(model.state_dict()) == keys
        assert {id(p) for p in model.parameters()} == {i for i, _ in parameters.values()}
        sparsify(model, threshold=0.25)
        assert densify(model) is model
        assert torch.equal(run(family, model), before)
    assert list(dict(model.named_modules())) == list(modules)
    assert all(module is modules[name] for name, module in model.named_modules())
    for name, p in model.named_parameters():
        assert id(p) == parameters[name][0]
        assert p.is_contiguous()
        assert torch.equal(p, parameters[name][1])


@pytest.mark.parametrize("family", ["OPT", "GPT2", "BERT"])
def test_saved_models_load_dense_with_identical_weights(family: str, tmp_path: Path):
    model = make(family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = run(family, model)
        sparsify(model, threshold=0.5).save_pretrained(tmp_path)
        loaded = getattr(transformers, FAMILIES[family].model).from_pretrained(tmp_path).eval()
        assert not any(isinstance(m, SparseMLP) for m in loaded.modules())
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert torch.equal(run(family, loaded), expected)
        sparsify(loaded, threshold=0.5)
        assert torch.equal(run(family, loaded), run(family, model))


@pytest.mark.parametrize("family", ["OPT", "GPT2", "ViT", "BERT", "Bloom"])
def test_compile(family: str):
    names = FAMILIES[family].names
    model = make(family)
    widths = {name: m.neurons for name, m in ((n, _parts(model, n)) for n in names)}
    plan = StandInPlan({n: Layer(torch.full((w,), 0.1), torch.randn(w) * 0.1) for n, w in widths.items()})
    sparsify(model, plan)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(run(family, compiled), run(family, model), rtol=1e-4, atol=1e-5)


def _parts(model: nn.Module, name: str):
    from sparsemlp.integrations._mlps import parts_of

    return parts_of(find_mlps(model)[name])


@pytest.mark.parametrize("family", ["OPT", "T5", "GPT2", "BERT", "BART"])
def test_training_is_the_dense_models(family: str):
    """With dropout the MLPs run dense, so that the same random numbers give the same outputs and gradients."""
    model = make(family).train()
    twin = copy.deepcopy(model)
    sparsify(model)
    for m in (model, twin):
        torch.manual_seed(5)
        run(family, m).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            scale = float(q.grad.abs().max()) + 1e-6
            assert torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-4 * scale), name


@pytest.mark.parametrize("method", ["cats", "upaware"])
@pytest.mark.parametrize("family", ["OPT", "GPT2", "BERT"])
def test_a_calibrated_plan(family: str, method: str, tmp_path: Path):
    model = make(family)
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(3))
    statistics = collect(model, [ids], progress=False)
    statistics.plan(0.7, method).save(tmp_path)
    plan = Plan.load(tmp_path)
    assert list(plan.layers) == list(FAMILIES[family].names)
    for layer in plan.layers.values():
        assert layer.sparsity >= 0.7 - 0.02
        values = layer.threshold.unique()
        assert len(values) == 1, "an ungated MLP has nothing to weight a neuron by"
    sparsify(model, plan)
    skipped: dict[str, float] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, name=name: skipped.__setitem__(name, m.skipped(args[0]).float().mean().item())
        )
        for name, module in find_mlps(model).items()
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    first = FAMILIES[family].names[0]  # its input is not changed by sparsity
    assert abs(skipped[first] - plan.layers[first].sparsity) < 0.02
    again = collect(model, [ids], progress=False)  # sparse modules run dense meanwhile
    for name, layer in statistics.layers.items():
        for ours, theirs in zip(layer.tables(), again.layers[name].tables(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=1e-4, atol=2)
    with pytest.raises(ValueError, match="another model"):
        sparsify(make("OPT", ffn_dim=64) if family == "OPT" else make("OPT"), plan)


def test_statistics_are_the_activations():
    """a = h, u = 1: the means and the lost share come from the activations alone."""
    model = make("GPT2")
    ids = torch.randint(3, 64, (3, 20), generator=torch.Generator().manual_seed(3))
    seen: list[Tensor] = []
    handle = model.transformer.h[0].mlp.act.register_forward_hook(lambda m, args, out: seen.append(out))
    statistics = collect(model, [ids], progress=False)
    handle.remove()
    a = seen[0].reshape(-1, seen[0].shape[-1]).double()
    layer = statistics.layers["transformer.h.0.mlp"]
    torch.testing.assert_close(layer.sum_h.sum(0).double(), a.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.sum_h2.sum(0).double(), a.square().sum(0), rtol=1e-4, atol=1e-4)
    assert bool((layer.sum_u2.sum(0) == len(a)).all())


def test_calibrate_an_encoder_decoder_and_images():
    ids = torch.randint(3, 64, (2, 8))
    plan = calibrate(make("T5"), [{"input_ids": ids, "decoder_input_ids": ids}], 0.5, progress=False)
    assert list(plan.layers) == list(FAMILIES["T5"].names)
    images = torch.randn(4, 3, 16, 16)
    plan = calibrate(make("ViT"), [{"pixel_values": images}], 0.5, "cats", progress=False)
    assert list(plan.layers) == list(FAMILIES["ViT"].names)


def test_int8_of_modules_and_not_of_layers():
    model = make("Phi")
    with torch.no_grad():
        dense = run("Phi", model)
        sparsify(model, quantize="int8")
        assert "model.layers.0.mlp.fc1.qweight" in model.state_dict()
        assert 1e-4 < (run("Phi", model) - dense).abs().max() < 0.1 * dense.abs().max()
    for family, name in (("OPT", "model.decoder.layers.0"), ("BERT", "encoder.layer.0")):
        model = make(family)
        message = (
            rf"^quantize is 'int8' and the MLP of {name} lies inside a larger layer \(\w+Layer\), expected"
        )
        with pytest.raises(ValueError, match=message):
            sparsify(model, quantize="int8")
        assert not any(isinstance(m, SparseMLP) for m in model.modules())
    with pytest.raises(
        ValueError, match=r"^quantize is 'int8' and .*c_fc is .*Conv1D, not exactly nn\.Linear"
    ):
        sparsify(make("GPT2"), quantize="int8")


def test_an_unknown_activation_stays_dense_beside_known_ones():
    """A Llama with a vision tower of quick_gelu, say."""
    model = nn.ModuleDict({"tower": make("ViT", hidden_act="quick_gelu"), "text": tiny_models.make()})
    with pytest.warns(
        UserWarning, match=r"^tower\.layers\.0\.mlp stays dense: .* has the activation QuickGELU"
    ):
        sparsify(model)
    assert [type(m) for m in find_mlps(model).values()] == [SparseGatedMLP] * 2
    alone = make("ViT", hidden_act="quick_gelu")
    with pytest.raises(ValueError, match=r"^activation of ViTModel's ViTMLP is 'quick_gelu' \(QuickGELU"):
        sparsify(alone)


def test_gated_and_ungated_together():
    model = nn.ModuleDict({"tower": make("ViT"), "text": tiny_models.make()})
    names = list(find_mlps(model))
    assert names == [
        "tower.layers.0.mlp",
        "tower.layers.1.mlp",
        "text.model.layers.0.mlp",
        "text.model.layers.1.mlp",
    ]
    sparsify(model, threshold=0.1)
    assert [type(m) for m in find_mlps(model).values()] == [SparseMLP] * 2 + [SparseGatedMLP] * 2
    assert list(find_mlps(densify(model))) == names
    assert not any(isinstance(m, (SparseMLP, SparseGatedMLP)) for m in model.modules())


def test_tied_layers_stay_tied():
    for family in ("OPT", "GPT2"):
        model = make(family)
        mlps = list(find_mlps(model).values())
        first, last = ("c_fc", "c_proj") if family == "GPT2" else ("fc1", "fc2")
        for name in (first, last):
            getattr(mlps[1], name).weight = nn.Parameter(
                getattr(mlps[0], name).weight.data
            )  # the same memory
        with torch.no_grad():
            before = run(family, model)
            sparsify(model)
            pointers = {m._layers()[i].weight.data_ptr() for m in find_mlps(model).values() for i in (0, 1)}
            assert len(pointers) == 2
            assert torch.allclose(run(family, model), before, rtol=1e-4, atol=1e-4)
            densify(model)
            assert torch.equal(run(family, model), before)
