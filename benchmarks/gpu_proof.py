"""What the kernels become on GPUs that are not here: the cases, and the committed table of their machine code.

    python -m benchmarks.gpu_proof              compile the cases of `make test` and compare with the table
    python -m benchmarks.gpu_proof --write      write the table anew; its diff shows what a change of a kernel did
    python -m benchmarks.gpu_proof --full       every activation, option, number of tokens and configuration

A new operator is one entry of `PLANS` and one line of `DEFAULT`; its kernels have one each of `INTENDED`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import gpus

if TYPE_CHECKING:
    from sparsemlp.kernels._launch import Launch

__all__ = [
    "DEFAULT",
    "DTYPES",
    "TABLE",
    "Case",
    "Row",
    "compile_all",
    "full",
    "intended",
    "read_table",
    "streams",
]

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "compile_table.csv"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FAMILIES = ("jsrelu", "silu", "weird")
"""An activation of the ReLU family, a smooth one, one with parameters."""
OPTIONS = ("token_scale", "skipped_mean", "biases", "per_neuron")
D, F = 4096, 14336
ODD = 577, 1537
"""Sizes at which no row but the first is aligned."""
INTENDED = {
    "gated_mlp_fwd_select": 2,
    "gated_mlp_fwd_down": 3,
    "gated_mlp_fwd_sum": 3,
    "gated_mlp_fwd_hidden": 8,
    "gated_mlp_fwd_repair": 3,
    "gated_mlp_fwd_tiles": 8,
    "gated_mlp_fwd_compact": 8,
    "gated_mlp_fwd_up_tiles": 2,
    "gated_mlp_fwd_down_tiles": 1,
    "activation_fwd": 6,
    "activation_bwd": 8,
}
"""Programs that a multiprocessor must hold at once in the default configuration, at least; see `intended`."""

_WEIGHTS = ("w_gate", "w_up", "w_down_t")
_STREAMS = ("p", "grad", "pre", "up", "partial")
"""What is read most where a kernel reads no weights."""


@dataclass(frozen=True)
class Case:
    """A call: launches of the plan `plan`.

    `options`: of `OPTIONS`, or "up" or "product"; `config`: (name, value) pairs over the default's.
    """

    plan: str
    dtype: str
    activation: str
    tokens: int = 1
    d: int = D
    f: int = F
    options: tuple[str, ...] = ()
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        parts = [self.plan, f"t{self.tokens}"]
        if (self.d, self.f) != (D, F):
            parts.append(f"{self.d}x{self.f}")
        return " ".join([*parts, *self.options, *(f"{k}={v}" for k, v in self.config)])

    def launches(self) -> list[Launch]:
        """From meta tensors: nothing is computed."""
        from sparsemlp.kernels import _configs

        if not self.config:
            return PLANS[self.plan](self)
        op, part = self.plan.split()
        if op == "gated_mlp" and part != "decode":
            op = "gated_mlp_prefill"
        with _configs.use(op, dict(self.config)):
            return PLANS[self.plan](self)


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
    return 1 if (kernel, arch) == ("gated_mlp_fwd_select", "gfx942") else INTENDED[kernel]


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _params(activation: str) -> Tensor | None:
    from sparsemlp import activations

    count = len(activations.get(activation).params)
    return _meta(count) if count else None


def _arguments(case: Case) -> dict[str, Any]:
    """The arguments of the gated MLP's launchers, by name."""
    dtype, has = DTYPES[case.dtype], case.options.__contains__
    d, f, biases, mean = case.d, case.f, has("biases"), has("skipped_mean")
    return {
        "x": _meta(case.tokens, d, dtype=dtype),
        "w_gate": _meta(f, d, dtype=dtype),
        "w_up": _meta(f, d, dtype=dtype),
        "w_down_t": _meta(f, d, dtype=dtype),
        "threshold": _meta(f) if has("per_neuron") else _meta(),
        "token_scale": _meta(case.tokens) if has("token_scale") else None,
        "skipped_mean": _meta(f) if mean else None,
        "skipped_out": _meta(d) if mean else None,
        "b_gate": _meta(f, dtype=dtype) if biases else None,
        "b_up": _meta(f, dtype=dtype) if biases else None,
        "b_down": _meta(d, dtype=dtype) if biases else None,
        "activation_params": _params(case.activation),
        "activation": case.activation,
        "indicator": next(filter(has, ("up", "product")), "gate"),
    }


def _decode(case: Case) -> list[Launch]:
    from sparsemlp.kernels import gated_mlp

    return gated_mlp.decode(**_arguments(case))[1]


def _sum(case: Case) -> list[Launch]:
    from sparsemlp.kernels import _configs, gated_mlp

    with _configs.use("gated_mlp", {"last_sums": False}):
        return gated_mlp.decode(**_arguments(case))[1][2:]


def _prefill(case: Case, part: str) -> list[Launch]:
    from sparsemlp.kernels import _configs, gated_mlp_tiles
    from sparsemlp.kernels import gated_mlp_prefill as prefill
    from sparsemlp.kernels._gated_mlp_rule import Rule

    a = _arguments(case)
    rule = Rule(**{name: a[name] for name in Rule._fields})
    dtype = DTYPES[case.dtype]
    key = {"tokens": case.tokens, "d": case.d, "f": case.f, "dtype": case.dtype}
    default = prefill.default(case.tokens, case.d, case.f, dtype)
    config = _configs.find("gated_mlp_prefill", torch.device("meta"), key, default)
    pre, out = _meta(case.tokens, case.f, dtype=dtype), _meta(case.tokens, case.d, dtype=dtype)
    if part == "hidden":
        return [prefill.hidden(pre, pre, rule, config)[1]]
    if part == "repair":
        return [
            prefill.repair(pre, pre, pre, a["w_down_t"], a["b_down"], a["skipped_out"], out, rule, config)
        ]
    flags, listed, counts, launches = gated_mlp_tiles.tile_list(pre, rule, config)
    products = gated_mlp_tiles.tile_products(
        a["x"], a["w_up"], a["w_down_t"], a["b_up"], a["b_down"], a["skipped_out"],
        pre, flags, listed, counts, rule, config,
    )  # fmt: skip
    return [*launches, *products[2]]


def _activation(case: Case, part: str) -> list[Launch]:
    from sparsemlp.kernels import activation

    p, params = _meta(case.tokens, case.f, dtype=DTYPES[case.dtype]), _params(case.activation)
    if part == "backward":
        return activation.backward_launches(p, p, params, case.activation)[-1]
    return activation.forward_launches(p, params, case.activation, counts=part == "counted")[-1]


PLANS: dict[str, Callable[[Case], list[Launch]]] = {
    "gated_mlp decode": _decode,
    "gated_mlp sum": _sum,
    "gated_mlp hidden": lambda case: _prefill(case, "hidden"),
    "gated_mlp repair": lambda case: _prefill(case, "repair"),
    "gated_mlp tiles": lambda case: _prefill(case, "tiles"),
    "activation forward": lambda case: _activation(case, "forward"),
    "activation counted": lambda case: _activation(case, "counted"),
    "activation backward": lambda case: _activation(case, "backward"),
}
"""A case's launches, by name."""


def _cases(plan: str, dtypes: Iterable[str], names: Iterable[str], **sizes: Any) -> tuple[Case, ...]:
    return tuple(Case(plan, dtype, name, **sizes) for dtype, name in itertools.product(dtypes, names))


DEFAULT: tuple[Case, ...] = (
    *_cases("gated_mlp decode", DTYPES, FAMILIES),
    *_cases("gated_mlp decode", ("bf16", "fp32"), ("silu",), tokens=8),
    *_cases("gated_mlp decode", ("fp16",), ("silu",), tokens=16),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), tokens=8, options=("up",)),
    *_cases("gated_mlp decode", ("bf16",), ("silu",), tokens=8, options=("product",)),
    *_cases("gated_mlp hidden", ("bf16",), FAMILIES, tokens=512),
    *_cases("gated_mlp sum", ("bf16",), ("silu",), tokens=8),
    *_cases("gated_mlp repair", ("bf16",), ("silu",), tokens=512),
    *_cases("gated_mlp tiles", ("bf16",), ("silu",), tokens=512),
    *_cases("activation forward", DTYPES, FAMILIES, tokens=512),
    *_cases("activation backward", DTYPES, FAMILIES, tokens=512),
    *_cases("activation counted", ("bf16",), ("jsrelu",), tokens=512),
)
"""What `make test` compiles, in the default configuration."""


def full() -> Iterator[Case]:
    """The matrix of `make test-full`, beside `DEFAULT`."""
    from sparsemlp import activations

    names = [*activations.ACTIVATIONS]
    for plan, tokens in (("gated_mlp decode", 1), ("gated_mlp hidden", 512), ("activation backward", 512)):
        yield from _cases(plan, ("bf16",), names, tokens=tokens)
    yield from _cases("activation counted", DTYPES, names, tokens=512)
    for tokens in (1, 2, 4, 5, 16):
        yield from _cases("gated_mlp decode", DTYPES, ("weird",), tokens=tokens, options=OPTIONS)
    for plan in ("gated_mlp hidden", "gated_mlp tiles"):
        yield Case(plan, "fp32", "silu", 512)
    for tokens in (1, 8):
        yield from _cases("gated_mlp sum", DTYPES, ("silu",), tokens=tokens, options=OPTIONS)
    for tokens, option in itertools.product((1, 8), OPTIONS):
        yield Case("gated_mlp decode", "bf16", "silu", tokens, options=(option,))
    plans = (
        ("decode", DTYPES, 1),
        ("decode", DTYPES, 8),
        ("hidden", ("bf16",), 512),
        ("repair", ("bf16",), 512),
    )
    for indicator, (plan, dtypes, tokens) in itertools.product(("up", "product"), plans):
        options = (*OPTIONS, indicator)
        yield from _cases(f"gated_mlp {plan}", dtypes, ("weird",), tokens=tokens, options=options)
    for plan in ("gated_mlp hidden", "gated_mlp repair", "gated_mlp tiles"):
        yield from _cases(plan, DTYPES, ("weird",), tokens=512, options=OPTIONS)
    for tokens, dtype in itertools.product((1, 8), DTYPES):
        yield Case("gated_mlp decode", dtype, "silu", tokens, 8192, 28672)
        yield Case("gated_mlp decode", dtype, "silu", tokens, *ODD)
    yield Case("gated_mlp tiles", "bf16", "silu", 77, *ODD)
    yield Case("activation forward", "bf16", "silu", 3, *ODD)
    yield from _configured()


def _configured() -> Iterator[Case]:
    """Every configuration that is committed, or that the tuner tries first."""
    from benchmarks.tune_spaces import SPACES, candidates
    from sparsemlp.kernels import _configs

    plans = {"gated_mlp": "gated_mlp decode", "gated_mlp_prefill": "gated_mlp tiles"}
    found = []
    for op in plans:
        for file in sorted(_configs.FOLDER.glob(f"{op}/*.json")):
            entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
            found += [(op, entry["key"], entry["config"]) for entry in entries]
        for tokens in (1, 8) if op == "gated_mlp" else (512,):
            key = {"tokens": tokens, "d": D, "f": F, "dtype": "bf16"}
            found += [(op, key, config) for config in candidates(op, key)]
    for op, key, config in found:
        default = SPACES[op].default(key)
        changed = tuple((name, value) for name, value in config.items() if default.get(name) != value)
        yield Case(plans[op], key["dtype"], "silu", key["tokens"], key["d"], key["f"], config=changed)


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
    names = [p.name for p in launch.kernel.params]
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
