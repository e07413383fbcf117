"""Lets 4-bit copies of a gated MLP's weights choose which neurons are computed, exactly, from the full weights.

    python examples/screen.py

For a whole model: `calibrate(model, batches, target=0.7, method="screen")` and `sparsify(model, plan)`.
"""

from __future__ import annotations

import torch

import sparsemlp
from sparsemlp.ops.screen import scores
from sparsemlp.screen import pack

D, F = 512, 2048


def main() -> None:
    torch.manual_seed(0)
    w_gate, w_up, w_down_t = (torch.randn(F, D) / n**0.5 for n in (D, D, F))
    x = torch.randn(1, D)

    gate, up = (
        pack(w_gate),
        pack(w_up),
    )  # 4 bits, a scale for 32 neighbours: once, when the weights are loaded
    size = gate.nbytes + up.nbytes
    print(f"copies: {size / 2**20:.2f} MiB beside {12 * D * F / 2**20:.0f} MiB of float32 weights")

    # In earnest the threshold comes from calibration text; here from 64 random tokens.
    sample = scores(torch.randn(64, D), gate, up, F).abs().flatten()
    limit = sample.quantile(0.7)

    with torch.inference_mode():
        a, u = torch.nn.functional.silu(x @ w_gate.t()), x @ w_up.t()
        dense = (a * u) @ w_down_t
        screened = sparsemlp.gated_mlp(
            x, w_gate, w_up, w_down_t, threshold=limit, indicator="screen", screen_gate=gate, screen_up=up
        )
        by_gate = sparsemlp.gated_mlp(
            x, w_gate, w_up, w_down_t, threshold=a.abs().flatten().quantile(0.7)
        )  # CATS: as many neurons, by the gate alone
    for name, out in (("screen", screened), ("gate alone", by_gate)):
        print(
            f"{name}: error {float((out - dense).norm() / dense.norm()):.1%} with 70 % of the neurons left out"
        )


if __name__ == "__main__":
    main()
