"""The machine and the build, in words: what a result depends on besides the code."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import sparsemlp
from sparsemlp import _env, _native

__all__ = ["Neighbours", "backend", "backends", "commit", "cpu", "device", "isa"]

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


class Neighbours:
    """How busy everybody else kept the CPUs since this object was made (Linux; 0 elsewhere).

    Other processes, and time stolen by other virtual machines. Threads of a process that must share its cores wait for
    one another at every barrier, so this hurts alternatives unequally: not even ratios are fair then.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Seconds of all CPUs: in total, busy, and busy for this process."""
        try:
            ticks = [int(field) for field in self._stat.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, 0.0
        second = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]  # idle and waiting for input
        mine = os.times()
        return sum(ticks) / second, (sum(ticks) - idle) / second, mine.user + mine.system

    def share(self) -> float:
        """The fraction of all CPU time since then that others used, 0 to 1."""
        total, busy, mine = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return min(1.0, max(0.0, (busy - mine) / total)) if total > 0 else 0.0


def isa() -> str:
    """The instruction set of the compiled kernels, or "none"."""
    return "none" if _native.problem() else _env.ISA_NAMES[_native.isa()]


def backend(op: str, x: torch.Tensor, *, name: str = "OP") -> tuple[str, str]:
    """What `auto` takes for x, and why not something faster: ("native", "") or ("reference", reasons).

    Args:
        op: a module of `sparsemlp.ops`, whose contract is called `name`.
    """
    contract = getattr(importlib.import_module(f"sparsemlp.ops.{op}"), name)
    reasons: list[str] = []
    for candidate in contract.backends:
        if x.device.type in candidate.unasked:
            continue
        reason = candidate.why_not((x,))
        if reason is None:
            return candidate.name, "; ".join(reasons)
        reasons.append(f"{candidate.name}: {reason}")
    return "reference", "; ".join(reasons)


def backends(op: str) -> tuple[str, ...]:
    """What the operator's `backend=` may be."""
    return importlib.import_module(f"sparsemlp.ops.{op}").OP.choices


def commit() -> str:
    """The package's version and the checkout's commit (`-dirty` with local changes)."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return sparsemlp.__version__
    return f"{sparsemlp.__version__}+{done.stdout.strip()}"
