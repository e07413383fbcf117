"""What a profile of a machine is valid for, and how large the caches are that a measurement must leave."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sparsemlp import _env, _native

__all__ = ["Host", "cpu", "last_level_cache", "this"]

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_ASSUMED_CACHE = 64 * 2**20


@dataclass(frozen=True)
class Host:
    """What measured times depend on besides the code.

    Args:
        cpu: the model's name. isa: the compiled kernels' instruction set. threads: PyTorch's. torch: its version.
    """

    cpu: str
    isa: str
    threads: int
    torch: str

    @property
    def slug(self) -> str:
        """For file names, without the versions: `amd-epyc-family-25-model-17_avx512bf16_2-threads`."""
        name = re.sub(r"[^a-z0-9]+", "-", self.cpu.lower()).strip("-")
        return f"{name}_{self.isa}_{self.threads}-threads"

    def why_not(self, other: Host) -> str | None:
        """Why a profile measured on `other` is not one of this machine, but for the number of threads; or None."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if name != "threads" and mine != theirs:
                return f"it was measured with {name} {theirs!r}, this is {mine!r}"
        return None

    def __str__(self) -> str:
        return f"{self.cpu}, {self.isa}, {self.threads} thread{'' if self.threads == 1 else 's'}, torch {self.torch}"


def this(isa: int | None = None, threads: int | None = None) -> Host:
    """This machine as it is set up now; needs the compiled library."""
    number = _native.isa() if isa is None else isa
    count = torch.get_num_threads() if threads is None else threads
    return Host(cpu(), _env.ISA_NAMES[number], count, str(torch.__version__))


@functools.cache
def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name; family and model are added where the name has no model number ("AMD EPYC")."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(errors="replace").splitlines():
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


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of last-level cache in the whole machine (all instances); 64 MiB where the system does not say."""
    levels: dict[int, dict[str, int]] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
            shared = (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if size[:-1].isdigit() and size[-1] in _UNITS:
            levels.setdefault(level, {})[shared] = int(size[:-1]) * _UNITS[size[-1]]
    return sum(levels[max(levels)].values()) if levels else _ASSUMED_CACHE
