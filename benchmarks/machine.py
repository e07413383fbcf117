"""The machine and the build, in words: what a result depends on besides the code."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
from pathlib import Path

import torch

import sparsemlp
from sparsemlp import _env, _native

__all__ = ["backend", "commit", "cpu", "device", "isa"]

ROOT = Path(__file__).resolve().parent.parent


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name; family and model are added where the name has no model number ("AMD EPYC")."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown CPU"
    name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*", "", name)
    name = " ".join(name.split())
    if not re.search(r"\d", name) and "cpu family" in fields:
        name += f" family {fields['cpu family']} model {fields.get('model', '?')}"
    return name


def device(threads: int) -> str:
    """The results folder of this machine, e.g. `amd-epyc-family-25-model-17_2-threads`."""
    slug = re.sub(r"[^a-z0-9]+", "-", cpu().lower()).strip("-")
    return f"{slug}_{threads}-thread{'' if threads == 1 else 's'}"


def isa() -> str:
    """The instruction set of the compiled kernels, or "none"."""
    return "none" if _native.problem() else _env.ISA_NAMES[_native.isa()]


def backend(op: str, x: torch.Tensor) -> tuple[str, str]:
    """What `auto` takes for x, and why not something faster: ("native", "") or ("reference", reasons)."""
    contract = importlib.import_module(f"sparsemlp.ops.{op}").OP
    reasons: list[str] = []
    for candidate in contract.backends:
        reason = candidate.why_not((x,))
        if reason is None:
            return candidate.name, "; ".join(reasons)
        reasons.append(f"{candidate.name}: {reason}")
    return "reference", "; ".join(reasons)


def commit() -> str:
    """The package's version and the checkout's commit (`-dirty` with local changes)."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return sparsemlp.__version__
    return f"{sparsemlp.__version__}+{done.stdout.strip()}"
