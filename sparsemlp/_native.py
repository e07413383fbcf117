"""Finds and loads the compiled library, and says why not where it cannot.

The library implements operators whose schemas `sparsemlp.ops` defines; it holds no Python symbols and is loaded with
`torch.ops.load_library`, so one file serves every PyTorch from 2.11 on.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from sparsemlp import _env

__all__ = ["isa", "isa_names", "problem"]

_FOLDER = Path(__file__).parent
_lib = torch.library.Library("sparsemlp", "FRAGMENT")
# The read-bandwidth probe: per-thread xors of a contiguous int64 tensor.
_lib.define("_read_native(Tensor words) -> Tensor")


@functools.cache
def problem() -> str | None:
    """Why the compiled library cannot be used, as a sentence, or None. Loads it on the first call."""
    if not _env.NATIVE:
        return "switched off by SPARSEMLP_NATIVE=0"
    path = _file()
    if path is None:
        reason = _FOLDER / "_native_reason.txt"
        if reason.is_file():
            return f"extension not built: {reason.read_text().strip()}"
        shadow = _shadowed_by_checkout()
        return (
            shadow
            or "extension not built: no compiled library beside the package; reinstall with a C++ compiler"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the compiled library {path.name} failed to load: {error}"
    supported = isa_names()
    if _env.ISA is not None and _env.ISA not in supported:
        return f"SPARSEMLP_ISA asks for {_env.ISA}, this CPU supports {', '.join(supported)}"
    return None


def _file() -> Path | None:
    return next(iter(sorted(_FOLDER.glob("_C*.so")) + sorted(_FOLDER.glob("_C*.pyd"))), None)


def _shadowed_by_checkout() -> str | None:
    """The current folder's ./sparsemlp hides an installed package of the same name: say so."""
    if (_FOLDER.parent / "setup.py").is_file() and (_FOLDER.parent / "csrc").is_dir():
        return (
            f"extension not built in the source tree {_FOLDER.parent}, which Python imports instead of any installed "
            "package; build it with `python setup.py build_ext --inplace` or run from another folder"
        )
    return None


@functools.cache
def isa_names() -> tuple[str, ...]:
    """The instruction sets this CPU can run, weakest first. Needs the library loaded."""
    best = ctypes.CDLL(str(_file())).sparsemlp_cpu_isa()
    return _env.ISA_NAMES[: best + 1]


@functools.cache
def isa() -> int:
    """The id of the instruction set in use: SPARSEMLP_ISA, or the best this CPU has."""
    return _env.ISA_NAMES.index(_env.ISA) if _env.ISA is not None else len(isa_names()) - 1
