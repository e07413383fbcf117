"""`SparseMLP`: dropout in training, and int8 weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp.nn import Int8Linear, SparseMLP
from sparsemlp.testing import assert_within_budget
from tests.mlp_modules import KINDS, Conv, Conv1D, D, N, Plain, Thresholded, away_from_band


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["hidden_dropout", "two_dropouts", "conv"])
@pytest.mark.parametrize("how", ["own", "replaced", "int8"])
def test_dropout_in_training_is_the_dense_modules(kind: str, how: str):
    """The same random numbers, the same places; outside of training, or with p = 0, the fused path again."""
    dense = Conv(p=0.3) if kind == "conv" else KINDS[kind]()
    if how == "int8" and kind == "conv":
        pytest.skip("int8 needs nn.Linear layers")
    options = {"int8": {"quantize": "int8"}, "replaced": {"activation": "silu"}}.get(how, {})
    if how == "int8":
        for name in dense.names:  # weights that int8 holds exactly
            weight = getattr(dense, name).weight
            weight.data = torch.randint(-127, 128, weight.shape).float()
            weight.data.view(-1)[:: weight.shape[1]] = weight.data[0] = 127.0
            weight.data[:, 0] = 127.0
    reference = copy.deepcopy(dense)
    if how == "replaced":
        setattr(reference, "activation" if kind == "two_dropouts" else "act", nn.SiLU())
    sparse = SparseMLP.from_dense(dense, threshold=torch.inf, **options)
    x = torch.randn(3, D)
    assert sparse.training
    with torch.no_grad():
        torch.manual_seed(7)
        expected = reference(x)
        torch.manual_seed(7)
        out = sparse(x)
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
        assert (out == 0).any() or kind == "hidden_dropout"
        plain = Thresholded(reference, torch.tensor(torch.inf)).out(x, torch.float32)
        assert torch.allclose(sparse.eval()(x), plain)
        sparse.train()
        for child in sparse.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.0
        assert torch.allclose(sparse(x), plain)


class FunctionalDropout(Plain):
    """Starcoder-2's: no child shows the dropout."""

    p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.p, training=self.training)


def test_dropout_that_no_child_shows():
    sparse = SparseMLP.from_dense(FunctionalDropout(), threshold=torch.inf)
    x = torch.randn(3, D)
    with torch.no_grad():
        assert (sparse(x) == 0).any()
        assert sparse(x).abs().max() > 1
        assert torch.equal(sparse.eval()(x), sparse.fc2.bias.expand(3, D))
    for change in ({"activation": "relu"}, {"quantize": "int8"}):
        with pytest.raises(
            ValueError, match=rf"^{next(iter(change))} is given for a FunctionalDropout, which has"
        ):
            SparseMLP.from_dense(FunctionalDropout(), **change)
    with pytest.raises(ValueError, match="has dropout inside its forward, expected none beside int8 weights"):
        sparse.quantize()


@pytest.mark.parametrize("kind", ["plain", "hidden_dropout", "two_dropouts"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(kind: str, later: bool, dtype: torch.dtype):
    dense = KINDS[kind](True).to(dtype).eval()
    x = torch.randn(4, D).to(dtype)
    sparse = SparseMLP.from_dense(copy.deepcopy(dense), quantize=None if later else "int8")
    if later:
        sparse.quantize()
    first, last = (getattr(sparse, name) for name in dense.names)
    assert type(first) is type(last) is Int8Linear
    rounded = copy.deepcopy(dense)
    for name, layer in zip(dense.names, (first, last), strict=True):
        getattr(rounded, name).weight = nn.Parameter(layer.to_linear().weight.to(dtype))
    wide = copy.deepcopy(dense).double()
    for name, layer in zip(dense.names, (first, last), strict=True):
        getattr(wide, name).weight = nn.Parameter(layer.qweight.double() * layer.scale.double()[:, None])
    limit = away_from_band(wide, x, 0.1)
    sparse.set_thresholds(limit, torch.randn(N) * 0.1)
    with torch.no_grad():
        truth = Thresholded(wide, limit, sparse.skipped_mean).truth(x)
        assert_within_budget(sparse(x), Thresholded(rounded, limit, sparse.skipped_mean).peers(x), truth)
        state = sparse.state_dict()
        other = SparseMLP.from_dense(KINDS[kind](True).to(dtype).eval(), quantize="int8")
        other.load_state_dict(state)
        other.set_thresholds(limit, sparse.skipped_mean)
        assert torch.equal(other(x), sparse(x))
        back = sparse.to_dense()
        assert type(getattr(back, dense.names[1])) is nn.Linear
        assert getattr(back, dense.names[0]).weight.dtype == dtype


def test_int8_of_a_conv1d_is_refused():
    dense = Conv()
    with pytest.raises(ValueError, match=r"^quantize is 'int8' and c_fc is .*Conv1D, not exactly nn\.Linear"):
        SparseMLP.from_dense(dense, quantize="int8")
    assert isinstance(dense.c_fc, Conv1D)
