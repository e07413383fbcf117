"""What can be tuned: for every operator the values of its configuration that are worth a try.

A new operator is one entry in `SPACES` and one trial in `benchmarks/tune_trials.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsemlp.kernels import activation, gated_mlp, gated_mlp_prefill

__all__ = ["DTYPES", "SPACES", "Space", "candidates", "fits", "neighbors"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_DOT = 16
"""A side of `tl.dot` is at least this long."""

Config = dict[str, Any]
Key = Mapping[str, Any]


def _same(key: Key, config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Space:
    """An operator's configurations.

    Args:
        default: the operator's own for a key.
        values: by name, in the order in which they are tried.
        fits: whether a configuration is worth compiling for a key.
        effective: what the launcher makes of a configuration: two that are the same then need not both be tried.
        together: changes that are tried as they stand, at the end, by the operator's trial.
    """

    default: Callable[[Key], Config]
    values: dict[str, tuple[Any, ...]]
    fits: Callable[[Key, Config], bool] = lambda key, config: True
    effective: Callable[[Key, Config], Config] = _same
    together: tuple[Config, ...] = ()


def _decode_effective(key: Key, config: Config) -> Config:
    widest = max(16, 1 << max(0, key["d"] - 1).bit_length())
    dots = key["tokens"] >= config["dot_from"] and key["dtype"] != "fp32"
    return {
        **config,
        "block_d": min(config["block_d"], widest),
        "down_block_d": min(config["down_block_d"], widest),
        "splits": max(1, min(config["splits"], -(-key["f"] // config["block_f"]))),
        "dot_from": dots,
    }


def _decode_fits(key: Key, config: Config) -> bool:
    """Tiles that do not overflow a warp's registers by far, and hold something for every thread.

    A key's entry is the nearest one for other numbers of tokens too: what these multiply by `tl.dot` counts as well.
    """
    dots_near = key["dtype"] != "fp32" and config["dot_from"] <= gated_mlp.DECODE_TOKENS
    config = _decode_effective(key, config)
    if (config["dot_from"] and config["block_f"] < _DOT) or (dots_near and config["block_i"] < _DOT):
        return False
    tiles = (
        (config["block_f"], config["block_d"], config["select_warps"]),
        (config["block_i"], config["down_block_d"], config["down_warps"]),
    )
    return all(4 <= rows * width // (32 * warps) <= 128 for rows, width, warps in tiles)


SPACES: dict[str, Space] = {
    "gated_mlp": Space(
        lambda key: gated_mlp.default(key["tokens"], key["d"], key["f"], DTYPES[key["dtype"]]),
        {
            "block_f": (4, 8, 16, 32),
            "block_d": (128, 256, 512, 1024, 2048),
            "select_warps": (2, 4, 8),
            "select_stages": (1, 2, 3, 4, 5),
            "splits": (8, 16, 32, 64, 128),
            "down_block_d": (64, 128, 256, 512, 1024),
            "block_i": (8, 16, 32, 64),
            "down_warps": (1, 2, 4, 8),
            "down_stages": (1, 2, 3, 4, 5),
            "dot_from": (2, 17),
        },
        _decode_fits,
        _decode_effective,
    ),
    "gated_mlp_prefill": Space(
        lambda key: gated_mlp_prefill.default(key["tokens"], key["d"], key["f"], DTYPES[key["dtype"]]),
        {
            "block_f": (512, 1024, 2048, 4096),
            "warps": (2, 4, 8),
        },
        together=(
            {},
            {"tile_t": 128, "tile_f": 64, "tile_d": 128, "tile_k": 64, "tile_warps": 8, "tile_stages": 3},
            {"tile_t": 128, "tile_f": 128, "tile_d": 128, "tile_k": 64, "tile_warps": 8, "tile_stages": 3},
            {"tile_t": 128, "tile_f": 64, "tile_d": 256, "tile_k": 64, "tile_warps": 8, "tile_stages": 4},
        ),
    ),
    "activation": Space(
        lambda key: dict(activation.DEFAULT),
        {"block": (512, 1024, 2048, 4096, 8192), "warps": (2, 4, 8), "counted_blocks": (4, 8, 16, 32)},
        lambda key, config: 4 <= config["block"] // (32 * config["warps"]) <= 64,
    ),
}
"""By the operator's name in configurations."""


def fits(op: str, key: Key, config: Config) -> bool:
    """Whether a configuration is worth compiling for a key; the default always is."""
    space = SPACES[op]
    return config == space.default(key) or space.fits(key, config)


def neighbors(op: str, key: Key, center: Config) -> list[Config]:
    """What differs from a configuration in one value, without what cannot pay or changes nothing."""
    space = SPACES[op]
    seen = [space.effective(key, center)]
    found = []
    for name, values in space.values.items():
        for value in values:
            other = {**center, name: value}
            effective = space.effective(key, other)
            if effective not in seen and fits(op, key, other):
                seen.append(effective)
                found.append(other)
    return found


def candidates(op: str, key: Key) -> list[Config]:
    """The default and every configuration that tuning tries first: what may be launched on a GPU."""
    default = SPACES[op].default(key)
    changed = [{**default, **change} for change in SPACES[op].together if change]
    return [default, *neighbors(op, key, default), *changed]
