"""Every environment variable the package reads, parsed once at import.

`TRITON_INTERPRET` is Triton's own and is read when a kernel is defined: see `sparsemlp._triton`.

| variable | values | effect |
| --- | --- | --- |
| `SPARSEMLP_ISA` | portable, avx2, avx512, avx512bf16 | use this instruction set instead of the best one |
| `SPARSEMLP_NATIVE` | 1 (default), 0 | 0: behave as if the compiled library were missing |
| `SPARSEMLP_CACHE_DIR` | a folder | where `sparsemlp tune` and the demo keep files (default: the user's cache folder) |
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_DIR", "ISA", "ISA_NAMES", "NATIVE"]

ISA_NAMES = ("portable", "avx2", "avx512", "avx512bf16")
"""In the order of the compiled library's ids, weakest first."""


def _choice(variable: str, values: tuple[str, ...], default: str | None) -> str | None:
    value = os.environ.get(variable)
    if value is None or value == "":
        return default
    if value not in values:
        raise ValueError(
            f"environment variable {variable} is {value!r}, expected one of: {', '.join(values)}"
        )
    return value


ISA: str | None = _choice("SPARSEMLP_ISA", ISA_NAMES, None)
NATIVE: bool = _choice("SPARSEMLP_NATIVE", ("0", "1"), "1") == "1"
CACHE_DIR = Path(
    os.environ.get("SPARSEMLP_CACHE_DIR")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsemlp"
)
