"""Makes a linear layer skip the smallest entries of its input, by two rules, and measures what that costs.

    python examples/sparse_linear.py

TEAL compares |x| with one threshold. WINA also looks at how large a channel's weights are.
"""

from __future__ import annotations

import torch
from torch import nn

from sparsemlp.nn import SparseLinear


def main() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 768, bias=False)
    linear.weight.data *= torch.rand(512) * 2  # as in trained layers, some channels weigh more
    samples, x = torch.randn(256, 512), torch.randn(64, 512)
    with torch.inference_mode():
        dense = linear(x)
        layer = SparseLinear.from_linear(linear)  # the same parameter, stored channel by channel
        for sparsity in (0.25, 0.5, 0.75):
            for name, weight_aware in (("TEAL", False), ("WINA", True)):
                layer.set_threshold(layer.threshold_for(samples, sparsity, weight_aware=weight_aware))
                skipped = (x.abs() < layer.threshold).float().mean()
                error = (layer(x) - dense).norm() / dense.norm()
                print(f"{name} skips {skipped:5.1%} of the input: relative error {error:.3f}")


if __name__ == "__main__":
    main()
