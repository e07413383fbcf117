"""Block sizes under which small samples exercise what only large ones would under the default."""

from __future__ import annotations

import contextlib

from tests.cases import Sample

TILES = {"skip_below": 2.0, "tile_t": 16, "tile_f": 16, "tile_d": 16, "tile_k": 16}
"""For many tokens: every call through products of active tiles, with several tiles of everything."""


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
