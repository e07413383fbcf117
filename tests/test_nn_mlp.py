"""`SparseMLP`: numbers against a float64 truth, layout, state, cache, gradients, compilation."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsemlp.nn import SparseMLP
from sparsemlp.testing import assert_within_budget
from tests.mlp_modules import (
    KINDS,
    D,
    HiddenDropout,
    N,
    Plain,
    Thresholded,
    TwoDropouts,
    away_from_band,
)


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()  # the limit on recompilations counts all modules of one class


EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@EVERY_KIND
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_numbers(kind: str, bias: bool, dtype: torch.dtype, tokens: int):
    dense = KINDS[kind](bias).to(dtype).eval()
    x = torch.randn(tokens, D).to(dtype)
    mean = torch.randn(N) * 0.1
    limit = away_from_band(dense, x, 0.1)
    sparse = SparseMLP.from_dense(copy.deepcopy(dense))
    with torch.no_grad():
        for threshold, mu in ((torch.zeros(()), None), (limit, None), (limit, mean), (limit.expand(N), mean)):
            sparse.set_thresholds(threshold, mu)
            plain = Thresholded(dense, threshold, mu)
            what = f"{threshold} {mu is not None}"
            assert_within_budget(sparse(x), plain.peers(x), plain.truth(x), what=what)


def test_a_threshold_one_percent_off_is_noticed():
    dense = Plain()
    x = torch.randn(64, D)
    limit = away_from_band(dense, x, 0.1)
    plain = Thresholded(dense, limit)
    sparse = SparseMLP.from_dense(copy.deepcopy(dense), threshold=limit * 1.03)
    with torch.no_grad(), pytest.raises(AssertionError, match="outside the budget"):
        assert_within_budget(sparse(x), plain.peers(x), plain.truth(x))


def test_token_scale():
    dense = Plain()
    sparse = SparseMLP.from_dense(copy.deepcopy(dense), threshold=torch.inf, skipped_mean=torch.ones(N))
    x = torch.randn(2, 1, D)
    with torch.no_grad():
        out = sparse(x, token_scale=torch.tensor([[0.0], [1.0]]))
        hidden = dense.activation_fn(dense.fc1(x[:1]))
        peer = dense.fc2(hidden - 1) + F.linear(
            torch.ones(N), dense.fc2.weight
        )  # the compensation, taken back
        assert_within_budget(out[:1], peer, Thresholded(dense, torch.zeros(())).truth(x[:1]))
        shifted = Thresholded(dense, torch.tensor(torch.inf), torch.ones(N))
        assert_within_budget(out[1:], shifted.peers(x[1:]), shifted.truth(x[1:]))


@EVERY_KIND
def test_children_and_state_dict_are_the_dense_modules(kind: str):
    dense = KINDS[kind]()
    children, kept = dict(dense.named_children()), {id(p) for p in dense.parameters()}
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    sparse = SparseMLP.from_dense(dense, threshold=0.1, skipped_mean=torch.zeros(N))
    assert dict(sparse.named_children()) == children
    state = sparse.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert {id(p) for p in sparse.parameters()} == kept
    first, last = (getattr(sparse, name).weight for name in dense.names)
    if kind == "conv":  # (D, F) by column and (F, D) by row: a neuron's weights lie together in both
        assert first.stride() == (1, D)
        assert last.stride() == (D, 1)
    else:
        assert first.stride() == (D, 1)
        assert last.stride() == (1, D)


@EVERY_KIND
def test_to_dense_gives_the_same_object_back(kind: str):
    dense = KINDS[kind]().eval()
    values = {name: value.clone() for name, value in dense.state_dict().items()}
    kept = {name: id(p) for name, p in dense.named_parameters()}
    x = torch.randn(3, D)
    with torch.no_grad():
        expected = dense(x)
        sparse = SparseMLP.from_dense(dense, threshold=0.1)
        sparse(x)
        sparse.train()
        back = sparse.to_dense()
        assert back is dense
        assert back.training
        assert torch.equal(back.eval()(x), expected)
    for name, p in back.named_parameters():
        assert id(p) == kept[name]
        assert p.is_contiguous()
        assert torch.equal(p, values[name])


@EVERY_KIND
def test_layout_after_loading_and_moving(kind: str):
    sparse = SparseMLP.from_dense(KINDS[kind]())
    other = KINDS[kind]().state_dict()
    strides = {name: p.stride() for name, p in sparse.named_parameters()}

    def check(model: nn.Module) -> None:
        assert {name: p.stride() for name, p in model.named_parameters()} == strides

    for assign in (False, True):
        model = nn.Sequential(copy.deepcopy(sparse))
        model.load_state_dict({f"0.{name}": value.clone() for name, value in other.items()}, assign=assign)
        check(model[0])
        assert all(torch.equal(value, other[name]) for name, value in model[0].state_dict().items())
    check(sparse.to(torch.bfloat16))
    check(sparse._apply(lambda t: t.clone(memory_format=torch.contiguous_format)))
    check(copy.deepcopy(sparse))
    check(sparse.to_empty(device="meta"))


@EVERY_KIND
def test_a_saved_module_loads_into_a_dense_one(kind: str, tmp_path):
    from safetensors.torch import load_file, save_file

    sparse = SparseMLP.from_dense(KINDS[kind](), threshold=0.1)
    save_file({n: v.contiguous() for n, v in sparse.state_dict().items()}, tmp_path / "mlp.safetensors")
    dense = KINDS[kind]()
    dense.load_state_dict(load_file(tmp_path / "mlp.safetensors"))
    for name, value in sparse.to_dense().state_dict().items():
        assert torch.equal(dense.state_dict()[name], value)


def test_thresholds_keep_their_precision():
    threshold, mean = torch.rand(N) + 1e-3, torch.randn(N)
    sparse = SparseMLP.from_dense(
        Plain(),
        activation="fatrelu",
        activation_params=torch.tensor([0.1]),
        threshold=threshold,
        skipped_mean=mean,
    )
    model = nn.Sequential(sparse)
    for move in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        move(model)
        assert torch.equal(sparse.threshold, threshold)
        assert torch.equal(sparse.skipped_mean, mean)
        assert sparse.activation_params.dtype == torch.float32
        with torch.no_grad():
            sparse(torch.randn(2, D, dtype=sparse.fc1.weight.dtype))
    sparse.to_empty(device="cpu")
    assert torch.equal(sparse.threshold, threshold)
    model.to("meta")
    assert sparse.threshold.device.type == "meta"


@EVERY_KIND
def test_deepcopy_and_pickle_are_independent(kind: str):
    sparse = SparseMLP.from_dense(KINDS[kind]().eval(), threshold=0.1, skipped_mean=torch.randn(N))
    x = torch.randn(2, D)
    with torch.no_grad():
        before = sparse(x)
        memory = io.BytesIO()
        torch.save(sparse, memory)
        memory.seek(0)
        for twin in (copy.deepcopy(sparse), torch.load(memory, weights_only=False)):
            assert torch.equal(twin(x), before)
            for p in twin.parameters():
                p.zero_()
            assert twin(x).abs().max() == 0
            assert torch.equal(sparse(x), before)
            dense = twin.to_dense()
            assert dense is not sparse._dense[0]
            assert {id(p) for p in dense.parameters()} == {id(p) for p in twin.parameters()}


@EVERY_KIND
@pytest.mark.parametrize("compiled", [False, True])
def test_skipped_out_follows_the_weight_and_the_mean(kind: str, compiled: bool):
    sparse = SparseMLP.from_dense(KINDS[kind]().eval(), threshold=torch.inf, skipped_mean=torch.randn(N))
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager") if compiled else sparse
    x = torch.randn(1, D)

    def check():
        """Everything is skipped: the output is W_out μ of now."""
        plain = Thresholded(sparse._dense[0], sparse.threshold, sparse.skipped_mean)
        assert_within_budget(run(x), plain.peers(x), plain.truth(x))

    last = getattr(sparse, sparse._members.last)
    with torch.no_grad():
        check()
        check()
        last.weight.mul_(2)
        check()
        sparse.skipped_mean.add_(1)
        check()
        sparse.set_thresholds(torch.inf, torch.randn(N))
        check()
        sparse.load_state_dict(KINDS[kind]().state_dict())
        check()
        sparse.load_state_dict(KINDS[kind]().state_dict(), assign=True)
        check()
        last.weight.data += 1.0
        sparse.train().eval()
        check()


@EVERY_KIND
def test_gradients(kind: str):
    dense = KINDS[kind](True).eval()
    x = torch.randn(5, D)
    mean, limit = torch.randn(N) * 0.1, away_from_band(dense, x, 0.1)
    sparse = SparseMLP.from_dense(copy.deepcopy(dense), threshold=limit, skipped_mean=mean)
    grad = torch.randn(5, D)
    ours, theirs, wide_x = (
        x.clone().to(t).requires_grad_() for t in (torch.float32, torch.float32, torch.float64)
    )
    wide = copy.deepcopy(dense).double()
    sparse(ours).backward(grad)
    Thresholded(dense, limit, mean).out(theirs, torch.float32).backward(grad)
    Thresholded(wide, limit, mean).truth(wide_x).backward(grad.double())
    assert_within_budget(ours.grad, theirs.grad, wide_x.grad)
    for (name, p), q, w in zip(sparse.named_parameters(), dense.parameters(), wide.parameters(), strict=True):
        assert_within_budget(p.grad, q.grad, w.grad, what=name)


def test_an_optimizer_step_keeps_the_layout_and_is_seen():
    sparse = SparseMLP.from_dense(Plain(), threshold=torch.inf, skipped_mean=torch.ones(N))
    optimizer = torch.optim.AdamW(sparse.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, D)
    with torch.no_grad():
        before = sparse(x)
    sparse(x).sum().backward()
    optimizer.step()
    assert sparse.fc2.weight.stride() == (1, D)
    with torch.no_grad():
        plain = Thresholded(sparse._dense[0], sparse.threshold, sparse.skipped_mean)
        assert not torch.equal(sparse(x), before)
        assert_within_budget(sparse(x), plain.peers(x), plain.truth(x))


def test_layers_of_two_dtypes_run_dense():
    """T5 in half precision keeps `wo` in float32, and its forward converts."""
    dense = HiddenDropout().to(torch.bfloat16).eval()
    dense.wo.float()
    x = torch.randn(3, D).bfloat16()
    with torch.no_grad():
        expected = dense(x)
        sparse = SparseMLP.from_dense(dense, threshold=torch.inf)
        with pytest.warns(UserWarning, match="wi.weight is torch.bfloat16 and wo.weight torch.float32"):
            torch.testing.assert_close(sparse(x), expected)


@EVERY_KIND
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(kind: str, dynamic: bool):
    sparse = SparseMLP.from_dense(KINDS[kind]().eval(), threshold=0.1, skipped_mean=torch.randn(N))
    run = torch.compile(sparse, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (2, 5, 40):
        x = torch.randn(tokens, D)
        with torch.no_grad():
            assert torch.equal(run(x), sparse(x))
        assert torch.allclose(run(x), sparse(x), rtol=1e-5, atol=1e-6)  # with gradients


def test_compiled_graphs_see_new_thresholds_without_compiling_again():
    sparse = SparseMLP.from_dense(Plain(bias=False), threshold=0.0)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, D)
    with torch.no_grad():
        assert run(x).abs().max() > 0
        with torch.compiler.set_stance("fail_on_recompile"):
            before = sparse.threshold
            sparse.set_thresholds(torch.inf)
            assert sparse.threshold is before  # written into: captured graphs hold the memory
            assert run(x).abs().max() == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["plain", "conv"])
def test_export_keeps_the_operator(kind: str, strict: bool) -> None:
    sparse = SparseMLP.from_dense(KINDS[kind]().eval(), threshold=0.1, skipped_mean=torch.randn(N))
    x = torch.randn(3, D)
    with torch.no_grad():
        program = torch.export.export(sparse, (x,), strict=strict)
        assert any("sparsemlp.mlp" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x), sparse(x))


def test_skipped_is_what_the_operator_skips():
    sparse = SparseMLP.from_dense(TwoDropouts().eval(), threshold=0.1)
    x = torch.randn(2, 3, D)
    with torch.no_grad():
        act = F.silu(sparse.lin1(x))
        assert torch.equal(sparse.skipped(x), act.abs() < 0.1)
        assert not sparse.train().skipped(x).any()  # dropout: it runs dense
        relu = SparseMLP.from_dense(Plain(act=nn.ReLU()))
        assert torch.equal(relu.skipped(x), relu.fc1(x) <= 0)
        relu.set_thresholds(0.0, torch.zeros(N))
        assert not relu.skipped(x).any()
