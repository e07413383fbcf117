"""The machine of a GPU run, into machine.json, and whether a Triton kernel can be built and launched on it at all."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shutil
import subprocess
from pathlib import Path

import torch

import sparsemlp
from benchmarks import machine
from benchmarks.gpu_device import Device, options, read_bytes_per_second, start
from benchmarks.report import write_atomic
from sparsemlp import _native

__all__ = ["main"]


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = ["--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def facts(where: Device) -> dict[str, object]:
    """Everything that numbers depend on besides the code."""
    nominal = where.datasheet_bytes_per_second()
    found: dict[str, object] = {
        "status": where.status,
        "gpu": where.name,
        "driver, clocks, power": _driver(),
        "l2_bytes": where.l2_bytes(),
        "free_bytes": where.free_bytes(),
        "datasheet_gb_per_s": "unknown" if nominal is None else nominal / 1e9,
        "read_gb_per_s": read_bytes_per_second(where) / 1e9,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "transformers": _version("transformers"),
        "pytest": _version("pytest"),
        "hypothesis": _version("hypothesis"),
        "python": platform.python_version(),
        "cpu": machine.cpu(),
        "compiled CPU kernels": _native.problem() or "available",
        "c_compiler": next((c for c in ("gcc", "cc", "clang") if shutil.which(c)), "none"),
        "compute_sanitizer": shutil.which("compute-sanitizer") or "none",
        "version": machine.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if not where.dry:
        properties = torch.cuda.get_device_properties(where.torch_device)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
    return found


def _first_kernel(where: Device) -> str:
    """Why not even a small call of a kernel works here, or ""."""
    p = torch.linspace(-1, 1, 100, device=where.torch_device)
    try:
        out = sparsemlp.activation(p, "relu", backend="triton")
        where.synchronize()
    except Exception as error:  # no compiler, no driver, an unknown GPU: Triton has no one error for it
        text = " ".join(str(error).split())[:300]
        hint = "; install gcc" if "compiler" in text.lower() or "gcc" in text.lower() else ""
        return f"no Triton kernel can be launched here ({type(error).__name__}: {text}){hint}"
    return "" if torch.equal(out, p.relu()) else "the first Triton kernel, a relu, computes something else"


def main(argv: list[str] | None = None) -> int:
    """Writes machine.json; 1 where no kernel runs."""
    args = options(__doc__).parse_args(argv)
    where, _ = start(args)
    found = facts(where)
    problem = _first_kernel(where)
    found["problem"] = problem
    path: Path = args.out / "machine.json"
    write_atomic(
        path, lambda partial: partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    )
    print("\n".join(f"{name:24} {value}" for name, value in found.items()))
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    raise SystemExit(main())
