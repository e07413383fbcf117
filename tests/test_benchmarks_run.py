"""The benchmark's command line: a gate that holds, where results go, bad arguments, the targets."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bandwidth, gate, machine, measure, overhead, registry, report, run, targets

KERNEL = "faster"


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """A cache and a read buffer of 1 MiB, so that nothing here takes long."""
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda: 2**20)
    monkeypatch.setattr(bandwidth, "_MIN_BUFFER", 2**20)


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _row(alternative: str, ms: float, **numbers: float) -> report.Row:
    return report.Row(alternative, alternative, ms, ms, ms, 300.0, 300.0 / ms, **numbers)


TINY = [
    "--shape",
    "tiny",
    "--layers",
    "2",
    "--rounds",
    "1",
    "--no-compile",
    "--threads",
    "1",
    "--sparsity",
    "90",
]


def _gated_by(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    entry = dataclasses.replace(registry.get("gated_mlp"), conformance=gate.Conformance((str(path),), KERNEL))
    monkeypatch.setitem(registry.ENTRIES, "gated_mlp", entry)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (f"def test_{KERNEL}(): assert False\ndef test_other(): pass\n", "1 failed"),
        ("def test_other(): pass\n", "1 deselected"),
        ("this is no python\n", "1 error"),
        (None, "no tests ran"),
    ],
)
def test_nothing_is_reported_on_a_red_gate(
    body: str | None,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "test_red.py"
    if body is not None:
        path.write_text(body)
    _gated_by(monkeypatch, path)
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("timed a kernel whose tests are red"))
    assert run.main([*TINY, "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert "gated_mlp: no result is reported" in last
    assert what in last
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_a_green_gate_lets_the_result_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _gated_by(monkeypatch, _text(tmp_path / "test_green.py", f"def test_{KERNEL}(): pass\n"))
    assert run.main([*TINY, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "1 passed" in out.splitlines()[0]
    (path,) = (tmp_path / "out").rglob("*.csv")
    assert path.parent.name == machine.device(1)
    assert path.name == "gated_mlp_tiny_bf16_t1.csv"
    assert report.read_csv(path).facts["status"] == "verified"
    assert path.with_suffix(".png").is_file() == (importlib.util.find_spec("matplotlib") is not None)


def test_unverified_results_stay_out_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    assert run.main([*TINY, "--no-gate"]) == 0
    assert "unverified" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.csv"))
    with pytest.raises(SystemExit) as stop:
        run.main([*TINY, "--no-gate", "--out", str(tmp_path / "results" / "sub")])
    assert stop.value.code == 2
    assert "unverified numbers do not belong there" in capsys.readouterr().err
    assert run.main([*TINY, "--no-gate", "--out", str(tmp_path / "else")]) == 0
    (path,) = (tmp_path / "else").rglob("*.csv")
    assert report.read_csv(path).facts["status"] == "unverified"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama9"], "shape is 'llama9'"),
        (["--shape", "vit-b"], "does not fit gated_mlp"),
        (["--activation", "fatrelu"], "has parameters"),
        (["--activation", "tanh"], "activation is 'tanh'"),
        (["--sparsity", "50,x"], "no list of percentages"),
        (["--sparsity", "100"], "outside"),
        (["--tokens", "0"], "whole number above 0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# Targets


def _results(factor: float) -> dict[targets.Key, report.Result]:
    """Results that pass every target by `factor`."""
    results = {}
    for key, sparsities in targets.CASES.items():
        mine = [t for t in targets.TARGETS if (t.dtype, t.tokens, t.weights) == key]
        rows = []
        for weights, every in (("float", "own"), ("int8", "int8")):
            for s in sparsities:
                name = measure.own_name(s, weights)
                wanted: dict[str, float] = {"share_of_read": 1.0, "vs_own_float": 2.0}
                for t in mine:
                    if t.alternative in (name, every):
                        wanted[t.key] = max(wanted.get(t.key, 0.0), t.must * factor)
                rows.append(_row(name, 1.0, **{**wanted, **_exact(mine, every, factor)}))
        results[key] = report.Result({}, rows)
    return results


def _exact(mine: list[targets.Target], every: str, factor: float) -> dict[str, float]:
    """What the worst row of a kind must have: every row here does."""
    return {t.key: t.must * factor for t in mine if t.alternative == every}


def test_targets_pass_and_fail_by_their_musts() -> None:
    text, reached = targets.evaluate(_results(1.01), targets.OVERHEAD_US - 0.1)
    assert reached
    assert "FAIL" not in text
    text, reached = targets.evaluate(_results(1.01), targets.OVERHEAD_US + 0.1)
    assert not reached
    assert text.count("FAIL") == 1
    text, reached = targets.evaluate(_results(0.7), 100.0)
    assert not reached
    assert text.count("FAIL") == len(targets.TARGETS) + 1
    text, _ = targets.evaluate(_results(2.0), 1.0)
    assert text.count("aim reached") == sum(t.aim is not None for t in targets.TARGETS)


@pytest.mark.parametrize(
    ("key", "field", "row"),
    [(("bf16", 1, "float"), "share_of_read", 2), (("bf16", 1, "int8"), "vs_own_float", 6)],
)
def test_the_worst_of_all_sparsities_counts(key: targets.Key, field: str, row: int) -> None:
    results = _results(1.01)
    rows = results[key].rows
    rows[row] = dataclasses.replace(rows[row], **{field: 0.5})
    text, reached = targets.evaluate(results, 1.0)
    assert not reached
    (line,) = (line for line in text.splitlines() if "FAIL" in line)
    assert rows[row].alternative in line


def test_targets_mode_measures_its_own_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _gated_by(monkeypatch, _text(tmp_path / "test_green.py", f"def test_{KERNEL}(): pass\n"))
    fixed = overhead.Fixed("sparsemlp.gated_mlp", "inference_mode", 30.0, 9.0, 8.0, 10.0)
    monkeypatch.setattr(overhead, "measure", lambda *_, **__: [fixed])
    code = run.main([*TINY, "--targets", "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert code == int("FAIL" in out)
    assert "9.00" in out.splitlines()[-1]
    names = sorted(path.name for path in (tmp_path / "out").rglob("targets/*.csv"))
    assert names == sorted(
        f"gated_mlp_tiny{'' if weights == 'float' else '-int8'}_{dtype}_t{tokens}.csv"
        for dtype, tokens, weights in targets.CASES
    )


def test_options_of_one_operator_are_refused_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--op", "mlp", "--indicator", "up"], "--indicator is given, which is not for mlp"),
        (["--op", "sparse_linear", "--input-sparsity", "50"], "--input-sparsity is given"),
        (["--backend", "cuda"], "--backend is 'cuda', expected one of: auto, native"),
        (["--peers", "--indicator", "up"], "--peers is given with --indicator"),
    ):
        with pytest.raises(SystemExit) as stop:
            run.main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(registry.ENTRIES))
def test_every_operator_is_gated_by_tests_that_exist(name: str) -> None:
    tests = registry.get(name).conformance
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests.paths, "-k", tests.select, "--collect-only", "-q"],
        cwd=gate.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-300:]
    assert done.stdout.count("::") > 100
