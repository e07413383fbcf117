"""Tuning: what is tried, that a wrong or failing configuration is never kept, that files are merged and whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import tune, tune_spaces, tune_trials
from benchmarks.gpu_device import Deadline, Device, Replay
from benchmarks.gpu_precompile import Precompiler
from sparsemlp.kernels import _channels, _configs, gated_mlp, mlp
from sparsemlp.kernels._launch import Launch
from sparsemlp.kernels._rule import Rule

KEYS = {
    "gated_mlp": [
        {"tokens": t, "d": d, "f": f, "dtype": dtype}
        for t in (1, 8, 16)
        for d, f in ((4096, 14336), (8192, 28672))
        for dtype in ("bf16", "fp32")
    ],
    "gated_mlp_prefill": [{"tokens": 512, "d": 4096, "f": 14336, "dtype": "bf16"}],
    "mlp": [{"tokens": t, "d": 2048, "f": 8192, "dtype": "bf16"} for t in (1, 8)],
    "mlp_prefill": [{"tokens": 512, "d": 2048, "f": 8192, "dtype": "bf16"}],
    "sparse_linear": [
        {"tokens": t, "k": k, "n": n, "dtype": dtype}
        for t in (1, 8)
        for k, n in ((4096, 14336), (14336, 4096))
        for dtype in ("bf16", "fp32")
    ],
    "sparse_linear_prefill": [{"tokens": 512, "k": 4096, "n": 14336, "dtype": "bf16"}],
    "activation": [{"n": 2**20, "dtype": "fp32"}],
}
KEY = KEYS["activation"][0]


@pytest.mark.parametrize("op", tune_spaces.SPACES)
def test_candidates(op: str) -> None:
    """The default first, nothing twice, nothing that a file could not say, and enough to choose from."""
    for key in KEYS[op]:
        found = tune.candidates(op, key)
        default = tune_spaces.SPACES[op].default(key)
        assert found[0] == default
        assert len({json.dumps(c, sort_keys=True) for c in found}) == len(found)
        assert 5 < len(found) < 60
        for config in found:
            assert config.keys() == default.keys()
            assert all(_configs._usable(name, v, default[name]) for name, v in config.items()), config


def _launches(op: str, key: dict[str, Any], tokens: int) -> list[Launch]:
    """The launches of a call near a key."""
    dtype, threshold = tune_spaces.DTYPES[key["dtype"]], torch.empty((), device="meta")

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if op == "sparse_linear":
        x, w = meta(tokens, key["k"]), meta(key["k"], key["n"])
        return _channels.few(x, w, threshold, None, None, dtype)[1]
    x, w = meta(tokens, key["d"]), meta(key["f"], key["d"])
    if op == "mlp":
        rule = Rule(threshold, None, None, None, "relu", "ungated")
        return mlp.decode(x, w, w, rule, None, None, None)[1]
    return gated_mlp.decode(x, w, w, w, threshold, *(None,) * 8, "silu", "gate")[1]


@pytest.mark.parametrize(
    ("op", "key"), [(op, key) for op in ("gated_mlp", "mlp", "sparse_linear") for key in KEYS[op]], ids=str
)
def test_a_candidate_can_be_launched_for_the_tokens_near_its_key_too(op: str, key: dict[str, Any]) -> None:
    """An entry is also the nearest one for numbers of tokens that nothing was tuned for."""
    for config in tune.candidates(op, key):
        for tokens in (1, 2, 3, 16):
            with _configs.use(op, config):
                select, rows = _launches(op, key, tokens)
            of_x = op == "sparse_linear"  # whose first launch multiplies nothing
            for launch in (rows,) if of_x else (select, rows):
                constants = launch.constants
                assert all(0 < n < 65536 for n in launch.grid[1:]), (config, tokens, launch.grid)
                if constants.get("DOT"):
                    sides = [
                        constants[name] for name in ("BLOCK_D", "BLOCK_I", "BLOCK_T") if name in constants
                    ]
                    assert min(sides) >= 16, (config, tokens, constants)
            if rows.constants.get("DOT"):  # as tuned, not rounded up
                assert rows.constants["BLOCK_I"] == config["block_i"], (config, tokens)


def test_short_sides_are_tried_where_nothing_near_multiplies_with_them() -> None:
    def found(dtype: str) -> set[int]:
        key = {"tokens": 1, "d": 4096, "f": 14336, "dtype": dtype}
        return {config["block_i"] for config in tune.candidates("gated_mlp", key)}

    assert 8 in found("fp32")
    assert min(found("bf16")) == 16


def test_every_value_that_can_be_tuned_exists_and_every_operator_has_a_trial() -> None:
    assert tune_spaces.SPACES.keys() == tune_trials.TRIALS.keys()
    for op, space in tune_spaces.SPACES.items():
        default = space.default(KEYS[op][0])
        for change in (dict.fromkeys(space.values), *space.together):
            assert change.keys() <= default.keys()


class Fake:
    """A trial whose times are a formula, and some of whose configurations fail."""

    key = KEY

    def __init__(
        self, milliseconds: Any, wrong: Any = lambda config: False, broken: Any = lambda config: False
    ) -> None:
        self.milliseconds, self.wrong, self.broken = milliseconds, wrong, broken

    def problem(self, config: dict[str, Any]) -> str:
        assert _configs.find("activation", Device(dry=True).torch_device, self.key, {"block": 0}) is not None
        if self.broken(config):
            raise RuntimeError("out of resource: shared memory")
        return "1 entry outside the budget" if self.wrong(config) else ""

    def replays(self, config: dict[str, Any]) -> list[Replay]:
        return [Replay(f"{self.milliseconds(config)}", lambda: None)]

    def finish(self, config: dict[str, Any]) -> dict[str, Any]:
        return config


@pytest.fixture(autouse=True)
def _exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay's name ends in the milliseconds that it "takes"."""
    monkeypatch.setattr(
        tune,
        "timed",
        lambda where, replays, rounds: {r.name: [float(r.name.split()[-1]) / 1e3] for r in replays},
    )


def find(trial: Fake) -> tuple[dict[str, Any], float, float, list[dict[str, Any]]]:
    where = Device(dry=True)
    run = tune.Search(where, "activation", trial, Deadline(60))
    kept: list[dict[str, Any]] = []
    best, seconds, default = tune.search(
        run, Precompiler(where, "", 0), lambda config, mine, default: kept.append(config)
    )
    return best, seconds, default, kept


def cost(config: dict[str, Any]) -> float:
    """Best at block 4096 and 8 warps."""
    return 10 + abs(math.log2(config["block"] / 4096)) + abs(math.log2(config["warps"] / 8))


def test_the_best_is_found_and_its_time_is_the_last_duels() -> None:
    best, seconds, default, kept = find(Fake(cost))
    assert (best["block"], best["warps"]) == (4096, 8)
    assert seconds == pytest.approx(10e-3)
    assert default == pytest.approx(cost(tune_spaces.SPACES["activation"].default(KEY)) / 1e3)
    times = [cost(config) for config in kept]
    assert times == sorted(times, reverse=True)


def test_a_wrong_or_broken_configuration_is_never_kept_however_fast() -> None:
    def bad(config: dict[str, Any]) -> bool:
        return config["block"] == 4096

    for trial in (Fake(cost, wrong=bad), Fake(cost, broken=bad)):
        best, *_, kept = find(trial)
        assert best["block"] in (2048, 8192)
        assert not any(map(bad, kept))


def test_less_than_one_percent_is_no_reason_to_change() -> None:
    best, *_ = find(Fake(lambda config: 10 - 0.05 * (config["block"] == 4096)))
    assert best == tune_spaces.SPACES["activation"].default(KEY)


def test_a_failing_default_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the default fails"):
        find(Fake(cost, wrong=lambda config: True))


def test_files_are_merged_by_key_and_whole(tmp_path: Path) -> None:
    other = {**KEY, "n": 5}
    for key, block in ((KEY, 1), (other, 2), (KEY, 3)):
        entry = {"key": key, "config": {"block": block}, "us": {"this": 1.0}}
        path = tune.save(tmp_path, "activation", "gpu", entry, "measured")
    found = json.loads(path.read_text())
    assert [(e["key"], e["config"]["block"]) for e in found["entries"]] == [(other, 2), (KEY, 3)]
    assert found.keys() == {"gpu", "status", "torch", "triton", "date", "entries"}
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]  # no temporary file is left
    path.write_text("{")
    with pytest.warns(UserWarning, match="written anew"):
        tune.save(tmp_path, "activation", "gpu", entry, "measured")
    assert len(json.loads(path.read_text())["entries"]) == 1


def test_what_is_written_is_what_a_call_reads(tmp_path: Path) -> None:
    config = {"block": 2048, "warps": 8, "counted_blocks": 4}
    tune.save(tmp_path, "activation", "cpu", {"key": KEY, "config": config}, "measured")
    _configs.read_from(tmp_path)
    try:
        default = tune_spaces.SPACES["activation"].default(KEY)
        assert _configs.find("activation", Device(dry=True).torch_device, KEY, default) == config
    finally:
        _configs.read_from(None)


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--op", "nothing"], "expected some of"),
        (["--dry"], "writes no measurement"),
    ):
        with pytest.raises(SystemExit):
            tune.main(arguments)
        assert message in capsys.readouterr().err
