"""Hugging Face models: every listed family, decoding, plans, saving, compilation, memory."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sparsemlp.integrations.transformers import activation_of, densify, find_mlps, sparsify
from sparsemlp.nn import SparseGatedMLP
from sparsemlp.testing import assert_within_budget
from tests.tiny_models import FAMILIES, Layer, StandInPlan, make

# `past_key_values` and what PEFT asks for have newer names in newer versions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_outputs_at_threshold_0(family: str, dtype: torch.dtype, tokens: Tensor):
    model = make(family).to(dtype)
    wide = copy.deepcopy(model).double()
    kind, activation = FAMILIES[family]
    names = [f"model.layers.{i}.mlp" for i in range(2)]
    found = find_mlps(model)
    assert list(found) == names
    assert {type(m).__name__ for m in found.values()} == {kind}
    assert {activation_of(m, model) for m in found.values()} == {activation}
    with torch.no_grad():
        truth = wide(tokens).logits
        dense = [model(tokens).logits]
        dense.append(torch.cat([model(row[None]).logits for row in tokens]))  # another order of summation
        assert sparsify(model) is model
        assert list(find_mlps(model)) == names
        assert all(
            isinstance(m, SparseGatedMLP) and m.activation == activation for m in find_mlps(model).values()
        )
        assert_within_budget(model(tokens).logits, dense, truth, what="prefill")
        cache, steps = None, []
        for i in range(12):
            out = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        assert_within_budget(torch.cat(steps, 1), [d[:, :12] for d in dense], truth[:, :12], what="decoding")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_same(family: str, tokens: Tensor):
    model = make(family)
    dense = model.generate(tokens[:, :6], max_new_tokens=20, do_sample=False)
    sparsify(model)
    assert torch.equal(model.generate(tokens[:, :6], max_new_tokens=20, do_sample=False), dense)
    densify(model)
    assert torch.equal(model.generate(tokens[:, :6], max_new_tokens=20, do_sample=False), dense)


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_thresholds_act_alike_in_prefill_and_decoding(family: str, tokens: Tensor):
    model = sparsify(make(family), threshold=0.1)
    reference = sparsify(make(family), threshold=0.1, backend="reference")
    wide = sparsify(make(family).double(), threshold=0.1)
    with torch.no_grad():
        dense = densify(make(family))(tokens).logits
        truth = wide(tokens).logits
        peers = [reference(tokens).logits, torch.cat([reference(row[None]).logits for row in tokens])]
        assert (truth - dense).abs().max() > 1e-2  # the threshold matters here
        assert_within_budget(model(tokens).logits, peers, truth, what="prefill")
        cache, steps = None, []
        for i in range(12):
            out = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        assert_within_budget(torch.cat(steps, 1), [p[:, :12] for p in peers], truth[:, :12], what="decoding")


def test_densify_gives_the_same_objects_back():
    model = make()
    modules = dict(model.named_modules())
    parameters = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    sparsify(model, threshold=0.5)
    assert list(model.state_dict()) == keys
    assert list(dict(model.named_modules())) == list(modules)  # paths of every child as well
    sparsify(model, threshold=0.25)
    assert densify(model) is model
    assert all(module is modules[name] for name, module in model.named_modules())
    for name, p in model.named_parameters():
        assert id(p) == parameters[name][0]
        assert p.is_contiguous()
        assert torch.equal(p, parameters[name][1])
    assert densify(model) is model


def test_sparsify_twice_updates_the_same_modules():
    model = sparsify(make(), threshold=0.5)
    first = find_mlps(model)
    sparsify(model, threshold=0.25, backend="reference")
    second = find_mlps(model)
    assert all(first[name] is second[name] for name in first)
    assert all(m.threshold.item() == 0.25 and m.backend == "reference" for m in second.values())
    assert sum(isinstance(m, SparseGatedMLP) for m in model.modules()) == 2


def test_plan():
    model = make()
    names = list(find_mlps(model))
    layers = {name: Layer(torch.rand(48), torch.randn(48)) for name in names}
    layers[names[1]].skipped_mean = None
    plan = StandInPlan(layers)
    sparsify(model, plan)
    assert plan.checked == [model]
    for name, module in find_mlps(model).items():
        assert torch.equal(module.threshold, layers[name].threshold)
        assert (module.skipped_mean is None) == (name == names[1])
    assert torch.equal(find_mlps(model)[names[0]].skipped_mean, layers[names[0]].skipped_mean)


def _without(layers):
    layers.pop("model.layers.1.mlp")


def _with(layers):
    layers["model.layers.2.mlp"] = Layer(torch.zeros(()))


def _nan(layers):
    layers["model.layers.1.mlp"].threshold = torch.full((48,), torch.nan)


def _short(layers):
    layers["model.layers.1.mlp"].skipped_mean = torch.zeros(47)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without,
            r"^plan lacks model\.layers\.1\.mlp, expected all of the model's MLPs; calibrate this model$",
        ),
        (_with, r"^plan has model\.layers\.2\.mlp, expected the model's MLPs only"),
        (_nan, r"^plan for model\.layers\.1\.mlp: threshold is or contains NaN"),
        (_short, r"^plan for model\.layers\.1\.mlp: skipped_mean has shape \(47,\)"),
    ],
)
def test_a_wrong_plan_changes_nothing(change, message: str):
    model = make()
    layers = {name: Layer(torch.zeros(48), torch.zeros(48)) for name in find_mlps(model)}
    change(layers)
    with pytest.raises(ValueError, match=message):
        sparsify(model, StandInPlan(layers))
    assert not any(isinstance(m, SparseGatedMLP) for m in model.modules())
    assert all(p.is_contiguous() for p in model.parameters())


def test_what_is_no_plan_or_no_model_gets_a_sentence():
    with pytest.raises(ValueError, match=r"^plan is str, expected a sparsemlp.Plan; load it with"):
        sparsify(make(), "plan50")
    with pytest.raises(ValueError, match=r"^model is NoneType, expected a loaded model"):
        sparsify(None)
    with pytest.raises(ValueError, match=r"^threshold is an integer beyond every float, expected"):
        sparsify(make(), threshold=10**400)


def test_a_plan_of_another_model_is_refused_by_its_check():
    class Other(StandInPlan):
        def check(self, model: nn.Module) -> None:
            raise ValueError("the plan is for another model")

    with pytest.raises(ValueError, match="another model"):
        sparsify(make(), Other({}))
    with pytest.raises(ValueError, match=r"^threshold is given together with plan"):
        sparsify(make(), StandInPlan({}), threshold=0.1)


def test_a_calibrated_plan(tokens: Tensor, tmp_path: Path):
    from sparsemlp.calibration import Plan, calibrate

    model = make()
    calibrate(model, [tokens], target=0.5, progress=False).save(tmp_path)
    plan = Plan.load(tmp_path)
    sparsify(model, plan)
    active = {}

    def count(name: str, module: SparseGatedMLP):
        def hook(_, args):
            act = nn.functional.silu(module.gate_proj(args[0]))
            active[name] = (act.abs() >= module.threshold).float().mean().item()

        return hook

    with torch.no_grad():
        for name, module in find_mlps(model).items():
            module.register_forward_pre_hook(count(name, module))
        model(tokens)
    first = active["model.layers.0.mlp"]  # its input is not changed by sparsity
    assert abs(1 - first - plan.layers["model.layers.0.mlp"].sparsity) < 0.02
    with pytest.raises(ValueError, match="another model"):
        sparsify(make(intermediate_size=64), plan)


def test_saved_models_load_dense_with_identical_weights(tokens: Tensor, tmp_path: Path):
    for family in ("Llama", "Gemma3", "Phi3"):
        model = make(family)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            logits = model(tokens).logits
        folder = tmp_path / family
        sparsify(model, threshold=0.5).save_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert not any(isinstance(m, SparseGatedMLP) for m in loaded.modules())
        for name, value in loaded.state_dict().items():
            assert value.is_contiguous()
            assert torch.equal(value, state[name]), name
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, logits)


def test_half_precision_keeps_the_thresholds():
    model = sparsify(make(), threshold=0.1).half()
    for module in find_mlps(model).values():
        assert module.threshold.dtype == torch.float32
        assert module.threshold == torch.tensor(0.1)
        assert module.down_proj.weight.dtype == torch.float16


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_static_cache_and_compile(family: str, tokens: Tensor):
    model = make(family)
    layers = {name: Layer(torch.full((48,), 0.1), torch.randn(48) * 0.1) for name in find_mlps(model)}
    sparsify(model, StandInPlan(layers))

    def decode(step) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        out = []
        for piece in (tokens[:, :5], *(tokens[:, i : i + 1] for i in range(5, 9))):
            out.append(step(input_ids=piece, past_key_values=cache, use_cache=True).logits)
        return torch.cat(out, dim=1)

    with torch.no_grad():
        eager = decode(model)
        compiled = decode(torch.compile(model.forward, fullgraph=True, backend="aot_eager"))
    assert torch.allclose(compiled, eager, rtol=1e-4, atol=1e-5)


def test_training_step_through_a_sparse_model(tokens: Tensor):
    model = sparsify(make(), threshold=0.05).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(tokens, labels=tokens).loss
    before.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert model(tokens, labels=tokens).loss < before


def test_shared_modules_are_replaced_once():
    model = make()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    dense = model.model.layers[0].mlp
    sparsify(model)
    assert list(find_mlps(model)) == ["model.layers.0.mlp"]
    assert isinstance(model.model.layers[0].mlp, SparseGatedMLP)
    assert model.model.layers[1].mlp is model.model.layers[0].mlp
    densify(model)
    assert model.model.layers[0].mlp is model.model.layers[1].mlp is dense


def storages(model: nn.Module) -> dict[StorageWeakRef, int]:
    found: dict[StorageWeakRef, int] = {}
    for module in find_mlps(model).values():
        for p in module.parameters():
            ref = StorageWeakRef(p.untyped_storage())
            if ref not in found:
                found[ref] = p.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("tied", ["no", "parameter", "memory"])
def test_weights_are_not_duplicated(tied: str, tokens: Tensor):
    model = make()
    first, second = (m.down_proj for m in find_mlps(model).values())
    if tied == "parameter":
        second.weight = first.weight
    elif tied == "memory":
        second.weight = nn.Parameter(first.weight.data)
    before = storages(model)
    with torch.no_grad():
        dense = model(tokens).logits
    sparsify(model)
    after = storages(model)
    assert sum(after.values()) == sum(before.values())
    alive = [ref for ref in before if not ref.expired() and ref not in after]
    assert alive == []  # the former down weights are gone
    if tied != "no":
        assert first.weight.data_ptr() == second.weight.data_ptr()
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, dense, rtol=1e-4, atol=1e-4)
    densify(model)
    assert sum(storages(model).values()) == sum(before.values())
    assert first.weight.is_contiguous()
    assert second.weight.is_contiguous()


def test_the_example_runs():
    path = Path(__file__).parent.parent / "examples" / "sparsify_model.py"
    environment = {**os.environ, "PYTHONPATH": str(path.parent.parent), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MLPs: model.layers.0.mlp, model.layers.1.mlp" in done.stdout
    assert "same tokens at threshold 0: True" in done.stdout


def test_importing_the_integration_does_not_import_transformers():
    code = "import sys, sparsemlp.integrations.transformers; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
