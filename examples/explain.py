"""Asks what would compute a layer's calls, and why, before and after it was seen to be sparse.

    python examples/explain.py

`sparsemlp tune` measures the machine; without it the times that come with the package are used.
"""

from __future__ import annotations

import torch

import sparsemlp

D, F = 256, 1024


def main() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(F, D) / D**0.5 for _ in range(3)]
    few, many = torch.randn(1, D), torch.randn(64, D)
    limit = torch.tensor(2.5)  # which one neuron in a hundred reaches
    with torch.inference_mode():
        print(sparsemlp.explain(sparsemlp.gated_mlp, few, *weights, threshold=limit), "\n")
        print(sparsemlp.explain(sparsemlp.gated_mlp, many, *weights, threshold=limit), "\n")
        for _ in range(20):
            routed = sparsemlp.gated_mlp(many, *weights, threshold=limit)
        after = sparsemlp.explain(sparsemlp.gated_mlp, many, *weights, threshold=limit)
        print(f"after 20 calls: {after.route}, {after.why}\n  density: {after.density_source}")
        with sparsemlp.set_router("off"):
            fixed = sparsemlp.gated_mlp(many, *weights, threshold=limit)
    # Whatever is chosen, the result is the same up to rounding.
    torch.testing.assert_close(routed, fixed)


if __name__ == "__main__":
    main()
