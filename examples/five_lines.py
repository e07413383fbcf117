"""Makes a language model's MLPs sparse in five lines, and compares what it generates.

    python examples/five_lines.py MODEL_DIR TEXT_FILE

MODEL_DIR is a Hugging Face model folder with a tokenizer. Without arguments: a tiny random Llama and random tokens,
which shows that it runs, not what it is good for.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import sparsemlp
from sparsemlp.integrations.transformers import sparsify


def load() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the tokens to calibrate on, (1, N) int64."""
    if len(sys.argv) == 3:
        folder, text = sys.argv[1:]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with open(text, encoding="utf-8") as file:
            tokens = tokenizer(file.read(), return_tensors="pt").input_ids
        return AutoModelForCausalLM.from_pretrained(folder), tokens[:, :8192]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config), torch.randint(0, 256, (1, 1024))


def main() -> None:
    model, tokens = load()
    before = model.generate(tokens[:, :16], max_new_tokens=16, do_sample=False)

    plan = sparsemlp.calibrate(model, tokens.split(512, dim=1), target=0.5)
    sparsify(model, plan)
    after = model.generate(tokens[:, :16], max_new_tokens=16, do_sample=False)

    for name, layer in plan.layers.items():
        print(f"{name}: {layer.sparsity:.1%} of the activations were skipped in calibration")
    same = int((before[0] == after[0]).cumprod(0).sum()) - 16
    print(f"the first {same} of 16 generated tokens are the dense model's")


if __name__ == "__main__":
    main()
