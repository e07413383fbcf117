"""What this machine can compute, and why not where it cannot: `python -m sparsemlp.info` or `sparsemlp info`.

`machine` names the machine beside every measured number; `report` is the page; `main` prints it.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import sparsemlp
from sparsemlp import _env, _native, _triton, ops
from sparsemlp._op import Op

__all__ = ["machine", "main", "notices", "operators", "report"]

OPTIONAL = ("transformers", "accelerate", "safetensors", "tqdm", "gguf", "matplotlib", "triton")


def machine() -> dict[str, str | int]:
    """This machine, for the head of a table of measured numbers.

    Returns:
        `cpu` (model name), `cores` (that this process may run on), `threads` (PyTorch's), `isa` (in use by the compiled
        kernels, or "none"), `gpu` (name, or "none"), `torch`, `python`, `sparsemlp` (versions), `system` and `date`
        (UTC, YYYY-MM-DD); all plain strings and ints.
    """
    return {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "isa": "none" if _native.problem() else _env.ISA_NAMES[_native.isa()],
        "gpu": _gpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sparsemlp": sparsemlp.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_name() -> str:
    if not torch.cuda.is_available():
        return "none"
    return f"{torch.cuda.get_device_name()} × {torch.cuda.device_count()}"


def operators() -> list[Op]:
    """Every operator that the package registers, by name."""
    found: dict[str, Op] = {}
    for module in pkgutil.iter_modules(ops.__path__, "sparsemlp.ops."):
        if module.name.rpartition(".")[2].startswith("_"):
            continue  # a backend's launcher, not a contract
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Op):
                found[value.name] = value
    return [found[name] for name in sorted(found)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def notices() -> list[str]:
    """What may surprise here, as sentences."""
    return [*_shadowed(), *_stale()]


def _shadowed() -> Iterator[str]:
    """A folder ./sparsemlp is imported before the installed package."""
    here = Path(sparsemlp.__file__).resolve().parent
    for entry in sys.path:
        other = (Path(entry or ".") / "sparsemlp").resolve()
        if other != here and (other / "__init__.py").is_file():
            yield (
                f"{here} is imported and hides the package installed in {other}, because its parent folder comes first "
                "on Python's path; run from another folder to use the installed one"
            )
            return


def _stale() -> Iterator[str]:
    """The sources of a checkout are newer than the library built from them."""
    here = Path(sparsemlp.__file__).resolve().parent
    library = next(iter(here.glob("_C*.so")), None)
    sources = [p for p in (here.parent / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".inl")]
    if library is not None and any(p.stat().st_mtime > library.stat().st_mtime for p in sources):
        yield f"{library.name} is older than csrc/; build it again with `python setup.py build_ext --inplace`"


def _environment() -> Iterator[tuple[str, str, str, str]]:
    """(variable, its value here, the values it may have, its effect), from the table in `sparsemlp._env`."""
    for row in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", _env.__doc__ or "", re.MULTILINE):
        yield row[0], os.environ.get(row[0], "not set"), row[1], row[2]


def _native_lines() -> Iterator[str]:
    problem = _native.problem()
    if problem is not None:
        yield f"  not available: {problem}"
        return
    yield f"  instruction sets this CPU supports   {', '.join(_native.isa_names())}"
    why = "set by SPARSEMLP_ISA" if _env.ISA else "the best of them"
    yield f"  instruction set in use               {_env.ISA_NAMES[_native.isa()]} ({why})"


def _operator_lines() -> Iterator[str]:
    for op in operators():
        yield f"  {op.name}"
        for backend in op.backends:
            reason = backend.machine()
            where = " and ".join(
                d for d in backend.devices if d not in backend.unasked or _triton.interpreting()
            )
            yield f"    {backend.name:<11}{f'available on {where}' if reason is None else f'not available: {reason}'}"
        yield f"    {'reference':<11}available on every device (plain PyTorch)"


def report() -> str:
    """The page that `main` prints: versions, machine, compiled kernels, operators, environment, notices."""
    host = machine()
    lines = [
        f"sparsemlp {sparsemlp.__version__} in {Path(sparsemlp.__file__).resolve().parent}",
        "",
        "versions",
    ]
    lines += [f"  {name:<14}{host[name]}" for name in ("python", "torch")]
    lines += [f"  {name:<14}{_version(name)}" for name in OPTIONAL]
    lines += ["", "machine"]
    lines += [f"  {name:<14}{host[name]}" for name in ("system", "cpu", "cores", "threads", "gpu")]
    lines += ["", "compiled CPU kernels", *_native_lines()]
    lines += [
        "",
        "operators and their backends, in the order that backend='auto' tries them",
        *_operator_lines(),
    ]
    lines += ["", "environment"]
    for variable, value, values, effect in _environment():
        lines += [f"  {variable:<21}{value}", f"  {'':<21}({values}) {effect}"]
    lines += [f"\nnotice: {sentence}" for sentence in notices()]
    return "\n".join(lines)


def main() -> int:
    """Prints `report()`; the exit status."""
    print(report())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
