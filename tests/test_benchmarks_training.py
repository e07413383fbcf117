"""Forward and backward in the benchmark: density, fresh inputs, a gate that finds wrong gradients, ratios, targets."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import (
    gate,
    run,
    shapes,
    training,
    training_gate,
    training_memory,
    training_run,
    training_targets,
)
from benchmarks import training_report as report
from sparsemlp.testing import assert_within_budget

TINY = [
    "--op",
    "mlp",
    "--mode",
    "fwdbwd",
    "--shape",
    "tiny-mlp",
    "--tokens",
    "24",
    "--rounds",
    "1",
    "--no-compile",
]


def case(**changes: object) -> training_run.Case:
    base = training_run.Case(
        op="mlp",
        shape=shapes.get("tiny-mlp"),
        dtype="fp32",
        tokens=40,
        densities=(0.1, 1.0),
        rounds=1,
        threads=1,
        compile=False,
        memory=False,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(autouse=True)
def _threads(threads: None) -> None:
    """The thread count is put back."""


@pytest.mark.parametrize(("op", "shape"), [("mlp", "tiny-mlp"), ("gated_mlp", "tiny")])
def test_the_bias_sets_the_density_and_inputs_are_new(op: str, shape: str) -> None:
    work = training.Training(op, shapes.get(shape), torch.float32, tokens=400)
    xs = [work.fresh()[0] for _ in range(2)]
    for density in (0.02, 0.5):
        found = work.density(xs[0], work.own_leaves(density))
        assert abs(found - density) < 0.2 * density
    assert work.density(xs[0], work.own_leaves(1.0)) == 1.0
    masks = [torch.nn.functional.linear(x, work.own_leaves(0.5).firsts[0]) > 0 for x in xs]
    assert abs((masks[0] == masks[1]).float().mean().item() - 0.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "shape"), [("mlp", "tiny-mlp"), ("gated_mlp", "tiny")])
@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_right_gradients_pass_the_gate(op: str, shape: str, dtype: torch.dtype, backend: str) -> None:
    work = training.Training(op, shapes.get(shape), dtype, tokens=30)
    training_gate.check(work, (0.05, 0.5, 1.0), backend)


@pytest.mark.parametrize("wrong", range(6))
def test_a_wrong_gradient_is_found(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = training.Training("mlp", shapes.get("tiny-mlp"), torch.float32, tokens=30)
    real, calls = training_gate.step_of, []

    def step_of(forward: training.Forward, leaves: training.Leaves) -> training.Step:
        calls.append(forward)
        step = real(forward, leaves)

        def broken(inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
            found = [t.clone() for t in step(inputs)]
            found[wrong].view(-1)[3] += 1e-3 * found[wrong].abs().max()
            return found

        return broken if len(calls) == 1 else step  # this package's comes first

    monkeypatch.setattr(training_gate, "step_of", step_of)
    name = training_gate.NAMES["mlp"][wrong]
    with pytest.raises(
        gate.GateError, match=rf"mlp: no result is reported because at density 50%.*\b{name}\b"
    ):
        training_gate.check(work, (0.5,), "auto")


@pytest.mark.parametrize("op", ["mlp", "gated_mlp"])
def test_a_run_reports_every_alternative(op: str, tmp_path: Path) -> None:
    shape = shapes.get("tiny-mlp" if op == "mlp" else "tiny")
    result = training_run.run(case(op=op, shape=shape))
    assert [row.alternative for row in result.rows] == ["eager", "own_10", "own_100"]
    eager, own = result.row("eager"), result.row("own_10")
    assert own.vs_eager == pytest.approx(eager.p50_ms / own.p50_ms)
    assert own.vs_best_dense == own.vs_eager
    assert eager.density is None
    assert own.density == pytest.approx(0.1, abs=0.03)
    assert result.row("own_100").density == 1.0
    assert "sparsemlp, density 10 %" in report.table(result)
    path = tmp_path / "r.csv"
    report.write_csv(result, path)
    again = report.read_csv(path)
    assert again.row("own_10").p50_ms == pytest.approx(own.p50_ms, rel=1e-4)
    assert again.row("eager").density is None
    assert again.facts["mode"] == "fwdbwd"
    path.write_text("a\n1\n")
    with pytest.raises(ValueError, match="expected what --mode fwdbwd writes"):
        report.read_csv(path)


def test_the_compiled_peer_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    work = training.Training("mlp", shapes.get("tiny-mlp"), torch.float32, tokens=16)
    x, grad = work.fresh()
    leaves = work.dense_leaves()
    try:
        setting, step, seconds = training.compiled(work, {"default": {}})
    except RuntimeError as error:
        pytest.skip(str(error))
    assert setting == "default"
    assert seconds["default"] > 0
    truth = training_gate.truth(work, x, grad, leaves)
    eager = training.step_of(work.dense, leaves)((x, grad))
    for ours, peer, right in zip(step((x, grad)), eager, truth, strict=True):
        assert_within_budget(ours, peer, right)
    monkeypatch.setattr(torch, "compile", lambda *a, **b: 1 / 0)
    with pytest.raises(RuntimeError, match=r"left out because no setting compiled here \(ZeroDivisionError"):
        training.compiled(work)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_the_peak_holds_what_a_step_keeps() -> None:
    """At least the hidden activations, p and the gradients; far less than ten times as much."""
    shape, tokens = shapes.get("tiny-mlp"), 20_000
    peak = training_memory.peak_mb("mlp", shape.name, "fp32", tokens, 0.5, "eager")
    assert peak is not None
    least = 4 * tokens * (shape.f + 2 * shape.d) / 1e6
    assert least < peak < 10 * least


# Targets


def _results(factor: float, peak: float = 90.0) -> dict[str, report.Result]:
    results = {}
    for dtype in training_targets.DTYPES:
        rows = [report.Row("eager", "PyTorch eager", 1, 1, 1, peak_mb=100.0)]
        for t in training_targets.TARGETS:
            if t.dtype == dtype:
                numbers = {"vs_best_dense": factor * t.must, "density": t.density / 100, "peak_mb": peak}
                rows.append(report.Row(f"own_{t.density:g}", "", 1, 1, 1, **numbers))
        results[dtype] = report.Result({}, rows)
    return results


def test_targets_pass_and_fail_by_their_musts() -> None:
    text, reached = training_targets.evaluate(_results(1.01))
    assert reached
    assert text.count("pass") == len(training_targets.TARGETS) + 2
    text, reached = training_targets.evaluate(_results(0.99))
    assert not reached
    assert text.count("FAIL") == len(training_targets.TARGETS)
    text, reached = training_targets.evaluate(_results(1.01, peak=101.0))
    assert not reached
    assert text.count("FAIL") == 2
    assert training_targets.evaluate(_results(2.0))[0].count("aim reached") == 6


# The command line


def _tests(monkeypatch: pytest.MonkeyPatch, path: Path, body: str) -> None:
    path.write_text(body)
    monkeypatch.setattr(training_run, "conformance", lambda: gate.Conformance((str(path),), "not triton"))


def test_a_green_gate_lets_the_result_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tests(monkeypatch, tmp_path / "test_green.py", "def test_it(): pass\n")
    monkeypatch.setattr(training_run.training_memory, "peak_mb", lambda *_: 12.0)
    assert run.main([*TINY, "--density", "10,50", "--out", str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out").rglob("training/*.csv"))
    assert names == [f"mlp_tiny-mlp_fwdbwd_{dtype}_t24.csv" for dtype in ("bf16", "fp32")]
    drawn = len(list((tmp_path / "out").rglob("*.png")))
    assert drawn == (2 if importlib.util.find_spec("matplotlib") else 0)
    out = capsys.readouterr().out
    assert "1 passed" in out
    assert "peak MB" in out


@pytest.mark.parametrize("red", ["tests", "gradients"])
def test_nothing_is_reported_on_a_red_gate(
    red: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tests(monkeypatch, tmp_path / "test_red.py", f"def test_it(): assert {red != 'tests'}\n")
    if red == "gradients":
        monkeypatch.setattr(training_gate, "assert_within_budget", lambda *a, **b: _fail())
    assert run.main([*TINY, "--out", str(tmp_path / "out")]) == 1
    assert "no result is reported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _fail() -> None:
    raise AssertionError("wrong")


def test_the_gate_runs_tests_that_exist() -> None:
    found = training_run.conformance()
    assert found.select == "not triton"
    assert all((gate.ROOT / path).is_file() for path in found.paths)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "sparse_linear"], "expected one of mlp, gated_mlp"),
        (["--shape", "tiny"], "expected an MLP without a gate"),
        (["--density", "0,5"], "0 < percent ≤ 100"),
        (["--indicator", "up"], "--indicator is given"),
        (["--weights", "int8"], "--weights is given"),
        (["--targets", "--density", "2"], "leave these options out"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(["--op", "mlp", "--mode", "fwdbwd", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
