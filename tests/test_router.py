"""The router's model and its choices, on made-up measured times."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsemlp
from sparsemlp import _native
from sparsemlp._op import Backend, Op
from sparsemlp.ops.gated_mlp import OP
from sparsemlp.router import decide
from sparsemlp.router.model import CHUNK, MARGIN, Problem, choose, few_tokens, most_screened, seconds, union
from tests.router_profiles import KINDS, flat, forced, using

D, F = 64, 100
NEEDS_LIBRARY = pytest.mark.skipif(_native.problem() is not None, reason=f"native: {_native.problem()}")


def problem(tokens: int, form: str = "gated", kind: str = "float32", d: int = D, f: int = F) -> Problem:
    return Problem(tokens, d, f, kind, form)


def operands(tokens: int, dtype: torch.dtype = torch.float32, f: int = F) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(tokens)
    weights = [torch.randn(f, D, generator=g).div(8).to(dtype) for _ in range(3)]
    return torch.randn(tokens, D, generator=g).to(dtype), *weights


def arguments(tokens: int, threshold: float = 0.0, indicator: str = "gate") -> tuple[Any, ...]:
    """The operator's, without the backend."""
    return *operands(tokens), torch.tensor(threshold), *(None,) * 15, "silu", indicator


def test_union_of_independent_tokens() -> None:
    assert union(0.5, 1) == 0.5
    assert union(0.5, 2) == 0.75
    assert union(0.0, 32) == 0
    assert union(1.0, 32) == 1


@pytest.mark.parametrize("form", ["gated", "product", "ungated"])
def test_times_are_the_measured_ones(form: str) -> None:
    """At a measured size and number of tokens nothing is interpolated: none, half and all of the rows."""
    profile = flat(sparse=(100.0, 220.0, 300.0), pytorch=7.0)
    at = {0.0: 100.0, 0.5: 220.0, 1.0: 300.0}
    for density, gated in at.items():
        expected = {"gated": gated, "ungated": 100 + (gated - 100) / 2, "product": 200 + (gated - 100) / 2}
        found = seconds(profile, problem(1, form), "sparse", density)
        assert found == pytest.approx(1e-6 * expected[form])
    third = 2 / 3 if form == "ungated" else 1
    assert seconds(profile, problem(64, form), "pytorch", 0.3) == pytest.approx(64e-6 * 7 * third)


def test_a_screened_call_pays_for_its_copies_and_reads_three_rows_a_neuron() -> None:
    profile = flat(sparse=(100.0, 220.0, 300.0), dense=10.0, pytorch=7.0, screen=5.0)
    for density, rows in {0.0: 0.0, 0.5: 1.5 * 120, 1.0: 1.5 * 200}.items():
        assert seconds(profile, problem(1, "screen"), "sparse", density) == pytest.approx(1e-6 * (5 + rows))
    for route, a_token in (("dense", 10), ("pytorch", 7)):
        assert seconds(profile, problem(64, "screen"), route, 0.3) == pytest.approx(64e-6 * (a_token + 5))


def test_up_to_how_many_tokens_the_screen_pays() -> None:
    """One token: 5 + 0.3 · 2 · 180 µs of 300; T of them: 5T + the union's rows, which passes 300 from 3 tokens on."""
    profile = flat(sparse=(100.0, 220.0, 300.0), pytorch=1e6, screen=5.0)

    def found(sparsity: float) -> int:
        return most_screened(profile, "float32", D, F, 1 - sparsity)

    assert seconds(profile, problem(2, "screen"), "sparse", 0.3) < 300e-6  # type: ignore[operator]
    unions = [1 - 0.7**t for t in range(1, 33)]
    rows = [360 * u if u <= 0.5 else 180 + 240 * (u - 0.5) for u in unions]
    assert found(0.7) == sum(5 * t + r < 300 for t, r in enumerate(rows, 1))
    assert found(0.0) == 0
    assert 1 <= found(0.5) < found(0.7) < found(0.95)


def test_without_times_the_bytes_say_up_to_how_many_tokens_the_screen_pays() -> None:
    assert most_screened(None, "bfloat16", D, F, 0.5) == 2  # 0.56 + 2.25 of 3; three tokens 0.56 + 2.625
    assert most_screened(None, "bfloat16", D, F, 0.2) == 7  # 1 − 0.8^T below 0.8125
    assert most_screened(None, "bfloat16/int8", D, F, 0.7) == 0
    assert most_screened(None, "float32", D, F, 0.2) == 10


def test_times_between_and_beyond_what_was_measured() -> None:
    profile = flat(dense=2.0, sizes=((64, 100), (256, 400)))
    assert seconds(profile, problem(160), "dense", 1) == pytest.approx(320e-6)  # between 64 and 256 tokens
    assert seconds(profile, problem(2560), "dense", 1) == pytest.approx(5120e-6)  # proportional above
    for d, f in ((128, 200), (32, 50), (1024, 1600), (64, 400)):  # D·F counts, between and outside
        expected = 64 * 2e-6 * d * f / 6400
        assert seconds(profile, problem(64, d=d, f=f), "dense", 1) == pytest.approx(expected)


def test_a_size_between_two_takes_something_of_both() -> None:
    small, large = flat(sizes=((64, 100),)), flat(dense=20.0, sizes=((256, 400),))
    both = replace(small, times=(*small.times, *large.times))

    def per_weight(d: int, f: int) -> float:
        found = seconds(both, problem(64, d=d, f=f), "dense", 1)
        assert found is not None
        return found * 6400 / (d * f) / 64e-6

    assert per_weight(64, 100) == pytest.approx(10)
    assert per_weight(128, 200) == pytest.approx(15)
    assert per_weight(256, 400) == pytest.approx(20)
    assert per_weight(16, 25) == pytest.approx(10)
    assert per_weight(4096, 14336) == pytest.approx(20)


def test_many_tokens_skip_rows_in_chunks() -> None:
    profile = flat()
    chunk = seconds(profile, problem(CHUNK), "sparse", 0.01)
    rest = seconds(profile, problem(6), "sparse", 0.01)
    assert chunk is not None
    assert rest is not None
    assert seconds(profile, problem(2 * CHUNK + 6), "sparse", 0.01) == pytest.approx(2 * chunk + rest)


def test_nothing_measured_of_a_kind() -> None:
    profile = flat(kinds=("float32",))
    assert seconds(profile, problem(64, kind="bfloat16"), "dense", 1) is None
    for found in (profile, None):
        many, few = (choose(found, problem(t, kind="bfloat16")) for t in (64, 4))
        assert (many.known, many.route(0.001), few.route(1.0)) == (False, "dense", "sparse")
        assert few_tokens(found, "bfloat16") == CHUNK
    assert seconds(flat(), problem(64, kind="float16/int8"), "dense", 1) is not None  # as float32's


@pytest.mark.parametrize("tokens", [33, 64, 100, 512])
@pytest.mark.parametrize("form", ["gated", "product", "ungated"])
def test_break_even_is_where_the_times_meet(tokens: int, form: str) -> None:
    """Just below it rows are worth skipping, by the times themselves, and just above they are not."""
    profile = flat(sparse=(50.0, 150.0, 300.0), dense=7.0, pytorch=9.0)
    asked = problem(tokens, form)
    found = choose(profile, asked)
    assert found.otherwise == "dense"
    limit = (1 - MARGIN) * (seconds(profile, asked, "dense", 1) or 0)
    assert 0 < found.break_even < 1
    for factor, cheaper in ((0.99, True), (1.01, False)):
        density = found.break_even * factor
        assert ((seconds(profile, asked, "sparse", density) or 0) <= limit) is cheaper
        assert found.route(density) == ("sparse" if cheaper else "dense")
    assert found.route(math.nan) == "dense"


def test_another_route_must_save_more_than_the_margin() -> None:
    def other(factor: float) -> tuple[str, str]:
        few = flat(sparse=(300.0, 300.0, 300.0), pytorch_few=300 * factor)
        many = flat(dense=10.0, pytorch=10 * factor, sparse=(1e6, 1e6, 1e6))
        return choose(few, problem(16)).route(1.0), choose(many, problem(64)).route(1.0)

    assert other(1 - MARGIN + 0.005) == ("sparse", "dense")
    assert other(1 - MARGIN - 0.005) == ("pytorch", "pytorch")


def test_few_tokens_is_up_to_where_pytorch_is_never_faster() -> None:
    assert few_tokens(flat(), "float32") == CHUNK
    assert few_tokens(flat(pytorch_few=1.0), "float32") == 0
    slow_at_16 = flat()
    for times in slow_at_16.times:
        times.pytorch[16] = (1.0, 1.0)  # type: ignore[index]
    # 8 tokens are measured and right, 9 lie on the way to 16.
    assert few_tokens(slow_at_16, "float32") == 8
    slow_if_ungated = flat()
    for times in slow_if_ungated.times:
        times.pytorch[1] = (1000.0, 1.0)  # type: ignore[index]
    assert few_tokens(slow_if_ungated, "float32") == 0
    assert all(
        few_tokens(forced(r), k) == (0 if r == "pytorch" else CHUNK)
        for r in ("sparse", "pytorch")
        for k in KINDS
    )


def test_only_auto_asks_and_only_where_native_would_compute() -> None:
    """The hook of `Op`: an explicit backend, and a call that native cannot compute, never meet it."""
    asked: list[tuple[Any, ...]] = []
    result: list[Callable[..., Any] | None] = [None]

    def route(args: tuple[Any, ...]) -> Callable[..., Any] | None:
        asked.append(args)
        return result[0]

    refusal: list[str | None] = [None]
    native = Backend("native", ("cpu",), "nowhere:nothing", call=lambda *a: refusal[0])
    other = Backend("triton", ("cpu",), "nowhere:nothing")
    op = Op(
        "router_hook_test",
        "Tensor x",
        fake=lambda x: torch.empty_like(x),
        reference=lambda x: x.clone(),
        backends=(native, other),
        castable=(),
        route=route,
    )
    args = (torch.zeros(2),)
    assert op.select(args, "auto") is native
    assert len(asked) == 1
    result[0] = torch.neg
    assert op.select(args, "auto") is torch.neg
    asked.clear()
    assert op.select(args, "native") is native
    assert op.select(args, "reference") is op.reference
    refusal[0] = "cannot"
    assert op.select(args, "auto") is other
    assert asked == []


@NEEDS_LIBRARY
@pytest.mark.parametrize("route", ["sparse", "dense", "pytorch"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_profile_makes_its_route_chosen(tokens: int, route: str) -> None:
    with using(forced(route)):
        chosen = OP.select(arguments(tokens), "auto")
        expected = "sparse" if tokens <= CHUNK and route == "dense" else route
        assert chosen is OP.route.routes[expected]  # type: ignore[union-attr]
        assert OP.select(arguments(tokens), "native").name == "native"  # type: ignore[attr-defined]


@NEEDS_LIBRARY
def test_few_tokens_take_the_straight_way_only_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is faster from 16 tokens on: 8 never ask, 16 do and get it, also through the public function."""
    profile = flat()
    for times in profile.times:
        for tokens in (16, 32):
            times.pytorch[tokens] = (1.0, 1.0)  # type: ignore[index]
    taken: list[int] = []
    router: Any = OP.route
    by_pytorch = router.routes["pytorch"]

    def recorded(*args: Any) -> Tensor:
        taken.append(args[0].shape[0])
        return by_pytorch(*args)

    monkeypatch.setitem(router.routes, "pytorch", recorded)
    with using(profile), torch.inference_mode():
        for tokens in (1, 8, 16, 32, 40):
            sparsemlp.gated_mlp(*operands(tokens), threshold=torch.zeros(()))
    assert taken == [16, 32]


@NEEDS_LIBRARY
def test_the_density_of_recent_calls_decides() -> None:
    profile = flat(sparse=(10.0, 200.0, 300.0), dense=5.0, pytorch=1e6)
    router: Any = OP.route
    with using(profile), torch.inference_mode():
        assert 0.005 < choose(profile, problem(64)).break_even < 0.5
        x, *weights = operands(64)
        args = arguments(64)
        args = (x, *weights, *args[4:])
        decide.observed_density(weights[2])
        sparsemlp.gated_mlp(x, *weights, threshold=0.0)  # all active: counted, whatever was there before
        for _ in range(50):
            sparsemlp.gated_mlp(x, *weights, threshold=0.0)
        assert decide.observed_density(weights[2]) == pytest.approx(1, abs=0.01)
        assert OP.select(args, "auto") is router.routes["dense"]
        for _ in range(200):
            sparsemlp.gated_mlp(x, *weights, threshold=math.inf)
        assert decide.observed_density(weights[2]) < 0.01
        assert OP.select(args, "auto") is router.routes["sparse"]


@NEEDS_LIBRARY
def test_a_layer_never_seen_is_taken_to_be_dense() -> None:
    fresh = torch.empty(F * D + 3)[3:].view(F, D)  # no weight ever began at such an address
    assert math.isnan(decide.observed_density(fresh))


def test_a_library_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(weight: Tensor) -> float:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(decide, "_density", absent)
    assert math.isnan(decide.observed_density(torch.empty(F, D)))


@NEEDS_LIBRARY
def test_frozen_keeps_the_first_choice_of_a_layer_and_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    density = [1.0]
    monkeypatch.setattr(decide, "observed_density", lambda weight: density[0])
    monkeypatch.setattr(decide, "_frozen", {})
    router: Any = OP.route
    layer, other = arguments(64), arguments(40)
    with using(flat(sparse=(10.0, 200.0, 300.0), dense=5.0, pytorch=1e6), "frozen"):
        assert OP.select(layer, "auto") is router.routes["dense"]
        density[0] = 0.0
        assert OP.select(layer, "auto") is router.routes["dense"]
        assert OP.select(other, "auto") is router.routes["sparse"]  # another layer
        again = (other[0][:33], *other[1:])
        assert OP.select(again, "auto") is router.routes["sparse"]
        density[0] = 1.0
        assert OP.select(other, "auto") is router.routes["sparse"]
        with sparsemlp.set_router("auto"):
            assert OP.select(other, "auto") is router.routes["dense"]
        assert OP.select(other, "auto") is router.routes["sparse"]  # for good
        assert OP.select((other[0][:35], *other[1:]), "auto") is router.routes["dense"]


@NEEDS_LIBRARY
def test_threads_that_meet_a_layer_at_once_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them look, find nothing, and see different densities: whoever is first decides for all."""
    counter, looking = iter(range(16)), threading.Barrier(16)

    def density(weight: Tensor) -> float:
        looking.wait(timeout=60)
        return float(next(counter) % 2)

    monkeypatch.setattr(decide, "observed_density", density)
    monkeypatch.setattr(decide, "_frozen", {})
    args = arguments(64)
    found: list[Any] = []

    def work() -> None:
        found.extend(OP.select(args, "auto") for _ in range(50))

    with using(flat(sparse=(10.0, 200.0, 300.0), dense=5.0, pytorch=1e6), "frozen"):
        workers = [threading.Thread(target=work) for _ in range(16)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
    assert len(found) == 800
    assert len(set(map(id, found))) == 1


@NEEDS_LIBRARY
def test_off_is_the_native_backend() -> None:
    for route in ("sparse", "pytorch"):
        with using(forced(route), "off"):
            for tokens in (3, 40):
                assert OP.select(arguments(tokens), "auto") is OP.backends[0]
                assert decide.fused_tokens(torch.float32, False) == CHUNK


def test_set_router_is_a_function_and_a_context() -> None:
    before = decide.mode()
    with sparsemlp.set_router("frozen"):
        assert decide.mode() == "frozen"
        with sparsemlp.set_router("off"):
            assert decide.mode() == "off"
        assert decide.mode() == "frozen"
        sparsemlp.set_router("auto")
        assert decide.mode() == "auto"
    assert decide.mode() == before
    with pytest.raises(ValueError, match=r"^mode is 'on', expected one of: auto, frozen, off$"):
        sparsemlp.set_router("on")
    assert decide.mode() == before


@NEEDS_LIBRARY
def test_no_tokens_and_no_neurons_are_left_to_the_backend() -> None:
    with using(forced("pytorch")):
        for args in (arguments(0), (torch.zeros(40, D), *(torch.zeros(0, D),) * 3, *arguments(1)[4:])):
            assert OP.select(args, "auto") is OP.backends[0]
        assert sparsemlp.gated_mlp(*operands(0)).shape == (0, D)


@NEEDS_LIBRARY
def test_many_sizes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_MOST", 4)
    monkeypatch.setattr(decide, "_choices", {})
    with using(forced("dense")):
        for tokens in range(33, 50):
            OP.select(arguments(tokens), "auto")
            assert len(decide._choices) <= 4


@NEEDS_LIBRARY
def test_it_decides_at_run_time_of_a_compiled_graph() -> None:
    """One compiled function, two profiles, no recompilation."""
    router: Any = OP.route
    x, *weights = operands(40)
    compiled = torch.compile(
        lambda x: sparsemlp.gated_mlp(x, *weights, threshold=0.1), fullgraph=True, backend="aot_eager"
    )
    taken: list[str] = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        for name, function in router.routes.items():

            def recorded(*args: Any, name: str = name, function: Callable[..., Tensor] = function) -> Tensor:
                taken.append(name)
                return function(*args)

            patch.setitem(router.routes, name, recorded)
        for route in ("dense", "pytorch", "sparse"):
            with using(forced(route)):
                compiled(x)
    assert taken == ["dense", "pytorch", "sparse"]
