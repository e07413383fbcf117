"""The benchmark's own claims: fresh masks, paired ratios, bytes, files written whole."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import bandwidth, gate, machine, measure, plot, registry, report, shapes, timing
from benchmarks.gated_mlp import GatedMlp, layers_beyond_cache

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


# The workload


def test_masks_are_new_on_every_call_at_the_wanted_density() -> None:
    work = GatedMlp(SMALL, torch.float32, 1, "silu", layers=2)
    seen = {s: [work.fresh() for _ in range(300)] for s in (0.5, 0.9)}
    for sparsity, density in work.densities(seen).items():
        wanted = 1 - sparsity
        assert density.density == pytest.approx(wanted, rel=0.1)
        assert density.union == pytest.approx(density.density)  # T = 1
        assert density.overlap == pytest.approx(wanted, rel=0.2)  # independent: chance only


def test_a_fixed_mask_would_be_noticed() -> None:
    work = GatedMlp(SMALL, torch.float32, 1, "silu", layers=2)
    again = work.fresh()
    assert work.densities({0.9: [again] * 20})[0.9].overlap == 1.0


def test_inputs_never_repeat() -> None:
    work = GatedMlp(SMALL, torch.bfloat16, 2, "silu", layers=3)
    inputs = [x for _ in range(20) for x in work.fresh()]
    assert all(x.shape == (2, SMALL.d) and x.dtype == torch.bfloat16 for x in inputs)
    assert len({tuple(x.float().flatten().tolist()) for x in inputs}) == len(inputs)


def test_tokens_of_a_call_have_independent_masks() -> None:
    work = GatedMlp(SMALL, torch.float32, 4, "silu", layers=2)
    density = work.densities({0.9: [work.fresh() for _ in range(200)]})[0.9]
    assert density.union == pytest.approx(1 - (1 - density.density) ** 4, rel=0.05)


@pytest.mark.parametrize("sparsity", [0.25, 0.9])
def test_threshold_is_the_exact_quantile_of_the_calibration_tokens(sparsity: float) -> None:
    work = GatedMlp(SMALL, torch.float32, 1, "silu", layers=1)
    threshold = work.threshold(0, sparsity)
    assert threshold.shape == ()
    assert threshold.dtype == torch.float32
    values = work._calibration[0]
    assert (values < threshold).sum().item() == round(sparsity * len(values))


def test_relu_starts_from_its_exact_zeros() -> None:
    work = GatedMlp(SMALL, torch.float32, 1, "relu", layers=1)
    density = work.densities({0.0: [work.fresh() for _ in range(100)]})[0.0]
    assert density.density == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_what_is_timed_computes_the_mlp(dtype: torch.dtype, activation: str) -> None:
    work = GatedMlp(SMALL, dtype, 16, activation, layers=2)
    entry = registry.get("gated_mlp")
    x, layer = work.fresh()[1], work.layers[1]
    wide = [t.double() for t in (x, layer.w_gate, layer.w_up, layer.w_down)]
    gate_out, up = F.linear(wide[0], wide[1]), F.linear(wide[0], wide[2])
    act = F.silu(gate_out) if activation == "silu" else F.gelu(gate_out, approximate="tanh")
    truth = F.linear(act * up, wide[3])
    baseline = (entry.dense[0].build(work)(1, x) - truth).abs().max()
    budget = 2 * baseline + torch.finfo(dtype).eps * truth.abs().max()
    with torch.inference_mode():
        assert (work.own(0.0)(1, x) - truth).abs().max() <= budget
        torch.testing.assert_close(entry.dense[1].build(work)(1, x), entry.dense[0].build(work)(1, x))
        # A threshold that drops nine tenths must change the result, or nothing was skipped.
        assert (work.own(0.9)(1, x) - truth).abs().max() > budget


def test_weights_are_shared_between_token_counts() -> None:
    first = measure.build(case())
    second = measure.build(case(tokens=4), share=first)
    assert second.layers is first.layers
    assert second.tokens == 4


def test_layers_leave_the_cache() -> None:
    assert layers_beyond_cache(352_000_000, 32 * 2**20) == 3
    small = layers_beyond_cache(5_308_416, 32 * 2**20)
    assert small * 5_308_416 > 4 * 32 * 2**20
    assert small * 5_308_416 / 3 > 32 * 2**20  # even a walk over the gates alone


def test_bytes_follow_the_rows_read() -> None:
    work = GatedMlp(SMALL, torch.bfloat16, 1, "silu", layers=1)
    assert work.bytes_dense == 3 * SMALL.d * SMALL.f * 2
    assert work.bytes_read(1.0) == work.bytes_dense
    assert work.bytes_read(0.0) == work.bytes_dense / 3


def test_tables_are_consistent() -> None:
    for name, shape in shapes.SHAPES.items():
        assert name == shape.name
        assert shape.d > 0
        assert shape.f > 0
    for entry in registry.ENTRIES.values():
        assert (gate.ROOT / entry.conformance.path).is_file()
        assert all(shapes.get(name).gated for name in entry.shapes)
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


def test_ratios_point_the_right_way() -> None:
    """In a single round every ratio is that of the two times."""
    result = measure.measure(case(rounds=1), measure.build(case()))
    read, eager, own = (result.row(name) for name in ("read", "eager", "own_90"))
    assert own.vs_eager == pytest.approx(eager.p50_ms / own.p50_ms)
    assert own.vs_own_0 == pytest.approx(result.row("own_0").p50_ms / own.p50_ms)
    fastest = min(eager.p50_ms, result.row("eager_neuron_major").p50_ms)
    assert own.vs_best_dense == pytest.approx(fastest / own.p50_ms)
    assert own.share_of_read == pytest.approx(own.gb_per_s / read.gb_per_s)


@pytest.mark.parametrize("skips", [True, False])
def test_bytes_of_a_path_that_reads_everything(skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ("native", "") if skips else ("reference", "native: not built")
    monkeypatch.setattr(machine, "backend", lambda op, x: found)
    result = measure.measure(case(), measure.build(case()))
    own, eager = result.row("own_90"), result.row("eager")
    assert (own.megabytes < 0.5 * eager.megabytes) is skips
    assert (own.megabytes == eager.megabytes) is not skips
    assert ("not built" in report.table(result)) is not skips


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
