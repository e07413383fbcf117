"""Hugging Face models: what is recognised and what is not, activations, adapters, offloading."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import Tensor, nn

from sparsemlp.integrations.transformers import activation_of, densify, find_mlps, sparsify
from sparsemlp.nn import SparseGatedMLP
from tests.tiny_models import SIZES, make

# `past_key_values` and what PEFT asks for have newer names in newer versions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)


class OddMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 16), nn.Linear(16, 8)


def test_a_model_without_known_mlps():
    message = (
        r"^model Sequential has no MLP of a known form \(saw FeedForward, OddMLP, where 0 has no member activation_fn, "
        r".* or gelu_impl\), expected children"
    )
    with pytest.raises(ValueError, match=message):
        sparsify(nn.Sequential(FeedForward(), OddMLP(), nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"\(saw no module named like an MLP\)"):
        sparsify(nn.Sequential(nn.Linear(8, 8)))
    t5 = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, feed_forward_proj="gated-gelu"
    )
    with pytest.raises(ValueError, match=r"saw T5LayerFF"):
        sparsify(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ValueError, match=r"^model is a LlamaMLP, an MLP itself"):
        sparsify(find_mlps(make())["model.layers.0.mlp"])


def test_look_alikes_are_not_matched():
    from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    config = Gemma3nTextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, activation_sparsity_pattern=[0.95, 0.0]
    )
    thresholded, plain = (Gemma3nTextMLP(config, i) for i in range(2))
    assert list(find_mlps(nn.ModuleList([thresholded, plain]))) == ["1"]  # the second is the plain formula
    with pytest.raises(ValueError, match=r"saw Gemma3nTextMLP, where 0 computes something else"):
        sparsify(nn.ModuleList([thresholded]))
    with pytest.warns(UserWarning, match=r"^0 stays dense: Gemma3nTextMLP computes something else"):
        sparsify(nn.ModuleList([thresholded, plain]))


def test_experts_of_a_mixture_stay_dense():
    config = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config["shared_expert_intermediate_size"] = 24
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**config)).eval()
    assert [name.split(".", 3)[3] for name in find_mlps(model)] == [
        "mlp.shared_expert"
    ] * 2  # an ordinary gated MLP
    mlp = next(iter(find_mlps(make()).values()))
    listed = nn.ModuleDict({"experts": nn.ModuleList([mlp])})
    assert find_mlps(listed) == {}
    with pytest.raises(ValueError, match="expert of a mixture"):
        sparsify(listed)


@pytest.mark.parametrize(
    ("hidden_act", "name"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("linear", "identity"),
    ],
)
def test_activations(hidden_act: str, name: str):
    model = make(hidden_act=hidden_act)
    assert {activation_of(m, model) for m in find_mlps(model).values()} == {name}
    sparsify(model)
    assert {activation_of(m, model) for m in find_mlps(model).values()} == {name}


@pytest.mark.parametrize(
    "hidden_act", ["quick_gelu", "gelu_10", "mish", "relu6", "leaky_relu", "tanh", "laplace"]
)
def test_an_unknown_activation_is_named(hidden_act: str):
    model = make(hidden_act=hidden_act)
    with pytest.raises(
        ValueError, match=rf"^activation of LlamaForCausalLM's LlamaMLP is '{hidden_act}' \(\w+\), expected"
    ):
        sparsify(model)
    assert not any(isinstance(m, SparseGatedMLP) for m in model.modules())


@pytest.mark.parametrize("order", ["adapters first", "sparsify first"])
def test_lora_is_not_bypassed(order: str, tokens: Tensor):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)

    def adapted(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        model = make()
        if sparse and order == "sparsify first":
            sparsify(model, threshold=torch.inf)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config).eval()
        if sparse and order == "adapters first":
            expected = (
                r"model\.layers\.0\.mlp and 1 more run dense .* down_proj is peft\.tuners\.lora\S*Linear,"
            )
            with pytest.warns(UserWarning, match=expected) as caught:
                sparsify(model, threshold=torch.inf)
            assert len([w for w in caught if "dense" in str(w.message)]) == 1
        return model

    dense, sparse = adapted(False), adapted(True)
    with torch.no_grad():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = sparse(tokens).logits
            sparse(tokens)
        told = [str(w.message) for w in caught if "runs dense" in str(w.message)]
        assert len(told) == (2 if order == "sparsify first" else 0)  # once a module
        assert torch.allclose(ours, dense(tokens).logits, rtol=1e-4, atol=1e-4)
        merged = densify(sparse.merge_and_unload())
        assert torch.allclose(merged(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)


def test_merging_an_adapter_gives_the_sparse_path_back(tokens: Tensor):
    peft = pytest.importorskip("peft")
    model = sparsify(make(), threshold=torch.inf)
    peft_model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj"])).eval()
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"^model\.layers\.0\.mlp runs dense .* up_proj is peft"):
            peft_model(tokens)
        merged = peft_model.merge_and_unload()
        outs = []
        for module in find_mlps(merged).values():
            module.register_forward_hook(lambda module, args, out: outs.append(out))
        merged(tokens)
    assert len(outs) == 2
    assert all(out.abs().max() == 0 for out in outs)


@pytest.mark.parametrize("order", ["hooks first", "sparsify first"])
def test_offloaded_layers_are_not_bypassed(order: str, tokens: Tensor):
    accelerate = pytest.importorskip("accelerate")
    model = make()
    with torch.no_grad():
        dense = model(tokens).logits
    if order == "sparsify first":
        sparsify(model, threshold=torch.inf)
    # Device hooks replace each layer's forward; the weights are on meta outside of it.
    accelerate.cpu_offload(model, torch.device("cpu"))
    mlp = find_mlps(model)["model.layers.0.mlp"]
    assert mlp.down_proj.weight.device.type == "meta"
    with torch.no_grad():
        match = r"_proj has a replaced forward"
        with pytest.warns(UserWarning, match=match) if order == "hooks first" else nullcontext():
            if order == "hooks first":
                sparsify(model, threshold=torch.inf)
        with pytest.warns(UserWarning, match=match) if order == "sparsify first" else nullcontext():
            ours = model(tokens).logits
        assert torch.allclose(ours, dense, rtol=1e-4, atol=1e-4)
