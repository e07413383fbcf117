"""What the kernels become on GPUs that are not here: the cases, and the committed table of their machine code.

    python -m benchmarks.gpu_proof              compile the cases of `make test` and compare with the table
    python -m benchmarks.gpu_proof --write      write the table anew; its diff shows what a change of a kernel did
    python -m benchmarks.gpu_proof --full       every activation, option, number of tokens and configuration

`benchmarks/gpu_cases.py` lists what is compiled.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from benchmarks import gpus
from benchmarks.gpu_cases import DEFAULT, Case, full

if TYPE_CHECKING:
    from sparsemlp.kernels._launch import Launch

__all__ = ["INTENDED", "ROOT", "TABLE", "Row", "compile_all", "intended", "read_table", "streams"]

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "compile_table.csv"
INTENDED = {
    "screen_fwd_quantize": 8,
    "screen_fwd_scores": 2,
    "select_fwd": 2,
    "rows_fwd": 3,
    "rows_fwd_sum": 3,
    "masked_fwd": 8,
    "masked_fwd_repair": 3,
    "gated_mlp_fwd_tiles": 8,
    "gated_mlp_fwd_compact": 8,
    "gated_mlp_fwd_up_tiles": 2,
    "gated_mlp_fwd_down_tiles": 1,
    "training_bwd_entries": 4,
    "training_repair": 2,
    "training_living": 8,
    "training_product": 1,
    "training_count": 8,
    "training_fill": 4,
    "training_values": 4,
    "training_gather": 4,
    "activation_fwd": 6,
    "activation_bwd": 8,
}
"""Programs that a multiprocessor must hold at once in the default configuration, at least; see `intended`."""

_WEIGHTS = ("w_gate", "w_up", "w_down_t", "weight_t", "weight", "factor", "codes_gate", "codes_up")
_STREAMS = ("p", "grad", "pre", "up", "partial", "x", "left", "right")
"""What is read most where a kernel reads no weights."""


@dataclass(frozen=True)
class Row:
    """What a kernel of a case became on an architecture: a line of the table.

    `resident`: programs that a multiprocessor holds at once. The other columns: see `gpu_compile.Machine`.
    """

    case: str
    kernel: str
    dtype: str
    activation: str
    arch: str
    registers: int
    shared: int
    spills: int
    resident: int
    weight_bits: int
    tensor: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.case, self.kernel, self.dtype, self.activation, self.arch


def intended(kernel: str, arch: str) -> int:
    """`INTENDED` on an architecture: with few KB of shared memory a CU holds one program of a pipelined `select`."""
    return 1 if (kernel, arch) == ("select_fwd", "gfx942") else INTENDED[kernel]


def _jobs(cases: Iterable[Case]) -> list[tuple[Case, Launch, str]]:
    """(case, launch, architecture), each kernel once: of the same specialisation only the first is kept."""
    found: dict[object, tuple[Case, Launch, str]] = {}
    for case in cases:
        for launch in case.launches():
            kinds = tuple(
                a.dtype if isinstance(a, Tensor) else None if a is None else (a == 1, a % 16 == 0, a < 2**31)
                for a in launch.args
            )
            constants = tuple(sorted((k, getattr(v, "__name__", v)) for k, v in launch.constants.items()))
            key = launch.name, kinds, constants, launch.num_warps, launch.num_stages
            for arch in gpus.ARCHITECTURES:
                found.setdefault((key, arch), (case, launch, arch))
    return [*found.values()]


def streams(launch: Launch) -> tuple[str, ...]:
    """The arguments of a launch that must be read 16 bytes at a time: weights, else activations."""
    names = [name for name, value in launch.arguments.items() if value is not None]
    weights = tuple(name for name in names if name in _WEIGHTS)
    return weights or tuple(name for name in names if name in _STREAMS)


def rows(cases: Iterable[Case], part: int = 0, parts: int = 1) -> Iterator[Row]:
    """Compiles every `parts`-th kernel of the cases, from the `part`-th."""
    from benchmarks.gpu_compile import machine_code

    for case, launch, arch in _jobs(cases)[part::parts]:
        machine = machine_code(launch, arch, streams(launch))
        resident = gpus.of_architecture(arch).resident(machine.registers, machine.shared, launch.num_warps)
        yield Row(
            case.name, launch.name.strip("_").removesuffix("_kernel"), case.dtype, case.activation, arch,
            machine.registers, machine.shared, machine.spills, resident, machine.weight_bits, machine.tensor,
        )  # fmt: skip


def compile_all(which: str = "default", processes: int | None = None) -> list[Row]:
    """The rows of "default" or "full", made in processes of their own, which have no TRITON_INTERPRET and no cache."""
    processes = processes or max(1, min(8, len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_proof", "--worker", which, f"{part}/{processes}"],
                cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for part in range(processes)
        ]  # fmt: skip
        ended = [(*process.communicate(), process.returncode) for process in started]
    for _, complaint, code in ended:
        if code != 0:
            raise RuntimeError(f"a kernel does not compile:\n{complaint[-4000:]}")
    return sorted((Row(**row) for out, _, _ in ended for row in json.loads(out)), key=lambda row: row.key)


def read_table(path: Path = TABLE) -> tuple[str, dict[tuple[str, ...], Row]]:
    """(the Triton version that the table is of, its rows by key)."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    number = {f.name for f in fields(Row) if f.type == "int"}
    found = [
        Row(**{k: int(v) if k in number else v for k, v in line.items()}) for line in csv.DictReader(lines)
    ]
    return first.removeprefix("# triton "), {row.key: row for row in found}


def write_table(found: list[Row], version: str, path: Path = TABLE) -> None:
    """Replaces the table."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(f"# triton {version}\n")
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--full", action="store_true", help="the whole matrix; it has no table")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        which, part = arguments.worker
        cases = DEFAULT if which == "default" else [*full()]
        json.dump([asdict(row) for row in rows(cases, *map(int, part.split("/")))], sys.stdout)
        return 0
    import triton

    found = compile_all("full" if arguments.full else "default")
    if arguments.write:
        write_table(found, triton.__version__)
    before = read_table()[1] if TABLE.is_file() else {}
    changed = [row for row in found if arguments.full or before.get(row.key) != row]
    print(*("  ".join(map(str, asdict(row).values())) for row in changed), sep="\n")
    what = "all listed" if arguments.full else f"{len(changed)} not as in {TABLE.relative_to(ROOT)}"
    print(f"{len(found)} kernels compiled with Triton {triton.__version__}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
