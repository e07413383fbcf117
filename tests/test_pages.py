"""Huge pages are a wish: values and addresses stay, whatever the system says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsemlp import pages

MB = 1 << 20


def test_values_and_addresses_stay() -> None:
    t = torch.arange(2 * MB, dtype=torch.int32)
    address = t.data_ptr()
    got = pages.use_huge_pages(t[5:])
    assert t.data_ptr() == address
    assert torch.equal(t, torch.arange(2 * MB, dtype=torch.int32))
    assert 0 <= got <= 8 * MB


def test_whole_pages_that_hold_some_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights lie in a page with others: the page is asked for, and the tensor's own bytes are counted."""
    asked = []
    monkeypatch.setattr(
        pages, "_madvise", lambda: lambda address, size, advice: asked.append((address, size)) or 0
    )
    t = torch.zeros(MB)
    assert pages.use_huge_pages(t) == 4 * MB
    begin = t.untyped_storage().data_ptr()
    first, last = begin // (2 * MB), (begin + 4 * MB - 1) // (2 * MB)
    assert asked == [(page * 2 * MB, 2 * MB) for page in range(first, last + 1) for _ in range(2)]


def test_a_module_asks_once_for_a_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        pages, "_madvise", lambda: lambda address, size, advice: asked.append((address, advice)) or 0
    )
    module = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(1024, 2048))
    module[1].weight = module[0].weight
    assert pages.use_huge_pages(module) == 8 * MB
    assert len(asked) == len(set(asked))
    assert [advice for _, advice in asked] == [14, 25] * (len(asked) // 2)


@pytest.mark.parametrize("refused", [14, 25])
def test_a_refusal_is_no_error(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pages, "_madvise", lambda: lambda address, size, advice: -1 if advice == refused else 0
    )
    assert pages.use_huge_pages(torch.zeros(2 * MB)) == 0


def test_what_is_small_or_elsewhere_and_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.use_huge_pages(torch.zeros(10)) == 0
    assert pages.use_huge_pages(torch.zeros(2 * MB, device="meta")) == 0
    assert pages.use_huge_pages(torch.zeros(2 * MB).to_sparse()) == 0
    assert pages.use_huge_pages(nn.Module()) == 0
    monkeypatch.setattr(pages.sys, "platform", "darwin")
    pages._madvise.cache_clear()
    assert pages.use_huge_pages(torch.zeros(2 * MB)) == 0
    pages._madvise.cache_clear()


def test_tensors_without_memory_of_their_own() -> None:
    assert pages.use_huge_pages(nn.LazyLinear(1000)) == 0
    with torch.device("meta"):
        assert pages.use_huge_pages(nn.Linear(1000, 1000)) == 0
    torch.vmap(lambda t: t * float(pages.use_huge_pages(t) == 0))(torch.zeros(2, MB))
    assert pages.use_huge_pages(torch._efficientzerotensor(MB)) == 0


def test_the_error() -> None:
    with pytest.raises(ValueError, match="target is list, expected a tensor"):
        pages.use_huge_pages([1])  # type: ignore[arg-type]
