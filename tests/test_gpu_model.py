"""The prediction: bytes against a count by hand, order, and that it never passes for a measurement."""

from __future__ import annotations

import csv
import io
import os
import random
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import gpu_model, gpus, shapes
from benchmarks.gpu_cases import DTYPES, Case
from benchmarks.gpu_proof import ROOT

SHAPE = shapes.Shape("small", 96, 640, "relu")


def residency(launch: object, gpu: gpus.Gpu, tile: int) -> tuple[int, int]:
    """Four programs a multiprocessor, a tile each: no compiler is asked."""
    return 4, 1


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bf16"), (3, "fp32"), (8, "fp16")])
def test_bytes_agree_with_a_walk_over_every_program(tokens: int, dtype: str) -> None:
    """A mask is drawn, and what each program of the two kernels reads and writes is added up, item by item."""
    case = Case("gated_mlp decode", dtype, "relu", tokens, SHAPE.d, SHAPE.f)
    select, down = case.launches()
    size, generator = DTYPES[dtype].itemsize, random.Random(tokens)
    block_t, block_f = select.constants["BLOCK_T"], select.constants["BLOCK_F"]
    wanted = [generator.random() < 0.4 for _ in range(SHAPE.f)]
    memory = l2 = 0
    seen_x = False
    items = 0
    for segment in range(select.grid[0]):
        rows = [j for j in range(segment * block_f, (segment + 1) * block_f) if j < SHAPE.f]
        active = [j for j in rows if wanted[j]]
        memory += (len(rows) + len(active)) * SHAPE.d * size  # gate and up rows
        for _ in range(2 if active else 1):  # x, for the gate and for the up rows
            l2 += tokens * SHAPE.d * size
        memory += 0 if seen_x else tokens * SHAPE.d * size
        seen_x = True
        memory += 4 + len(active) * (4 + 4 + 4 * block_t)  # count; index, tokens, hidden values
        items += len(active)
    first, second = gpu_model.traffic(case, select, down, items)
    assert first.memory == pytest.approx(memory, rel=1e-12)
    assert first.l2 == pytest.approx(l2, rel=0.05)  # which blocks have an active neuron is an expectation
    chunks, splits = down.grid
    listed = 4 * select.grid[0] + items * (4 + 4 + 4 * block_t)
    assert second.memory == pytest.approx(
        items * SHAPE.d * size + tokens * SHAPE.d * size + listed, rel=1e-12
    )
    partial = sum(2 * 4 * tokens * SHAPE.d for _ in range(splits)) if splits > 1 else 0
    assert second.l2 == pytest.approx(chunks * listed + partial, rel=1e-12)


@pytest.mark.parametrize("tokens", [1, 8])
def test_bytes_of_the_other_operators(tokens: int) -> None:
    """Counted by hand at what differs: no up rows; x alone before the rows; a gate of which channels are read."""
    d, f, size, wanted = SHAPE.d, SHAPE.f, 2, 100.0
    gated, mlp, linear, given = (
        Case(f"{op} decode", "bf16", "relu", tokens, d, f, options)
        for op, options in (("gated_mlp", ()), ("mlp", ()), ("sparse_linear", ()), ("gated_mlp", ("input",)))
    )
    both = [gpu_model.traffic(case, *case.launches(), wanted) for case in (gated, mlp, linear)]
    assert both[0][0].weights - both[1][0].weights == wanted * d * size
    assert both[1][0].weights == f * d * size
    assert both[0][1].weights == both[1][1].weights == wanted * d * size
    assert both[2][0].weights == 0
    assert both[2][1].weights == wanted * f * size
    moved = gpu_model._moves(given, given.launches(), wanted, 30.0)
    assert [traffic.weights for _, traffic in moved] == [
        0, 30 * f * size, wanted * d * size, wanted * d * size,
    ]  # fmt: skip
    written = tokens * f * 4  # pre-activations, in float32
    assert moved[1][1].memory == pytest.approx(
        30 * f * size + written + 30 * (8 + 4 * moved[0][0].constants["BLOCK_T"]) + 4 * moved[0][0].grid[0]
    )


@pytest.mark.parametrize("op", gpu_model.OPERATORS)
def test_the_other_operators_never_beat_the_byte_bound(op: str) -> None:
    gpu = gpus.get("h200")
    for shape in gpu_model.SHAPES[op]:
        for inputs in (None, 0.5) if op == "gated_mlp" else (None,):
            lines = [
                gpu_model.predict(gpu, shape, "bf16", 2, s, residency, op, inputs) for s in (0, 0.5, 0.9)
            ]
            assert all(0 < line.share_of_bound < gpu.read_share for line in lines)
            times = [line.microseconds for line in lines]
            assert times == sorted(times, reverse=True)


def test_the_byte_bound_is_every_needed_tensor_once() -> None:
    d, f, size, tokens = SHAPE.d, SHAPE.f, 2, 3
    gate, up, down, x, out = f * d, 10 * d, 10 * d, tokens * d, tokens * d
    assert gpu_model.minimum_bytes(d, f, size, tokens, 10) == size * (gate + up + down + x + out)
    linear = gpu_model.minimum_bytes(d, f, size, tokens, 10, op="sparse_linear")
    assert linear == size * (10 * f + tokens * (d + f))
    assert gpu_model.minimum_bytes(d, f, size, tokens, 10, op="mlp") == size * (gate + up + x + out)
    halved = gpu_model.minimum_bytes(d, f, size, tokens, 10, channels=d / 2)
    assert halved == size * (gate / 2 + up + down + x + out)
    assert gpu_model.union(0.5, 1) == 0.5
    assert gpu_model.union(0.5, 2) == 0.75


@pytest.mark.parametrize("name", [gpu.name for gpu in gpus.GPUS])
@pytest.mark.parametrize("tokens", gpu_model.TOKENS)
def test_sparser_is_faster_and_nothing_beats_the_byte_bound(name: str, tokens: int) -> None:
    shape = shapes.get("llama3-8b")
    lines = [
        gpu_model.predict(gpus.get(name), shape, "bf16", tokens, sparsity, residency)
        for sparsity in gpu_model.SPARSITIES
    ]
    times = [line.microseconds for line in lines]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert all(0 < line.share_of_bound < gpus.get(name).read_share for line in lines)


def test_fewer_resident_programs_are_never_faster() -> None:
    gpu, shape = gpus.get("h200"), shapes.get("llama3-8b")
    times = [
        gpu_model.predict(gpu, shape, "bf16", 1, 0.5, lambda *_, n=n: (n, 1)).microseconds for n in (1, 2, 4)
    ]
    assert times[0] > times[1] >= times[2]


def test_every_line_says_that_it_is_predicted() -> None:
    lines = [gpu_model.predict(gpus.get("h200"), SHAPE, "bf16", 1, s, residency) for s in (0.0, 0.9)]
    assert gpu_model.table(lines).startswith("PREDICTED, not measured")
    assert {line["kind"] for line in csv.DictReader(io.StringIO(gpu_model.as_csv(lines)))} == {"predicted"}


def test_predictions_stay_out_of_the_measured_results() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    target = ROOT / "benchmarks" / "results" / "predicted.csv"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_model", "--out", str(target)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "expected a file elsewhere" in done.stderr
    assert not target.exists()
    for path in (ROOT / "benchmarks" / "results").rglob("*.csv"):
        assert gpu_model.MARK not in path.read_text(encoding="utf-8"), path
