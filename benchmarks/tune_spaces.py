"""What can be tuned: for every operator the values of its configuration that are worth a try.

A new operator is one entry in `SPACES` and one trial in `benchmarks/tune_trials.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsemlp.kernels import _masked, _rows, activation, gated_mlp, gated_mlp_prefill, mlp, sparse_linear

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


def _widest(size: int) -> int:
    return max(_DOT, 1 << max(0, size - 1).bit_length())


def _rows_effective(key: Key, config: Config, rows: int, columns: int) -> Config:
    """What all calls of few tokens have in common: the rows of a weight, added for a list of them."""
    return {
        **config,
        "down_block_d": min(config["down_block_d"], _widest(columns)),
        "splits": max(1, min(config["splits"], -(-rows // config["block_f"]))),
        "dot_from": key["tokens"] >= config["dot_from"] and key["dtype"] != "fp32",
    }


def _mlp_effective(key: Key, config: Config) -> Config:
    effective = _rows_effective(key, config, key["f"], key["d"])
    return {**effective, "block_d": min(config["block_d"], _widest(key["d"]))}


def _linear_effective(key: Key, config: Config) -> Config:
    return _rows_effective(key, config, key["k"], key["n"])


def _holds_something(rows: int, width: int, warps: int) -> bool:
    """A tile that does not overflow a warp's registers by far, and holds something for every thread."""
    return 4 <= rows * width // (32 * warps) <= 128


def _rows_fit(key: Key, config: Config, effective: Config) -> bool:
    """A key's entry is the nearest one for other numbers of tokens too: what these multiply by `tl.dot` counts."""
    dots_near = key["dtype"] != "fp32" and config["dot_from"] <= _rows.MOST_TOKENS
    if (effective["dot_from"] and config["block_f"] < _DOT) or (dots_near and config["block_i"] < _DOT):
        return False
    return _holds_something(effective["block_i"], effective["down_block_d"], effective["down_warps"])


def _mlp_fits(key: Key, config: Config) -> bool:
    effective = _mlp_effective(key, config)
    return _rows_fit(key, config, effective) and _holds_something(
        effective["block_f"], effective["block_d"], effective["select_warps"]
    )


def _linear_fits(key: Key, config: Config) -> bool:
    return _rows_fit(key, config, _linear_effective(key, config))


_ROWS: dict[str, tuple[Any, ...]] = {
    "splits": (8, 16, 32, 64, 128),
    "down_block_d": (64, 128, 256, 512, 1024),
    "block_i": (8, 16, 32, 64),
    "down_warps": (1, 2, 4, 8),
    "down_stages": (1, 2, 3, 4, 5),
    "dot_from": (2, 17),
}
_SELECT: dict[str, tuple[Any, ...]] = {
    "block_f": (4, 8, 16, 32),
    "block_d": (128, 256, 512, 1024, 2048),
    "select_warps": (2, 4, 8),
    "select_stages": (1, 2, 3, 4, 5),
}
_MASKED: dict[str, tuple[Any, ...]] = {"block_f": (512, 1024, 2048, 4096), "warps": (2, 4, 8)}


SPACES: dict[str, Space] = {
    "gated_mlp": Space(
        lambda key: gated_mlp.default(key["tokens"], key["d"], key["f"], DTYPES[key["dtype"]]),
        {**_SELECT, **_ROWS},
        _mlp_fits,
        _mlp_effective,
    ),
    "gated_mlp_prefill": Space(
        lambda key: gated_mlp_prefill.default(key["tokens"], key["d"], key["f"], DTYPES[key["dtype"]]),
        _MASKED,
        together=(
            {},
            {"tile_t": 128, "tile_f": 64, "tile_d": 128, "tile_k": 64, "tile_warps": 8, "tile_stages": 3},
            {"tile_t": 128, "tile_f": 128, "tile_d": 128, "tile_k": 64, "tile_warps": 8, "tile_stages": 3},
            {"tile_t": 128, "tile_f": 64, "tile_d": 256, "tile_k": 64, "tile_warps": 8, "tile_stages": 4},
        ),
    ),
    "mlp": Space(
        lambda key: mlp.default(key["tokens"], key["d"], key["f"], DTYPES[key["dtype"]]),
        {**_SELECT, **_ROWS},
        _mlp_fits,
        _mlp_effective,
    ),
    "mlp_prefill": Space(lambda key: dict(_masked.DEFAULT), _MASKED),
    "sparse_linear": Space(
        lambda key: sparse_linear.default(key["tokens"], key["k"], key["n"], DTYPES[key["dtype"]]),
        {"block_f": (16, 32, 64), "select_warps": (1, 2), **_ROWS},
        _linear_fits,
        _linear_effective,
    ),
    "sparse_linear_prefill": Space(lambda key: dict(_masked.DEFAULT), _MASKED),
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
