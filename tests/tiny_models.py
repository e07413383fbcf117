"""Tiny Hugging Face models with random weights, and a stand-in for a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # activations of a size that thresholds matter for
}
FAMILIES = {
    "Llama": ("LlamaMLP", "silu"),
    "Mistral": ("MistralMLP", "silu"),
    "Qwen2": ("Qwen2MLP", "silu"),
    "Qwen3": ("Qwen3MLP", "silu"),
    "Gemma": ("GemmaMLP", "gelu_tanh"),
    "Gemma2": ("Gemma2MLP", "gelu_tanh"),
    "Gemma3": ("Gemma3MLP", "gelu_tanh"),
    "SmolLM3": ("SmolLM3MLP", "silu"),
    "Phi3": ("Phi3MLP", "silu"),
}


def make(family: str = "Llama", **changes) -> nn.Module:
    config_class = getattr(transformers, f"{family}TextConfig", None) if family == "Gemma3" else None
    config_class = config_class or getattr(transformers, f"{family}Config")
    sizes = {
        k: v for k, v in SIZES.items() if not (k == "head_dim" and family in ("Phi3", "Qwen2", "SmolLM3"))
    }
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config_class(**{**sizes, **changes})).eval()


@dataclass
class Layer:
    threshold: Tensor
    skipped_mean: Tensor | None = None


@dataclass
class StandInPlan:
    """What `sparsify` asks of a `sparsemlp.Plan`."""

    layers: dict[str, Layer]
    checked: list[nn.Module] = field(default_factory=list)

    def check(self, model: nn.Module) -> None:
        self.checked.append(model)
