"""The GPU run works from end to end: all of it, on the CPU in Triton's interpreter, at tiny sizes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import gpu_check, gpu_device, gpu_info, gpu_rows, gpu_run, tune_trials
from benchmarks.gpu_operators import OPERATORS
from benchmarks.gpu_rows import Row
from sparsemlp.info import operators

ROOT = Path(__file__).resolve().parent.parent
BACKWARD = ("activation_bwd", "activation_counts", "gated_mlp_bwd", "mlp_bwd")
"""Operators that are covered with the one they belong to."""


def _files() -> list[Path]:
    """Every file of the repository that git does not ignore; without git all but caches."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name]
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
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".venv")]
        found += [Path(folder, name) for name in files]
    return found


def _tree() -> dict[Path, str]:
    """The files and what is in them."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in _files() if path.is_file()}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], set[Path]]:
    """A dry run: its folder, its output, and which files of the repository came, went or changed meanwhile."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    before = _tree()
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_run.sh"), "--dry", str(out)],
        capture_output=True, text=True, cwd=out.parent, timeout=400, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    return out, done, {path for path, _ in before.items() ^ _tree().items()}


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
    timed = ("activation", "decode", "prefill", "mlp_decode", "sparse_linear_decode", "training")
    tables = ["decode_default.csv", *(f"{name}_tuned.csv" for name in timed)]
    configs = [f"configs/{op}/cpu.json" for op in sorted(tune_trials.TRIALS)]
    facts = ["checks.json", "conformance.json", "machine.json"]
    assert names == sorted([*tables, *configs, *facts, "log.txt", "stages.json"])
    for name in (*configs, *facts):
        assert json.loads((out / name).read_text())["status"] == gpu_device.DRY, name
    for name in tables:
        rows = gpu_rows.read(out / name)
        assert rows, name
        assert {row.shape for row in rows if row.op != "activation"} <= {"tiny"}, name
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
    tmp_path: Path,
    stages: list[gpu_run.Stage],
    monkeypatch: pytest.MonkeyPatch,
    budget: str = "60",
    out: str = "out",
) -> int:
    monkeypatch.setattr(gpu_run, "stages", lambda out, dry: stages)
    return gpu_run.main([str(tmp_path / out), "--dry", "--budget", budget])


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
    assert _run(tmp_path, [_shell("two", "true")], monkeypatch, out="two") == 0
    assert _run(tmp_path, [], monkeypatch, out="three") == 3


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
    assert code == 0  # such a stage ends when the time does, if nothing needs it
    outcomes = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert [o["outcome"] for o in outcomes] == ["stopped", "skipped"]
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_end_from_outside_still_prints_the_table(tmp_path: Path, number: int) -> None:
    stage = "('one', ('/bin/sh', '-c', 'echo $$; exec sleep 60'), 60, timed=False, dry_seconds=60)"
    script = (
        "import signal, sys; from benchmarks import gpu_run as g\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"g.stages = lambda out, dry: [g.Stage{stage}]\n"
        f"sys.exit(g.main([{str(tmp_path)!r}, '--dry']))"
    )
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while "=== one" not in run.stdout.readline():
        pass
    pid = int(run.stdout.readline())
    run.send_signal(number)
    rest, _ = run.communicate(timeout=60)
    assert "ended from outside" in rest
    assert "=== results" in rest
    assert run.returncode == 3
    assert not Path(f"/proc/{pid}").exists()


# Arguments, and stages that must run


@pytest.mark.parametrize("stopped", [False, True])
def test_what_must_run_and_did_not_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(gpu_run, "_KEPT", 1.0)
    must = _shell("checks", "sleep 30" if stopped else "true", must=True)
    assert _run(tmp_path, [must], monkeypatch, "7" if stopped else "3") == 1
    outcome = json.loads((tmp_path / "out" / "stages.json").read_text())[0]
    assert outcome["outcome"] == ("stopped" if stopped else "skipped")


def test_checks_that_did_nothing_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def skip(where: gpu_device.Device) -> None:
        raise gpu_check.Skip("too small")

    for checks, seconds, code in (
        ({"a": lambda where: None}, 0.0, 1),
        ({"a": skip}, 60.0, 1),
        ({"a": skip, "b": lambda where: None}, 60.0, 0),
    ):
        monkeypatch.setattr(gpu_check, "CHECKS", checks)
        args = ["checks", "--out", str(tmp_path), "--dry", "--seconds", str(seconds)]
        assert gpu_check.main(args) == code, (checks, seconds)
    assert "checks: 1 skipped, 1 passed" in capsys.readouterr().out


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is printed with exit code 2."""
    with pytest.raises(SystemExit) as refused:
        gpu_run.main(arguments)
    assert refused.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below", Path("/proc/nowhere"), tmp_path / ("x" * 300)):
        assert "expected a folder that can be written" in _refused([str(out), "--dry"], capsys)
    for name in ("decode_tuned.csv", "stages.json", "log.txt"):
        (tmp_path / name[:3]).mkdir()
        (tmp_path / name[:3] / name).write_text("old")
        assert "results of another run" in _refused([str(tmp_path / name[:3]), "--dry"], capsys)
        assert [path.name for path in (tmp_path / name[:3]).iterdir()] == [name]
        assert (tmp_path / name[:3] / name).read_text() == "old"
    assert _run(tmp_path, [_shell("one", "true")], monkeypatch) == 0
    assert "another run" in _refused([str(tmp_path / "out"), "--dry"], capsys)


@pytest.mark.parametrize("budget", ["0", "-5", "nan", "inf"])
def test_a_budget_that_is_no_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str
) -> None:
    assert "expected seconds above 0" in _refused([str(tmp_path), "--dry", "--budget", budget], capsys)


@pytest.mark.parametrize("only", ["zzz", "machine,zzz", "", "machine,"])
def test_an_unknown_stage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str) -> None:
    line = _refused([str(tmp_path / "out"), "--dry", "--only", only], capsys)
    assert repr(only.rpartition(",")[2]) in line
    assert "'conformance'" in line
    assert not (tmp_path / "out").exists()


def test_stages_are_chosen_by_their_first_words(tmp_path: Path) -> None:
    planned = gpu_run.stages(tmp_path, dry=True)
    chosen, problem = gpu_run._chosen(planned, "decode,tune")
    assert [stage.name for stage in chosen] == ["decode, default", "tune", "decode, tuned"]
    assert problem == ""


def test_skipped_tests_are_not_passed_off_as_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [_shell("pytest", "echo 12 skipped in 0.1s"), _shell("one", "echo 5 skipped")]
    monkeypatch.setattr(gpu_run, "_why_not", lambda stage: "")
    assert _run(tmp_path, stages, monkeypatch) == 0
    outcomes = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert [(o["outcome"], o["sentence"]) for o in outcomes] == [("ok", "12 skipped"), ("ok", "")]
    assert "ok (12 skipped)" in gpu_rows.summary(tmp_path / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("module", ["gpu_info", "gpu_check", "tune"])
def test_without_a_gpu_there_is_one_sentence(tmp_path: Path, module: str) -> None:
    what = ["checks"] if module == "gpu_check" else []
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *what, "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "no GPU is visible to PyTorch, expected one; run on a machine with one, or with --dry"
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_rate_is_no_zero(tmp_path: Path) -> None:
    assert gpu_info.facts(gpu_device.Device(dry=True))["datasheet_gb_per_s"] == "unknown"


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
