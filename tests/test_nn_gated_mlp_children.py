"""`SparseGatedMLP`: which modules it takes, which children it does not bypass, which arguments it refuses."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from sparsemlp import BackendUnavailableError, activations
from sparsemlp.nn import SparseGatedMLP
from sparsemlp.testing import assert_within_budget
from tests.gated_mlp_modules import KINDS, D, Merged, N, Separate


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


class Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class OtherLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Tagged(Tensor):
    """A tensor subclass that is otherwise a plain tensor."""


def _hook(sparse: SparseGatedMLP, child: str) -> None:
    getattr(sparse, child).register_forward_hook(lambda module, args, out: out + 1)


def _pre_hook(sparse: SparseGatedMLP, child: str) -> None:
    getattr(sparse, child).register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _parametrize(sparse: SparseGatedMLP, child: str) -> None:
    parametrize.register_parametrization(getattr(sparse, child), "weight", Scaled())


def _weight_norm(sparse: SparseGatedMLP, child: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(getattr(sparse, child))
    getattr(sparse, child).weight_g.data *= 2


def _prune(sparse: SparseGatedMLP, child: str) -> None:
    from torch.nn.utils import prune

    layer = getattr(sparse, child)
    prune.custom_from_mask(layer, "weight", torch.rand_like(layer.weight) < 0.5)


def _subclass(sparse: SparseGatedMLP, child: str) -> None:
    old = getattr(sparse, child)
    new = OtherLinear(old.in_features, old.out_features)
    setattr(sparse, child, new)


def _forward(sparse: SparseGatedMLP, child: str) -> None:
    layer = getattr(sparse, child)
    old = layer.forward
    layer.forward = lambda x: old(x) + 1


def _tensor_subclass(sparse: SparseGatedMLP, child: str) -> None:
    layer = getattr(sparse, child)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))


OBSTACLES = {
    _hook: "has forward or backward hooks",
    _pre_hook: "has forward or backward hooks",
    _parametrize: "ParametrizedLinear, not exactly nn.Linear",
    _weight_norm: "has forward or backward hooks",
    _prune: "has forward or backward hooks",
    _subclass: "OtherLinear, not exactly nn.Linear",
    _forward: "has a replaced forward",
    _tensor_subclass: "has a weight of type Tagged",
}


@pytest.mark.parametrize("child", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", OBSTACLES, ids=lambda f: f.__name__)
def test_a_changed_child_is_not_bypassed(change, child: str):
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=torch.inf)
    sparse.name = "layers.3.mlp"
    x = torch.randn(3, D)
    with torch.no_grad():
        assert sparse(x).abs().max() == 0
        change(sparse, child)
        with pytest.warns(UserWarning, match="runs dense") as caught:
            out = sparse(x)
        text = str(caught[0].message)
        assert text.startswith(
            "layers.3.mlp runs dense and no neuron of it is thresholded or skipped: " + child
        )
        assert OBSTACLES[change] in text
        expected = sparse.down_proj(F.silu(sparse.gate_proj(x)) * sparse.up_proj(x))
        assert torch.equal(out, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one warning only
            assert torch.equal(sparse(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_is_removed_gives_the_sparse_path_back(kind: str):
    sparse = SparseGatedMLP.from_dense(KINDS[kind](), threshold=torch.inf)
    x = torch.randn(3, D)
    seen = []
    handle = sparse.down_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        with pytest.warns(UserWarning, match="down_proj has forward or backward hooks"):
            assert sparse(x).abs().max() > 0
        assert len(seen) == 1
        handle.remove()
        assert sparse(x).abs().max() == 0
        assert len(seen) == 1


def test_hooks_on_the_activation_and_global_hooks_and_an_exchanged_activation():
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=torch.inf)
    x, seen = torch.randn(1, D), []
    with torch.no_grad():
        handle = sparse.act_fn.register_forward_hook(lambda module, args, out: seen.append(out))
        with pytest.warns(UserWarning, match="act_fn has forward or backward hooks"):
            sparse(x)
        assert len(seen) == 1
        handle.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
        try:
            sparse._warned = False
            with pytest.warns(UserWarning, match="is called with global module hooks"):
                sparse(x)
        finally:
            handle.remove()
        assert sparse.down_proj in seen
        assert sparse(x).abs().max() == 0
        sparse.act_fn, sparse._warned = nn.ReLU(), False
        with pytest.warns(UserWarning, match="act_fn was replaced by ReLU"):
            out = sparse(x)
        assert torch.equal(out, sparse.down_proj(F.relu(sparse.gate_proj(x)) * sparse.up_proj(x)))


def test_hooks_on_the_module_itself_survive_both_ways():
    dense, seen = Separate(), []
    handle = dense.register_forward_hook(lambda module, args, out: seen.append(module))
    sparse = SparseGatedMLP.from_dense(dense)
    assert seen == []  # the look at the module did not call it
    sparse(torch.randn(1, D))
    assert seen == [sparse]
    sparse.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    sparse.to_dense()(torch.randn(1, D))
    assert seen == [sparse, "pre", dense]
    handle.remove()
    dense(torch.randn(1, D))
    assert seen == [sparse, "pre", dense, "pre"]


def test_a_weight_in_the_wrong_layout_runs_dense_and_is_put_right():
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=torch.inf)
    x = torch.randn(2, D)
    sparse.down_proj.weight = nn.Parameter(torch.randn(D, N))
    with torch.no_grad():
        with pytest.warns(
            UserWarning, match=rf"down_proj\.weight was exchanged for one with strides \({N}, 1\)"
        ):
            out = sparse(x)
        assert torch.equal(out, sparse.down_proj(F.silu(sparse.gate_proj(x)) * sparse.up_proj(x)))
        sparse.set_thresholds(torch.inf)
        assert sparse(x).abs().max() == 0


def test_compile_of_a_module_that_runs_dense_warns_once():
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=torch.inf)
    sparse.up_proj = OtherLinear(D, N)
    x = torch.randn(2, D)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.warns(UserWarning, match="up_proj is .*OtherLinear, not exactly nn.Linear"):
        out = run(x)
    expected = sparse.down_proj(F.silu(sparse.gate_proj(x)) * sparse.up_proj(x))
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_activation_by_value_and_by_name():
    for act, name in (
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.Identity(), "identity"),
    ):
        assert SparseGatedMLP.from_dense(Separate(act=act)).activation == name
    for act in (nn.Mish(), nn.ReLU6(), nn.LeakyReLU(), nn.Hardtanh(0.0, 30.0)):
        with pytest.raises(
            ValueError, match=rf"^activation of Separate is {type(act).__name__}, expected one of: relu"
        ):
            SparseGatedMLP.from_dense(Separate(act=act))
    dense = Separate()
    sparse = SparseGatedMLP.from_dense(copy.deepcopy(dense), activation="relu2")
    x = torch.randn(3, D)
    relu2 = Separate(act=nn.ReLU())
    relu2.load_state_dict(dense.state_dict())
    relu2.act_fn.forward = lambda p: F.relu(p) ** 2
    with torch.no_grad():
        wide = copy.deepcopy(dense).double()
        expected = wide.down_proj(F.relu(wide.gate_proj(x.double())) ** 2 * wide.up_proj(x.double()))
        assert_within_budget(sparse(x), relu2(x), expected)
        sparse.up_proj.register_forward_hook(lambda module, args, out: None)
        with pytest.warns(UserWarning, match="runs dense"):
            out = sparse(x)
        assert torch.equal(
            out, sparse.down_proj(activations.apply(sparse.gate_proj(x), "relu2") * dense.up_proj(x))
        )
    assert isinstance(sparse.act_fn, nn.SiLU)  # only its place in the module tree


class Inline(nn.Module):
    """No activation member: it must be named."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, N), nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


def test_a_module_without_activation_member():
    with pytest.raises(ValueError, match="has no member act_fn or activation_fn"):
        SparseGatedMLP.from_dense(Inline())
    with pytest.raises(ValueError, match="computes something else than"):
        SparseGatedMLP.from_dense(Inline(), activation="silu")
    dense = Inline()
    x = torch.randn(3, D)
    with torch.no_grad():
        expected = dense(x)
        assert torch.allclose(
            SparseGatedMLP.from_dense(dense, activation="relu")(x), expected, rtol=1e-5, atol=1e-6
        )


class Clipped(Separate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-2, 2))


class Swapped(Separate):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class UpFirst(Merged):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Dropped(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Scale(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Clipped, "computes something else than"),
        (Swapped, "computes something else than"),
        (UpFirst, "computes something else than"),
        (Dropped, r"has a further child dropout \(Dropout\)"),
        (Scale, "has parameters or buffers of its own"),
        (lambda: nn.Linear(3, 4), "has no children gate_proj, up_proj, down_proj"),
        (lambda: SparseGatedMLP.from_dense(Separate()), "has parameters or buffers of its own"),
    ],
)
def test_other_mathematics_is_refused(kind, reason: str):
    with pytest.raises(ValueError, match=rf"^module is a \w+ that {reason}"):
        SparseGatedMLP.from_dense(kind())


def test_looking_at_a_module_changes_nothing():
    dense = Separate().eval()
    seen: list[object] = []
    for module in dense.modules():
        module.register_forward_hook(lambda *args: seen.append(args))
    state = torch.get_rng_state()
    values = {name: value.clone() for name, value in dense.state_dict().items()}
    sparse = SparseGatedMLP.from_dense(dense)
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values[name], value) for name, value in sparse.state_dict().items())
    assert not sparse.training


@pytest.mark.parametrize(
    ("threshold", "mean", "message"),
    [
        (-1.0, None, "threshold is or contains -1, expected a number ≥ 0"),
        (float("nan"), None, "threshold is or contains NaN"),
        (torch.tensor([0.0] * (N - 1) + [-2.0]), None, "threshold is or contains -2"),
        (torch.zeros(N + 1), None, rf"threshold has shape \({N + 1},\), expected .* = \({N},\)"),
        (torch.zeros(1, N), None, "threshold has shape"),
        (torch.zeros(N, dtype=torch.int64), None, "threshold is int64, expected float32"),
        ("0.1", None, "threshold is str, expected a number"),
        (True, None, "threshold is bool"),
        (
            0.0,
            torch.zeros(N - 1),
            rf"skipped_mean has shape \({N - 1},\), expected a tensor of shape \(F,\) = \({N},\)",
        ),
        (0.0, torch.full((N,), torch.nan), "skipped_mean contains NaN or inf"),
        (0.0, 1.0, "skipped_mean is float, expected"),
        (0.0, torch.zeros(N, dtype=torch.int32), "skipped_mean is a tensor of torch.int32"),
    ],
)
def test_bad_thresholds(threshold, mean, message: str):
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=0.25)
    with pytest.raises(ValueError, match=f"^{message}"):
        sparse.set_thresholds(threshold, mean)
    assert sparse.threshold.item() == 0.25  # unchanged
    assert sparse.skipped_mean is None
    dense = Separate()
    with pytest.raises(ValueError, match=f"^{message}"):
        SparseGatedMLP.from_dense(dense, threshold=threshold, skipped_mean=mean)
    assert dense.down_proj.weight.is_contiguous()


def test_bad_backend_and_parameters():
    with pytest.raises(ValueError, match=r"^backend is 'cuda', expected one of: auto"):
        SparseGatedMLP.from_dense(Separate(), backend="cuda")
    with pytest.raises(
        ValueError, match=r"^activation_params is NoneType, expected a tensor of shape \(1,\): \(tau\)"
    ):
        SparseGatedMLP.from_dense(Separate(), activation="fatrelu")
    with pytest.raises(
        ValueError, match=r"^activation_params is shape \(1,\), expected None for activation 'silu'"
    ):
        SparseGatedMLP.from_dense(Separate(), activation_params=torch.zeros(1))


def test_backend_is_passed_on():
    sparse = SparseGatedMLP.from_dense(Separate(), backend="native").double()
    with pytest.raises(
        BackendUnavailableError, match="gated_mlp_fwd: backend 'native' cannot compute this call"
    ):
        sparse(torch.randn(1, D, dtype=torch.float64))


def test_shape_and_threshold_of_a_printed_module():
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=0.125)
    assert "activation='silu', threshold=0.125, backend='auto'" in repr(sparse)
    sparse.set_thresholds(torch.zeros(N), torch.zeros(N))
    assert f"threshold=({N}), skipped_mean" in repr(sparse)
