"""Files of measured times: written whole, read strictly, and never a reason to fail."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsemlp
from sparsemlp import _env, _native
from sparsemlp.router import decide, host, profile
from sparsemlp.router.profile import ProfileError, Times, find, load, path, save
from tests.router_profiles import KINDS, flat

HERE = host.Host("Some CPU 9000", "avx2", 4, "2.13.0")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder, and warnings that were not given yet."""
    monkeypatch.setattr(_env, "CACHE_DIR", tmp_path / "cache")
    profile._warn.cache_clear()
    profile._shipped.cache_clear()
    yield
    profile._warn.cache_clear()
    profile._shipped.cache_clear()


def measured(where: host.Host = HERE, date: str = "2026-02-03") -> profile.Profile:
    return replace(flat(), host=where, date=date)


def rounded(times: tuple[Times, ...]) -> tuple[Times, ...]:
    """To four digits, as files hold them."""

    def column(values: Mapping[int, tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
        return {t: tuple(float(f"{v:.4g}") for v in row) for t, row in values.items()}

    return tuple(
        replace(t, sparse=column(t.sparse), dense=column(t.dense), pytorch=column(t.pytorch)) for t in times
    )


def changed(change: Callable[[dict[str, Any]], object]) -> Path:
    """A good file with one thing wrong."""
    file = path(HERE)
    save(measured(), file)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return file


def test_a_profile_is_read_as_it_was_written() -> None:
    before = measured()
    save(before, path(HERE))
    found = find(HERE)
    assert found is not None
    assert (found.host, found.date, found.read_gb_per_s) == (HERE, "2026-02-03", 40.0)
    assert found.times == rounded(before.times)
    assert found.source == f"measured on this machine ({path(HERE)})"
    assert path(HERE).name == "some-cpu-9000_avx2_4-threads.json"


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = path(HERE)
    save(measured(), file)
    before = file.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(measured(date="2026-03-04"), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(schema=2), "its schema is 2, this version reads 3"),
        (lambda d: d.pop("schema"), "its schema is None, this version reads 3"),
        (lambda d: d.pop("machine"), r"it is damaged \(KeyError: 'machine'\)"),
        (lambda d: d["machine"].update(threads="4"), r"it is damaged \(ValueError: '4' is no int in range\)"),
        (lambda d: d["machine"].update(threads=True), r"it is damaged \(ValueError: True is no int"),
        (lambda d: d.update(times_us=[]), r"it is damaged \(ValueError: it holds no times\)"),
        (lambda d: d.update(times_us=3), r"it is damaged \(TypeError"),
        (lambda d: d["times_us"][0].pop("dense"), r"it is damaged \(KeyError: 'dense'\)"),
        (lambda d: d["times_us"][0].update(d=0), r"it is damaged \(ValueError: 0 is no int in range\)"),
        (lambda d: d["times_us"][0].update(sparse={}), r"it is damaged \(ValueError: a route has no times\)"),
        (lambda d: d["times_us"][0]["sparse"].update({"8": [1, 2]}), "sparse at 8 tokens has 2 values, expected 3"),
        (lambda d: d["times_us"][0]["sparse"].update({"-8": [1, 2, 3]}), "-8 is no int in range"),
        (lambda d: d["times_us"][0]["sparse"].update({"few": [1, 2, 3]}), r"it is damaged \(ValueError"),
        (lambda d: d["times_us"][0]["sparse"].update({"8": [1, 2, 0]}), "0 is no number above 0"),
        (lambda d: d["times_us"][0]["sparse"].update({"8": [1, 2, float("nan")]}), "nan is no number above 0"),
        (lambda d: d["times_us"][0]["sparse"].update({"8": [1, 2, float("inf")]}), "inf is no number above 0"),
        (lambda d: d["times_us"][0]["sparse"].update({"8": "abc"}), "'a' is no number above 0"),
        (lambda d: d.update(read_gb_per_s=None), "None is no number above 0"),
        (lambda d: d.pop("training_break_even"), r"it is damaged \(KeyError: 'training_break_even'\)"),
        (lambda d: d["training_break_even"].update(float32=0), "0 is no number above 0"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    file = changed(change)
    with pytest.raises(ProfileError, match=sentence):
        load(file, "")
    with pytest.warns(
        UserWarning, match=r"\.json is not used: .*; run `sparsemlp tune` to measure this machine$"
    ):
        found = find(HERE)
    assert found is None or found.source.startswith("shipped with the package")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{", b"[" * 100_000, b'{"schema": 3}'])
def test_garbage_is_ignored_with_one_warning(content: bytes) -> None:
    path(HERE).parent.mkdir(parents=True)
    path(HERE).write_bytes(content)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(3):
            find(HERE)
    assert len(given) == 1
    assert str(path(HERE)) in str(given[0].message)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (replace(HERE, torch="2.12.0"), r"it was measured with torch '2\.12\.0', this is '2\.13\.0'"),
        (replace(HERE, cpu="Other"), "it was measured with cpu 'Other', this is 'Some CPU 9000'"),
        (replace(HERE, isa="portable"), "it was measured with isa 'portable', this is 'avx2'"),
    ],
)
def test_a_file_under_this_name_of_something_else(other: host.Host, sentence: str) -> None:
    save(measured(other), path(HERE))
    with pytest.warns(UserWarning, match=sentence):
        assert find(HERE) != measured(other)


def test_other_machines_files_are_passed_over_in_silence() -> None:
    """A home folder may be shared by many."""
    other = replace(HERE, cpu="Other CPU")
    save(measured(other), path(other))
    (profile.folder() / "half.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find(HERE)
    assert found is None or found.host != other


def test_the_nearest_number_of_threads_is_taken() -> None:
    for threads in (1, 3, 64):
        where = replace(HERE, threads=threads)
        save(measured(where), path(where))
    found = find(HERE)
    assert found is not None
    assert found.host.threads == 3
    save(measured(), path(HERE))
    found = find(HERE)
    assert found is not None
    assert found.host.threads == 4


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_ignored() -> None:
    save(measured(), path(HERE))
    path(HERE).chmod(0)
    with pytest.warns(UserWarning, match="Permission denied"):
        find(HERE)


def test_a_folder_in_the_files_place_is_ignored() -> None:
    path(HERE).mkdir(parents=True)
    with pytest.warns(UserWarning, match="is not used: .*Is a directory"):
        find(HERE)


@pytest.mark.parametrize("isa", _env.ISA_NAMES)
def test_shipped_profiles_are_usable(isa: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find(replace(HERE, isa=isa))
    assert found is not None
    assert found.host.isa == isa
    assert {t.kind for t in found.times} >= set(KINDS)
    assert found.source.startswith(f"shipped with the package, measured on {found.host} ({found.date}); run")


def test_a_damaged_shipped_profile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SHIPPED", tmp_path)
    (tmp_path / "avx2.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be used: it is not JSON; reinstall the package"):
        assert find(HERE) is None


@pytest.mark.skipif(_native.problem() is not None, reason=f"native: {_native.problem()}")
def test_calls_work_whatever_the_file_says() -> None:
    """Nothing that lies in the cache folder can break a call."""
    file = path(host.this())
    file.parent.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(n, 16, generator=generator) for n in (40, 32, 32, 32))
    expected = sparsemlp.gated_mlp(x, *weights, backend="reference")
    for content in ("{", '{"schema": 9}', json.dumps({"schema": 3, "machine": []})):
        file.write_text(content)
        profile._warn.cache_clear()
        decide.forget()
        with sparsemlp.set_router("auto"), pytest.warns(UserWarning, match="is not used"):
            found = sparsemlp.gated_mlp(x, *weights)
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    decide.forget()


def test_the_name_of_a_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for name, expected in (
        ("Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "Intel Xeon Platinum 8480+"),
        ("AMD EPYC", "AMD EPYC family 25 model 17"),
    ):
        info.write_text(f"processor : 0\nmodel name : {name}\ncpu family : 25\nmodel : 17\n")
        host.cpu.cache_clear()
        assert host.cpu(info) == expected
    host.cpu.cache_clear()
    assert host.cpu(tmp_path / "absent")
    host.cpu.cache_clear()


def test_the_last_level_cache(tmp_path: Path) -> None:
    assert host.last_level_cache(tmp_path) == 64 * 2**20
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for index, (level, size) in enumerate((("1", "32K"), ("3", "16384K"))):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(level)
            (folder / "size").write_text(size)
            (folder / "shared_cpu_list").write_text(shared if level == "3" else str(cpu))
    assert host.last_level_cache(tmp_path) == 2 * 16384 * 2**10
