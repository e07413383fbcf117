"""A plan itself: equality, which models it fits, and what it refuses when made by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsemlp.calibration import LayerPlan, Plan, collect
from sparsemlp.integrations.transformers import densify, sparsify
from tests.plan_samples import FIRST, make


def test_equality_is_bit_exact() -> None:
    def changed(**fields: Any) -> Plan:
        layers = make().layers
        name = "model.layers.0.mlp"
        old = layers[name]
        layers[name] = LayerPlan(**{**vars(old), **fields})
        return make(layers=layers)

    assert changed() == make()
    one_bit = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    for other in (
        changed(threshold=one_bit),
        changed(threshold=torch.full((5,), 0.1)),
        changed(skipped_mean=None),
        changed(skipped_mean=-torch.linspace(-1, 1, 5).flip(0) * (1 + 1e-6)),
        changed(sparsity=0.5),
        make(target=0.30000001),
        make(tokens=8),
        make(method="upaware"),
        make(method="screen", bits=4, group=32),
    ):
        assert other != make()
    screens = [make(method="screen", bits=b, group=g) for b, g in ((4, 32), (4, 64), (3, 32))]
    assert screens[0] == make(method="screen", bits=4, group=32)
    assert screens[0] not in screens[1:]
    assert LayerPlan(torch.tensor(0.0), None, 0.0) != LayerPlan(torch.tensor(-0.0), None, 0.0)


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_attention_heads": 2, **changes})).eval()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return collect(llama(), [torch.arange(30)[None]], progress=False).plan(0.5)


def test_plan_fits_its_model_dense_or_sparse(plan: Plan) -> None:
    model = llama()
    plan.check(model)
    sparsify(model, plan)
    plan.check(model)
    plan.check(densify(model.bfloat16()))
    assert collect(model, [torch.arange(30)[None]], progress=False).fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 3},
            "2 layers in the plan, 3 in the model; the plan has no layer model.layers.2.mlp",
        ),
        (
            {"num_hidden_layers": 1},
            "2 layers in the plan, 1 in the model; the model has no layer model.layers.1.mlp",
        ),
        (
            {"intermediate_size": 20},
            "intermediate_size of model.layers.0.mlp is 24 in the plan, 20 in the model",
        ),
        ({"hidden_size": 32}, "hidden_size of model.layers.0.mlp is 16 in the plan, 32 in the model"),
        ({"hidden_act": "gelu"}, "activation of model.layers.0.mlp is silu in the plan, gelu in the model"),
    ],
)
def test_plan_of_another_model(plan: Plan, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the plan is for another model ({message}")):
        plan.check(llama(**changes))
    with pytest.raises(ValueError, match="the plan is for another model"):
        sparsify(llama(**changes), plan)


def test_plan_of_another_architecture(plan: Plan) -> None:
    with pytest.raises(
        ValueError, match="architecture is LlamaForCausalLM in the plan, LlamaModel in the model"
    ):
        plan.check(llama().model)


def test_plan_made_by_hand_is_checked() -> None:
    layers = make().layers
    with pytest.raises(ValueError, match=r"layers lacks model.layers.1.mlp"):
        make(layers={FIRST: layers[FIRST]})
    with pytest.raises(ValueError, match="bits is None, expected one of: 3, 4, 8"):
        make(method="screen")
    with pytest.raises(ValueError, match="group is 16, expected one of: 32, 64, 128"):
        make(method="screen", bits=4, group=16)
    with pytest.raises(ValueError, match="bits is 4 and group 32 with method 'upaware', expected None"):
        make(method="upaware", bits=4, group=32)
    layers[FIRST] = LayerPlan(torch.tensor(-1.0), None, 0.5)
    with pytest.raises(ValueError, match=r"holds -1\.0, expected numbers ≥ 0"):
        make(layers=layers)
