"""Launch configurations: measured ones from `configs/<op>/<gpu>.json`, else the operator's conservative default.

A file is written by `benchmarks/tune.py` and holds, for one GPU, entries of a key (sizes and dtype), the fastest
configuration found for it and its time. A call takes the entry of its dtype that is nearest in the logarithm of the
sizes. Nothing is tuned inside a call. What cannot be read in a file, or lies outside the limits below, costs one
warning and is as if it were not there. Values inside the limits are taken as they are: where a GPU cannot launch them
(together they need more shared memory than it has, say), Triton's error is the caller's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["FOLDER", "Config", "Key", "find", "gpu_name", "path", "read_from", "use"]

FOLDER = Path(__file__).parent / "configs"
"""The configurations that come with the package."""

Config = dict[str, Any]
"""Values by name; which names is up to the operator. Names with `block`, `tile` or `warps` are powers of two."""
Key = Mapping[str, "int | str"]
"""What a configuration is for: sizes (int) and `dtype` ("bf16", "fp16", "fp32")."""

_FAR = 8.0
"""Nearer than this in the sum of log₂ ratios, or the default is used: a shape 256 times as big is another problem."""
_MOST_SIZE = 2**62
_MOST_BLOCK = 8192
_MOST = {"warps": 16, "stages": 8, "counted_blocks": 1024}
"""By the whole name or its last word. Sixteen warps are 1024 threads on AMD, as many as a program can have."""
_MOST_OTHER = 65535
"""`splits` for example: the programs of a grid in its second dimension."""
_LEAST_DOT = 16
"""Sides of `tl.dot`: `block_d`, `down_block_d` and tiles."""
_REMEMBERED = 4096
_BY_HAND = ("training",)
"""What `benchmarks/tune.py` does not tune: nobody is told to, and a file that is not there is no surprise."""

_folder = FOLDER
_forced: dict[str, Config] = {}
_found: dict[tuple[Any, ...], Config] = {}


def gpu_name(device: torch.device) -> str:
    """The GPU as in file names, e.g. "nvidia-h200"; "cpu" for Triton's interpreter."""
    if device.type != "cuda":
        return device.type
    return _slug(torch.cuda.get_device_name(device))


@functools.cache
def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def path(op: str, gpu: str) -> Path:
    """Where the configurations of an operator on a GPU are."""
    return _folder / op / f"{gpu}.json"


def read_from(folder: Path | None) -> None:
    """Every later call reads configurations from this folder; None: from the package's own, also if already read."""
    global _folder
    _folder = FOLDER if folder is None else folder
    _entries.cache_clear()
    _found.clear()


def _is_key(key: Any) -> bool:
    return (
        isinstance(key, dict)
        and isinstance(key.get("dtype"), str)
        and all(type(v) is int and 0 <= v < _MOST_SIZE for k, v in key.items() if k != "dtype")
    )


def _remedy(op: str) -> str:
    return "correct the file" if op in _BY_HAND else f"run `python -m benchmarks.tune --op {op}` for this GPU"


@functools.cache
def _entries(op: str, gpu: str) -> tuple[tuple[Key, Config], ...]:
    """The file's entries; none, after one warning, where there is no usable file."""
    file = path(op, gpu)
    advice = f"{op}: the conservative default is used; {_remedy(op)}"
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["entries"]
        pairs = [(entry["key"], entry["config"]) for entry in listed]
    except FileNotFoundError:
        if gpu not in ("cpu", "meta") and op not in _BY_HAND:
            warnings.warn(f"no measured configuration for {gpu}; {advice}", stacklevel=2)
        return ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warnings.warn(f"{file} cannot be used ({type(error).__name__}: {error}); {advice}", stacklevel=2)
        return ()
    good = tuple((key, config) for key, config in pairs if _is_key(key) and isinstance(config, dict))
    if len(good) < len(pairs):
        warnings.warn(
            f"{file}: {len(pairs) - len(good)} of {len(pairs)} entries are left out, whose key is not sizes (whole "
            "numbers below 2**62) and a dtype, or whose config is no object; correct or delete them",
            stacklevel=2,
        )
    return good


def _distance(key: Key, other: Key) -> float:
    if key.get("dtype") != other.get("dtype") or key.keys() != other.keys():
        return math.inf
    sizes = [(v, other[k]) for k, v in key.items() if k != "dtype"]
    return sum(abs(math.log2(max(int(a), 1) / max(int(b), 1))) for a, b in sizes)


def _limits(name: str) -> tuple[int, int, bool]:
    """The least and the most that a whole number may be, and whether it must be a power of two."""
    kind = name.rpartition("_")[2]
    for known in (name, kind):
        if known in _MOST:
            return 1, _MOST[known], kind != "stages"
    if name in ("block_d", "down_block_d") or name.startswith("tile_"):
        return _LEAST_DOT, _MOST_BLOCK, True
    return (1, _MOST_BLOCK, True) if "block" in name else (1, _MOST_OTHER, False)


def _usable(name: str, value: Any, default: Any) -> bool:
    """Whether a value has the default's type and is within the limits of its name."""
    if type(default) is float:
        return type(value) in (int, float) and -_MOST_SIZE < value < _MOST_SIZE
    if type(default) is not int:
        return type(value) is type(default)
    least, most, power = _limits(name)
    return type(value) is int and least <= value <= most and not (power and value & (value - 1))


def _nearest(op: str, gpu: str, key: Key, default: Config) -> Config:
    entries = _entries(op, gpu)
    if not entries:
        return default
    nearest, config = min(entries, key=lambda entry: _distance(key, entry[0]))
    if _distance(key, nearest) > _FAR:
        return default
    known = {name: value for name, value in config.items() if name in default}
    bad = [name for name, value in known.items() if not _usable(name, value, default[name])]
    if bad:
        warnings.warn(
            f"{path(op, gpu)}: {', '.join(f'{name} = {reprlib.repr(known[name])}' for name in bad)} cannot be "
            f"launched; the default is used instead; {_remedy(op)}",
            stacklevel=2,
        )
    return {**default, **{name: value for name, value in known.items() if name not in bad}}


def find(op: str, device: torch.device, key: Key, default: Config) -> Config:
    """The configuration for a call: `default`, with what the nearest measured entry says instead.

    The default must depend on the key alone: the answer for a key is remembered. Read it, do not change it.
    """
    if op in _forced:
        return {**default, **_forced[op]}
    asked = (op, device, *key.values())
    config = _found.get(asked)
    if config is None:
        if len(_found) >= _REMEMBERED:
            _found.clear()
        config = _found[asked] = _nearest(op, gpu_name(device), key, default)
    return config


@contextlib.contextmanager
def use(op: str, config: Config) -> Iterator[None]:
    """Within the block every call of the operator uses these values over its defaults: for tuning and for tests."""
    before = dict(_forced)
    _forced[op] = config
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
