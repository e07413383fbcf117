"""The benchmark's own claims: fresh masks, paired ratios, bytes, files written whole."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import alternatives, bandwidth, gate, machine, measure, plot, registry, report, shapes, timing

SMALL = shapes.Shape("small", 96, 640, "silu")


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """A cache and a read buffer of 1 MiB, so that nothing here takes long."""
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda: 2**20)
    monkeypatch.setattr(bandwidth, "_MIN_BUFFER", 2**20)


def case(**changes: object) -> measure.Case:
    base = measure.Case(
        entry=registry.get("gated_mlp"),
        shape=SMALL,
        dtype="fp32",
        tokens=1,
        sparsities=(0.0, 0.9),
        activation="silu",
        rounds=2,
        threads=1,
        compile=False,
        layers=2,
    )
    return dataclasses.replace(base, **changes)


# Interleaving and statistics


def test_every_round_times_everything_in_changing_order() -> None:
    count = 5
    orders = [timing.order(count, r) for r in range(2 * count)]
    assert all(sorted(o) == list(range(count)) for o in orders)
    assert {o[0] for o in orders} == set(range(count))
    followers = {pair for o in orders for pair in itertools.pairwise(o)}
    assert {(b, a) for a, b in followers} == followers  # nobody is always timed behind the same one


def test_two_alternatives_change_places() -> None:
    assert {tuple(timing.order(2, r)) for r in range(2, 4)} == {(0, 1), (1, 0)}


def test_a_trial_is_short_for_slow_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sweeps = [0.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def sweep(_: object) -> None:
        clock[0] += 3.0
        sweeps[0] += 1

    assert timing.trial([timing.Timed("a", lambda: None, sweep, calls=2)], seconds=4.0) == {"a": 1.5}
    assert sweeps[0] == 1 + 2
    clock[0], sweeps[0] = 0.0, 0
    timing.trial([timing.Timed("a", lambda: None, sweep, calls=2)], seconds=1000.0)
    assert sweeps[0] == 1 + 5


def test_interleave_leaves_preparation_and_warmup_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    log: list[str] = []

    def spend(name: str, what: str, seconds: float) -> None:
        log.append(f"{what} {name}")
        clock[0] += seconds

    def timed(name: str, seconds: float) -> timing.Timed:
        return timing.Timed(
            name, lambda: spend(name, "prepare", 10.0), lambda _: spend(name, "sweep", seconds), calls=4
        )

    samples = timing.interleave([timed("a", 8.0), timed("b", 2.0)], rounds=3, warmup=1)
    assert samples == {"a": [2.0] * 3, "b": [0.5] * 3}
    assert len(log) == 2 * 2 * (3 + 1)
    assert log[:2] in (["prepare a", "sweep a"], ["prepare b", "sweep b"])


def test_paired_ratio_is_immune_to_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(0)
    load = 1 + 3 * torch.rand(40, generator=generator, dtype=torch.float64)  # hits both of a round alike
    slow, fast = (3.0 * load).tolist(), (2.0 * load).tolist()
    ratio = timing.paired_ratio(slow, fast)
    assert ratio.low == pytest.approx(1.5)
    assert ratio.high == pytest.approx(1.5)
    shuffled = [fast[i] for i in torch.randperm(40, generator=generator).tolist()]
    unpaired = timing.paired_ratio(slow, shuffled)
    assert unpaired.high - unpaired.low > 0.1


def test_bootstrap_interval_covers_the_true_median() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(500):
        values = torch.randn(30, generator=generator, dtype=torch.float64).exp().tolist()  # median 1, skewed
        interval = timing.median_interval(values, resamples=400)
        assert interval.low <= interval.median <= interval.high
        covered += interval.low <= 1.0 <= interval.high
    assert 0.90 <= covered / 500 <= 0.98  # one that always covers would be too wide to mean anything


def test_quantiles_interpolate() -> None:
    assert timing.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5


# Tables


def test_tables_are_consistent() -> None:
    for name, shape in shapes.SHAPES.items():
        assert name == shape.name
        assert shape.d > 0
        assert shape.f > 0
    for entry in registry.ENTRIES.values():
        assert all((gate.ROOT / path).is_file() for path in entry.conformance.paths)
        assert entry.name == entry.workload.op
        assert entry.shapes
    assert shapes.get("llama3-8b") == shapes.Shape("llama3-8b", 4096, 14336, "silu")


@pytest.mark.parametrize(("find", "wrong"), [(shapes.get, "llama9"), (registry.get, "conv")])
def test_unknown_names_list_the_known(find: object, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.*expected one of"):
        find(wrong)  # type: ignore[operator]


# One run


def test_measure_reports_every_alternative() -> None:
    result = measure.measure(case(tokens=2), measure.build(case(tokens=2)))
    names = [row.alternative for row in result.rows]
    assert names == ["read", "eager", "eager_neuron_major", "own_0", "own_90"]
    for row in result.rows:
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.gb_per_s == pytest.approx(row.megabytes / row.p50_ms)
    own, eager = result.row("own_90"), result.row("eager")
    assert result.row("own_0").vs_own_0 == 1.0
    assert eager.vs_eager == 1.0
    assert eager.vs_own_0 is None
    assert own.vs_eager is not None
    assert own.union_density is not None
    assert own.share_of_read is not None
    if result.facts["backend"] == "native":
        assert own.megabytes == pytest.approx(eager.megabytes * (1 + 2 * own.union_density) / 3)
    assert "sparsemlp, 90 % sparse" in report.table(result)


def test_int8_weights_are_timed_beside_the_same_sparsity() -> None:
    one = case(weights="int8", dtype="bf16", rounds=1)
    result = measure.measure(one, measure.build(one))
    narrow, wide = result.row("int8_90"), result.row("own_90")
    assert narrow.vs_own_float == pytest.approx(wide.p50_ms / narrow.p50_ms)
    assert narrow.vs_own_0 is None
    assert wide.vs_own_float is None
    assert narrow.density == wide.density
    if result.facts["backend"] == "native":
        assert narrow.megabytes == pytest.approx(wide.megabytes / 2)
    assert "× own float" in report.table(result)
    assert "× own float" not in report.table(measure.measure(case(), measure.build(case())))


def test_options_reach_the_operator_and_the_table() -> None:
    one = case(options={"indicator": "product", "input_sparsity": 0.5}, rounds=1)
    result = measure.measure(one, measure.build(one))
    assert "indicator product" in report.table(result)
    assert "50% of the gate's input" in report.table(result)
    assert result.facts["indicator"] == "product"


@pytest.mark.parametrize(("op", "shape"), [("mlp", "tiny-mlp"), ("sparse_linear", "tiny-linear")])
def test_other_operators_are_measured(op: str, shape: str, tmp_path: Path) -> None:
    row = shapes.get(shape)
    one = case(entry=registry.get(op), shape=row, activation=row.activation, rounds=1, tokens=3)
    result = measure.measure(one, measure.build(one))
    names = [row.alternative for row in result.rows]
    assert names == ["read", "eager", "eager_neuron_major", "own_0", "own_90"]
    own, eager = result.row("own_90"), result.row("eager")
    assert own.union_density is not None
    if result.facts["backend"] == "native":
        share = own.union_density if op == "sparse_linear" else (1 + own.union_density) / 2
        assert own.megabytes == pytest.approx(eager.megabytes * share)
    pytest.importorskip("matplotlib", reason="plots need the bench extra")
    plot.draw(result, tmp_path / "r.png")


def test_ratios_point_the_right_way() -> None:
    """In a single round every ratio is that of the two times."""
    result = measure.measure(case(rounds=1), measure.build(case()))
    read, eager, own = (result.row(name) for name in ("read", "eager", "own_90"))
    assert own.vs_eager == pytest.approx(eager.p50_ms / own.p50_ms)
    assert own.vs_own_0 == pytest.approx(result.row("own_0").p50_ms / own.p50_ms)
    fastest = min(eager.p50_ms, result.row("eager_neuron_major").p50_ms)
    assert own.vs_best_dense == pytest.approx(fastest / own.p50_ms)
    assert own.share_of_read == pytest.approx(own.gb_per_s / read.gb_per_s)


@pytest.mark.parametrize("route", ["sparse", "dense", "pytorch", "reference"])
def test_bytes_of_a_path_that_reads_everything(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "explained", lambda call, work: SimpleNamespace(route=route))
    result = measure.measure(case(), measure.build(case()))
    own, eager = result.row("own_90"), result.row("eager")
    assert (own.megabytes < 0.5 * eager.megabytes) is (route == "sparse")
    assert (own.megabytes == eager.megabytes) is (route != "sparse")
    assert own.route == route
    assert f"sparsemlp, 90 % sparse ({route})" in report.table(result)


def test_a_missing_library_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "backend", lambda op, x: ("reference", "native: not built"))
    assert "not built" in report.table(measure.measure(case(), measure.build(case())))


@pytest.mark.parametrize(
    ("others", "words"), [(0.07, "trust ratios"), (0.4, "not even the ratios"), (0.0, None)]
)
def test_neighbours_are_pointed_out(
    others: float, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.Neighbours, "share", lambda self: others)
    monkeypatch.setattr(measure, "_NOISY", float("inf"))
    table = report.table(measure.measure(case(), measure.build(case())))
    assert ("NOTE: a shared" in table) is (words is not None)
    assert words is None or words in table


def test_few_layers_are_pointed_out() -> None:
    result = measure.measure(case(rounds=1), measure.build(case()))
    assert result.facts["leaves_cache"] == "no"
    assert "may stay in the cache" in report.table(result)
    assert len(measure.build(case(layers=None)).layers) >= 6 * 2**20 / (3 * SMALL.d * SMALL.f * 4)


def test_read_reaches_every_candidate_and_reports_its_bytes() -> None:
    timed, name, size = bandwidth.reader(2**20)
    assert name in bandwidth.candidates()
    assert size == 2**20
    timed.sweep(timed.prepare())


def test_cache_size_counts_every_instance_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size) in enumerate([(1, "32K"), (2, "1024K"), (3, "32768K")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text((shared if level == 3 else str(cpu)) + "\n")
    assert bandwidth.last_level_cache(tmp_path) == 2 * 32 * 2**20
    assert bandwidth.last_level_cache(tmp_path / "none") == 64 * 2**20


def test_device_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n")
    assert machine.cpu(info) == "AMD EPYC family 25 model 17"
    info.write_text("cpu family\t: 6\nmodel name\t: Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz\n")
    assert machine.cpu(info) == "Intel Xeon Platinum 8480+"
    monkeypatch.setattr(machine, "cpu", lambda: "Intel Xeon Platinum 8480+")
    assert machine.device(2) == "intel-xeon-platinum-8480_2-threads"
    assert machine.device(1) == "intel-xeon-platinum-8480_1-thread"


def test_what_others_use_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    mine = [0.0]
    monkeypatch.setattr(machine.os, "times", lambda: SimpleNamespace(user=mine[0], system=0.0))
    stat = _text(tmp_path / "stat", "cpu  1000 0 0 5000 0 0 0 0 0 0\n")
    neighbours = machine.Neighbours(stat)
    stat.write_text("cpu  1500 0 0 5400 0 0 0 100 0 0\n")  # 10 s: 5 busy, 4 idle, 1 stolen
    mine[0] = 2.0
    assert neighbours.share() == pytest.approx(0.4)
    assert machine.Neighbours(tmp_path / "none").share() == 0.0


# Files


def test_csv_holds_the_result(tmp_path: Path) -> None:
    result = measure.measure(case(), measure.build(case()))
    path = tmp_path / "deep" / "r.csv"
    report.write_csv(result, path)
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["alternative"] for line in lines] == [row.alternative for row in result.rows]
    assert all(line["status"] == "verified" and line["D"] == "96" for line in lines)
    again = report.read_csv(path)
    assert again.row("own_90").p50_ms == pytest.approx(result.row("own_90").p50_ms, rel=1e-4)
    assert again.row("eager").density is None
    later = [
        name for name in lines[0] if name.startswith("vs_own_float")
    ]  # an older file lacks these columns
    with open(tmp_path / "older.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [name for name in lines[0] if name not in later], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    kept = report.read_csv(tmp_path / "older.csv")
    assert kept.row("own_90").vs_own_float is None
    assert kept.row("own_90").p50_ms == again.row("own_90").p50_ms
    with pytest.raises(ValueError, match="no benchmark result"):
        report.read_csv(_text(tmp_path / "other.csv", "a,b\n1,2\n"))


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = _text(tmp_path / "r.csv", "old")

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        report.write_atomic(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.csv"]
    report.write_atomic(path, lambda partial: partial.write_text("new"))
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["r.csv"]


def test_stem_names_a_foreign_activation() -> None:
    facts = {"op": "gated_mlp", "shape": "llama3-8b", "activation": "silu", "dtype": "bf16", "tokens": 4}
    assert report.stem(facts, "silu") == "gated_mlp_llama3-8b_bf16_t4"
    assert report.stem({**facts, "activation": "relu"}, "silu") == "gated_mlp_llama3-8b-relu_bf16_t4"
    options = {"indicator": "up", "input_sparsity": 0.25, "weights": "int8"}
    assert report.stem({**facts, **options}, "silu") == "gated_mlp_llama3-8b-up-input25-int8_bf16_t4"


def _row(alternative: str, ms: float, density: float | None = None, **numbers: float) -> report.Row:
    return report.Row(alternative, alternative, ms, ms, ms, 300.0, 300.0 / ms, density=density, **numbers)


def test_break_even_is_where_the_curve_crosses() -> None:
    own = [_row("own_0", 12.0, 1.0), _row("own_50", 8.0, 0.5), _row("own_90", 5.0, 0.1)]
    assert plot.break_even(own, 10.0) == pytest.approx(25.0)
    assert plot.break_even(own, 13.0) == 0.0
    assert plot.break_even(own, 4.0) is None


def test_plot_is_drawn_from_a_stored_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the bench extra")
    path = tmp_path / "r.csv"
    report.write_csv(measure.measure(case(), measure.build(case())), path)
    plot.draw(report.read_csv(path), tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
