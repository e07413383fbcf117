"""`SparseLinear`: hooks, and weights that are not plain tensors stored channel by channel."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from sparsemlp.nn import SparseLinear
from tests.test_nn_sparse_linear import K, N, masked


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def test_hooks_on_the_layer_survive_both_ways() -> None:
    dense, seen = nn.Linear(K, N), []
    handle = dense.register_forward_hook(lambda module, args, out: seen.append(module))
    sparse = SparseLinear.from_linear(dense)
    sparse(torch.randn(1, K))
    sparse.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    sparse.to_linear()(torch.randn(1, K))
    assert seen == [sparse, "pre", dense]
    handle.remove()
    dense(torch.randn(1, K))
    assert seen == [sparse, "pre", dense, "pre"]


class Tagged(Tensor):
    """A tensor subclass that is otherwise a plain tensor."""


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def _subclass(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))


def _parametrize(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


def _prune(layer: nn.Linear) -> None:
    prune.custom_from_mask(layer, "weight", torch.rand_like(layer.weight) < 0.5)


def _exchange(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(N, K))


CHANGES = {
    _subclass: "weight is a Tagged, not a plain tensor",
    _parametrize: "weight is computed (a parametrization, pruning or norm)",
    _prune: "weight is computed (a parametrization, pruning or norm)",
    _exchange: f"weight was exchanged for one with strides ({K}, 1) (set_threshold stores it anew)",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_weight_is_computed_by_its_own_rules(change: Callable[[nn.Linear], None]) -> None:
    """The values are those of a thresholded layer with the weight as it is now; it says that nothing is saved."""
    sparse = SparseLinear(K, N, threshold=0.5)
    sparse.name = "layers.3.o_proj"
    change(sparse)
    x = torch.randn(2, 3, K)
    scale = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 1.0])
    with torch.no_grad():
        with pytest.warns(UserWarning, match="reads all of its weight") as caught:
            out = sparse(x)
        text = str(caught[0].message)
        assert text.startswith("layers.3.o_proj reads all of its weight")
        assert text.endswith(CHANGES[change])
        assert torch.equal(out, F.linear(masked(x, 0.5), sparse.weight, sparse.bias))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one warning only
            routed = sparse(x, token_scale=scale)
        expected = F.linear(masked(x.reshape(6, K), 0.5 * scale[:, None]), sparse.weight, sparse.bias)
        assert torch.equal(routed.reshape(6, N), expected)


def test_set_threshold_puts_the_layout_right() -> None:
    sparse = SparseLinear(K, N)
    _exchange(sparse)
    sparse.set_threshold(torch.inf)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sparse(torch.randn(1, K))[0], sparse.bias)


@pytest.mark.parametrize("change", [_subclass, _parametrize, _prune], ids=lambda f: f.__name__)
def test_such_a_layer_is_not_taken_over(change: Callable[[nn.Linear], None]) -> None:
    dense = nn.Linear(K, N)
    change(dense)
    with pytest.raises(
        ValueError, match=r"^linear (is|has) .*, expected an nn\.Linear with plain parameters"
    ):
        SparseLinear.from_linear(dense)
    other = nn.Linear(K, N)
    other.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"^linear has a replaced forward"):
        SparseLinear.from_linear(other)
    for kind in (SparseLinear(K, N), nn.Identity(), None):
        with pytest.raises(ValueError, match=r"^linear is \w.*, not exactly nn\.Linear, expected"):
            SparseLinear.from_linear(kind)  # type: ignore[arg-type]


def test_compile_of_a_layer_that_reads_everything_warns() -> None:
    sparse = SparseLinear(K, N, threshold=0.5)
    _parametrize(sparse)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, K)
    with torch.no_grad(), pytest.warns(UserWarning, match="reads all of its weight"):
        out = run(x)
    torch.testing.assert_close(out, F.linear(masked(x, 0.5), sparse.weight, sparse.bias))
