"""A small GPT-like decoder over bytes, and its twin with sparse kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp.nn import Activation, SparseMLP

__all__ = ["Decoder", "DenseL1", "Sizes", "with_sparse_kernels"]

VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    """What the decoder is made of: width D, MLP width 4·D."""

    width: int
    layers: int
    heads: int
    length: int


class MLP(nn.Module):
    """fc2(act(fc1(x))), with this package's activation: dense kernels get the fused φ as well."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = Activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, activation: str) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp: nn.Module = MLP(width, activation)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Logits (batch, length, 256) of the byte after each of `tokens` (batch, length)."""

    def __init__(self, sizes: Sizes, activation: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, sizes.width)
        self.place = nn.Parameter(torch.zeros(sizes.length, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes, activation) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of the bytes in `tokens` (batch, length + 1), in nats a byte."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def with_sparse_kernels(model: Decoder, activation: str) -> Decoder:
    """A copy of the model with the same weights, whose MLPs run by `sparsemlp.mlp`, forward and backward."""
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        assert isinstance(block, Block)
        block.mlp = SparseMLP.from_dense(block.mlp, activation=activation)
    return twin


class DenseL1:
    """For a dense model what `sparsemlp.metrics.l1_penalty` is for a sparse one, and its densities.

    The hidden activations are there already, so the term costs one pass over them.
    """

    def __init__(self, model: Decoder) -> None:
        self._hidden: list[Tensor] = []
        acts = [block.mlp.act for block in model.blocks if isinstance(block.mlp, MLP)]
        keep: Callable[..., None] = lambda _, args, out: self._hidden.append(out)  # noqa: E731, one line is enough
        self._hooks = [act.register_forward_hook(keep) for act in acts]

    def __enter__(self) -> DenseL1:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def __call__(self) -> Tensor:
        hidden, self._hidden = self._hidden, []
        return torch.stack([h.abs().mean() for h in hidden]).mean()

    def densities(self) -> list[float]:
        """Of each layer the fraction of entries that are not 0."""
        hidden, self._hidden = self._hidden, []
        return [(h != 0).float().mean().item() for h in hidden]
