"""Trains an MLP block with sparse kernels beside its dense twin: the same losses, most products left out.

    python examples/train_step.py

Both start from the same weights and see the same batches; only the MLP's module differs.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sparsemlp.metrics import densities
from sparsemlp.nn import SparseMLP

STEPS, TOKENS, WIDTH, NEURONS = 6, 512, 256, 2048


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, NEURONS), nn.ReLU(), nn.Linear(NEURONS, WIDTH)
        nn.init.constant_(self.fc1.bias, -0.75)  # few neurons are active, as in a trained model

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def main() -> None:
    torch.manual_seed(0)
    dense = Block()
    sparse = copy.deepcopy(dense)
    sparse.mlp = SparseMLP.from_dense(sparse.mlp)  # takes over the layers: parameters and state dict stay
    blocks = (dense, sparse)
    optimizers = [torch.optim.AdamW(block.parameters(), lr=1e-3) for block in blocks]
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH)
        losses = []
        for block, optimizer in zip(blocks, optimizers, strict=True):
            loss = (block(x) - x.roll(1, dims=1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found = densities(sparse, x)
        print(
            f"step {step}: loss dense {losses[0]:.6f}, sparse {losses[1]:.6f}; of the entries "
            f"{found.activation_density:.1%} active, {found.derivative_density:.1%} with a derivative"
        )


if __name__ == "__main__":
    main()
