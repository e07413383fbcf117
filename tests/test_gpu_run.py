"""The GPU run works from end to end: all of it, on the CPU in Triton's interpreter, at tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import gpu_check, gpu_device, gpu_rows, gpu_run, tune_trials
from benchmarks.gpu_operators import OPERATORS
from benchmarks.gpu_rows import Row
from sparsemlp.info import operators

ROOT = Path(__file__).resolve().parent.parent
BACKWARD = ("activation_bwd", "activation_counts")
"""Operators that are covered with the one they belong to."""


def _tree() -> dict[str, int]:
    """Every file of the repository but caches, with its time."""
    skipped = {
        ".git",
        ".venv",
        "__pycache__",
        ".pytest_cache",
        ".hypothesis",
        ".ruff_cache",
        ".mypy_cache",
        "build",
    }
    found = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".venv")]
        found |= {f"{folder}/{name}": os.stat(f"{folder}/{name}").st_mtime_ns for name in files}
    return found


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], set[str]]:
    """A dry run: its folder, its output, and what it changed in the folders that it could have written to."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    before = _tree()
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_run.sh"), "--dry", str(out)],
        capture_output=True, text=True, cwd=out.parent, timeout=400, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    mine = ("kernels/configs", "benchmarks/results")
    changed = {p for p, t in _tree().items() if before.get(p) != t and any(m in p for m in mine)}
    new = {p for p in _tree().keys() - before.keys() if not p.endswith((".py", ".md", ".pyc"))}
    return out, done, changed | new


def test_every_stage_is_fine(dry: Any) -> None:
    out, done, _ = dry
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    stages = json.loads((out / "stages.json").read_text())
    assert [stage["name"] for stage in stages] == [stage.name for stage in gpu_run.stages(out, dry=True)]
    assert {stage["outcome"] for stage in stages} == {"ok"}, stages


def test_every_file_says_that_it_is_no_measurement(dry: Any) -> None:
    out, done, _ = dry
    assert gpu_device.DRY in done.stdout.splitlines()[-1]
    names = [path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if path.is_file()]
    tables = ["activation_tuned.csv", "decode_default.csv", "decode_tuned.csv", "prefill_tuned.csv"]
    configs = [f"configs/{op}/cpu.json" for op in sorted(tune_trials.TRIALS)]
    facts = ["checks.json", "conformance.json", "machine.json"]
    assert names == sorted([*tables, *configs, *facts, "log.txt", "stages.json"])
    for name in (*configs, *facts):
        assert json.loads((out / name).read_text())["status"] == gpu_device.DRY, name
    for name in tables:
        rows = gpu_rows.read(out / name)
        assert rows, name
        assert {row.status for row in rows} == {gpu_device.DRY}, name
        for row in rows:
            assert row.us is not None, row
            assert row.us > 0, row
            assert not row.note.startswith(("failed", "WRONG")), row
    assert "WRONG" not in (out / "log.txt").read_text()


def test_everything_was_checked(dry: Any) -> None:
    out, _, _ = dry
    checks = json.loads((out / "checks.json").read_text())
    assert set(checks.values()) == {gpu_device.DRY, "passed"}, checks
    conformance = json.loads((out / "conformance.json").read_text())
    assert conformance["failures"] == []
    assert conformance["passed"] >= 10
    assert conformance["cases"] > 100


def test_the_tuned_stages_used_what_was_tuned(dry: Any) -> None:
    out, _, _ = dry
    entries = json.loads((out / "configs" / "activation" / "cpu.json").read_text())["entries"]
    assert all(entry["us"]["this"] > 0 for entry in entries)
    used = [json.loads(row.config) for row in gpu_rows.read(out / "activation_tuned.csv") if row.config]
    assert used
    assert {row.configs for row in gpu_rows.read(out / "decode_tuned.csv")} == {"tuned"}


def test_nothing_was_written_into_the_repository(dry: Any) -> None:
    assert dry[2] == set()


def test_every_operator_is_in_the_run() -> None:
    """An operator with a Triton backend is one entry in one list."""
    with_triton = {op.name for op in operators() if any(b.name == "triton" for b in op.backends)}
    assert with_triton - set(BACKWARD) == {operator.name for operator in OPERATORS}


# What must not go wrong where nobody can repair it


def _run(
    tmp_path: Path, stages: list[gpu_run.Stage], monkeypatch: pytest.MonkeyPatch, budget: str = "60"
) -> int:
    monkeypatch.setattr(gpu_run, "stages", lambda out, dry: stages)
    return gpu_run.main([str(tmp_path / "out"), "--dry", "--budget", budget])


def _shell(name: str, script: str, **options: Any) -> gpu_run.Stage:
    return gpu_run.Stage(
        name, ("/bin/sh", "-c", script), 30, timed=False, dry_seconds=options.pop("s", 20), **options
    )


def test_a_failing_stage_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [_shell("one", "echo reason; exit 7"), _shell("two", "echo fine")]
    assert _run(tmp_path, stages, monkeypatch) == 3
    outcomes = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert [o["outcome"] for o in outcomes] == ["FAILED", "ok"]
    assert outcomes[0]["sentence"] == "exit code 7: reason"
    printed = capsys.readouterr().out
    assert printed.index("=== two") < printed.index("=== results")
    assert (tmp_path / "out" / "log.txt").read_text().strip() == printed.strip()


def test_what_must_be_right_decides_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        _run(tmp_path, [_shell("conformance", "exit 1", must=True), _shell("two", "true")], monkeypatch) == 1
    )
    assert _run(tmp_path, [_shell("two", "true")], monkeypatch) == 0
    assert _run(tmp_path, [], monkeypatch) == 3


def test_a_hanging_stage_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "_KEPT", 2.0)
    pid = tmp_path / "pid"
    begin = time.monotonic()
    code = _run(
        tmp_path,
        [_shell("one", f"sleep 99 & echo $! > {pid}; wait"), _shell("two", "true")],
        monkeypatch,
        "9",
    )
    assert time.monotonic() - begin < 25
    assert code == 0  # such a stage ends when the time does
    outcomes = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert [o["outcome"] for o in outcomes] == ["stopped", "skipped"]
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_an_end_from_outside_still_prints_the_table(tmp_path: Path) -> None:
    script = (
        "import sys; from benchmarks import gpu_run as g\n"
        "g.stages = lambda out, dry: [g.Stage('one', ('/bin/sleep', '60'), 60, timed=False, dry_seconds=60)]\n"
        f"sys.exit(g.main([{str(tmp_path)!r}, '--dry']))"
    )
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while "=== one" not in run.stdout.readline():
        pass
    time.sleep(0.5)
    run.send_signal(signal.SIGTERM)
    rest, _ = run.communicate(timeout=60)
    assert "ended from outside" in rest
    assert "=== results" in rest


def test_a_wrong_kernel_fails_the_conformance_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only a crash: a case outside the budget is counted, named, and the exit code."""

    def wrong() -> None:
        raise AssertionError("out: 1 of 3 entries outside the budget")

    args = type("Args", (), {"out": tmp_path, "part": 0, "parts": 1, "limit": 0})()
    operator = type("Operator", (), {"load": lambda self, what: lambda dry: [[wrong, lambda: None]]})()
    monkeypatch.setattr(gpu_check, "OPERATORS", [operator])
    part = gpu_check._part(gpu_device.Device(dry=True), args, gpu_device.Deadline(60))
    assert (part["passed"], len(part["failures"])) == (1, 1)  # type: ignore[arg-type]
    assert "outside the budget" in part["failures"][0]  # type: ignore[index]


def test_rows_come_back_from_the_file_and_a_wrong_result_has_no_time(tmp_path: Path) -> None:
    row = Row(
        "measured", "gated_mlp", "decode", "tuned", "s", 8, 9, "bf16", 1, "own_90", 0.9, us=2.5, vs_eager=2.0
    )
    bad = Row(
        "measured", "gated_mlp", "decode", "tuned", "s", 8, 9, "bf16", 1, "own_50", 0.5, note="WRONG: x, y\n"
    )
    gpu_rows.append(tmp_path / "decode_tuned.csv", [row])
    gpu_rows.append(tmp_path / "decode_tuned.csv", [bad])
    assert gpu_rows.read(tmp_path / "decode_tuned.csv") == [row, bad]
    text = gpu_rows.summary(tmp_path)
    assert "50%: WRONG" in text
    assert "MISSED   T = 1, 90% sparse, × eager ≥ 2.1: worst 2.00" in text
    assert "not a measurement" not in text
