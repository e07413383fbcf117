"""The MLP and layer shapes of real models, as one table.

Sizes are `hidden_size` (D), `intermediate_size` (F) and the activation of each model's public configuration file. For a
single linear layer they are its input channels (K) and its outputs (N).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "SHAPES", "Shape", "get"]

KINDS = {"gated": "a gated MLP", "mlp": "an MLP without a gate", "linear": "a single linear layer"}


@dataclass(frozen=True)
class Shape:
    """One row: D model width, F MLP width, the model's activation, and the kind of computation (of `KINDS`)."""

    name: str
    d: int
    f: int
    activation: str
    kind: str = "gated"

    @property
    def what(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]


_ROWS = (
    Shape("llama3-8b", 4096, 14336, "silu"),  # also Mistral 7B
    Shape("llama3-70b", 8192, 28672, "silu"),
    Shape("llama2-7b", 4096, 11008, "silu"),  # ProSparse and ReluLLaMA: the same sizes with relu
    Shape("tinyllama-1.1b", 2048, 5632, "silu"),
    Shape("qwen3-0.6b", 1024, 3072, "silu"),
    Shape("qwen3-8b", 4096, 12288, "silu"),
    Shape("smollm2-135m", 576, 1536, "silu"),
    Shape("smollm2-1.7b", 2048, 8192, "silu"),
    Shape("gemma2-2b", 2304, 9216, "gelu_tanh"),
    Shape("gemma3-1b", 1152, 6912, "gelu_tanh"),
    Shape("phi3-mini", 3072, 8192, "silu"),
    Shape("vit-b", 768, 3072, "gelu", "mlp"),
    Shape("opt-1.3b", 2048, 8192, "relu", "mlp"),
    Shape(
        "train-mlp", 768, 3072, "relu", "mlp"
    ),  # ViT-B's sizes with relu: forward and backward are timed on it
    Shape("train-gated", 768, 3072, "relu"),
    Shape("llama3-8b-up", 4096, 14336, "identity", "linear"),  # also its gate
    Shape("llama3-8b-down", 14336, 4096, "identity", "linear"),
    Shape("llama3-8b-q", 4096, 4096, "identity", "linear"),  # also the attention's output projection
    Shape("tiny", 64, 160, "silu"),  # no models: these check the benchmark itself
    Shape("tiny-mlp", 64, 160, "relu", "mlp"),
    Shape("tiny-linear", 64, 160, "identity", "linear"),
)

SHAPES: dict[str, Shape] = {row.name: row for row in _ROWS}
"""Every shape by name."""


def get(name: str) -> Shape:
    """The shape called `name`; ValueError naming the known ones otherwise."""
    try:
        return SHAPES[name]
    except KeyError:
        raise ValueError(f"shape is {name!r}, expected one of: {', '.join(SHAPES)}") from None
