"""A machine's measured times, and where they are kept: `sparsemlp tune` writes a file, the package ships one per ISA.

A file that cannot be used (of another machine or version, damaged, unreadable) costs one warning and is as if it were
not there.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparsemlp import _env
from sparsemlp.router.host import Host

__all__ = ["SCHEMA", "SHIPPED", "Profile", "ProfileError", "Times", "find", "folder", "load", "path", "save"]

SCHEMA = 3
"""Of the file; a file with another one is not read."""

SHIPPED = Path(__file__).parent / "profiles"
"""Measured on a Zen 4, one file per instruction set: what is used where nothing was measured."""

_COLUMNS = (("sparse", 3), ("dense", 2), ("pytorch", 2), ("screen", 1))
"""Fields of `Times` in the file, and how many values each has for a number of tokens."""

_LARGEST = 2**31
_ADVICE = "run `sparsemlp tune` to measure this machine"


class ProfileError(ValueError):
    """A profile's file cannot be used; the message is the end of a sentence."""


@dataclass(frozen=True)
class Times:
    """What calls of one size took, in µs a call.

    Args:
        kind: the dtype of x and, where they are int8, of the weights: "bfloat16", "bfloat16/int8".
        d, f: model width D and neurons F.
        sparse: by tokens, the gated MLP when the share of neurons wanted by some token is 0, ½ and 1.
        dense, pytorch: by tokens, the gated MLP and the ungated one.
        screen: by tokens, the pass over the gate's and up projection's copies of 4 bits, the one value.
    """

    kind: str
    d: int
    f: int
    sparse: Mapping[int, tuple[float, ...]]
    dense: Mapping[int, tuple[float, ...]]
    pytorch: Mapping[int, tuple[float, ...]]
    screen: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class Profile:
    """The measured times of a machine.

    Args:
        host: what they were measured on. date: when (UTC, YYYY-MM-DD).
        read_gb_per_s: memory read by all threads.
        times: by kind and size.
        training: by dtype, the density of entries below which a training step's products are faster by lists of them.
        source: where this came from, in words; not in the file.
    """

    host: Host
    date: str
    read_gb_per_s: float
    times: tuple[Times, ...]
    training: Mapping[str, float]
    source: str = ""

    def of(self, kind: str) -> tuple[Times, ...]:
        """The sizes measured for a kind."""
        return tuple(t for t in self.times if t.kind == kind)


def folder() -> Path:
    """Where measured profiles are."""
    return _env.CACHE_DIR / "router"


def path(host: Host) -> Path:
    """The file of this machine's profile."""
    return folder() / f"{host.slug}.json"


def save(profile: Profile, file: Path) -> None:
    """Writes the file whole or not at all; an OSError says why it cannot be written."""
    from sparsemlp.demo.files import write_file

    document = {
        "schema": SCHEMA,
        "machine": asdict(profile.host),
        "date": profile.date,
        "read_gb_per_s": _digits(profile.read_gb_per_s),
        "training_break_even": {dtype: _digits(v) for dtype, v in profile.training.items()},
        "times_us": [
            {
                "kind": t.kind,
                "d": t.d,
                "f": t.f,
                **{route: _column(getattr(t, route)) for route, _ in _COLUMNS},
            }
            for t in profile.times
        ],
    }
    write_file(file, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _column(times: Mapping[int, tuple[float, ...]]) -> dict[str, list[float]]:
    return {str(tokens): [_digits(v) for v in values] for tokens, values in times.items()}


def load(file: Path, source: str) -> Profile:
    """Reads a file.

    Raises:
        ProfileError: it is damaged or of another version. OSError: it cannot be read.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise ProfileError("it is not JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ProfileError(f"its schema is {found!r}, this version reads {SCHEMA}")
    try:
        machine = document["machine"]
        host = Host(**{name: _of_type(machine[name], kind) for name, kind in _HOST.items()})
        times = tuple(_times(row) for row in document["times_us"])
        if not times:
            raise ValueError("it holds no times")
        training = {dtype: _number(v) for dtype, v in document["training_break_even"].items()}
        return Profile(
            host, str(document["date"]), _number(document["read_gb_per_s"]), times, training, source
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"it is damaged ({type(error).__name__}: {error})") from None


_HOST: dict[str, type] = {"cpu": str, "isa": str, "threads": int, "torch": str}


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind or (type(value) is int and not 0 < value < _LARGEST):
        raise ValueError(f"{value!r} is no {kind.__name__} in range")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no number above 0")
    return float(value)


def _times(row: Any) -> Times:
    columns = {}
    for route, width in _COLUMNS:
        column: dict[int, tuple[float, ...]] = {}
        for tokens, values in row[route].items():
            if len(values) != width:
                raise ValueError(f"{route} at {tokens} tokens has {len(values)} values, expected {width}")
            column[_of_type(int(tokens), int)] = tuple(map(_number, values))
        columns[route] = dict(sorted(column.items()))
    if not all(columns.values()):
        raise ValueError("a route has no times")
    return Times(_of_type(row["kind"], str), _of_type(row["d"], int), _of_type(row["f"], int), **columns)


def find(host: Host) -> Profile | None:
    """The profile to use: this machine's, else its own with another number of threads, else the shipped one.

    Returns:
        None: there is none at all for this instruction set.
    """
    own = path(host)
    others = sorted(folder().glob("*.json")) if folder().is_dir() else []
    near: list[tuple[float, Profile]] = []
    for file in sorted({own, *others}, key=lambda f: f != own):
        found = _usable(file, host, quiet=file != own)
        if found is not None and found.host.threads == host.threads:
            return found
        if found is not None:
            near.append((abs(math.log(found.host.threads / host.threads)), found))
    if near:
        return min(near, key=lambda pair: pair[0])[1]
    return _shipped(host.isa)


@functools.cache
def _shipped(isa: str) -> Profile | None:
    file = SHIPPED / f"{isa}.json"
    if not file.is_file():
        return None
    try:
        found = load(file, "")
    except (ProfileError, OSError) as error:
        warnings.warn(f"{file} cannot be used: {error}; reinstall the package, or {_ADVICE}", stacklevel=2)
        return None
    source = f"shipped with the package, measured on {found.host} ({found.date}); {_ADVICE}"
    return replace(found, source=source)


def _usable(file: Path, host: Host, *, quiet: bool) -> Profile | None:
    """A file's profile where it is this machine's; `quiet`: another machine's file is nobody's business."""
    try:
        found = load(file, f"measured on this machine ({file})")
        problem = host.why_not(found.host)
    except FileNotFoundError:
        return None
    except (ProfileError, OSError) as error:
        problem, found = str(error), None
    if problem is None:
        return found
    if not quiet:
        _warn(f"{file} is not used: {problem}; {_ADVICE}")
    return None


@functools.cache
def _warn(sentence: str) -> None:
    """Once a process, whatever the warning filters."""
    warnings.warn(sentence, stacklevel=4)
