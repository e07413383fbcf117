"""A plan made by hand, of two layers of different widths."""

from __future__ import annotations

from typing import Any

import torch

from sparsemlp.calibration import LayerPlan, Plan

WIDTHS = {"model.layers.0.mlp": 5, "model.layers.1.mlp": 7}
FIRST = "model.layers.0.mlp"


def fingerprint(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 3, "activation": "silu"}
    layers = {name: {**sizes, "intermediate_size": width} for name, width in WIDTHS.items()}
    return {"architecture": "LlamaForCausalLM", "layers": layers, **changes}


def make(**changes: Any) -> Plan:
    first = LayerPlan(torch.tensor(0.1), torch.linspace(-1, 1, 5), 0.4999999, 0.1)
    second = LayerPlan(torch.tensor([0.0, 1e-45, 0.3, float("inf"), 3e38, 1.0, 0.1]), None, 0.7)
    layers = dict(zip(WIDTHS, (first, second), strict=True))
    return Plan(
        **{
            "method": "cats",
            "target": 0.3,
            "fingerprint": fingerprint(),
            "layers": layers,
            "tokens": 9,
            **changes,
        }
    )
