"""Block sizes under which small samples exercise what only large ones would under the default."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from tests.cases import Sample

TILES = {"skip_below": 2.0, "tile_t": 16, "tile_f": 16, "tile_d": 16, "tile_k": 16}
"""For many tokens: every call through products of active tiles, with several tiles of everything."""


TRAINING_BLOCKS: dict[str, Any] = {
    "block_f": 16, "repair_block_f": 16, "repair_block_d": 16, "entry_block_f": 64, "entry_rows": 8,
    "tile_m": 16, "tile_n": 16, "tile_k": 16, "list_block_f": 32, "value_block_e": 64, "value_block_d": 16,
    "gather_block_e": 8, "gather_block_d": 16,
}  # fmt: skip
"""For training: several of everything out of small sizes."""
TRAINING_PATHS: dict[str, dict[str, Any]] = {
    "dense": {"compact": False, "gather_below": 0.0},
    "compact": {"compact": True, "gather_below": 0.0},
    "lists": {"gather_below": math.inf},
}
"""Configurations that send every training call one way."""


def training_path(path: str, *, small: bool = True) -> contextlib.AbstractContextManager[None]:
    """In the block every call of the Triton training kernels goes this way; `small`: in small blocks."""
    from sparsemlp.kernels import _configs

    return _configs.use("training", {**(TRAINING_BLOCKS if small else {}), **TRAINING_PATHS[path]})


def small_blocks(sample: Sample, backend: str) -> contextlib.AbstractContextManager[None]:
    """Blocks of a GPU kernel that make several of everything (tiles of D, segments in a split) out of small sizes.

    Where F is large, larger ones: Triton's interpreter runs programs one by one and would take half a minute. Partial
    sums are added by the last program or, where D is even, by a launch of their own.
    """
    if backend != "triton":
        return contextlib.nullcontext()
    from sparsemlp.kernels import _configs

    config = {"splits": 3, "block_f": 16, "block_i": 16, "block_d": 64, "down_block_d": 64}
    config["last_sums"] = sample.x.shape[-1] % 2 == 1
    large = sample.w_gate.shape[0] >= 1000
    return _configs.use("gated_mlp", {**config, "block_f": 256, "block_i": 64} if large else config)
