"""The Triton kernels compiled for GPUs that need not be here: what their machine code uses, against a committed table.

Here kernels belong to Triton's interpreter (see conftest), so they are compiled in processes of their own.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from benchmarks import gpu_cases, gpu_proof, gpus
from benchmarks.gpu_proof import Row

FLAGS_ONLY = ("gated_mlp_fwd_compact",)
ELEMENTWISE = (
    "activation_fwd",
    "activation_bwd",
    "masked_fwd",
    "gated_mlp_fwd_tiles",
    "screen_fwd_quantize",
    "training_bwd_entries",
    "training_living",
    "training_count",
    "training_fill",
)
CODES = ("screen_fwd_scores",)
TENSOR = {  # (architecture, rows of the tile): 64 and more, or 16
    ("sm_80", 64): "mma.sync",
    ("sm_80", 16): "mma.sync",
    ("sm_90", 64): "wgmma",
    ("sm_90", 16): "mma.sync",
    ("sm_100", 64): "tcgen05",
    ("sm_100", 16): "mma.sync",
    ("gfx942", 64): "mfma",
    ("gfx942", 16): "mfma",
}


@pytest.fixture(scope="module")
def compiled() -> list[Row]:
    return gpu_proof.compile_all()


def elsewhere(code: str) -> object:
    """What Python code prints as JSON in a process without the interpreter; it finds benchmarks imported."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    names = "gpu_cases, gpu_compile, gpu_proof"
    preamble = f"import json\nfrom dataclasses import asdict, replace\nfrom benchmarks import {names}\n"
    done = subprocess.run(
        [sys.executable, "-c", preamble + code],
        cwd=gpu_proof.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wrong(rows: list[Row], spills: int = 0) -> list[str]:
    """What breaks a limit of the chip, spills more, or cannot run: a sentence each."""
    found = []
    for row in rows:
        gpu = gpus.of_architecture(row.arch)
        where = f"{row.case} {row.kernel} {row.dtype} {row.activation} {row.arch}"
        if (
            row.registers > gpu.registers_per_thread
            or row.shared > gpu.shared_per_program
            or row.resident < 1
        ):
            found.append(
                f"{where}: {row.registers} registers, {row.shared} bytes of shared memory do not fit"
            )
        if row.spills > spills:
            found.append(f"{where}: spills {row.spills}")
    return found


def narrow(rows: list[Row]) -> list[str]:
    """What does not load weight rows 128 bits a thread; activations 64 at least (512 bytes an AMD wave). Products of
    many tokens take codes a group of few words at a time, from the caches: a word at least."""
    found = []
    for row in rows:
        of_x = row.kernel == "select_fwd" and row.case.startswith("sparse_linear")  # a few bytes a program
        needed = 0 if row.kernel in FLAGS_ONLY or of_x else 64 if row.kernel in ELEMENTWISE else 128
        needed = 32 if row.kernel in CODES else needed
        if row.weight_bits < needed:
            found.append(f"{row.case} {row.kernel} {row.dtype} {row.arch}: {row.weight_bits}-bit loads")
    return found


def test_the_cases_are_what_was_promised(compiled: list[Row]) -> None:
    assert len(compiled) <= 380
    assert len({row.key for row in compiled}) == len(compiled)
    for op in ("select_fwd", "activation_fwd", "activation_bwd"):
        found = {(row.dtype, row.activation, row.arch) for row in compiled if row.kernel == op}
        assert found >= {
            (dtype, activation, arch)
            for dtype in gpu_cases.DTYPES
            for activation in gpu_cases.FAMILIES
            for arch in gpus.ARCHITECTURES
        }


def test_the_machine_code_is_the_table_s(compiled: list[Row]) -> None:
    """With the Triton version of the table exactly; `python -m benchmarks.gpu_proof --write` after a wanted change."""
    version, table = gpu_proof.read_table()
    assert {row.key for row in compiled} == {*table}
    if triton.__version__ == version:
        changed = [f"{table[row.key]} became {row}" for row in compiled if row != table[row.key]]
        assert not changed, "\n".join(changed)


def test_nothing_spills_and_everything_fits(compiled: list[Row]) -> None:
    assert wrong(compiled) == []


def test_a_multiprocessor_holds_the_intended_programs(compiled: list[Row]) -> None:
    assert {row.kernel for row in compiled} == {*gpu_proof.INTENDED}
    assert [row for row in compiled if row.resident < gpu_proof.intended(row.kernel, row.arch)] == []


def test_rows_are_loaded_128_bits_at_a_time(compiled: list[Row]) -> None:
    assert narrow(compiled) == []


def test_tensor_cores_multiply_where_tl_dot_is_meant(compiled: list[Row]) -> None:
    seen = collections.Counter()
    for row in compiled:
        few = " decode t8" in row.case or " decode t16" in row.case
        of_x = row.kernel == "select_fwd" and row.case.startswith("sparse_linear")
        many = (row.case, row.kernel) == ("gated_mlp decode t16", "select_fwd")
        rows = 64 if many or row.kernel.endswith(("up_tiles", "down_tiles", "scores", "product")) else 16
        dot = (few and not of_x and row.kernel != "screen_fwd_quantize") or rows == 64
        if not dot:
            assert row.tensor == "none", row
        elif row.dtype == "fp32":  # IEEE float32, which only AMD's matrix cores multiply
            assert row.tensor in ("none", "mfma"), row
        else:
            assert row.tensor == TENSOR[row.arch, rows], row
            seen[row.tensor] += 1
    assert {*seen} == {"mma.sync", "wgmma", "tcgen05", "mfma"}


# The checks themselves


def test_the_checks_can_fail(compiled: list[Row]) -> None:
    bad = elsewhere("""
case = gpu_cases.Case("gated_mlp decode", "bf16", "silu", 1)
select = case.launches()[0]
wide = replace(select, constants={**select.constants, "BLOCK_D": 16384})
names = gpu_proof.streams(select)
print(json.dumps({
    "good": asdict(gpu_compile.machine_code(select, "sm_90", names)),
    "unaligned": asdict(gpu_compile.machine_code(select, "sm_90", names, aligned=False)),
    "unaligned_amd": asdict(gpu_compile.machine_code(select, "gfx942", names, aligned=False)),
    "huge": asdict(gpu_compile.machine_code(wide, "sm_90", names)),
    "huge_amd": asdict(gpu_compile.machine_code(wide, "gfx942", names)),
}))
""")
    assert bad["good"]["weight_bits"] == 128
    assert bad["good"]["spills"] == 0
    assert bad["unaligned"]["weight_bits"] < 128
    assert bad["unaligned_amd"]["weight_bits"] < 128
    assert bad["huge"]["spills"] > 0
    assert bad["huge_amd"]["spills"] > 0
    fields = {k: v for k, v in bad["huge"].items() if k != "asynchronous"}
    row = Row("bad", "select_fwd", "bf16", "silu", "sm_90", resident=0, **fields)
    assert len(wrong([row])) == 2
    fields = {k: v for k, v in bad["unaligned"].items() if k != "asynchronous"}
    assert len(narrow([Row("bad", "select_fwd", "bf16", "silu", "sm_90", resident=1, **fields)])) == 1


def test_disassembled_code_agrees_with_what_is_read_from_ptx() -> None:
    """As many loads of each width, and the tensor-core instruction."""
    found = elsewhere("""
import re
out = []
for case, place in (("gated_mlp decode", 0), ("gated_mlp tiles", 2)):
    launch = gpu_cases.Case(case, "bf16", "silu", 1 if case.endswith("decode") else 512).launches()[place]
    code = gpu_compile.disassembly(launch, "sm_90")
    loads = [b for _, b, _ in gpu_compile._loads(gpu_compile.compile_launch(launch, "sm_90")[0].asm["ptx"])]
    widest = len(re.findall(r"LDG(?:STS)?[.][A-Z.]*128", code))
    out.append((loads.count(128), widest, "HGMMA" in code, "STL" in code))
print(json.dumps(out))
""")
    (vector, sass, _, spilled), (tiles, tiles_sass, wgmma, tiles_spilled) = found
    assert vector == sass > 0
    assert tiles == tiles_sass > 0
    assert wgmma
    assert not spilled
    assert not tiles_spilled


def test_four_products_of_int8_are_one_instruction() -> None:
    """What the compilers do not find by themselves, and the interpreter cannot run; the constants are the arch's."""
    found = elsewhere("""
out = {}
for bits in (3, 4, 8):
    case = gpu_cases.Case("gated_mlp decode", "bf16", "silu", 1, options=(f"screen{bits}/32",))
    quantize, select, rows = case.launches()
    out[bits] = (
        gpu_compile.disassembly(select, "sm_90").count("IDP.4A.S8.S8"),
        gpu_compile.compile_launch(select, "gfx942")[0].asm["amdgcn"].count("v_dot4_i32_i8"),
    )
print(json.dumps(out))
""")
    assert {*found} == {"3", "4", "8"}
    for nvidia, amd in found.values():  # 32 inputs of 4 neurons for gate and up: 2 · 4 · 8
        assert nvidia >= 64
        assert amd >= 64


def test_parked_registers_are_not_touched_in_loops() -> None:
    """Where the compiler lets a screen's select spill, it does between loops: `test_the_full_matrix_compiles`."""
    bodies = elsewhere("""
out = []
for dtype, tokens, bits in (("bf16", 2, 4), ("fp32", 8, 4), ("bf16", 8, 3)):
    options = (*gpu_cases.OPTIONS, f"screen{bits}/32")
    select = gpu_cases.Case("gated_mlp decode", dtype, "weird", tokens, options=options).launches()[1]
    out.append(gpu_compile.loops(select, "sm_90"))
print(json.dumps(out))
""")
    for loops in bodies:
        assert len(loops) >= 5  # groups for gate and for up, tokens, full rows of both
        assert any("IDP.4A" in line for loop in loops for line in loop)
        assert not any("STL" in line or "LDL" in line for loop in loops for line in loop)


def test_quantized_tokens_are_compiled_without_fused_products() -> None:
    """x · factor is rounded before it is rounded to an integer, and quotients are IEEE's."""
    alone, fused = elsewhere("""
quantize = gpu_cases.Case("gated_mlp decode", "fp32", "silu", 1, options=("screen4/32",)).launches()[0]
out = []
for launch in (quantize, replace(quantize, fp_fusion=True)):
    ptx = gpu_compile.compile_launch(launch, "sm_90")[0].asm["ptx"]
    out.append({name: ptx.count(name) for name in ("mul.rn.f32", "fma.rn.f32", "div.rn.f32")})
print(json.dumps(out))
""")
    assert alone["mul.rn.f32"] > 0  # PTX's assembler fuses no product whose rounding is named
    assert alone["fma.rn.f32"] == 0
    assert alone["div.rn.f32"] > 0
    assert fused["fma.rn.f32"] > 0


def test_residency_follows_from_registers_shared_memory_and_warps() -> None:
    h200, amd = gpus.get("h200"), gpus.get("mi300x")
    assert h200.resident(32, 0, 4) == 16  # 64 warps
    assert h200.resident(128, 0, 4) == 4
    assert h200.resident(129, 0, 4) == 3  # registers in steps of 8
    assert h200.resident(32, 100 * 1024, 4) == 2
    assert h200.resident(32, 228 * 1024, 4) == h200.resident(256, 0, 4) == 0
    assert amd.resident(64, 0, 4) == 8
    assert amd.resident(129, 0, 4) == 3
    assert amd.resident(512, 0, 4) == 1
    assert amd.resident(32, 40 * 1024, 4) == 1
    with pytest.raises(ValueError, match="expected one of: a100"):
        gpus.get("h300")


@pytest.mark.slow
def test_the_full_matrix_compiles() -> None:
    rows = gpu_proof.compile_all("full")
    odd = f"{gpu_cases.ODD[0]}x{gpu_cases.ODD[1]}"
    default = [row for row in rows if "=" not in row.case]  # what the tuner tries may be bad: it measures
    assert len(default) < len(rows)
    # ptxas parks one register in a few of hundreds of variants, once a program; by a screen, whose select has the
    # most loops, up to twelve between them, which gives a multiprocessor one program more
    screened = [row for row in default if " screen" in row.case]
    assert 0 < len(screened) < len(default)
    assert wrong([row for row in default if row not in screened], spills=8) == []
    assert wrong(screened, spills=48) == []
    assert narrow([row for row in default if odd not in row.case]) == []
