"""Weights in huge pages: the same outputs, read faster (Linux 6.1 or later; elsewhere nothing changes)."""

import time

import torch

import sparsemlp
from sparsemlp.pages import use_huge_pages

D, F, LAYERS = 768, 3072, 16  # together larger than most caches
layers = [[torch.randn(F, D, dtype=torch.bfloat16) / 28 for _ in range(3)] for _ in range(LAYERS)]
x = torch.randn(1, D, dtype=torch.bfloat16)


def milliseconds() -> float:
    """Of one token through all layers, the median of 30."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        for w_gate, w_up, w_down_t in layers:
            sparsemlp.gated_mlp(x, w_gate, w_up, w_down_t)
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[15]


with torch.inference_mode():
    expected, before = sparsemlp.gated_mlp(x, *layers[0]), milliseconds()
    size = sum(use_huge_pages(weight) for layer in layers for weight in layer)
    assert torch.equal(sparsemlp.gated_mlp(x, *layers[0]), expected)
    print(f"{size >> 20} MB in huge pages: {before:.2f} ms before, {milliseconds():.2f} ms after")
