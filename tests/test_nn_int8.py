"""`Int8Linear`, and `SparseGatedMLP` over int8 layers: numbers, memory, state, conversion back, changes."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsemlp.nn import Int8Linear, SparseGatedMLP, _skipped_out
from sparsemlp.testing import assert_within_budget
from tests.gated_mlp_modules import KINDS, D, N, Separate, Thresholded, away_from_band

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def value(layer: Int8Linear) -> Tensor:
    """The weight in float64."""
    scale = layer.scale.double()
    return layer.qweight.double() * scale[:, None]


def widened(sparse: SparseGatedMLP, dense: nn.Module) -> nn.Module:
    """The dense module in float64 with the values that the int8 layers stand for."""
    twin = copy.deepcopy(dense).double()
    for name, layer in sparse.named_children():
        if isinstance(layer, Int8Linear):
            getattr(twin, name).weight = nn.Parameter(value(layer))
    return twin


# Int8Linear


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer(by_column: bool, bias: bool, dtype: torch.dtype) -> None:
    linear = nn.Linear(70, 1100, bias=bias).to(dtype)
    layer = Int8Linear.from_linear(linear, by_column=by_column)
    assert (layer.qweight.dtype, layer.scale.dtype, layer.dtype) == (torch.int8, torch.float32, dtype)
    assert layer.scale.shape == (1100,)
    assert layer.qweight.stride() == ((1, 1100) if by_column else (70, 1))
    assert layer.bias is linear.bias
    step = layer.scale.double() / 2
    error = (value(layer) - linear.weight.double()).abs()
    assert (error <= 1.00001 * step[:, None]).all()
    for shape in ((3, 70), (70,), (2, 5, 70), (0, 70)):
        x = torch.randn(shape).to(dtype)
        out = layer(x)
        truth = nn.functional.linear(
            x.double(), value(layer), None if bias is False else linear.bias.double()
        )
        orders = [torch.randperm(70) for _ in range(3)]
        peers = [nn.functional.linear(x[..., o], value(layer).to(dtype)[:, o], linear.bias) for o in orders]
        assert out.dtype == dtype
        assert_within_budget(out, peers, truth)


@pytest.mark.parametrize("by_column", [False, True])
def test_layer_moves_and_keeps_its_integers_and_scales(by_column: bool) -> None:
    layer = Int8Linear.from_linear(nn.Linear(9, 12), by_column=by_column)
    q, scale = layer.qweight.clone(), layer.scale.clone()
    for move, dtype in (
        (nn.Module.half, torch.float16),
        (nn.Module.bfloat16, torch.bfloat16),
        (nn.Module.double, torch.float64),
        (nn.Module.float, torch.float32),
        (lambda module: module.to(torch.bfloat16), torch.bfloat16),
    ):
        move(layer)
        assert torch.equal(layer.qweight, q)
        assert layer.scale.dtype == torch.float32
        assert torch.equal(layer.scale, scale)
        assert layer.dtype == layer.bias.dtype == dtype
        assert layer.to_linear().weight.dtype == dtype
        assert layer(torch.randn(2, 9).to(dtype)).dtype == dtype
    strides = layer.qweight.stride()
    twin = copy.deepcopy(layer)
    assert twin.qweight.stride() == strides
    assert layer.to("meta").scale.dtype == torch.float32
    empty = layer.half().to_empty(device="cpu")
    assert (empty.scale.dtype, empty.qweight.dtype, empty.scale.device.type) == (
        torch.float32,
        torch.int8,
        "cpu",
    )


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_layer_back_to_linear(by_column: bool, trainable: bool) -> None:
    linear = nn.Linear(9, 12).eval()
    linear.weight.requires_grad_(trainable)
    layer = Int8Linear.from_linear(linear, by_column=by_column)
    back = layer.to_linear()
    assert type(back) is nn.Linear
    assert (back.in_features, back.out_features, back.training) == (9, 12, False)
    assert back.weight.requires_grad is trainable
    assert back.weight.is_contiguous()
    assert torch.equal(back.weight, value(layer).float())
    assert back.bias is linear.bias
    x = torch.randn(4, 9)
    torch.testing.assert_close(back(x), layer(x))


def test_layer_errors() -> None:
    for shape in ((), (1,), (3,), (4, 1)):
        with pytest.raises(
            ValueError, match=r"^scale is shape \(.*\), expected \(out_features,\) = \(4,\); pass"
        ):
            Int8Linear(torch.ones(4, 3, dtype=torch.int8), torch.ones(shape), None, torch.float32)
    bad = nn.Linear(3, 3)
    bad.weight.data[1, 1] = torch.inf
    with pytest.raises(ValueError, match=r"^weight holds NaN, inf or .* in row 1"):
        Int8Linear.from_linear(bad)


def test_layer_gradient_reaches_x_and_bias() -> None:
    layer = Int8Linear.from_linear(nn.Linear(9, 12)).double()
    x = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, value(layer).sum(0).expand(2, 9))
    assert (layer.bias.grad == 2).all()


# SparseGatedMLP


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40, 130])
def test_numbers(kind: str, bias: bool, dtype: torch.dtype, tokens: int) -> None:
    dense = KINDS[kind](bias).to(dtype)
    x = torch.randn(tokens, D).to(dtype)
    sparse = SparseGatedMLP.from_dense(copy.deepcopy(dense), quantize="int8")
    wide = widened(sparse, dense)
    low = copy.deepcopy(wide).to(dtype)
    limit = away_from_band(wide, x, 0.1)
    mean = torch.randn(N) * 0.1
    with torch.no_grad():
        for threshold, mu in ((torch.zeros(()), None), (limit, None), (limit.expand(N), mean)):
            if mu is not None and dtype == torch.float64:
                continue  # W_down·mean of int8 weights is float32
            sparse.set_thresholds(threshold, mu)
            truth, peers = Thresholded(wide, threshold, mu).truth(x), Thresholded(low, threshold, mu).peers(x)
            assert_within_budget(sparse(x), peers, truth, what=f"{threshold} {mu is not None}")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_close_to_the_float_module(kind: str) -> None:
    """Rounding costs less than two percent of the output here: 127 steps a row, three layers."""
    dense = KINDS[kind]()
    x = torch.randn(64, D)
    sparse = SparseGatedMLP.from_dense(copy.deepcopy(dense), quantize="int8")
    with torch.no_grad():
        expected = dense(x)
        error = (sparse(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_float_weights_are_freed_and_bytes_shrink(kind: str) -> None:
    dense = KINDS[kind]()
    before = sum(p.nbytes for p in dense.parameters())
    gone = [weakref.ref(p) for p in dense.parameters()]
    sparse = SparseGatedMLP.from_dense(dense, quantize="int8")
    gc.collect()
    assert all(ref() is None for ref in gone)
    after = sum(t.nbytes for t in (*sparse.parameters(), *sparse.buffers()))
    scales = sum(layer.out_features for layer in sparse.children() if isinstance(layer, Int8Linear)) * 4
    assert after == before // 4 + scales + sparse.threshold.nbytes
    assert dense.down_proj is sparse.down_proj


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_to_dense_gives_float_layers_of_the_same_values(kind: str, dtype: torch.dtype) -> None:
    dense = KINDS[kind](bias=True).to(dtype).eval()
    names = [name for name, _ in dense.named_parameters()]
    shapes = [p.shape for p in dense.parameters()]
    sparse = SparseGatedMLP.from_dense(dense, quantize="int8", threshold=0.1)
    values = {name: value(layer) for name, layer in sparse.named_children() if isinstance(layer, Int8Linear)}
    back = sparse.to_dense()
    assert back is dense
    assert not back.training
    assert [name for name, _ in back.named_parameters()] == sorted(names, key=names.index)
    assert [p.shape for p in back.parameters()] == shapes
    for name, wanted in values.items():
        layer = getattr(back, name)
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, wanted.to(dtype))
        assert layer.weight.is_contiguous()
    again = SparseGatedMLP.from_dense(back, quantize="int8")
    if dtype == torch.float32:  # rounding what lies on the grid changes nothing
        for name, wanted in values.items():
            torch.testing.assert_close(value(getattr(again, name)), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_round_trip(kind: str, tmp_path) -> None:
    """Through safetensors into another quantised module, also on meta; a float state dict is refused."""
    sparse = SparseGatedMLP.from_dense(KINDS[kind](bias=True), quantize="int8", threshold=0.05)
    x = torch.randn(3, D)
    state = sparse.state_dict()
    assert {t.dtype for t in state.values()} == {torch.int8, torch.float32}
    assert not any(name.endswith(("threshold", "_float")) or name.endswith("proj.weight") for name in state)
    save_file({name: t.contiguous() for name, t in state.items()}, tmp_path / "mlp.safetensors")
    loaded = load_file(tmp_path / "mlp.safetensors")
    with torch.device("meta"):
        empty = KINDS[kind](bias=True)
    on_meta = SparseGatedMLP.from_dense(empty, quantize="int8", threshold=0.05)
    others = [
        (SparseGatedMLP.from_dense(KINDS[kind](bias=True), quantize="int8", threshold=0.05), False),
        (SparseGatedMLP.from_dense(KINDS[kind](bias=True), quantize="int8", threshold=0.05), True),
        (on_meta, True),
    ]
    with torch.no_grad():
        for other, assign in others:
            other.load_state_dict(loaded, assign=assign)
            assert torch.equal(other(x), sparse(x))
            assert other.down_proj.qweight.stride() == (1, D)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*qweight"):
        sparse.load_state_dict(KINDS[kind](bias=True).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*qweight"):
        KINDS[kind](bias=True).load_state_dict(loaded)


def test_pickle_and_deepcopy() -> None:
    sparse = SparseGatedMLP.from_dense(
        Separate(), quantize="int8", threshold=0.05, skipped_mean=torch.randn(N)
    )
    x = torch.randn(3, D)
    with torch.no_grad():
        before = sparse(x)
        twin = copy.deepcopy(sparse)
        twin.gate_proj.qweight.zero_()
        assert torch.equal(sparse(x), before)
        assert not torch.equal(twin(x), before)
        buffer = io.BytesIO()
        torch.save(sparse.state_dict(), buffer)
        assert twin.to_dense().down_proj is not sparse.down_proj


def test_mean_is_computed_from_the_integers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = SparseGatedMLP.from_dense(
        Separate(), quantize="int8", threshold=torch.inf, skipped_mean=torch.randn(N)
    )
    x = torch.randn(2, D)
    expected = (value(sparse.down_proj) @ sparse.skipped_mean.double()).float().expand(2, D)
    computed = []
    plain = _skipped_out.reference.skipped_out
    monkeypatch.setattr(
        _skipped_out.reference, "skipped_out", lambda *args: computed.append(1) or plain(*args)
    )
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(sparse(x), expected)
        assert len(computed) == 1
        sparse.down_proj.scale.mul_(2)
        torch.testing.assert_close(sparse(x), 2 * expected)
        sparse.down_proj.qweight.zero_()
        assert (sparse(x) == 0).all()
        assert len(computed) == 3


def test_moving_keeps_layout_integers_and_scales() -> None:
    sparse = SparseGatedMLP.from_dense(
        Separate(bias=True), quantize="int8", threshold=0.1, input_threshold=0.2
    )
    model = nn.Sequential(sparse)
    integers = {name: t.clone() for name, t in sparse.named_buffers() if t.dtype == torch.int8}
    scales = {name: t.clone() for name, t in sparse.named_buffers() if name.endswith("scale")}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        found = dict(sparse.named_buffers())
        assert all(torch.equal(found[name], t) for name, t in {**integers, **scales}.items())
        assert sparse.down_proj.qweight.stride() == (1, D)
        assert sparse.gate_proj.qweight.stride() == (1, N)
        assert sparse.gate_proj.bias.dtype == dtype
        with torch.no_grad():
            assert sparse(torch.randn(2, D, dtype=dtype)).dtype == dtype


def test_quantize_later_and_twice() -> None:
    dense = Separate()
    sparse = SparseGatedMLP.from_dense(dense, threshold=0.05)
    at_once = SparseGatedMLP.from_dense(copy.deepcopy(dense), threshold=0.05, quantize="int8")
    x = torch.randn(3, D)
    sparse.quantize()
    layers = dict(sparse.named_children())
    sparse.quantize()
    assert dict(sparse.named_children()) == layers
    with torch.no_grad():
        assert torch.equal(sparse(x), at_once(x))


def _hook(sparse: SparseGatedMLP) -> None:
    sparse.up_proj.register_forward_hook(lambda module, args, out: out + 1)


def _forward(sparse: SparseGatedMLP) -> None:
    old = sparse.down_proj.forward
    sparse.down_proj.forward = lambda x: old(x) + 1


def _float_layer(sparse: SparseGatedMLP) -> None:
    sparse.gate_proj = nn.Linear(D, N)


def _tagged(sparse: SparseGatedMLP) -> None:
    class Tagged(Tensor):
        pass

    sparse.down_proj.qweight = sparse.down_proj.qweight.as_subclass(Tagged)


@pytest.mark.parametrize(("change", "words"), [
    (_hook, "up_proj has forward or backward hooks"),
    (_forward, "down_proj has a replaced forward"),
    (_float_layer, "some of its layers are int8 and some are not"),
    (_tagged, "down_proj has a qweight of type Tagged"),
])  # fmt: skip
def test_a_changed_child_is_not_bypassed(change, words: str) -> None:
    sparse = SparseGatedMLP.from_dense(Separate(), quantize="int8", threshold=torch.inf)
    x = torch.randn(3, D)
    with torch.no_grad():
        assert sparse(x).abs().max() == 0
        change(sparse)
        with pytest.warns(UserWarning, match=words):
            out = sparse(x)
        expected = sparse.down_proj(nn.functional.silu(sparse.gate_proj(x)) * sparse.up_proj(x))
        assert torch.equal(out, expected)
        assert out.abs().max() > 0


def test_errors_change_nothing() -> None:
    dense = Separate()
    children = dict(dense.named_children())
    stride = dense.down_proj.weight.stride()
    with pytest.raises(ValueError, match=r"^quantize is 'int4', expected None or 'int8'$"):
        SparseGatedMLP.from_dense(dense, quantize="int4")
    dense.up_proj.weight.data[7, 3] = torch.nan
    with pytest.raises(ValueError, match=r"^up_proj\.weight holds NaN, inf or .* in row 7, expected finite"):
        SparseGatedMLP.from_dense(dense, quantize="int8")
    dense.up_proj.weight.data[7, 3] = 0
    handle = dense.down_proj.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(
        ValueError, match=r"^quantize is 'int8' and down_proj has forward or backward hooks, .*"
    ):
        SparseGatedMLP.from_dense(dense, quantize="int8")
    handle.remove()
    assert dict(dense.named_children()) == children
    assert dense.down_proj.weight.stride() == stride
    sparse = SparseGatedMLP.from_dense(dense)
    dense.down_proj.weight.data[3, 1] = torch.inf
    with pytest.raises(ValueError, match=r"^down_proj\.weight holds NaN, inf or .* in row 3,"):
        sparse.quantize()
    assert dict(sparse.named_children()) == children


@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind: str) -> None:
    sparse = SparseGatedMLP.from_dense(
        KINDS[kind](bias=True), quantize="int8", threshold=0.1, skipped_mean=torch.randn(N)
    )
    run = torch.compile(sparse, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5, 40):
        x = torch.randn(tokens, D)
        with torch.no_grad():
            assert torch.equal(run(x), sparse(x))


def test_gradients_are_those_of_the_widened_module() -> None:
    dense = Separate(bias=True)
    sparse = SparseGatedMLP.from_dense(copy.deepcopy(dense), quantize="int8").double()
    wide = widened(sparse, dense)
    for name, p in wide.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    x = torch.randn(5, D, dtype=torch.float64)
    grads = []
    for module in (sparse, wide):
        leaf = x.clone().requires_grad_()
        biases = [p for p in module.parameters() if p.requires_grad]
        grads.append(torch.autograd.grad(module(leaf).square().sum(), [leaf, *biases]))
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth)
