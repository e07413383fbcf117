"""Trains a small MLP whose activation changes from ReLU to JSReLU, and watches how sparse it is.

    python examples/activation.py

λ of `mix` rises from 0 (ReLU) to 1 (JSReLU); the counts come from the pass that computes the activation.
"""

from __future__ import annotations

import torch
from torch import nn

import sparsemlp

STEPS = 60


def main() -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(16, 256), nn.Linear(256, 1)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=3e-3)
    for step in range(STEPS + 1):
        x = torch.randn(128, 16)
        lam = torch.tensor([min(1.0, 2 * step / STEPS)])
        hidden, counts = sparsemlp.activation(up(x), "mix", params=lam, counts=True)
        loss = (down(hidden).squeeze(1) - x.square().sum(1).sqrt()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            used, trained = (counts / hidden.numel()).tolist()
            print(
                f"step {step:3}: λ {lam.item():.2f}, loss {loss.item():7.3f}, {used:.1%} of the neurons active"
            )
            assert used == trained  # of these two rows: no slope where there is no value


if __name__ == "__main__":
    main()
