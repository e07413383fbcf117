"""The low-bit copies that `SparseGatedMLP` holds for indicator "screen": what they are, when made and when freed."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from sparsemlp import pages
from sparsemlp.nn import SparseGatedMLP, _screens
from sparsemlp.screen import BITS, GROUPS, pack
from tests.gated_mlp_modules import KINDS, D, N, Separate
from tests.screen_modules import Screened, held, same

NONE = [None, None]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def screened(dense: nn.Module, **options) -> SparseGatedMLP:
    return SparseGatedMLP.from_dense(dense, indicator="screen", threshold=0.1, **options)


def addresses(sparse: SparseGatedMLP) -> list[int]:
    return [t.data_ptr() for packed in held(sparse) for t in packed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_they_are_those_of_the_weights(
    kind: str, quantize: str | None, bits: int, group: int, dtype: torch.dtype
) -> None:
    """Of merged layers the halves apart, of int8 layers of their values."""
    sparse = screened(KINDS[kind]().to(dtype), quantize=quantize, screen_bits=bits, screen_group=group)
    assert same(held(sparse), Screened(sparse, bits, group).copies)
    assert [(p.bits, p.group) for p in held(sparse)] == [(bits, group)] * 2


@pytest.mark.parametrize("neurons", [16, 1023, 1024, 1040, 2100])
def test_int8_rows_are_widened_some_at_a_time(neurons: int) -> None:
    q = torch.randint(-127, 128, (neurons, D), dtype=torch.int8)
    scale = torch.rand(neurons)
    assert same([_screens._packed(q, scale, 4, 32)], [pack(q.float() * scale[:, None], 4, 32)])


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64), (8, 128)])
def test_bytes(bits: int, group: int) -> None:
    """As the docstring states them; by default 3/16 of a bfloat16 MLP."""
    for d, f in ((256, 96), (100, 50)):
        dense = Separate(d=d, f=f).bfloat16()
        weights = sum(p.nbytes for p in dense.parameters())
        sparse = screened(dense, screen_bits=bits, screen_group=group)
        found = sum(getattr(sparse, name).nbytes for name in _screens.BUFFERS)
        rows, width = -(-f // 16) * 16, -(-d // group) * group
        assert found == 2 * rows * width * (bits + 16 / group) / 8
        if (bits, d) == (4, 256):
            assert found == weights * 3 / 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_they_are_not_saved_and_never_cast(kind: str, quantize: str | None) -> None:
    dense = KINDS[kind](bias=True)
    plain = SparseGatedMLP.from_dense(copy.deepcopy(dense), quantize=quantize)
    sparse = screened(dense, quantize=quantize)
    assert list(sparse.state_dict()) == list(plain.state_dict())
    assert dict(sparse.named_children()).keys() == dict(plain.named_children()).keys()
    assert len(list(sparse.parameters())) == len(list(plain.parameters()))
    before = copy.deepcopy(held(sparse))
    model = nn.Sequential(sparse)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        assert same(held(sparse), before)
        with torch.no_grad():
            assert sparse(torch.randn(2, D, dtype=dtype)).dtype == dtype
    sparse.to_empty(device="cpu")
    assert same(held(sparse), before)
    assert {t.device.type for packed in held(sparse.to("meta")) for t in packed} == {"meta"}


def test_set_indicator_makes_and_frees_them() -> None:
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=0.1)
    assert held(sparse) == NONE
    sparse.set_indicator("screen")
    assert same(held(sparse), Screened(sparse).copies)
    before = addresses(sparse)
    sparse.set_indicator("screen")
    assert addresses(sparse) == before
    sparse.set_indicator("screen", screen_bits=3, screen_group=64)
    assert same(held(sparse), Screened(sparse, 3, 64).copies)
    x = torch.randn(3, D)
    for indicator in ("product", "up", "gate"):
        sparse.set_indicator(indicator)
        assert held(sparse) == NONE
        other = SparseGatedMLP.from_dense(Separate(), threshold=0.1, indicator=indicator)
        other.load_state_dict(sparse.state_dict())
        with torch.no_grad():
            assert torch.equal(sparse(x), other(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_makes_them_anew(kind: str, quantize: str | None, assign: bool) -> None:
    """Also where the parent is loaded; into the same memory, and the same bits from the same weights."""
    sparse = screened(KINDS[kind](), quantize=quantize)
    other = screened(KINDS[kind](), quantize=quantize)
    assert not same(held(sparse), held(other))
    before = addresses(sparse)
    state = {f"0.{name}": t.clone() for name, t in other.state_dict().items()}
    nn.Sequential(sparse).load_state_dict(state, assign=assign)
    assert same(held(sparse), held(other))
    assert addresses(sparse) == before
    x = torch.randn(3, D)
    with torch.no_grad():
        assert torch.equal(sparse(x), other(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_to_int8_makes_them_anew(kind: str) -> None:
    dense = KINDS[kind]()
    for layer in dense.children():
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 1 + torch.rand_like(layer.weight)  # so that some code changes
    at_once = screened(copy.deepcopy(dense), quantize="int8")
    sparse = screened(dense)
    floats = copy.deepcopy(held(sparse))
    sparse.quantize()
    assert same(held(sparse), held(at_once))
    assert not same(held(sparse), floats)
    assert same(held(sparse), Screened(sparse).copies)


def test_training_leaves_them_until_they_are_asked_for() -> None:
    sparse = screened(Separate())
    before, pointers = copy.deepcopy(held(sparse)), addresses(sparse)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=1.0)
    sparse(torch.randn(5, D)).square().sum().backward()
    optimizer.step()
    assert same(held(sparse), before)
    assert not same(held(sparse), Screened(sparse).copies)
    sparse.repack_screen()
    assert same(held(sparse), Screened(sparse).copies)
    assert addresses(sparse) == pointers


def test_without_a_screen_nothing_can_be_made_anew() -> None:
    gate = SparseGatedMLP.from_dense(Separate())
    with pytest.raises(
        ValueError, match=r"indicator is 'gate', expected 'screen'.*set_indicator\('screen'\)"
    ):
        gate.repack_screen()
    assert held(gate) == NONE


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_layer_that_is_put_in(name: str) -> None:
    """Another one, or the same with something merged into it, as adapters do it."""
    sparse = screened(Separate())
    x = torch.randn(3, D)
    layer = getattr(sparse, name)
    layer.weight.data += torch.randn(N, D)
    for new in (layer, nn.Linear(D, N, bias=False)):
        setattr(sparse, name, new)
        with torch.no_grad():
            out = sparse(x)
        assert same(held(sparse), Screened(sparse).copies)
        with torch.no_grad():
            assert torch.equal(sparse(x), out)


def test_what_runs_dense_has_none_until_it_can_skip() -> None:
    dense = Separate()
    hook = dense.up_proj.register_forward_hook(lambda module, args, out: out + 1)
    sparse = SparseGatedMLP.from_dense(dense, indicator="screen", threshold=torch.inf)
    x = torch.randn(3, D)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="up_proj has forward or backward hooks"):
            out = sparse(x)
        assert torch.equal(out, dense(x))
        for change in (sparse.repack_screen, lambda: sparse.load_state_dict(Separate().state_dict())):
            change()
            assert held(sparse) == NONE
        hook.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (sparse(x) == 0).all()
        assert same(held(sparse), Screened(sparse).copies)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_weights_on_meta_get_them_with_their_values(quantize: str | None) -> None:
    with torch.device("meta"):
        empty = Separate()
    sparse = screened(empty, quantize=quantize)
    assert {t.device.type for packed in held(sparse) for t in packed} == {"meta"}
    other = screened(Separate(), quantize=quantize)
    state, x = other.state_dict(), torch.randn(3, D)
    twin = copy.deepcopy(sparse)
    sparse.load_state_dict(state, assign=True)
    twin.to_empty(device="cpu")
    twin.load_state_dict(state)
    filled = copy.deepcopy(twin)  # by hand
    _screens.drop(filled)
    for module in (sparse, twin, filled):
        with torch.no_grad():
            assert torch.equal(module(x), other(x))
        assert same(held(module), held(other))


def test_pickle_and_deepcopy() -> None:
    sparse = screened(Separate(), skipped_mean=torch.randn(N), screen_bits=3, screen_tokens=7)
    x = torch.randn(3, D)
    saved = io.BytesIO()
    torch.save(sparse, saved)
    saved.seek(0)
    with torch.no_grad():
        before = sparse(x)
        twins = [
            copy.deepcopy(sparse),
            pickle.loads(pickle.dumps(sparse)),
            torch.load(saved, weights_only=False),
        ]
        for twin in twins:
            assert same(held(twin), held(sparse))
            assert (twin.indicator, twin.screen_bits, twin.screen_tokens) == ("screen", 3, 7)
            assert torch.equal(twin(x), before)
            twin.load_state_dict(Separate().state_dict())
            assert not same(held(twin), held(sparse))
        assert torch.equal(sparse(x), before)


def test_made_in_inference_mode_they_serve_outside() -> None:
    with torch.inference_mode():
        sparse = screened(Separate())
    assert not any(t.is_inference() for packed in held(sparse) for t in packed)
    assert same(held(sparse), Screened(sparse).copies)


def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: lambda address, size, advice: 0)
    dense = Separate(d=1024, f=1024)
    plain = pages.use_huge_pages(SparseGatedMLP.from_dense(copy.deepcopy(dense)))
    codes = 1024 * 1024 // 2
    assert plain == 3 * 4 * 1024 * 1024
    assert pages.use_huge_pages(screened(dense)) == plain + 2 * codes  # the scales are below the least size


def test_memory_while_they_are_made() -> None:
    """One copy's codes come on top for a moment, and no wide matrix does."""
    from tests.test_nn_gated_mlp import Live

    sparse = SparseGatedMLP.from_dense(Separate(d=64, f=16 * 1024))
    q, scale = torch.ones(16 * 1024, 64, dtype=torch.int8), torch.ones(16 * 1024)
    copied = pack(sparse.gate_proj.weight).nbytes
    live = Live(sparse.parameters())
    before = live.now()
    with live:
        sparse.set_indicator("screen")
    assert 2 * copied <= live.now() - before < 2 * copied + 1000
    chunk = 1024 * 64 * 4
    assert live.peak - before < 3 * copied + 8 * chunk
    live = Live([q, scale])
    before = live.now()
    with live:
        _screens._packed(q, scale, 4, 32)
    assert live.peak - before < 2 * copied + 8 * chunk


def test_copies_do_not_outlive_what_makes_the_module_run_dense() -> None:
    """A parametrization leaves other weights behind when it is removed; nothing of the former ones may choose then."""
    from torch.nn.utils import parametrize

    class Turned(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 3 * w.flip(0)

    module = SparseGatedMLP.from_dense(Separate(), indicator="screen", threshold=0.05)
    x = torch.randn(2, module.gate_proj.in_features)
    parametrize.register_parametrization(module.gate_proj, "weight", Turned())
    with torch.no_grad(), pytest.warns(UserWarning, match="runs dense"):
        module(x)
    assert module.screen_gate is None
    parametrize.remove_parametrizations(module.gate_proj, "weight", leave_parametrized=True)
    with torch.no_grad():
        module(x)
    assert torch.equal(module.screen_gate, pack(module.gate_proj.weight).codes)


@pytest.mark.parametrize("value", ["auto", -1, 2.0, True])
def test_screen_tokens_is_checked_where_it_is_set(value: object) -> None:
    module = SparseGatedMLP.from_dense(Separate(), indicator="screen")
    with pytest.raises(ValueError, match=r"screen_tokens is .*expected None or a whole number"):
        module.screen_tokens = value
    assert module.screen_tokens is None
