"""`SparseGatedMLP` with indicator "screen": numbers, the number of tokens, compilation, gradients, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sparsemlp.demo.evaluate import _skipped
from sparsemlp.nn import SparseGatedMLP
from sparsemlp.ops import _gated_mlp_native
from sparsemlp.reference import gated_mlp as reference
from sparsemlp.testing import assert_within_budget
from tests.gated_mlp_modules import KINDS, D, Merged, N, Separate
from tests.screen_modules import Screened, held, same

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZE = (None, "int8")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def screened(dense: nn.Module, **options) -> SparseGatedMLP:
    return SparseGatedMLP.from_dense(copy.deepcopy(dense), indicator="screen", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", QUANTIZE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_numbers(kind: str, quantize: str | None, bias: bool, dtype: torch.dtype, tokens: int) -> None:
    sparse = screened(KINDS[kind](bias).to(dtype), quantize=quantize)
    x = torch.randn(tokens, D).to(dtype)
    plain = Screened(sparse)
    limit, mean = plain.threshold(x), torch.randn(N) * 0.1
    kept = ~(plain.scores(x).abs() < limit.double())
    assert 0.3 < kept.double().mean() < 0.7
    with torch.no_grad():
        for threshold, mu in ((limit, None), (limit, mean), (limit.expand(N), mean)):
            if mu is not None and quantize is not None and dtype == torch.float64:
                continue  # W_down·mean of int8 weights is float32
            sparse.set_thresholds(threshold, mu)
            truth, peers = plain.truth_and_peers(x, kept, mu)
            assert_within_budget(sparse(x), peers, truth, what=f"{threshold} {mu is not None}")
        if dtype == torch.float32:  # what `sparsemlp bench` counts
            assert torch.equal(_skipped(sparse, x.unsqueeze(0))[0], ~kept)


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (8, 32), (4, 64), (3, 128)])
def test_numbers_of_other_copies(bits: int, group: int) -> None:
    """Padded: 24 inputs are less than a group, 40 neurons no multiple of 16."""
    dense, x = Separate(), torch.randn(5, D)
    plain = Screened(dense, bits, group)
    limit = plain.threshold(x)
    kept = ~(plain.scores(x).abs() < limit.double())
    sparse = screened(dense, threshold=limit, screen_bits=bits, screen_group=group)
    truth, peers = plain.truth_and_peers(x, kept)
    with torch.no_grad():
        assert_within_budget(sparse(x), peers, truth)


@pytest.mark.parametrize("wrong", ["threshold", "bits", "halves"])
def test_another_choice_is_noticed(wrong: str) -> None:
    """A threshold 2 % off, copies of 3 bits, the copies of gate and up exchanged."""
    dense, x = Separate(), torch.randn(64, D)
    plain = Screened(dense)
    limit = plain.threshold(x)
    kept = ~(plain.scores(x).abs() < limit.double())
    sparse = screened(dense, threshold=limit)
    truth, peers = plain.truth_and_peers(x, kept)
    with torch.no_grad():
        assert_within_budget(sparse(x), peers, truth)
        if wrong == "threshold":
            sparse.set_thresholds(limit * 1.02)
        elif wrong == "bits":
            sparse.set_indicator("screen", screen_bits=3)
        else:
            sparse.screen_gate, sparse.screen_up = sparse.screen_up, sparse.screen_gate
        with pytest.raises(AssertionError, match="outside the budget"):
            assert_within_budget(sparse(x), peers, truth)


def test_token_scale() -> None:
    """0 runs a token dense: none of its neurons is replaced by a mean."""
    dense, x = Separate(), torch.randn(2, 1, D)
    mean = torch.randn(N)
    sparse = screened(dense, threshold=torch.inf, skipped_mean=mean)
    plain = Screened(dense)
    with torch.no_grad():
        out = sparse(x, token_scale=torch.tensor([[0.0], [1.0]]))
        for i, mu in ((0, None), (1, mean)):
            kept = torch.full((1, N), i == 0)
            truth, peers = plain.truth_and_peers(x[i], kept, mu)
            if i == 0:  # the mean is added with the others' and taken back
                hidden = plain.act(dense.gate_proj(x[0])) * dense.up_proj(x[0])
                down = plain.down.weight
                peers.append((hidden - mean) @ down.t() + down @ mean)
            assert_within_budget(out[i], peers, truth)


# The number of tokens


def forbid_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> Tensor:
        raise AssertionError("the screen was asked")

    monkeypatch.setattr(_gated_mlp_native, "screen_scores", forbidden)
    monkeypatch.setattr(reference.screen, "scores", forbidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", QUANTIZE)
@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_many_tokens_are_dense(
    kind: str, quantize: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit everything is computed, without a look at the copies; up to it the screen decides."""
    sparse = screened(
        KINDS[kind](), threshold=torch.inf, skipped_mean=torch.randn(N), quantize=quantize, screen_tokens=6,
        backend=backend,
    )  # fmt: skip
    plain = Screened(sparse)
    with torch.no_grad():
        for shape in ((6, D), (2, 3, D), (D,)):
            out = sparse(torch.randn(shape)).reshape(-1, D)
            assert torch.equal(out, out[:1].expand_as(out))  # W_down·mean, everything is skipped
            assert not _skipped(sparse, torch.randn(shape)).logical_not().any()
        forbid_the_screen(monkeypatch)
        for shape in ((7, D), (2, 4, D), (1, 7, D)):
            x = torch.randn(shape)
            truth, peers = plain.truth_and_peers(x, torch.tensor(True))
            assert_within_budget(sparse(x), peers, truth, what=f"{shape}")
            assert_within_budget(sparse(x, token_scale=torch.ones(shape[:-1])), peers, truth)
            assert not _skipped(sparse, x).any()
        sparse.screen_tokens = 0  # never
        assert sparse(torch.randn(1, D)).abs().max() > 0
        sparse.screen_tokens = None
        with pytest.raises(AssertionError, match="the screen was asked"):
            sparse(x)


def test_a_token_scale_of_many_tokens_is_checked_too() -> None:
    sparse = screened(Separate(), threshold=0.1, screen_tokens=2)
    with pytest.raises(ValueError, match=r"^token_scale is shape \(4\), expected"):
        sparse(torch.randn(3, D), token_scale=torch.ones(4))


# Compilation


@pytest.mark.parametrize(
    ("kind", "quantize", "screen_tokens"),
    [("separate", None, None), ("separate", None, 10), ("merged", "int8", 10)],
)
def test_compile(kind: str, quantize: str | None, screen_tokens: int | None) -> None:
    sparse = screened(
        KINDS[kind](bias=True), threshold=0.1, skipped_mean=torch.randn(N), quantize=quantize,
        screen_tokens=screen_tokens,
    )  # fmt: skip
    run = torch.compile(sparse, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5, 40, 10, 11):
        x = torch.randn(tokens, D)
        with torch.no_grad():
            assert torch.equal(run(x), sparse(x))
        torch.testing.assert_close(run(x), sparse(x))  # with gradients


def test_compiled_graphs_see_new_thresholds_and_copies_without_compiling_again() -> None:
    sparse = screened(Separate(), threshold=0.0)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, D)
    with torch.no_grad():
        assert run(x).abs().max() > 0
        pointers = [t.data_ptr() for packed in held(sparse) for t in packed]
        with torch.compiler.set_stance("fail_on_recompile"):
            sparse.set_thresholds(torch.inf)
            assert run(x).abs().max() == 0
            sparse.set_thresholds(0.1)
            sparse.load_state_dict(Separate().state_dict())
            assert [t.data_ptr() for packed in held(sparse) for t in packed] == pointers
            assert torch.equal(run(x), sparse(x))


def test_compiling_makes_copies_that_are_not_there_yet() -> None:
    dense = Separate()
    hook = dense.up_proj.register_forward_hook(lambda module, args, out: out)
    sparse = SparseGatedMLP.from_dense(dense, indicator="screen", threshold=torch.inf)
    hook.remove()
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, D)
    with torch.no_grad():
        assert held(sparse) == [None, None]
        assert (run(x) == 0).all()
        assert same(held(sparse), Screened(sparse).copies)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert (run(x) == 0).all()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_export(strict: bool, mean: bool) -> None:
    """As one operator; `torch.export` counts buffers that are None, so these come last (input thresholds' too)."""
    x = torch.randn(3, D)
    for options in (dict(indicator="screen"), dict(input_threshold=0.1)):
        sparse = SparseGatedMLP.from_dense(
            Separate(), threshold=0.3, skipped_mean=torch.randn(N) if mean else None, **options
        )
        with torch.no_grad():
            program = torch.export.export(sparse, (x,), strict=strict)
            assert sum("sparsemlp.gated_mlp" in str(node.target) for node in program.graph.nodes) == 1
            assert torch.equal(program.module()(x), sparse(x))


# Gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [5, 9])
def test_gradients(kind: str, tokens: int) -> None:
    """Those of the composition whose mask is given; above `screen_tokens` of the dense MLP."""
    dense = KINDS[kind](bias=True)
    x = torch.randn(tokens, D)
    plain = Screened(dense)
    limit = plain.threshold(x)
    sparse = screened(dense, threshold=limit, screen_tokens=8)
    kept = ~(plain.scores(x).abs() < limit.double()) if tokens <= 8 else torch.tensor(True)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    sparse(ours).square().sum().backward()
    if plain.merged:
        gate, up = dense.gate_up_proj(theirs).chunk(2, dim=-1)
    else:
        gate, up = dense.gate_proj(theirs), dense.up_proj(theirs)
    dense.down_proj(torch.where(kept, plain.act(gate) * up, 0)).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for (name, p), q in zip(sparse.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


# What is refused, and the repr


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(screen_bits=5), r"screen_bits is 5, expected one of: 3, 4, 8"),
    (dict(screen_bits=True), r"screen_bits is True, expected one of: 3, 4, 8"),
    (dict(screen_group=16), r"screen_group is 16, expected one of: 32, 64, 128"),
    (dict(screen_tokens=-1), r"screen_tokens is -1, expected None or a whole number ≥ 0"),
    (dict(screen_tokens=8.0), r"screen_tokens is 8.0, expected None or a whole number ≥ 0"),
    (dict(screen_tokens="auto"), r"screen_tokens is 'auto', expected None or a whole number ≥ 0"),
    (dict(indicator="gate", screen_tokens=8), r"screen_tokens is given with indicator 'gate', expected .*; leave .*"),
    (dict(input_threshold=0.1), r"input_threshold is given with indicator 'screen', expected None: .*; leave one .*"),
])  # fmt: skip
def test_errors_change_nothing(arguments: dict[str, object], message: str) -> None:
    dense = Separate()
    with pytest.raises(ValueError, match=f"^{message}$"):
        SparseGatedMLP.from_dense(dense, **{"indicator": "screen", **arguments})
    assert dense.gate_proj.weight.is_contiguous()
    assert dense.down_proj.weight.is_contiguous()


def test_a_screen_and_an_input_threshold_exclude_each_other_later_too() -> None:
    sparse = screened(Separate(), threshold=0.1)
    before = held(sparse)
    message = r"^input_threshold is given with indicator 'screen', expected None"
    with pytest.raises(ValueError, match=message):
        sparse.set_input_threshold(0.1)
    assert sparse.input_threshold is None
    assert sparse.gate_proj.weight.is_contiguous()
    sparse.set_input_threshold(None)
    assert all(a.codes is b.codes for a, b in zip(held(sparse), before, strict=True))
    other = SparseGatedMLP.from_dense(Separate(), input_threshold=0.1)
    with pytest.raises(ValueError, match=message):
        other.set_indicator("screen")
    with pytest.raises(ValueError, match=r"^screen_bits is 2, expected one of: 3, 4, 8$"):
        other.set_indicator("up", screen_bits=2)
    with pytest.raises(
        ValueError, match=r"^indicator is 'down', expected one of: gate, up, product, screen$"
    ):
        other.set_indicator("down")
    assert (other.indicator, held(other)) == ("gate", [None, None])


def test_repr() -> None:
    text = repr(SparseGatedMLP.from_dense(Merged(), indicator="screen", screen_bits=3, screen_group=64))
    assert "indicator='screen', screen_bits=3, screen_group=64, backend='auto'" in text
    assert "screen_group=32, screen_tokens=64," in repr(screened(Separate(), screen_tokens=64))
    assert "screen" not in repr(SparseGatedMLP.from_dense(Separate()))
