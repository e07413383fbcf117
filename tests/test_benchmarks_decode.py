"""Decoding whole models at equal perplexity: the choice of sparsities, inputs that are new, and what is reported."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import decode, decode_models, gate, shapes
from benchmarks.decode_models import Subject
from sparsemlp.integrations.transformers import find_mlps
from sparsemlp.nn import SparseGatedMLP
from tests import tiny_models

QUALITY = """rule,target,ratio
dense,0,1
cats,0.3,1.05
cats,0.5,1.25
screen4,0.5,1.05
screen4,0.7,1.2
screen4,0.8,1.5
"""
TARGETS = {("cats", 1.2): 0.4, ("screen4", 1.2): 0.7}


@pytest.fixture
def quality(tmp_path: Path) -> Path:
    path = tmp_path / "quality.csv"
    path.write_text(QUALITY)
    return path


def small(name: str = "tiny", layers: int = 2) -> Subject:
    return decode_models.stack(shapes.get(name), layers)


def test_a_measured_ratio_gives_its_target(quality: Path) -> None:
    assert decode_models.target_at(quality, "cats", 1.05) == pytest.approx(0.3)
    assert decode_models.target_at(quality, "screen4", 1.2) == pytest.approx(0.7)


def test_between_measured_ratios_the_logarithm_is_linear(quality: Path) -> None:
    middle = math.sqrt(1.05 * 1.25)
    assert decode_models.target_at(quality, "cats", middle) == pytest.approx(0.4)
    assert decode_models.target_at(quality, "screen4", math.sqrt(1.05)) == pytest.approx(0.25)


@pytest.mark.parametrize(("rule", "ratio"), [("cats", 1.3), ("cats", 0.9), ("upaware", 1.2)])
def test_what_was_not_measured_is_named(rule: str, ratio: float, quality: Path) -> None:
    with pytest.raises(ValueError, match=f"--at is {ratio}, expected between 1 and"):
        decode_models.target_at(quality, rule, ratio)


def test_inputs_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = small()
    found = decode_models.configurations(subject, TARGETS)
    monkeypatch.setattr(decode, "check", lambda *args: None)  # gives all configurations the same, on purpose
    seen: list[Tensor] = []
    for one in found:
        one.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
    decode.run(subject, found, rounds=3, steps=4, context=8)
    vectors = torch.cat([x.flatten(0, 1) for x in seen])
    assert len(vectors) >= len(found) * 3 * (8 + 4)
    assert len(vectors.unique(dim=0)) == len(vectors)


def test_every_configuration_reaches_its_target() -> None:
    subject = small()
    rows = decode.run(subject, decode_models.configurations(subject, TARGETS), rounds=3, steps=4, context=8)
    names = ["dense", "threshold_0", "cats_at_1.2", "screen4_at_1.2"]
    assert [row.configuration for row in rows] == names
    dense, own, cats, screen = rows
    for row, wanted in ((dense, 0.0), (own, 0.0), (cats, 0.4), (screen, 0.7)):
        assert row.sparsity == pytest.approx(wanted, abs=0.06)
        assert 0 < row.mlp_ms < row.ms
        assert row.ms_low <= row.ms <= row.ms_high
    assert (dense.vs_dense, own.vs_threshold_0, cats.vs_cats) == (None, None, None)
    assert None not in (own.vs_dense, cats.vs_threshold_0, screen.vs_cats, screen.mlp_vs_dense)


def test_weights_are_shared_but_not_what_the_router_remembers_by() -> None:
    subject = small()
    models = [one.model for one in decode_models.configurations(subject, TARGETS)]
    mlps = [next(iter(find_mlps(model).values())) for model in models]
    assert [type(mlp) is SparseGatedMLP for mlp in mlps] == [False, True, True, True]
    assert len({mlp.down_proj.weight.data_ptr() for mlp in mlps}) == len(mlps)
    assert len({mlp.gate_proj.weight.data_ptr() for mlp in mlps}) == 1
    assert [mlp.indicator for mlp in mlps[1:]] == ["gate", "gate", "screen"]


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_nothing_is_timed_that_is_computed_wrong(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = small()
    found = decode_models.configurations(subject, TARGETS)
    monkeypatch.setattr(decode, "interleave", lambda *args: pytest.fail("timed"))
    for mlp in find_mlps(found[broken].model).values():
        mlp.register_forward_hook(lambda m, args, out: out if m.backend == "reference" else 2 * out)
    with pytest.raises(gate.GateError, match=f"mlp of {found[broken].name} is .* off in norm"):
        decode.run(subject, found, rounds=1, steps=1, context=4)


def test_perplexity_is_measured_where_there_is_text() -> None:
    model = tiny_models.make().to(torch.bfloat16)
    ids = torch.randint(0, 64, (4, 1, 32), generator=torch.Generator().manual_seed(0))
    subject = Subject(
        "tiny", model, "input_ids", list(ids), lambda tokens: torch.randint(0, 64, (1, tokens)), list(ids)
    )
    found = decode_models.configurations(subject, {("screen4", 1.2): 0.7})
    dense, own, screen = decode.run(subject, found, rounds=1, steps=2, context=4)
    assert dense.perplexity_ratio == 1
    assert own.perplexity_ratio == pytest.approx(1, abs=0.05)
    assert screen.perplexity_ratio not in (None, 1)


def run_main(quality: Path, tmp_path: Path, *more: str, tested: Callable[[], str] = lambda: "green") -> int:
    few = ["--rounds", "2", "--tokens", "2", "--context", "4", "--layers", "1"]
    files = ["--quality", str(quality), "--out", str(tmp_path / "out")]
    return decode.main(["--model", "tiny", "--at", "1.2", *few, *files, *more], tested)


def test_a_run_writes_its_rows(quality: Path, tmp_path: Path) -> None:
    for more, status in (([], "verified"), (["--no-gate"], "unverified")):
        assert run_main(quality, tmp_path, *more) == 0
        (path,) = (tmp_path / "out").glob("*/decode/tiny_bf16.csv")
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["configuration"] for row in rows][2:] == ["cats_at_1.2", "screen4_at_1.2"]
        assert {(row["status"], row["model"], row["F"], row["layers"]) for row in rows} == {
            (status, "tiny", "160", "1")
        }
        assert rows[0]["vs_dense"] == ""
        assert float(rows[3]["vs_cats_low"]) <= float(rows[3]["vs_cats"]) <= float(rows[3]["vs_cats_high"])


def test_a_red_gate_writes_nothing(quality: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def red() -> str:
        raise gate.GateError("gated_mlp: no result is reported")

    assert run_main(quality, tmp_path, tested=red) == 1
    assert "no result is reported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--quality", "absent.csv"], "--quality absent.csv is no file"),
        (["--tokens", "0"], "--tokens is 0, expected 1 or more"),
        (["--context", "1000"], "1002 together, expected at most 1000"),
        (["--at", "3"], "run benchmarks.quality with more --target"),
        (["--model", "vit-b"], "expected a gated MLP"),
        (["--model", "unheard-of"], "shape is 'unheard-of'"),
    ],
)
def test_bad_arguments(
    more: list[str], sentence: str, quality: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(quality, tmp_path, *more) == 2
    assert sentence in capsys.readouterr().err
