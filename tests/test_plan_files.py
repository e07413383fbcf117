"""A plan's two files: round trip bit for bit, and a clear sentence for everything that can be wrong with them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsemlp.calibration import METHODS, LayerPlan, Plan
from tests.plan_samples import FIRST, WIDTHS, fingerprint, make


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make().save(tmp_path / "plan")
    return tmp_path / "plan"


def edit_json(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / "plan.json").read_text())
    record.update(changes)
    (folder / "plan.json").write_text(json.dumps(record))


def edit_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Other tensors with the right checksum."""
    tensors = safetensors.torch.load_file(folder / "plan.safetensors")
    tensors.update(changes)
    replace_bytes(folder, safetensors.torch.save({name: t for name, t in tensors.items() if t is not None}))


def replace_bytes(folder: Path, data: bytes) -> None:
    (folder / "plan.safetensors").write_bytes(data)
    edit_json(folder, tensors_sha256=hashlib.sha256(data).hexdigest())


# Round trip


def test_round_trip(saved: Path) -> None:
    loaded = Plan.load(saved)
    assert loaded == make()
    assert list(loaded.layers) == list(WIDTHS)
    assert sorted(path.name for path in saved.iterdir()) == ["plan.json", "plan.safetensors"]
    assert loaded.sparsity == pytest.approx(0.6, abs=1e-6)


FLOATS = st.floats(width=32, min_value=0, allow_nan=False)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(FLOATS, min_size=5, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=5, max_size=5),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1),
    st.sampled_from(METHODS),
)
def test_round_trip_of_any_values(
    tmp_path: Path, thresholds: list[float], means: list[float], target: float, sparsity: float, method: str
) -> None:
    layers = make().layers
    layers["model.layers.0.mlp"] = LayerPlan(
        torch.tensor(thresholds), torch.tensor(means), sparsity, sparsity / 3
    )
    sizes = {"bits": 3, "group": 128} if method == "screen" else {}
    plan = make(layers=layers, target=target, method=method, **sizes)
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_screen_is_saved_with_its_plan(tmp_path: Path, bits: int, group: int) -> None:
    plan = make(method="screen", bits=bits, group=group)
    plan.save(tmp_path)
    record = json.loads((tmp_path / "plan.json").read_text())
    assert (record["version"], record["method"], record["bits"], record["group"]) == (
        1,
        "screen",
        bits,
        group,
    )
    loaded = Plan.load(tmp_path)
    assert loaded == plan
    assert (loaded.bits, loaded.group) == (bits, group)
    assert loaded != make(method="screen", bits=bits, group=32 if group != 32 else 64)


def test_plans_of_the_other_methods_are_the_bytes_they_were_before_there_was_a_screen(tmp_path: Path) -> None:
    make(package_version="0").save(tmp_path)
    record = json.loads((tmp_path / "plan.json").read_text())
    assert list(record) == [
        "format", "version", "package_version", "method", "target", "calibration_tokens", "tensors_sha256",
        "fingerprint", "layers",
    ]  # fmt: skip
    text = (tmp_path / "plan.json").read_text().replace(record["tensors_sha256"], "")
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "6d30bb8805210069c95d75fe2a489072f0f34a388f0745bf15574a5edd79118f"
    )
    assert Plan.load(tmp_path).bits is Plan.load(tmp_path).group is None


def test_views_and_gradients_are_saved_as_values(tmp_path: Path) -> None:
    wide = torch.arange(20.0, requires_grad=True).reshape(5, 4)
    layers = make().layers
    layers["model.layers.0.mlp"] = LayerPlan(wide[:, 1], wide[:, 1], 0.5)
    make(layers=layers).save(tmp_path)
    loaded = Plan.load(tmp_path).layers["model.layers.0.mlp"]
    assert loaded.threshold.tolist() == loaded.skipped_mean.tolist() == [1, 5, 9, 13, 17]
    assert not loaded.threshold.requires_grad


# Writing


def test_save_overwrites_and_makes_folders(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make().save(folder)
    make(target=0.7).save(str(folder))
    assert Plan.load(str(folder)).target == 0.7


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_files_get_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    make().save(tmp_path)
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("crash_at", [0, 1])
def test_interrupted_save(saved: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int) -> None:
    """After a crash before the first rename the old plan loads; between the two, a clear error."""
    calls, replace = [], os.replace

    def crashing(source: Path, to: Path) -> None:
        calls.append(to)
        if len(calls) > crash_at:
            raise KeyboardInterrupt
        replace(source, to)

    monkeypatch.setattr(os, "replace", crashing)
    layers = make().layers
    layers["model.layers.0.mlp"] = LayerPlan(torch.tensor(0.9), None, 0.5)
    with pytest.raises(KeyboardInterrupt):
        make(layers=layers).save(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["plan.json", "plan.safetensors"]
    if crash_at == 0:
        assert Plan.load(saved) == make()
    else:
        with pytest.raises(ValueError, match=r"does not match the checksum in plan.json .*interrupted save"):
            Plan.load(saved)


def test_missing_safetensors_names_the_extra(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: make().save(saved), lambda: Plan.load(saved)):
        with pytest.raises(ImportError, match=re.escape("pip install 'sparsemlp[calibrate]'")):
            call()


# Reading


def refused(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as error:  # one line
        Plan.load(folder)
    return str(error.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"folder is '.*nowhere', expected a folder written by Plan.save"
    ):
        Plan.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="folder is"):
        Plan.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors"])
def test_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert f"has no {name}, expected a folder written by Plan.save" in refused(saved)
    (saved / name).mkdir()
    assert f"{name} cannot be read" in refused(saved)


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"format": "sparsemlp-plan", "version"', "\xff\xfe", "[" * 200_000, "9" * 5000],
    ids=["empty", "open", "cut", "no-text", "deep", "digits"],
)
def test_damaged_json(saved: Path, text: str) -> None:
    (saved / "plan.json").write_bytes(text.encode("latin-1"))
    assert "plan.json is not valid JSON" in refused(saved)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format": "other", "version": 1}'])
def test_json_of_something_else(saved: Path, text: str) -> None:
    (saved / "plan.json").write_text(text)
    assert "is not a plan, expected format 'sparsemlp-plan'" in refused(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has version 2, this sparsemlp reads up to 1; install a newer sparsemlp"),
        ({"version": "1"}, "has version '1', expected a whole number"),
        ({"version": True}, "has version True, expected a whole number"),
        ({"version": 0}, "has version 0, expected a whole number"),
        ({"method": "magic"}, "method is 'magic', expected one of: cats, upaware, screen"),
        ({"method": ["cats"]}, "method is ['cats'], expected one of"),
        ({"method": "screen"}, "key 'bits' is missing"),
        ({"method": "screen", "bits": 5, "group": 32}, "bits is 5, expected one of: 3, 4, 8"),
        ({"method": "screen", "bits": 4.0, "group": 32}, "bits is 4.0, expected one of: 3, 4, 8"),
        ({"method": "screen", "bits": 4, "group": None}, "group is None, expected one of: 32, 64, 128"),
        ({"bits": 4}, "bits is 4 and group None with method 'cats', expected None beside any but 'screen'"),
        ({"group": 32}, "bits is None and group 32 with method 'cats'"),
        ({"target": 1.5}, "target is 1.5, expected a share in [0, 1)"),
        ({"target": float("nan")}, "target is nan, expected a share"),
        ({"calibration_tokens": None}, "tokens is None, expected the number of calibration tokens"),
        ({"calibration_tokens": -1}, "tokens is -1, expected the number of calibration tokens"),
        ({"calibration_tokens": float("inf")}, "tokens is inf, expected the number of calibration tokens"),
        ({"package_version": None}, "package_version is None, expected a string"),
        ({"layers": []}, "plan.json is damaged"),
        (
            {"layers": {}},
            "plan.safetensors has model.layers.0.mlp.skipped_mean, which plan.json does not know",
        ),
        ({"fingerprint": None}, "fingerprint is incomplete"),
        ({"fingerprint": {"architecture": "A", "layers": {}}}, "fingerprint is incomplete"),
        ({"fingerprint": fingerprint(architecture=3)}, "fingerprint is incomplete"),
        (
            {"fingerprint": fingerprint(layers={"a": {}})},
            "fingerprint of layer a is {}, expected hidden_size",
        ),
        ({"tensors_sha256": "0" * 64}, "does not match the checksum"),
        ({"tensors_sha256": None}, "does not match the checksum"),
    ],
)
def test_damaged_fields(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(saved, **changes)
    assert message in refused(saved)


@pytest.mark.parametrize(
    "key",
    ["method", "target", "fingerprint", "layers", "calibration_tokens", "package_version", "tensors_sha256"],
)
def test_missing_fields(saved: Path, key: str) -> None:
    record = json.loads((saved / "plan.json").read_text())
    del record[key]
    (saved / "plan.json").write_text(json.dumps(record))
    assert (
        "does not match the checksum" if key == "tensors_sha256" else f"key '{key}' is missing"
    ) in refused(saved)


@pytest.mark.parametrize("key", ["bits", "group"])
def test_missing_screen(tmp_path: Path, key: str) -> None:
    make(method="screen", bits=4, group=32).save(tmp_path)
    record = json.loads((tmp_path / "plan.json").read_text())
    del record[key]
    (tmp_path / "plan.json").write_text(json.dumps(record))
    assert f"key '{key}' is missing" in refused(tmp_path)


def test_layers_missing_and_extra(saved: Path) -> None:
    record = json.loads((saved / "plan.json").read_text())
    name = "model.layers.1.mlp"
    figures = record["layers"].pop(name)
    edit_json(saved, layers=record["layers"])
    assert f"plan.safetensors has {name}.threshold, which plan.json does not know" in refused(saved)
    edit_tensors(saved, {f"{name}.threshold": None})
    assert f"layers lacks {name}, expected every layer of the fingerprint" in refused(saved)
    edit_json(saved, layers={**record["layers"], name: figures})
    assert f"plan.safetensors lacks {name}.threshold" in refused(saved)
    edit_tensors(saved, {f"{name}.threshold": torch.ones(7), "extra.threshold": torch.ones(2)})
    edit_json(saved, layers={**record["layers"], name: figures, "extra": figures})
    assert "layers has extra, which the fingerprint does not know" in refused(saved)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("threshold", torch.tensor(float("nan")), "threshold of layer model.layers.0.mlp holds NaN"),
        (
            "threshold",
            torch.tensor([0.0, 1, 2, float("nan"), 3]),
            "threshold of layer model.layers.0.mlp holds NaN",
        ),
        (
            "threshold",
            torch.tensor(-0.5),
            "threshold of layer model.layers.0.mlp holds -0.5, expected numbers ≥ 0",
        ),
        (
            "threshold",
            torch.ones(6),
            "threshold of layer model.layers.0.mlp has shape (6,), expected () or (5,)",
        ),
        ("threshold", torch.ones(5, 1), "has shape (5, 1), expected () or (5,)"),
        (
            "threshold",
            torch.ones(5).half(),
            "threshold of layer model.layers.0.mlp is torch.float16, expected float32",
        ),
        (
            "skipped_mean",
            torch.ones(()),
            "skipped_mean of layer model.layers.0.mlp has shape (), expected (5,)",
        ),
        (
            "skipped_mean",
            torch.full((5,), float("inf")),
            "skipped_mean of layer model.layers.0.mlp holds NaN or inf",
        ),
        ("skipped_mean", torch.ones(5, dtype=torch.int32), "is torch.int32, expected float32"),
    ],
)
def test_bad_tensors(saved: Path, name: str, tensor: Tensor, message: str) -> None:
    edit_tensors(saved, {f"{FIRST}.{name}": tensor})
    assert message in refused(saved)


@pytest.mark.parametrize(
    ("figure", "value"),
    [("sparsity", 1.5), ("sparsity", -0.1), ("hidden_error", float("nan")), ("hidden_error", -1.0)],
)
def test_bad_figures(saved: Path, figure: str, value: float) -> None:
    record = json.loads((saved / "plan.json").read_text())
    record["layers"][FIRST][figure] = value
    edit_json(saved, layers=record["layers"])
    assert f"{figure} of layer model.layers.0.mlp is {value}" in refused(saved)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_tensors(saved: Path, keep: int) -> None:
    data = (saved / "plan.safetensors").read_bytes()
    (saved / "plan.safetensors").write_bytes(data[:keep])
    assert "does not match the checksum" in refused(saved)
    replace_bytes(saved, data[:keep])
    assert "plan.safetensors is not safetensors" in refused(saved)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickled",))


def test_nothing_is_unpickled(saved: Path, tmp_path: Path) -> None:
    replace_bytes(saved, pickle.dumps(Bomb()))
    assert "plan.safetensors is not safetensors" in refused(saved)
    torch.save(torch.ones(5), tmp_path / "zip")
    replace_bytes(saved, (tmp_path / "zip").read_bytes())
    assert "plan.safetensors is not safetensors" in refused(saved)
