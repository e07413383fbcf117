"""`SparseGatedMLP` with other indicators and with a threshold on what the gate sees."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp.demo.evaluate import _skipped
from sparsemlp.nn import SparseGatedMLP
from sparsemlp.testing import assert_within_budget
from tests.gated_mlp_modules import D, Merged, N, Separate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def parts(dense: Separate, x: Tensor, limit: Tensor | None) -> tuple[Tensor, Tensor]:
    """a and u in the module's dtype."""
    seen = x if limit is None else torch.where(x.double().abs() < limit.double(), 0, x)
    return F.silu(dense.gate_proj(seen)), dense.up_proj(x)


def out(dense: Separate, x: Tensor, kept: Tensor, limit: Tensor | None) -> Tensor:
    act, up = parts(dense, x, limit)
    return dense.down_proj(torch.where(kept, act * up, 0))


def gap(values: Tensor, wanted: float) -> Tensor:
    """A threshold near `wanted` in the widest gap between the magnitudes there."""
    values = values.detach().abs().flatten().sort().values
    values = values[(values > wanted * 0.7) & (values < wanted * 1.4)]
    i = (values[1:] - values[:-1]).argmax()
    return ((values[i] + values[i + 1]) / 2).float()


@pytest.mark.parametrize("indicator", ["gate", "up", "product"])
@pytest.mark.parametrize("inputs", [None, 0.5, "channels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_numbers(indicator: str, inputs: float | str | None, dtype: torch.dtype, tokens: int) -> None:
    dense = Separate(bias=True).to(dtype)
    wide = copy.deepcopy(dense).double()
    x = torch.randn(tokens, D).to(dtype)
    limit = torch.rand(D) if inputs == "channels" else None if inputs is None else torch.tensor(inputs)
    act, up = parts(wide, x.double(), limit)
    m = {"gate": act, "up": up, "product": act * up}[indicator]
    threshold = gap(m, m.detach().abs().median().item())
    kept = ~(m.abs() < threshold)
    sparse = SparseGatedMLP.from_dense(
        copy.deepcopy(dense), threshold=threshold, indicator=indicator, input_threshold=limit
    )
    with torch.no_grad():
        truth, peer = out(wide, x.double(), kept, limit), out(dense, x, kept, limit)
        plain = copy.deepcopy(dense)
        order = torch.randperm(N)  # of the neurons: another order of summation
        plain.down_proj.weight.data = plain.down_proj.weight.data[:, order]
        act, up = parts(dense, x, limit)
        other = plain.down_proj(torch.where(kept, act * up, 0)[:, order])
        assert_within_budget(sparse(x), [peer, other], truth)
        if dtype == torch.float32:  # what `sparsemlp bench` counts, from the layers' rounded outputs
            assert torch.equal(_skipped(sparse, x.unsqueeze(0))[0], ~kept)


def test_an_input_threshold_five_percent_off_is_noticed() -> None:
    dense, x = Separate(), torch.randn(64, D)
    wide = copy.deepcopy(dense).double()
    kept = torch.ones(64, N, dtype=torch.bool)
    for factor, good in ((1.0, True), (1.05, False)):
        sparse = SparseGatedMLP.from_dense(copy.deepcopy(dense), input_threshold=0.5 * factor)
        limit = torch.tensor(0.5)
        with torch.no_grad():
            args = sparse(x), out(dense, x, kept, limit), out(wide, x.double(), kept, limit)
            if good:
                assert_within_budget(*args)
            else:
                with pytest.raises(AssertionError, match="outside the budget"):
                    assert_within_budget(*args)


def test_the_gate_is_stored_by_column_only_while_there_is_an_input_threshold() -> None:
    dense = Separate()
    weight, values = dense.gate_proj.weight, dense.gate_proj.weight.detach().clone()
    sparse = SparseGatedMLP.from_dense(dense, input_threshold=0.1)
    assert sparse.gate_proj.weight is weight
    assert weight.stride() == (1, N)
    assert torch.equal(weight, values)
    sparse.set_input_threshold(None)
    assert weight.stride() == (D, 1)
    sparse.set_input_threshold(torch.rand(D))
    assert weight.stride() == (1, N)
    state = {name: t.clone() for name, t in Separate().state_dict().items()}
    sparse.load_state_dict(state, assign=True)
    assert sparse.gate_proj.weight.stride() == (1, N)
    assert torch.equal(sparse.gate_proj.weight, state["gate_proj.weight"])
    assert copy.deepcopy(sparse).gate_proj.weight.stride() == (1, N)
    assert sparse.double().gate_proj.weight.stride() == (1, N)
    back = sparse.to_dense()
    assert back.gate_proj.weight.is_contiguous()
    assert back.down_proj.weight.is_contiguous()
    assert list(back.state_dict()) == list(state)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_buffers_are_not_saved_and_keep_their_precision(quantize: str | None) -> None:
    limit = torch.rand(D)
    sparse = SparseGatedMLP.from_dense(Separate(), input_threshold=limit, quantize=quantize)
    assert not any("threshold" in name for name in sparse.state_dict())
    for move in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        move(sparse)
        assert sparse.input_threshold.dtype == torch.float32
        assert torch.equal(sparse.input_threshold, limit)
    assert "input_threshold" in repr(sparse)
    assert "indicator='up'" in repr(SparseGatedMLP.from_dense(Separate(), indicator="up"))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_compiled_graph_sees_a_new_input_threshold(quantize: str | None) -> None:
    sparse = SparseGatedMLP.from_dense(Separate(), input_threshold=0.0, quantize=quantize)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, D)
    with torch.no_grad():
        before = run(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            sparse.set_input_threshold(torch.inf)
            after = run(x)
        assert torch.equal(after, sparse(x))
        assert not torch.equal(after, before)


def test_an_exchanged_gate_runs_dense_until_it_is_stored_again() -> None:
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=torch.inf, input_threshold=0.1)
    sparse.gate_proj.weight = nn.Parameter(torch.randn(N, D))
    x = torch.randn(2, D)
    with torch.no_grad():
        with pytest.warns(
            UserWarning, match=r"gate_proj.weight was exchanged for one with strides \(24, 1\)"
        ):
            assert sparse(x).abs().max() > 0
        sparse.set_input_threshold(0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (sparse(x) == 0).all()


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(indicator="down"), r"indicator is 'down', expected one of: gate, up, product, screen"),
    (dict(indicator="screen", input_threshold=0.1), r"input_threshold is given with indicator 'screen', expected None: "
     r".*; leave one of the two away"),
    (dict(input_threshold=-1.0), r"input_threshold is or contains -1, expected a number ≥ 0 or .*"),
    (dict(input_threshold=torch.tensor(torch.nan)), r"input_threshold is or contains NaN, expected .*"),
    (dict(input_threshold=torch.ones(N)), r"input_threshold has shape \(40,\), expected .* or \(D,\) = \(24,\)"),
    (dict(input_threshold="0.1"), r"input_threshold is str, expected a number ≥ 0 or a tensor of shape .*"),
    (dict(input_threshold=torch.ones(D, dtype=torch.int64)), r"input_threshold is int64, expected float32; .*"),
])  # fmt: skip
def test_errors_change_nothing(arguments: dict[str, object], message: str) -> None:
    dense = Separate()
    with pytest.raises(ValueError, match=f"^{message}$"):
        SparseGatedMLP.from_dense(dense, **arguments)
    assert dense.gate_proj.weight.is_contiguous()
    assert dense.down_proj.weight.is_contiguous()


def test_gate_and_up_in_one_layer_cannot_be_stored_two_ways() -> None:
    message = (
        r"^input_threshold is given for a module with gate and up in one layer, expected a gate layer .*"
    )
    with pytest.raises(ValueError, match=message):
        SparseGatedMLP.from_dense(Merged(), input_threshold=0.1)
    sparse = SparseGatedMLP.from_dense(Merged(), indicator="product", threshold=0.01)
    with pytest.raises(ValueError, match=message):
        sparse.set_input_threshold(0.1)


def test_training_goes_through_both_paths() -> None:
    """The gate's path is closed for x_k below its threshold, the up path is not; the weights learn."""
    dense = Separate()
    sparse = SparseGatedMLP.from_dense(copy.deepcopy(dense), input_threshold=0.5)
    x = torch.randn(6, D)
    grads = []
    for module in (sparse, dense):
        leaf = x.clone().requires_grad_()
        y = module(leaf) if module is sparse else out(dense, leaf, torch.tensor(True), torch.tensor(0.5))
        grads.append(torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()]))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
