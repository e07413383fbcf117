"""Compiles a `Launch` for a GPU that need not be here, and reads from the machine code what it would use.

A launch made from meta tensors is specialised as Triton's own launcher would (argument types, divisibility by 16,
integers equal to 1) and compiled to a cubin or an AMD code object. Only in a process without TRITON_INTERPRET: kernels
decorated for the interpreter cannot be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from benchmarks import gpus

if TYPE_CHECKING:
    from sparsemlp.kernels._launch import Launch

__all__ = ["Machine", "compile_launch", "disassembly", "loops", "machine_code", "signature", "weight_lines"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TENSOR = {"tcgen05.mma": "tcgen05", "wgmma.mma_async": "wgmma", "mma.sync": "mma.sync", "v_mfma": "mfma"}
"""Tensor-core instructions, the strongest first: of sm_100, of sm_90, of every NVIDIA GPU, of AMD's."""

_ASSIGN = re.compile(r"\s*(?P<name>%[\w$]+) = (?P<op>[\w.]+)(?P<rest>.*)")
_CARRIED = re.compile(r"(%[\w$]+) = (%[\w$]+)")
_REFERENCE = re.compile(r"loc\((#loc\d*)\)\s*$")
_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_FILE_LINE = re.compile(r'"([^"]+)":(\d+):\d+')
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s.*?"([^"]+)"(?:\s+md5\s+\S+|\s+0x\S+)?\s*$', re.MULTILINE)
_LINE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s")
_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(?P<count>\d))?\.[bsuf](?P<bits>\d+)\s")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^\]]*\][^\]]*\],\s*(?P<bytes>0x[\da-f]+|\d+)")
_AMD_LOAD = re.compile(
    r"^\s*(?:global|buffer)_load_(?P<lds>lds_)?(?P<size>dwordx4|dwordx3|dwordx2|dword|u?short|[us]byte)"
)
_AMD_BITS = {
    "dwordx4": 128,
    "dwordx3": 96,
    "dwordx2": 64,
    "dword": 32,
    "ushort": 16,
    "short": 16,
    "ubyte": 8,
    "sbyte": 8,
}


@dataclass(frozen=True)
class Machine:
    """What a compiled launch is made of.

    `registers` a thread; `shared` bytes a program; `spills`: bytes of stack (NVIDIA) or registers (AMD); `weight_bits`:
    the narrowest load of the arguments asked for, 0 where none was found; `tensor`: the tensor-core instruction, or
    "none"; `asynchronous`: whether loads are copied to shared memory ahead of their use.
    """

    registers: int
    shared: int
    spills: int
    weight_bits: int
    tensor: str
    asynchronous: bool


def signature(launch: Launch, backend: type) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list]]:
    """(types, constexpr values, attributes) of a launch's arguments, as Triton's launcher specialises them."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list] = {}
    values = iter(launch.args)
    for i, param in enumerate(launch.kernel.params):
        if param.is_constexpr:
            types[param.name], constants[param.name] = "constexpr", launch.constants[param.name]
            continue
        value = next(values)
        special, key = native_specialize_impl(
            backend,
            value,
            param.is_const,
            not param.do_not_specialize,
            not param.do_not_specialize_on_alignment,
        )
        types[param.name] = special
        if special == "constexpr":
            constants[param.name] = value
        elif isinstance(key, str) and (parsed := backend.parse_attr(key)):
            attributes[(i,)] = parsed
    return types, constants, attributes


def compile_launch(launch: Launch, arch: str, *, aligned: bool = True) -> tuple[Any, list[str]]:
    """Triton's compiled kernel of a launch, and the names of the arguments that are not constants in it.

    Args:
        arch: one of `gpus.ARCHITECTURES`.
        aligned: False compiles as if nothing were known of alignment.
    """
    gpu = gpus.of_architecture(arch)
    launch = replace(launch, constants=launch.constants_for(gpu.backend))
    target = GPUTarget(gpu.backend, gpu.target, gpu.warp_size)
    types, constants, attributes = signature(launch, type(make_backend(target)))
    source = ASTSource(
        fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes if aligned else {}
    )
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": launch.fp_fusion,
    }
    compiled = triton.compile(source, target=target, options=options)
    return compiled, [name for name, kind in types.items() if kind != "constexpr"]


def _locations(ttir: str) -> dict[str, tuple[str, int] | None]:
    """(file name, line) of every location of a module; of an inlined call, where the callee's code is."""
    raw = dict(_LOCATION.findall(ttir))

    def resolve(name: str, depth: int = 0) -> tuple[str, int] | None:
        body = raw.get(name, "")
        if found := _FILE_LINE.search(body):
            return Path(found[1]).name, int(found[2])
        inner = re.search(r"#loc\d*", body)  # callsite(#callee at #caller) or "name"(#loc)
        return resolve(inner[0], depth + 1) if inner and depth < 20 else None

    return {name: resolve(name) for name in raw}


def weight_lines(ttir: str, wanted: frozenset[int]) -> set[tuple[str, int]]:
    """Where in the source the pointer arguments `wanted` (by place among the compiled arguments) are loaded from.

    Every pointer of Triton's IR is followed back, through offsets and loops, to the argument that it began as.
    """
    places = _locations(ttir)
    root: dict[str, int] = {}
    lines: set[tuple[str, int]] = set()
    for line in ttir.splitlines():
        if "tt.func" in line:
            arguments = re.findall(r"(%[\w$]+): (\S+)", line.split("tt.func", 1)[1])
            root.update({name: i for i, (name, kind) in enumerate(arguments) if kind.startswith("!tt.ptr")})
            continue
        for name, start in _CARRIED.findall(line) if "iter_args" in line else ():
            if start in root:
                root[name] = root[start]
        if not (found := _ASSIGN.match(line)):
            continue
        operands = re.findall(r"%[\w$]+", found["rest"])
        begins = root.get(operands[0]) if operands else None
        if begins is None:
            continue
        if found["op"] == "tt.load":
            reference = _REFERENCE.search(line)
            place = places.get(reference[1]) if reference else None
            if begins in wanted and place is not None:
                lines.add(place)
        elif found["op"] in (
            "tt.addptr",
            "tt.splat",
            "tt.broadcast",
            "tt.expand_dims",
            "tt.reshape",
            "tt.bitcast",
        ):
            root[found["name"]] = begins
    return lines


def _loads(code: str) -> list[tuple[tuple[str, int] | None, int, bool]]:
    """(source line, bits a thread, copied to shared memory) of every load from global memory in PTX or AMD assembly.

    Lines come from `.loc`; those within inline assembly count on line by line from where it begins, and are wrong. (The
    disassembly of a cubin has only these, therefore PTX, whose loads ptxas leaves as wide as they are.)
    """
    files = {number: Path(name).name for number, name in _FILE.findall(code)}
    at: tuple[str, int] | None = None
    found = []
    inline = False
    for line in code.splitlines():
        if "inline asm" in line:
            inline = "begin" in line
        elif mark := _LINE.match(line):
            if not inline:
                at = files.get(mark[1], ""), int(mark[2])
        elif load := _LOAD.search(line):
            found.append((at, int(load["count"] or 1) * int(load["bits"]), False))
        elif copy := _COPY.search(line):
            found.append((at, 8 * int(copy["bytes"], 0), True))
        elif load := _AMD_LOAD.match(line):
            found.append((at, _AMD_BITS[load["size"]], bool(load["lds"])))
    return found


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a cubin's kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, f"cuobjdump says nothing of registers: {usage!r}"
    return int(found[1]), int(found[2])


def machine_code(launch: Launch, arch: str, weights: tuple[str, ...], *, aligned: bool = True) -> Machine:
    """Compiles a launch and reads its machine code.

    Args:
        weights: names of arguments whose loads `Machine.weight_bits` is about.
        aligned: see `compile_launch`.
    """
    compiled, names = compile_launch(launch, arch, aligned=aligned)
    if arch.startswith("gfx"):
        code = compiled.asm["amdgcn"]
        fields = r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
        count = {key: int(number) for key, number in re.findall(fields, code)}
        registers, spills = (
            count["vgpr_count"],
            count["vgpr_spill_count"] + count["private_segment_fixed_size"],
        )
    else:
        code = compiled.asm["ptx"]
        registers, spills = _usage(compiled.asm["cubin"])
    wanted = frozenset(i for i, name in enumerate(names) if name in weights)
    lines = weight_lines(compiled.asm["ttir"], wanted)
    loads = _loads(code)
    bits = [bits for at, bits, _ in loads if at in lines]
    tensor = next((name for text, name in _TENSOR.items() if text in code), "none")
    shared = compiled.metadata.shared
    return Machine(
        registers, shared, spills, min(bits, default=0), tensor, any(ahead for _, _, ahead in loads)
    )


def disassembly(launch: Launch, arch: str) -> str:
    """SASS of a launch for an NVIDIA GPU."""
    compiled, _ = compile_launch(launch, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = [str(_TOOLS / "nvdisasm"), "-c", file.name]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def loops(launch: Launch, arch: str) -> list[list[str]]:
    """The bodies of a launch's loops, in SASS: from a label to a jump back to it; inner ones also in outer ones."""
    lines = disassembly(launch, arch).splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    bodies = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump[1], i) < i:
            bodies.append(lines[labels[jump[1]] : i + 1])
    return bodies
