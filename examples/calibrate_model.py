"""Calibrate a model, save the plan, load it, run sparse. Offline: a tiny random Llama and random tokens.

For a real model replace `model` by `AutoModelForCausalLM.from_pretrained(...)` and `batches` by tokenized text.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsemlp.calibration import METHODS, Plan, collect
from sparsemlp.integrations.transformers import sparsify


def main(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    batches = [torch.randint(0, 100, (2, 64)) for _ in range(4)]

    # One pass serves every target and method; the scores of a 4-bit screen are for method "screen" only.
    statistics = collect(model, batches, screen=(4, 32))
    for method in METHODS:
        for target in (0.0, 0.3, 0.5, 0.7):
            plan = statistics.plan(target, method)
            error = sum(layer.hidden_error for layer in plan.layers.values()) / len(plan.layers)
            print(
                f"{method:8} target {target:.0%}: sparsity {plan.sparsity:.1%}, hidden energy lost {error:.2%}"
            )

    statistics.plan(0.5).save(folder)
    dense = model(batches[0]).logits
    sparsify(model, Plan.load(folder))
    with torch.inference_mode():
        change = (model(batches[0]).logits - dense).norm() / dense.norm()
    print(f"the 50 % plan in {folder} changes the logits by {change:.1%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
