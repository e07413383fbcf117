"""`sparsemlp tune`: what is measured becomes the profile that the router decides from. Clocks are made up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsemlp import _env, _native, cli
from sparsemlp.router import decide, host, profile, tune
from sparsemlp.router.model import Problem, choose, seconds
from tests.router_profiles import flat

pytestmark = [
    pytest.mark.skipif(
        _native.problem() is not None,
        reason=f"nothing to measure without the compiled library: {_native.problem()}",
    ),
    pytest.mark.usefixtures("threads"),
]


class Clock:
    """Time that passes only inside a route: µs from `costs` by route and tokens, 1 elsewhere."""

    def __init__(self, costs: Any) -> None:
        self.now, self.costs, self.cells = 0.0, costs, []
        self.timing: Any = None

    def __call__(self) -> float:
        if self.timing is not None:
            self.now += 1e-6 * self.costs(self.timing)
        return self.now


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Little memory, no cached profiles, and the router as it was afterwards."""
    monkeypatch.setattr(host, "last_level_cache", lambda: 2**16)
    monkeypatch.setattr(tune, "_read_bandwidth", lambda: 12.5)
    monkeypatch.setattr(_env, "CACHE_DIR", tmp_path / "cache")
    yield
    decide.forget()


def timed_by(monkeypatch: pytest.MonkeyPatch, costs: Any) -> Clock:
    """`tune` measures these µs: a function of (route, tokens, column)."""
    clock = Clock(costs)
    original = tune._time

    def time(cell: Any, layers: Any) -> None:
        clock.timing = cell.route, cell.tokens, cell.column
        clock.cells.append(clock.timing)
        original(cell, layers)
        clock.timing = None

    monkeypatch.setattr(tune, "_clock", clock)
    monkeypatch.setattr(tune, "_time", time)
    monkeypatch.setattr(tune, "KINDS", ((torch.bfloat16, False), (torch.float32, True)))
    return clock


def test_the_routes_times_land_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(cell: tuple[str, int, int]) -> float:
        route, tokens, column = cell
        return (
            {"sparse": 100, "dense": 200, "pytorch": 300, "screen": 400}[route] + 10 * column + tokens / 1000
        )

    timed_by(monkeypatch, costs)
    found = tune.tune(0.0, [(16, 48), (32, 96)])
    assert [(t.kind, t.d, t.f) for t in found.times] == [
        ("bfloat16", 16, 48), ("float32/int8", 16, 48), ("bfloat16", 32, 96), ("float32/int8", 32, 96),
    ]  # fmt: skip
    assert found.host == host.this()
    assert found.read_gb_per_s == 12.5
    for times in found.times:
        assert {len(times.sparse[t]) for t in times.sparse} == {3}
        for tokens, values in times.sparse.items():
            assert tokens <= 32
            assert values == pytest.approx([100 + 10 * i + tokens / 1000 for i in range(3)])
        for tokens, values in times.dense.items():
            assert tokens > 32
            assert values == pytest.approx([200 + 10 * i + tokens / 1000 for i in range(2)])
        for tokens, values in times.pytorch.items():
            assert values == pytest.approx([300 + 10 * i + tokens / 1000 for i in range(2)])
        assert set(times.pytorch) == set(times.sparse) | set(times.dense)
        assert times.screen == {t: pytest.approx((400 + t / 1000,)) for t in (1, 8, 32, 512)}
    problem = Problem(64, 16, 48, "bfloat16", "gated")
    assert seconds(found, problem, "dense", 1) == pytest.approx(200.064e-6)


def test_measured_calls_have_the_share_of_rows_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which neurons some token wants, by the operator's own rule, on random weights."""
    magnitudes = torch.nn.functional.silu(
        torch.randn(2**18, generator=torch.Generator().manual_seed(3))
    ).abs()
    g = torch.Generator().manual_seed(4)
    for tokens in (1, 8, 32):
        for share in (0.0, 0.5, 1.0):
            limit = tune._threshold(magnitudes.sort().values, share, tokens)
            a = torch.nn.functional.silu(torch.randn(tokens, 20_000, generator=g)).abs()
            wanted = (~(a < limit)).any(dim=0).double().mean().item()
            # The standard deviation of a mean over 20,000 neurons, six times.
            assert abs(wanted - share) <= 6 * math.sqrt(0.25 / 20_000)


def test_a_hopeless_route_is_not_timed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timed_by(monkeypatch, lambda cell: 10_000 * cell[1] if cell[0] == "pytorch" else 100)
    monkeypatch.setattr(tune, "KINDS", ((torch.float32, False),))
    (times,) = tune.tune(0.0, [(16, 48)]).times
    assert list(times.pytorch) == [1, 2]
    assert max(t for route, t, _ in clock.cells if route == "pytorch") == 2
    one = profile.Profile(host.this(), "", 1.0, (times,), {})
    assert seconds(one, Problem(512, 16, 48, "float32", "gated"), "pytorch", 1) == pytest.approx(5.12)
    assert choose(one, Problem(512, 16, 48, "float32", "gated")).route(1.0) == "dense"


def test_a_slow_route_that_does_not_grow_is_timed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading or widening the weights takes long with one token; with many it may still win."""
    timed_by(monkeypatch, lambda cell: 10_000 if cell[0] == "pytorch" else 100 * cell[1])
    monkeypatch.setattr(tune, "KINDS", ((torch.float32, False),))
    (times,) = tune.tune(0.0, [(16, 48)]).times
    assert max(times.pytorch) == 512
    one = profile.Profile(host.this(), "", 1.0, (times,), {})
    assert choose(one, Problem(512, 16, 48, "float32", "gated")).otherwise == "pytorch"


def test_medians_of_interleaved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One disturbed round of many changes nothing, and alternatives take turns."""
    calls: dict[tuple[str, int, int], int] = {}

    def costs(cell: tuple[str, int, int]) -> float:
        calls[cell] = calls.get(cell, 0) + 1
        return 1e6 if calls[cell] == 2 else 100.0

    clock = timed_by(monkeypatch, costs)
    monkeypatch.setattr(tune, "_LEAST_ROUNDS", 5)
    monkeypatch.setattr(tune, "KINDS", ((torch.float32, False),))
    (times,) = tune.tune(0.0, [(16, 48)]).times
    for column in (times.sparse, times.dense, times.pytorch):
        assert all(v == pytest.approx(100) for values in column.values() for v in values)
    distinct = len(set(clock.cells))
    rounds = [clock.cells[i : i + distinct] for i in range(0, len(clock.cells), distinct)]
    assert len(rounds) == 6
    assert all(set(r) == set(clock.cells) for r in rounds)
    assert rounds[1] == rounds[2][::-1]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_native, "problem", lambda: "switched off")
    with pytest.raises(RuntimeError, match=r"without compiled kernels \(switched off\)"):
        tune.tune(0.0)
    assert cli.main(["tune"]) == 2
    assert capsys.readouterr().err.endswith("without compiled kernels (switched off)\n")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes the file that the next call decides from."""
    timed_by(monkeypatch, lambda cell: 1.0 if cell[0] == "pytorch" else 1000.0)
    assert cli.main(["tune", "--shape", "16x48", "--threads", "1"]) == 0
    out, _ = capsys.readouterr()
    file = profile.path(host.this())
    assert file.is_file()
    assert json.loads(file.read_text())["machine"]["threads"] == 1
    assert out.splitlines()[0] == f"{host.this()}; reads 12.5 GB/s"
    assert out.splitlines()[-1] == f"written: {file}"
    found = decide.current_profile()
    assert found is not None
    assert found.source == f"measured on this machine ({file})"
    assert choose(found, Problem(64, 16, 48, "bfloat16", "gated")).route(1.0) == "pytorch"


def test_the_commands_output_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed_by(monkeypatch, lambda cell: 100.0)
    assert cli.main(["tune", "--shape", "16x48", "-o", str(tmp_path / "mine.json")]) == 0
    assert profile.load(tmp_path / "mine.json", "").times
    assert not profile.folder().exists()
    capsys.readouterr()


def test_an_unwritable_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(_env, "CACHE_DIR", tmp_path / "file")
    timed_by(monkeypatch, lambda cell: 100.0)
    assert cli.main(["tune", "--shape", "16x48"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"sparsemlp tune: {tmp_path}/file/router/")
    assert last.endswith(
        "cannot be written: Not a directory; set SPARSEMLP_CACHE_DIR to a folder you can write"
    )
    assert cli.main(["tune", "--shape", "16x48", "-o", str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("; name another --output")


@pytest.mark.parametrize("shape", ["16", "16x", "0x16", "axb", "16x-4", "1048576x1"])
def test_wrong_shapes(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--shape", shape]) == 2
    assert f"is {shape}, expected model width x neurons, e.g. 4096x14336" in capsys.readouterr().err


def test_a_busy_machine_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed_by(monkeypatch, lambda cell: 100.0)
    for load, said in ((3.2, True), (0.1, False), (None, False)):
        monkeypatch.setattr(tune, "busy", lambda load=load: load)
        assert cli.main(["tune", "--shape", "16x48", "-o", str(tmp_path / "x.json")]) == 0
        assert ("other programs keep 3.2 CPUs busy" in capsys.readouterr().err) is said


def test_the_summary_says_what_follows() -> None:
    text = tune.summary(flat(sparse=(10.0, 200.0, 300.0), dense=5.0, pytorch=6.0, kinds=("float32",)))
    *_, last, training = text.splitlines()
    assert training == "training by lists below a density of 40% (float32), 30% (bfloat16)"
    last = last.split()
    assert last[:3] == ["float32", "64", "100"]
    assert "dense" in last
    assert "up to 32 tokens" in text
    assert "%" in text
