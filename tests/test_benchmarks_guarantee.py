"""The guarantee: a slower auto is found, noise is not taken for one, and a stopped run goes on where it was."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bandwidth, gate, guarantee, guarantee_cells, guarantee_report, machine, shapes
from benchmarks.guarantee_cells import Bench, Budget, Group, Outcome
from benchmarks.timing import Interval
from benchmarks.verdict import FLOOR, LEAST_ROUNDS, Comparison, compare, halves, verdict

TINY = [
    "--shape", "tiny,tiny-mlp", "--dtype", "fp32", "--tokens", "1,3", "--sparsity", "0,90", "--rounds", "4",
    "--layers", "2", "--threads", "1", "--compile", "no",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda: 2**20)


def noisy(
    seconds: float, rounds: int, seed: int, spread: float = 0.05, load: Tensor | None = None
) -> list[float]:
    """Samples around `seconds`, `load` times as slow in each round, where that is given."""
    generator = torch.Generator().manual_seed(seed)
    values = seconds * torch.exp(spread * torch.randn(rounds, generator=generator, dtype=torch.float64))
    return (values if load is None else values * load).tolist()


def neighbour(rounds: int, seed: int) -> Tensor:
    """Up to four times as slow, a round's samples all alike."""
    return 1 + 3 * torch.rand(rounds, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The decision


def test_halves_hold_every_order_and_its_reverse() -> None:
    choosing, comparing = halves(12)
    assert sorted(choosing + comparing) == list(range(12))
    assert len(choosing) == len(comparing) == 6
    for half in (choosing, comparing):
        assert {(r - 1) in half if r % 2 else (r + 1) in half for r in half} == {True}


@pytest.mark.parametrize("rounds", [LEAST_ROUNDS, 40])
@pytest.mark.parametrize("seed", range(5))
def test_a_slower_auto_fails(rounds: int, seed: int) -> None:
    load = neighbour(rounds, seed)
    times = {"auto": 1.10, "eager": 2.0, "compile": 1.0, "own_dense": 1.3}

    def run(start: int) -> Comparison:
        return compare(
            {name: noisy(t, rounds, start + i, 0.02, load) for i, (name, t) in enumerate(times.items())}
        )

    first, second = run(10 * seed), run(10 * seed + 5)
    assert first.best == "compile"
    assert first.ratio.median == pytest.approx(1 / 1.10, rel=0.03)
    assert first.slower
    assert verdict([first, second]) == "fail"


def test_equal_times_pass_and_noise_alone_hardly_ever_fails() -> None:
    """Three equals beside auto: the luckiest would look faster if it were compared on the rounds that chose it."""
    slower = both = 0
    for seed in range(200):
        runs = []
        for again in (0, 1000):
            load = neighbour(LEAST_ROUNDS, seed + again)
            names = ("auto", "eager", "compile", "own_dense")
            samples = {
                n: noisy(1.0, LEAST_ROUNDS, 7 * seed + i + again, 0.08, load) for i, n in enumerate(names)
            }
            runs.append(compare(samples))
        slower += runs[0].slower
        both += verdict(runs) == "fail"
    assert slower < 0.15 * 200
    assert both <= 2


def test_the_best_is_chosen_on_other_rounds_than_compared() -> None:
    rounds = 40
    choosing, _ = halves(rounds)
    lucky = [0.5 if r in choosing else 2.0 for r in range(rounds)]
    steady = [1.0] * rounds
    found = compare({"auto": [1.0] * rounds, "lucky": lucky, "steady": steady})
    assert found.best == "lucky"
    assert found.ratio == Interval(2.0, 2.0, 2.0)
    assert not found.slower


def test_auto_within_the_allowance_passes() -> None:
    rounds = 40
    found = compare({"auto": noisy(1.02, rounds, 1, 0.01), "eager": noisy(1.0, rounds, 2, 0.01)})
    assert found.ratio.median < 1.0
    assert verdict([found]) == "pass"


def test_too_little_to_compare_is_named() -> None:
    with pytest.raises(ValueError, match="0 dense alternatives"):
        compare({"auto": [1.0] * 12})
    with pytest.raises(ValueError, match="in 3 rounds"):
        compare({"auto": [1.0] * 3, "eager": [1.0] * 3})


def test_verdicts_of_one_and_two_runs() -> None:
    slow, fine = (Comparison("eager", Interval(m, m - 0.01, m + 0.01)) for m in (0.9, 1.0))
    assert verdict([fine]) == "pass"
    assert verdict([slow]) == "again"
    assert verdict([slow, slow]) == "fail"
    assert verdict([slow, fine]) == "pass, second run"
    assert not Comparison("eager", Interval(0.9, 0.8, FLOOR)).slower


# A cell


def test_a_cell_times_auto_beside_the_dense_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    group, budget = Group(shapes.get("tiny"), "fp32", 2), Budget(rounds=4, compile="no", layers=2)
    monkeypatch.setattr(guarantee_cells, "_HOPELESS", float("inf"))
    work = guarantee_cells.build(group, budget, None)
    with torch.inference_mode():
        outcome = Bench(group, work, budget, lambda line: None).cell(0.9)
    assert outcome.key == ("tiny", "fp32", 2, 90.0)
    assert outcome.op == "gated_mlp"
    assert outcome.density == pytest.approx(0.1, rel=0.5)
    assert outcome.compile_ms is None
    assert outcome.auto_ms > 0
    assert outcome.eager_ms > 0
    own = machine.isa() != "none"
    assert (outcome.own_dense_ms is not None) is own
    assert outcome.compared == ("eager+own_dense" if own else "eager")
    assert outcome.route in ("sparse", "dense", "pytorch", "reference")


def test_hopeless_alternatives_are_tried_but_not_timed_in_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    group, budget = Group(shapes.get("tiny"), "fp32", 1), Budget(rounds=4, compile="no", layers=2)
    monkeypatch.setattr(guarantee_cells, "trial", lambda *_: {"eager": 1.0, "own_dense": 2.0})
    with torch.inference_mode():
        outcome = Bench(group, guarantee_cells.build(group, budget, None), budget, lambda line: None).cell(
            0.0
        )
    assert outcome.compared == "eager"
    assert outcome.own_dense_ms == 2000.0


@pytest.mark.parametrize(
    ("a_round", "rounds"), [(0.1, 40), (0.001, guarantee_cells.MOST_ROUNDS), (9.0, LEAST_ROUNDS)]
)
def test_rounds_fit_the_budget(a_round: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group, budget = Group(shapes.get("tiny"), "fp32", 1), Budget(seconds=4.0, compile="no", layers=2)
    monkeypatch.setattr(guarantee_cells, "trial", lambda *_: {"eager": a_round / 4})
    bench = Bench(group, guarantee_cells.build(group, budget, None), budget, lambda line: None)
    assert bench._rounds(a_round / 4) == rounds
    assert rounds % 4 == 0


def test_auto_and_the_dense_kernel_do_not_share_what_a_router_remembers() -> None:
    group = Group(shapes.get("tiny"), "fp32", 1)
    work = guarantee_cells.build(group, Budget(layers=2), None)
    work.own(0.5, apart="auto 0.5")
    copy = work.apart("auto 0.5", 0, work.layers[0].w_down_t)
    assert copy.data_ptr() != work.layers[0].w_down_t.data_ptr()
    assert torch.equal(copy, work.layers[0].w_down_t)


def test_a_layer_beyond_the_cache_is_enough() -> None:
    large = Group(shapes.Shape("large", 512, 4096, "silu"), "fp32", 1)
    assert len(guarantee_cells.build(large, Budget(), None).layers) == 1
    assert len(guarantee_cells.build(Group(shapes.get("tiny"), "fp32", 1), Budget(), None).layers) > 3


# The whole run


def fake(ratios: Mapping[tuple[str, int, float], Sequence[float]], log: list[tuple[str, int, float]]) -> type:
    """A `Bench` whose cells have these ratios, run by run; 1.0 where none is given."""

    class Fake:
        def __init__(self, group: Group, *_: object) -> None:
            self.group = group

        def cell(self, sparsity: float) -> Outcome:
            group = self.group
            key = group.shape.name, group.tokens, 100 * sparsity
            ratio = [*ratios.get(key, (1.0,))][min(log.count(key), 1)] if key in ratios else 1.0
            log.append(key)
            found = Comparison("compile", Interval(ratio, ratio - 0.01, ratio + 0.01))
            return dataclasses.replace(
                OUTCOME,
                shape=group.shape.name,
                dtype=group.dtype,
                tokens=group.tokens,
                sparsity=100 * sparsity,
                verdict=verdict([found]),
                ratio=ratio,
                ratio_low=ratio - 0.01,
                ratio_high=ratio + 0.01,
            )

    return Fake


OUTCOME = Outcome(
    op="gated_mlp", shape="tiny", D=64, F=160, dtype="fp32", tokens=1, sparsity=0.0, density=1.0, layers=2, rounds=4,
    verdict="pass", best_dense="compile", ratio=1.0, ratio_low=0.99, ratio_high=1.01, auto_ms=1.0, eager_ms=1.0,
    compile_ms=None, own_dense_ms=None, compile_setting="", compile_s=None, compared="eager", route="sparse",
    profile="shipped, measured on another machine", others_cpu=0.0, time="2026-01-01T00:00:00+00:00",
)  # fmt: skip


def test_a_cell_fails_only_in_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = {("tiny", 1, 0.0): (0.8, 0.85), ("tiny-mlp", 3, 90.0): (0.9, 1.0)}
    log: list[tuple[str, int, float]] = []
    monkeypatch.setattr(guarantee, "Bench", fake(ratios, log))
    assert guarantee.main([*TINY, "--no-gate", "--out", str(tmp_path)]) == 1
    assert len(log) == 8 + 2
    assert log[-2:] == [("tiny", 1, 0.0), ("tiny-mlp", 3, 90.0)]  # again, at the end
    out = capsys.readouterr().out
    assert "FAIL tiny fp32, T = 1, 0 %: 0.800 (at most 0.810), then 0.850 (at most 0.860)" in out
    assert "8 cells, 1 slower than 0.97" in out
    assert "1 in the first only" in out
    assert "worst: 0.850" in out
    (path,) = tmp_path.rglob("guarantee.csv")
    facts = {"status": "unverified", "cpu": machine.cpu()}
    found = {o.key: o for o in guarantee_report.read(path, facts)}
    assert found["tiny", "fp32", 1, 0.0].verdict == "fail"
    assert found["tiny-mlp", "fp32", 3, 90.0].verdict == "pass, second run"
    assert found["tiny-mlp", "fp32", 3, 90.0].ratio_2 == 1.0
    assert found["tiny", "fp32", 3, 0.0] == dataclasses.replace(OUTCOME, tokens=3)
    drawn = {p.name for p in path.parent.glob("*.png")}
    wanted = {"tiny_fp32.png", "tiny-mlp_fp32.png"} if importlib.util.find_spec("matplotlib") else set()
    assert drawn == wanted


def test_a_stopped_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[tuple[str, int, float]] = []
    whole = fake({("tiny", 1, 0.0): (0.8, 1.0)}, log)

    class Stops(whole):  # type: ignore[misc, valid-type]
        def cell(self, sparsity: float) -> Outcome:
            if len(log) == 3:
                raise KeyboardInterrupt
            return super().cell(sparsity)

    monkeypatch.setattr(guarantee, "Bench", Stops)
    arguments = [*TINY, "--no-gate", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        guarantee.main(arguments)
    monkeypatch.setattr(guarantee, "Bench", whole)
    with pytest.raises(SystemExit) as stop:
        guarantee.main(arguments)
    assert stop.value.code == 2
    assert "add --resume to go on" in capsys.readouterr().err
    assert guarantee.main([*arguments, "--resume"]) == 0
    assert len(log) == 8 + 1
    assert log[-1] == ("tiny", 1, 0.0)
    assert len(set(log)) == 8
    monkeypatch.setattr(machine, "cpu", lambda: "Another CPU 9000")
    monkeypatch.setattr(machine, "device", lambda threads: next(tmp_path.iterdir()).name)
    with pytest.raises(SystemExit):
        guarantee.main([*arguments, "--resume"])
    assert "was measured with cpu" in capsys.readouterr().err


def test_nothing_is_timed_on_a_red_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def red(*_: object) -> str:
        raise gate.GateError("mlp: no result is reported because its conformance tests are not green")

    monkeypatch.setattr(gate, "check", red)
    monkeypatch.setattr(guarantee, "Bench", lambda *_: pytest.fail("timed a kernel whose tests are red"))
    assert guarantee.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "not green" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama9"], "shape is 'llama9'"),
        (["--dtype", "int4"], "--dtype has 'int4'"),
        (["--tokens", "1,x"], "no list of whole numbers above 0"),
        (["--sparsity", "0,101"], "outside"),
        (["--rounds", "3"], "expected at least 4"),
        (["--no-gate"], "unverified numbers do not belong there"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        guarantee.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_real_run_writes_its_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = guarantee.main([*TINY, "--no-gate", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == int("FAIL" in out)
    assert "8 cells" in out
    assert (tmp_path / machine.device(1) / "guarantee" / "guarantee.csv").is_file()
