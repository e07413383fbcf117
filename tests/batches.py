"""What a token's result may depend on: never on its batch mates' numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

ALONE = 4
"""Batches of up to so many tokens add like a single one, on every instruction set."""


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_independent(sample: Any, function: Callable[..., Tensor], backend: str) -> None:
    """Token i of the sample has the same bits when every other token's numbers are others; of few tokens also alone."""
    out = sample.run(function, backend=backend)
    tokens = sample.x.shape[0]
    for i in range(tokens) if tokens <= ALONE else (0, tokens // 2, tokens - 1):
        x = sample.x * -3 + 0.5
        x[i] = sample.x[i]
        others = replace(sample, x=x).run(function, backend=backend)
        assert torch.equal(bits(others[i]), bits(out[i])), f"token {i} of {tokens} with other mates"
        if tokens <= ALONE:
            alone = sample.token(i).run(function, backend=backend)[0]
            assert torch.equal(bits(alone), bits(out[i])), f"token {i} of {tokens} alone"
