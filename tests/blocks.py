"""Block sizes under which small samples exercise what only large ones would under the default."""

from __future__ import annotations

import contextlib

from tests.cases import Sample


def small_blocks(sample: Sample, backend: str) -> contextlib.AbstractContextManager[None]:
    """Blocks of a GPU kernel that make several of everything (tiles of D, segments in a split) out of small sizes.

    Where F is large, larger ones: Triton's interpreter runs programs one by one and would take half a minute.
    """
    if backend != "triton":
        return contextlib.nullcontext()
    from sparsemlp.kernels import _configs

    large = sample.w_gate.shape[0] >= 1000
    config = {"splits": 3, "block_f": 16, "block_i": 16, "block_d": 64, "down_block_d": 64}
    return _configs.use("gated_mlp", {**config, "block_f": 256, "block_i": 64} if large else config)
