"""A ReLU model run sparse without any loss: OPT's MLPs skip the neurons whose activation is exactly 0.

    python examples/sparsify_opt.py

Runs offline: the model is tiny and random. For a real one use `OPTForCausalLM.from_pretrained("facebook/opt-…")`.
"""

import torch
from transformers import OPTConfig, OPTForCausalLM

from sparsemlp.integrations.transformers import densify, find_mlps, sparsify


def main() -> None:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=128,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = OPTForCausalLM(config).eval()
    prompt = torch.randint(3, 128, (1, 8))

    with torch.inference_mode():
        dense = model.generate(prompt, max_new_tokens=12, do_sample=False)
        logits = model(dense).logits

        sparsify(model)  # threshold 0
        change = (model(dense).logits - logits).abs().max() / logits.abs().max()
        same = torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), dense)
        print(f"threshold 0: same tokens {same}, logits differ by {change:.1e} of their size")

        def report(name: str) -> None:
            def hook(mlp: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                print(f"{name}: {mlp.skipped(args[0]).float().mean():.1%} of the neurons are skipped")

            handles.append(find_mlps(model)[name].register_forward_pre_hook(hook))

        handles: list[torch.utils.hooks.RemovableHandle] = []
        for name in find_mlps(model):
            report(name)
        model(dense)
        for handle in handles:
            handle.remove()

        densify(model)  # the original modules are back
        print("dense again:", torch.equal(model(dense).logits, logits))


if __name__ == "__main__":
    main()
