"""Makes a Hugging Face model's MLPs sparse and undoes it. Runs offline in a second: the model is tiny and random.

    python examples/sparsify_model.py

For a real model, load it with `AutoModelForCausalLM.from_pretrained(folder)` and pass a plan from
`sparsemlp.calibrate` instead of one threshold.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsemlp.integrations.transformers import densify, find_mlps, sparsify


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(128, (1, 5))

    with torch.inference_mode():
        dense = model.generate(prompt, max_new_tokens=12, do_sample=False)

        sparsify(model)  # threshold 0: the same function, run by sparsemlp
        print("MLPs:", ", ".join(find_mlps(model)))
        same = torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), dense)
        print("same tokens at threshold 0:", same)

        sparsify(model, threshold=0.02)  # only new thresholds; a silu this close to 0 adds little
        logits = model(dense).logits

        densify(model)  # the original modules are back
        difference = (model(dense).logits - logits).abs().max().item()
        print(f"largest logit difference at threshold 0.02: {difference:.2g}")


if __name__ == "__main__":
    main()
