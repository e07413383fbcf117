"""Launch configurations: the nearest entry, one warning without a file, and files that cannot break a call."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import sparsemlp
from sparsemlp.kernels import _configs, activation, gated_mlp, gated_mlp_prefill

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
DEFAULT = {"block_f": 16, "warps": 4, "stages": 2, "skip_below": 0.0, "splits": 32}
MLP = gated_mlp.default(1, 4096, 14336, torch.bfloat16)
PREFILL = gated_mlp_prefill.default(512, 4096, 14336, torch.bfloat16)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A GPU of a name, and an empty folder of configurations."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (test)")
    _configs.read_from(tmp_path)
    yield
    _configs.read_from(None)


def key(tokens: int = 1, d: int = 4096, f: int = 14336, dtype: str = "bf16") -> dict[str, int | str]:
    return {"tokens": tokens, "d": d, "f": f, "dtype": dtype}


def write(folder: Path, entries: Any, op: str = "op", gpu: str = "nvidia-h200-test") -> None:
    (folder / op).mkdir(exist_ok=True)
    text = entries if isinstance(entries, str) else json.dumps({"entries": entries})
    (folder / op / f"{gpu}.json").write_text(text)
    _configs.read_from(folder)


def entry(config: Any, **sizes: Any) -> dict[str, Any]:
    return {"key": key(**sizes), "config": config}


def test_names() -> None:
    assert _configs.gpu_name(GPU) == "nvidia-h200-test"
    assert _configs.gpu_name(CPU) == "cpu"
    assert _configs.path("op", "x").parts[-2:] == ("op", "x.json")


def test_the_default_and_one_warning_without_a_file() -> None:
    with pytest.warns(
        UserWarning, match=r"no measured configuration for nvidia-h200-test.*benchmarks\.tune --op op"
    ):
        assert _configs.find("op", GPU, key(), DEFAULT) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _configs.find("op", GPU, key(tokens=5), DEFAULT) == DEFAULT
        assert _configs.find("op", CPU, key(), DEFAULT) == DEFAULT  # the interpreter has nothing to be tuned


def test_the_nearest_entry_of_the_dtype(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            entry({"block_f": 32}, tokens=1),
            entry({"block_f": 64}, tokens=8),
            entry({"block_f": 128}, tokens=3, dtype="fp16"),
        ],
    )
    found = {t: _configs.find("op", GPU, key(tokens=t), DEFAULT)["block_f"] for t in (1, 2, 3, 8, 16)}
    assert found == {1: 32, 2: 32, 3: 64, 8: 64, 16: 64}
    assert _configs.find("op", GPU, key(tokens=3, dtype="fp16"), DEFAULT)["block_f"] == 128
    assert _configs.find("op", GPU, key(tokens=3, dtype="fp32"), DEFAULT) == DEFAULT
    assert _configs.find("op", GPU, key(d=16, f=32), DEFAULT) == DEFAULT  # too far
    assert _configs.find("op", GPU, {"n": 5, "dtype": "bf16"}, DEFAULT) == DEFAULT  # another kind of key


def test_unknown_names_are_ignored_and_the_rest_is_the_default(tmp_path: Path) -> None:
    write(tmp_path, [entry({"block_f": 64, "of_the_future": 3})])
    assert _configs.find("op", GPU, key(), DEFAULT) == {**DEFAULT, "block_f": 64}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"entries": 3}',
        '{"entries": [3]}',
        '{"entries": [{"key": {}}]}',
        "\x00",
        "[" * 10**5,
    ],
    ids=repr if False else lambda t: repr(t[:12]),
)
def test_a_damaged_file_is_one_warning_and_the_default(text: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    with pytest.warns(UserWarning, match="cannot be used"):
        assert _configs.find("op", GPU, key(), DEFAULT) == DEFAULT


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "op" / "nvidia-h200-test.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be used"):
        assert _configs.find("op", GPU, key(), DEFAULT) == DEFAULT


@pytest.mark.parametrize(
    "bad",
    [
        {"key": {**key(), "d": "4096"}, "config": {}},
        {"key": {**key(), "d": None}, "config": {}},
        {"key": {**key(), "d": True}, "config": {}},
        {"key": {**key(), "d": -1}, "config": {}},
        {"key": {**key(), "d": 10**400}, "config": {}},
        {"key": {**key(), "d": 2**62}, "config": {}},
        {"key": {**key(), "dtype": 3}, "config": {}},
        {"key": [], "config": {}},
        {"key": key(), "config": [1]},
    ],
)
def test_one_bad_entry_does_not_cost_the_others(bad: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, [bad, entry({"block_f": 64})])
    with pytest.warns(UserWarning, match="1 of 2 entries are left out"):
        assert _configs.find("op", GPU, key(), DEFAULT)["block_f"] == 64


@pytest.mark.parametrize(
    "bad",
    [
        {"block_f": 48}, {"block_f": 0}, {"block_f": -16}, {"block_f": "16"}, {"block_f": True}, {"block_f": 2**21},
        {"block_f": 16.0}, {"block_f": None}, {"warps": 3}, {"warps": 32}, {"stages": 9}, {"stages": 0},
        {"skip_below": "x"}, {"skip_below": float("nan")}, {"skip_below": float("inf")}, {"skip_below": 10**400},
        {"splits": [1]}, {"splits": 65536}, {"splits": 10**400},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_cannot_be_launched_is_the_default(bad: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, [entry({"block_f": 64, "warps": 8, **bad})])
    with pytest.warns(UserWarning, match="cannot be launched"):
        found = _configs.find("op", GPU, key(), DEFAULT)
    assert found == {**DEFAULT, "block_f": 64, "warps": 8, **{name: DEFAULT[name] for name in bad}}


@pytest.mark.parametrize(
    "good",
    [
        {"stages": 3}, {"stages": 8}, {"skip_below": 1}, {"skip_below": 0.5}, {"splits": 33}, {"splits": 65535},
        {"warps": 16}, {"block_f": 1}, {"block_f": 8192},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_can_be_launched_is_taken(good: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, [entry(good)])
    assert _configs.find("op", GPU, key(), DEFAULT) == {**DEFAULT, **good}


@pytest.mark.parametrize(
    ("op", "default", "bad"),
    [
        ("gated_mlp", MLP, {"block_f": 2**20, "block_i": 2**20}),
        ("gated_mlp", MLP, {"block_d": 8, "down_block_d": 8, "select_warps": 32, "down_stages": 9}),
        (
            "gated_mlp_prefill",
            PREFILL,
            {"tile_t": 2**20, "tile_f": 8, "tile_d": 8, "tile_k": 8, "tile_warps": 32},
        ),
        ("gated_mlp_prefill", PREFILL, {"repair_block_f": 16384, "tile_k": 16384, "tile_stages": 9}),
        ("activation", activation.DEFAULT, {"block": 2**20, "counted_blocks": 2**20}),
        ("activation", activation.DEFAULT, {"counted_blocks": 2048}),
    ],
    ids=str,
)
def test_every_operators_values_have_limits(
    op: str, default: dict[str, Any], bad: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, [entry(bad)], op=op)
    with pytest.warns(UserWarning, match="cannot be launched"):
        assert _configs.find(op, GPU, key(), default) == default


def test_a_long_number_is_not_in_the_warning_in_full(tmp_path: Path) -> None:
    write(tmp_path, [entry({"block_f": 10**400})])
    with pytest.warns(UserWarning, match="cannot be launched") as caught:
        _configs.find("op", GPU, key(), DEFAULT)
    assert len(str(caught[0].message)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("default", [MLP, PREFILL, activation.DEFAULT])
def test_the_defaults_are_within_the_limits(default: dict[str, Any]) -> None:
    assert [name for name, value in default.items() if not _configs._usable(name, value, value)] == []


def test_a_file_is_read_once_and_answers_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [entry({"block_f": 64})])
    first = _configs.find("op", GPU, key(), DEFAULT)
    monkeypatch.setattr(_configs, "_nearest", None)  # calling it again would fail
    assert _configs.find("op", GPU, key(), DEFAULT) is first
    monkeypatch.undo()
    monkeypatch.setattr(_configs, "_REMEMBERED", 3)
    for tokens in range(1, 50):
        _configs.find("op", CPU, key(tokens=tokens), DEFAULT)
        assert len(_configs._found) <= 3


def test_forced_values_end_with_the_block(tmp_path: Path) -> None:
    write(tmp_path, [entry({"block_f": 64, "warps": 8})])
    with _configs.use("op", {"warps": 2}):
        assert _configs.find("op", GPU, key(), DEFAULT) == {**DEFAULT, "warps": 2}
        with _configs.use("op", {"stages": 1}), _configs.use("other", {}):
            assert _configs.find("op", GPU, key(), DEFAULT) == {**DEFAULT, "stages": 1}
        assert _configs.find("op", GPU, key(), DEFAULT) == {**DEFAULT, "warps": 2}
    with pytest.raises(KeyError), _configs.use("op", {"warps": 2}):
        raise KeyError
    assert _configs.find("op", GPU, key(), DEFAULT) == {**DEFAULT, "block_f": 64, "warps": 8}


def test_the_packages_own_files_are_usable() -> None:
    """Every committed file: named after an operator, every entry taken as it is, and measured."""
    _configs.read_from(None)
    for path in _configs.FOLDER.glob("*/*.json"):
        found = json.loads(path.read_text())
        assert found["status"] == "measured", path
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(_configs._entries(path.parent.name, path.stem)) == len(found["entries"]) > 0, path


def test_a_kernel_uses_what_the_file_says(tmp_path: Path) -> None:
    """From the file to the launch, on the CPU's own file."""
    sizes = {"tokens": 2, "d": 64, "f": 96, "dtype": "fp32"}
    config = {"block_f": 32, "splits": 2, "down_warps": 1}
    write(tmp_path, [{"key": sizes, "config": config}], op="gated_mlp", gpu="cpu")
    x, w = torch.zeros(2, 64), torch.zeros(96, 64)
    nothing = (None,) * 8
    _, (select, down) = gated_mlp.decode(x, w, w, w, torch.zeros(()), *nothing, "silu", "gate")
    assert (select.grid, select.constants["BLOCK_F"], down.constants["SPLITS"], down.num_warps) == (
        (3,),
        32,
        2,
        1,
    )
    assert sparsemlp.gated_mlp(x, w, w, w, backend="reference").shape == x.shape
