"""`SparseLinear`: numbers, layout, state, the parameters it shares, compilation, thresholds."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sparsemlp.nn import SparseLinear
from sparsemlp.testing import assert_within_budget

K, N = 24, 40


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def masked(x: Tensor, t: float | Tensor) -> Tensor:
    return torch.where(x.abs() < t, 0, x)


def storage(layer: nn.Linear) -> int:
    return layer.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 40, 140])
@pytest.mark.parametrize("t", [0.0, 0.5, "channels"])
def test_numbers(t: Any, tokens: int, dtype: torch.dtype, bias: bool) -> None:
    dense = nn.Linear(K, N, bias).to(dtype)
    threshold = torch.rand(K) if t == "channels" else torch.tensor(t)
    sparse = SparseLinear.from_linear(copy.deepcopy(dense), threshold=threshold)
    x = torch.randn(tokens, K).to(dtype)
    h = masked(x.double(), threshold.double())
    wide = copy.deepcopy(dense).double()
    with torch.no_grad():
        orders = [torch.randperm(K) for _ in range(6)]
        peers = [F.linear(h.to(dtype)[:, o], dense.weight[:, o], dense.bias) for o in orders]
        assert_within_budget(sparse(x), peers, wide(h))
        assert sparse(x[0]).shape == (N,)
        assert sparse(x[None, :, None]).shape == (1, tokens, 1, N)


def test_a_threshold_one_percent_off_is_noticed() -> None:
    dense, x = nn.Linear(K, N), torch.randn(64, K)
    sparse = SparseLinear.from_linear(copy.deepcopy(dense), threshold=0.505)
    h = masked(x, 0.5)
    with torch.no_grad(), pytest.raises(AssertionError, match="outside the budget"):
        assert_within_budget(sparse(x), dense(h), copy.deepcopy(dense).double()(h.double()))


def test_it_starts_as_nn_linear_does() -> None:
    for options in ({}, dict(bias=False), dict(dtype=torch.bfloat16)):
        torch.manual_seed(1)
        dense = nn.Linear(K, N, **options)
        torch.manual_seed(1)
        sparse = SparseLinear(K, N, **options)
        assert isinstance(sparse, nn.Linear)
        assert sparse.weight.stride() == (1, N)
        assert list(sparse.state_dict()) == list(dense.state_dict())
        for ours, theirs in zip(sparse.parameters(), dense.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert SparseLinear(K, N, True, "meta", torch.float16).weight.device.type == "meta"
    assert nn.utils.skip_init(SparseLinear, K, N).weight.stride() == (1, N)


def test_from_linear_takes_the_very_parameters_and_to_linear_gives_them_back() -> None:
    dense = nn.Linear(K, N).eval()
    weight, bias, values = dense.weight, dense.bias, dense.weight.detach().clone()
    random = torch.get_rng_state()
    sparse = SparseLinear.from_linear(dense, threshold=0.1)
    assert torch.equal(torch.get_rng_state(), random)
    assert sparse.weight is weight
    assert sparse.bias is bias
    assert weight.stride() == (1, N)
    assert torch.equal(weight, values)
    assert [name for name, _ in sparse.named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in sparse.named_modules()] == [""]
    assert not sparse.training
    back = sparse.to_linear()
    assert back is dense
    assert back.weight is weight
    assert weight.is_contiguous()
    assert torch.equal(weight, values)


def test_to_linear_of_a_layer_that_was_made_and_of_a_layout_that_was_there() -> None:
    made = SparseLinear(K, N, threshold=0.3)
    weight, x = made.weight, torch.randn(2, K)
    dense = made.to_linear()
    assert type(dense) is nn.Linear
    assert dense.weight is weight
    assert (dense.in_features, dense.out_features) == (K, N)
    assert torch.equal(dense(x), F.linear(x, weight, made.bias))
    columns = nn.Linear(K, N)
    columns.weight.data = columns.weight.data.t().contiguous().t()
    place = storage(columns)
    assert storage(SparseLinear.from_linear(columns)) == place  # left alone
    sparse = SparseLinear.from_linear(columns)
    assert storage(sparse.to_linear()) == place


def test_conversion_holds_one_extra_weight_at_most() -> None:
    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = {id(a.untyped_storage()) for a in args if isinstance(a, Tensor)}
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, Tensor)
                and out.device.type == "cpu"
                and id(out.untyped_storage()) not in before
            ):
                self.made += out.untyped_storage().nbytes() if out._base is None else 0
            return out

    dense = nn.Linear(64, 128, bias=False)
    with Largest() as seen:
        sparse = SparseLinear.from_linear(dense)
    assert dense.weight.nbytes <= seen.made < 1.1 * dense.weight.nbytes
    old = torch.multiprocessing.reductions.StorageWeakRef(sparse.weight.untyped_storage())
    sparse.load_state_dict({"weight": torch.randn(128, 64)}, assign=True)
    assert old.expired(), "the dense layer keeps what was exchanged alive"
    assert sparse.weight.stride() == (1, 128)
    assert sparse.to_linear().weight is sparse.weight


def test_layout_after_loading_moving_and_copying(tmp_path: Any) -> None:
    sparse = SparseLinear.from_linear(nn.Linear(K, N), threshold=0.25)
    other = nn.Linear(K, N).state_dict()
    for assign in (False, True):
        model = nn.Sequential(copy.deepcopy(sparse))
        model.load_state_dict({f"0.{name}": t.clone() for name, t in other.items()}, assign=assign)
        assert model[0].weight.stride() == (1, N)
        assert torch.equal(model[0].weight, other["weight"])
    copies = (
        copy.deepcopy(sparse),
        pickle.loads(pickle.dumps(sparse)),
        copy.deepcopy(sparse).to(torch.bfloat16),
        copy.deepcopy(sparse).double(),
        copy.deepcopy(sparse)._apply(lambda t: t.clone(memory_format=torch.contiguous_format)),
        copy.deepcopy(sparse).to_empty(device="cpu"),
    )
    for twin in copies:
        assert twin.weight.stride() == (1, N)
        assert twin.threshold.item() == 0.25
        assert twin.to_linear().weight is twin.weight
        assert twin.weight is not sparse.weight
    torch.save(sparse.state_dict(), tmp_path / "layer.pt")
    dense = nn.Linear(K, N)
    dense.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(dense.weight, sparse.weight)


def test_state_dict_through_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="a file format of its own package")
    sparse = SparseLinear(K, N, threshold=torch.rand(K))
    state = {name: t.contiguous() for name, t in sparse.state_dict().items()}
    safetensors.save_file(state, tmp_path / "layer.safetensors")
    dense = nn.Linear(K, N)
    dense.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(dense.weight, sparse.weight)


def test_thresholds_keep_their_precision_and_are_written_into() -> None:
    threshold = torch.rand(K) + 1e-3
    sparse = SparseLinear(K, N, threshold=threshold)
    for move in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        move(nn.Sequential(sparse))
        assert sparse.threshold.dtype == torch.float32
        assert torch.equal(sparse.threshold, threshold)
        with torch.no_grad():
            sparse(torch.randn(2, K, dtype=sparse.weight.dtype))
    sparse.to_empty(device="cpu")
    assert torch.equal(sparse.threshold, threshold)
    buffer = sparse.threshold
    sparse.set_threshold(torch.ones(K))
    assert sparse.threshold is buffer  # captured graphs hold the memory
    sparse.set_threshold(0.5)
    assert sparse.threshold.shape == ()
    with torch.inference_mode():
        made = SparseLinear(K, N, threshold=0.5)
        made.set_threshold(0.25)
    made.set_threshold(0.125)
    assert made.threshold.item() == 0.125
    sparse.to("meta")
    assert sparse.threshold.device.type == "meta"


def test_gradients_and_training() -> None:
    dense = nn.Linear(K, N)
    dense.weight.data = dense.weight.data.t().contiguous().t()  # PyTorch adds in another order then
    sparse = SparseLinear.from_linear(copy.deepcopy(dense), threshold=0.5)
    x, grad = torch.randn(5, K), torch.randn(5, N)
    ours, theirs = (x.clone().requires_grad_(True) for _ in range(2))
    sparse(ours).backward(grad)
    dense(masked(theirs, 0.5)).backward(grad)
    assert torch.equal(ours.grad, theirs.grad)
    for p, q in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in (sparse, dense)]
    for optimizer in optimizers:
        optimizer.step()
    assert sparse.weight.stride() == (1, N)
    assert torch.equal(sparse.weight, dense.weight)


@pytest.mark.parametrize("t", [0.0, 0.5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(t: float, dynamic: bool) -> None:
    sparse = SparseLinear(K, N, threshold=t)
    run = torch.compile(sparse, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (2, 5, 40):
        x = torch.randn(tokens, K)
        with torch.no_grad():
            assert torch.equal(run(x), sparse(x))
        assert torch.equal(run(x), sparse(x))  # with gradients


def test_compiled_graphs_see_new_thresholds_without_compiling_again() -> None:
    sparse = SparseLinear(K, N, bias=False)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, K)
    with torch.no_grad():
        assert run(x).abs().max() > 0
        with torch.compiler.set_stance("fail_on_recompile"):
            sparse.set_threshold(torch.inf)
            assert run(x).abs().max() == 0


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict: bool) -> None:
    sparse = SparseLinear(K, N, threshold=0.5)
    x = torch.randn(3, K)
    with torch.no_grad():
        program = torch.export.export(sparse, (x,), strict=strict)
        assert any("sparsemlp.sparse_linear" in str(node.target) for node in program.graph.nodes)
        assert torch.equal(program.module()(x), sparse(x))


def test_modes_token_scale_and_backend() -> None:
    sparse = SparseLinear(K, N, threshold=torch.inf, backend="native")
    x = torch.randn(4, K)
    with pytest.raises(ValueError, match="backend is 'native', which has no derivative"):
        sparse(x)
    sparse.backend = "auto"
    scale = torch.tensor([1.0, 0.0, 1.0, 0.0])
    with torch.inference_mode():
        out = sparse(x, token_scale=scale)
        assert torch.equal(out[::2], sparse.bias.expand(2, -1))
        assert_within_budget(
            out[1::2],
            F.linear(x, sparse.weight, sparse.bias)[1::2],
            copy.deepcopy(sparse).to_linear().double()(x[1::2].double()),
        )
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert sparse(x).dtype == torch.bfloat16


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("weight_aware", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threshold_for_a_sparsity(sparsity: float, weight_aware: bool, dtype: torch.dtype) -> None:
    sparse = SparseLinear(K, N, dtype=dtype)
    sparse.weight.data[:, 3] = 0
    x = torch.randn(50, 4, K).to(dtype)
    limit = sparse.threshold_for(x, sparsity, weight_aware=weight_aware)
    assert limit.dtype == torch.float32
    assert not limit.requires_grad
    skipped = (x.float().abs() < limit).float()
    wanted = int(sparsity * x.numel())
    if weight_aware:  # the channel without weights is skipped whole, whatever the rest
        assert limit.shape == (K,)
        assert limit[3] == torch.inf
        wanted = max(wanted, x.numel() // K)
        norms = sparse.weight.detach().float().norm(dim=0)
        kept = [c for c in range(K) if c != 3]
        assert torch.allclose(limit[kept] * norms[kept], (limit[0] * norms[0]).expand(K - 1), rtol=1e-5)
    else:
        assert limit.shape == ()
    assert abs(skipped.sum() - wanted) <= (x.numel() // 50 if dtype == torch.bfloat16 else 3)
    sparse.set_threshold(limit)
    assert torch.equal(sparse.threshold, limit)


def test_bad_arguments() -> None:
    sparse = SparseLinear(K, N, threshold=0.25)
    expected = rf"expected a number ≥ 0 or a tensor of shape \(\) or \(in_features,\) = \({K},\)"
    for threshold, message in (
        (-1.0, f"threshold is or contains -1, {expected}"),
        (torch.nan, "threshold is or contains NaN"),
        (torch.zeros(N), rf"threshold has shape \({N},\), {expected}"),
        (torch.zeros(K, dtype=torch.int64), "threshold is int64, expected float32"),
        ("0.1", f"threshold is str, {expected}"),
    ):
        for set_ in (
            sparse.set_threshold,
            lambda t: SparseLinear(K, N, threshold=t),
            lambda t: SparseLinear.from_linear(nn.Linear(K, N), threshold=t),
        ):
            with pytest.raises(ValueError, match=f"^{message}"):
                set_(threshold)
    assert sparse.threshold.item() == 0.25  # unchanged
    dense = nn.Linear(K, N)
    for bad in (dict(threshold=-1.0), dict(backend="cuda")):
        with pytest.raises(ValueError, match=r"^(threshold|backend) is"):
            SparseLinear.from_linear(dense, **bad)
    assert dense.weight.is_contiguous()
    x = torch.randn(2, K)
    for args, message in (
        ((x, 1.0), "sparsity is 1.0, expected a number from 0 up to (not including) 1"),
        ((x, torch.nan), "sparsity is nan, expected"),
        ((x[:, 1:], 0.5), f"x is shape (2, {K - 1}), expected (..., K) with K = {K} and some tokens"),
        ((x[:0], 0.5), f"x is shape (0, {K}), expected"),
        (([1.0], 0.5), "x is list, expected"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            sparse.threshold_for(*args)


def test_a_printed_layer() -> None:
    sparse = SparseLinear(K, N, threshold=0.125)
    assert repr(sparse) == (
        f"SparseLinear(in_features={K}, out_features={N}, bias=True, threshold=0.125, backend='auto')"
    )
    sparse.set_threshold(torch.zeros(K))
    assert f"threshold=({K})" in repr(sparse)
