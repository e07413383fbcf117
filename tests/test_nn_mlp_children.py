"""`SparseMLP`: which modules it takes, which children it does not bypass, which arguments it refuses."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from sparsemlp import BackendUnavailableError, activations
from sparsemlp.nn import SparseGatedMLP, SparseMLP
from sparsemlp.testing import assert_within_budget
from tests.gated_mlp_modules import Separate
from tests.mlp_modules import KINDS, Conv, Conv1D, D, HiddenDropout, N, Plain


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


class OtherConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Tagged(Tensor):
    """A tensor subclass that is otherwise a plain tensor."""


def _hook(sparse: SparseMLP, child: str) -> None:
    getattr(sparse, child).register_forward_hook(lambda module, args, out: out + 1)


def _pre_hook(sparse: SparseMLP, child: str) -> None:
    getattr(sparse, child).register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _parametrize(sparse: SparseMLP, child: str) -> None:
    parametrize.register_parametrization(getattr(sparse, child), "weight", Scaled())


def _subclass(sparse: SparseMLP, child: str) -> None:
    old = getattr(sparse, child)
    if isinstance(old, Conv1D):
        setattr(sparse, child, OtherConv1D(old.nf, old.nx))
    else:
        setattr(sparse, child, OtherLinear(old.in_features, old.out_features))


def _forward(sparse: SparseMLP, child: str) -> None:
    layer = getattr(sparse, child)
    old = layer.forward
    layer.forward = lambda x: old(x) + 1


def _tensor_subclass(sparse: SparseMLP, child: str) -> None:
    layer = getattr(sparse, child)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))


OBSTACLES = {
    _hook: "has forward or backward hooks",
    _pre_hook: "has forward or backward hooks",
    _parametrize: "Parametrized(Linear|Conv1D), not exactly nn.Linear",
    _subclass: "Other(Linear|Conv1D), not exactly nn.Linear",
    _forward: "has a replaced forward",
    _tensor_subclass: "has a weight of type Tagged",
}


@pytest.mark.parametrize("kind", ["plain", "conv"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("change", OBSTACLES, ids=lambda f: f.__name__)
def test_a_changed_child_is_not_bypassed(change, which: int, kind: str):
    dense = KINDS[kind]()
    child, names = dense.names[which], dense.names
    sparse = SparseMLP.from_dense(dense, threshold=torch.inf)
    sparse.name = "layers.3.mlp"
    x = torch.randn(3, D)
    with torch.no_grad():
        assert torch.equal(sparse(x), getattr(sparse, names[1]).bias.expand(3, D))
        change(sparse, child)
        expected = "layers.3.mlp runs dense and no neuron of it is thresholded or skipped: "
        with pytest.warns(UserWarning, match=rf"^{expected}{child} .*{OBSTACLES[change]}"):
            out = sparse(x)
        first, last = (getattr(sparse, name) for name in names)
        act = nn.GELU(approximate="tanh" if kind == "conv" else "none")
        assert torch.equal(out, last(act(first(x))))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one warning only
            assert torch.equal(sparse(x), out)
        assert sparse.to_dense() is dense
        assert getattr(dense, child) is (first, last)[which]


def test_a_hook_that_is_removed_gives_the_sparse_path_back():
    sparse = SparseMLP.from_dense(HiddenDropout().eval(), threshold=torch.inf)
    x, seen = torch.randn(3, D), []
    for name in ("wo", "dropout", "act"):
        handle = getattr(sparse, name).register_forward_hook(lambda module, args, out: seen.append(out))
        sparse._warned = False
        with torch.no_grad():
            with pytest.warns(UserWarning, match=f"{name} has forward or backward hooks"):
                assert sparse(x).abs().max() > 0
            handle.remove()
            assert sparse(x).abs().max() == 0
    assert len(seen) == 3


def test_global_hooks_and_exchanged_children():
    sparse = SparseMLP.from_dense(HiddenDropout(p=0.0), threshold=torch.inf)
    x, seen = torch.randn(1, D), []
    with torch.no_grad():
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
        try:
            with pytest.warns(UserWarning, match="is called with global module hooks"):
                sparse(x)
        finally:
            handle.remove()
        assert sparse.wo in seen
        assert sparse(x).abs().max() == 0
        sparse.act, sparse._warned = nn.SiLU(), False
        with pytest.warns(UserWarning, match="act was replaced by SiLU"):
            out = sparse(x)
        assert torch.equal(out, sparse.wo(F.silu(sparse.wi(x))))
        sparse.act, sparse.dropout, sparse._warned = nn.ReLU(), nn.AlphaDropout(0.0), False
        with pytest.warns(UserWarning, match="dropout was replaced by AlphaDropout"):
            sparse(x)


def test_hooks_on_the_module_itself_survive_both_ways():
    dense, seen = Plain(), []
    handle = dense.register_forward_hook(lambda module, args, out: seen.append(module))
    sparse = SparseMLP.from_dense(dense)
    assert seen == []  # the look at the module did not call it
    sparse(torch.randn(1, D))
    assert seen == [sparse]
    sparse.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    sparse.to_dense()(torch.randn(1, D))
    assert seen == [sparse, "pre", dense]
    handle.remove()
    dense(torch.randn(1, D))
    assert seen == [sparse, "pre", dense, "pre"]


def test_weights_in_the_wrong_layout_run_dense_and_are_put_right():
    sparse = SparseMLP.from_dense(Plain(bias=False), threshold=torch.inf)
    x = torch.randn(2, D)
    with torch.no_grad():
        sparse.fc2.weight = nn.Parameter(torch.randn(D, N))
        with pytest.warns(UserWarning, match=rf"fc2\.weight was exchanged for one with strides \({N}, 1\)"):
            out = sparse(x)
        assert torch.equal(out, sparse.fc2(sparse.activation_fn(sparse.fc1(x))))
        sparse.set_thresholds(torch.inf)
        assert sparse(x).abs().max() == 0
        sparse.fc1.weight, sparse._warned = nn.Parameter(torch.randn(D, N).t()), False
        with pytest.warns(UserWarning, match=r"fc1\.weight is not stored row by row"):
            assert sparse(x).abs().max() > 0


def test_compile_of_a_module_that_runs_dense_warns_once():
    sparse = SparseMLP.from_dense(HiddenDropout().eval(), threshold=torch.inf)
    sparse.wi = OtherLinear(D, N)
    x = torch.randn(2, D)
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.warns(UserWarning, match=r"wi is .*OtherLinear, not exactly nn\.Linear"):
        out = run(x)
    assert torch.allclose(out, sparse.wo(F.relu(sparse.wi(x))), rtol=1e-6, atol=1e-6)


def test_activation_by_value_and_by_name():
    for act, name in (
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.Identity(), "identity"),
    ):
        assert SparseMLP.from_dense(Plain(act=act)).activation == name
    for act in (nn.Mish(), nn.ReLU6(), nn.LeakyReLU(), nn.Hardtanh(0.0, 30.0)):
        with pytest.raises(
            ValueError, match=rf"^activation of Plain is {type(act).__name__}, expected one of: relu"
        ):
            SparseMLP.from_dense(Plain(act=act))
    dense = Plain()
    sparse = SparseMLP.from_dense(copy.deepcopy(dense), activation="relu2")
    x = torch.randn(3, D)
    with torch.no_grad():
        wide = copy.deepcopy(dense).double()
        expected = wide.fc2(F.relu(wide.fc1(x.double())) ** 2)
        assert_within_budget(sparse(x), dense.fc2(F.relu(dense.fc1(x)) ** 2), expected)
        sparse.fc2.register_forward_hook(lambda module, args, out: None)
        with pytest.warns(UserWarning, match="runs dense"):
            out = sparse(x)
        assert torch.equal(out, sparse.fc2(activations.apply(sparse.fc1(x), "relu2")))
    assert isinstance(sparse.activation_fn, nn.GELU)  # only its place in the module tree


class Inline(nn.Module):
    """No activation member: it must be named."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def test_a_module_without_activation_member():
    with pytest.raises(ValueError, match="has no member activation_fn, act_fn, act"):
        SparseMLP.from_dense(Inline())
    with pytest.raises(ValueError, match="computes something else than"):
        SparseMLP.from_dense(Inline(), activation="silu")
    dense, x = Inline(), torch.randn(3, D)
    with torch.no_grad():
        expected = dense(x)
        sparse = SparseMLP.from_dense(dense, activation="relu")
        assert torch.allclose(sparse(x), expected, rtol=1e-5, atol=1e-6)


class FunctionMember(Inline):
    """An activation that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act_fn(self.fc1(x)))


def test_an_activation_that_is_a_function():
    sparse = SparseMLP.from_dense(FunctionMember(), threshold=torch.inf)
    x = torch.randn(2, D)
    assert sparse.activation == "silu"
    with torch.no_grad():
        assert torch.equal(sparse(x), sparse.fc2.bias.expand(2, D))
        sparse.fc1.register_forward_hook(lambda module, args, out: None)
        with pytest.warns(UserWarning, match="fc1 has forward or backward hooks"):
            assert torch.equal(sparse(x), sparse.fc2(F.silu(sparse.fc1(x))))


class Clipped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-2, 2)


class Residual(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scale(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, N), nn.GELU(), nn.Linear(N, D + 1)


class ByInput(Conv):
    """Conv1D-like layers that compute something else are no Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = OtherConv1D(N, D), OtherConv1D(D, N)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Clipped, "computes something else than"),
        (Residual, "computes something else than"),
        (Scale, "has parameters or buffers of its own"),
        (Normed, r"has a further child norm \(LayerNorm\)"),
        (Widening, r"has layers of sizes \(24, 40\) and \(40, 25\) \(inputs, outputs\)"),
        (lambda: nn.Linear(3, 4), r"has no two linear layers of known names \(fc1 and fc2"),
        (Separate, "has no two linear layers of known names"),
        (lambda: SparseMLP.from_dense(Plain()), "has parameters or buffers of its own"),
    ],
)
def test_other_mathematics_is_refused(kind, reason: str):
    with pytest.raises(ValueError, match=rf"^module is a \w+ that {reason}"):
        SparseMLP.from_dense(kind())


def test_a_look_alike_of_conv1d_runs_dense():
    dense, x = ByInput(), torch.randn(2, D)
    with torch.no_grad():
        expected = dense(x)
        sparse = SparseMLP.from_dense(dense, threshold=torch.inf)
        with pytest.warns(UserWarning, match=r"c_fc is .*OtherConv1D, not exactly nn\.Linear"):
            assert torch.equal(sparse(x), expected)


def test_looking_at_a_module_changes_nothing():
    dense = HiddenDropout()
    seen: list[object] = []
    for module in dense.modules():
        module.register_forward_hook(lambda *args: seen.append(args))
    state = torch.get_rng_state()
    values = {name: value.clone() for name, value in dense.state_dict().items()}
    modes = {name: module.training for name, module in dense.named_modules()}
    sparse = SparseMLP.from_dense(dense)
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values[name], value) for name, value in sparse.state_dict().items())
    assert {name: module.training for name, module in sparse.named_modules()} == modes
    sparse.eval()
    assert not dense.training


@pytest.mark.parametrize(
    ("threshold", "mean", "message"),
    [
        (-1.0, None, "threshold is or contains -1, expected a number ≥ 0"),
        (torch.zeros(N + 1), None, rf"threshold has shape \({N + 1},\), expected .* = \({N},\)"),
        ("0.1", None, "threshold is str, expected a number"),
        (0.0, torch.zeros(N - 1), rf"skipped_mean has shape \({N - 1},\), expected .* = \({N},\)"),
        (0.0, torch.full((N,), torch.nan), "skipped_mean contains NaN or inf"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "conv"])
def test_bad_thresholds(kind: str, threshold, mean, message: str):
    sparse = SparseMLP.from_dense(KINDS[kind](), threshold=0.25)
    with pytest.raises(ValueError, match=f"^{message}"):
        sparse.set_thresholds(threshold, mean)
    assert sparse.threshold.item() == 0.25  # unchanged
    assert sparse.skipped_mean is None
    dense = KINDS[kind]()
    with pytest.raises(ValueError, match=f"^{message}"):
        SparseMLP.from_dense(dense, threshold=threshold, skipped_mean=mean)
    assert all(p.is_contiguous() for p in dense.parameters())


def test_bad_backend_and_parameters():
    with pytest.raises(ValueError, match=r"^backend is 'cuda', expected one of: auto"):
        SparseMLP.from_dense(Plain(), backend="cuda")
    with pytest.raises(
        ValueError, match=r"^activation_params is NoneType, expected a tensor of shape \(1,\)"
    ):
        SparseMLP.from_dense(Plain(), activation="fatrelu")
    with pytest.raises(ValueError, match=r"^quantize is 'int4', expected None or 'int8'"):
        SparseMLP.from_dense(Plain(), quantize="int4")
    with pytest.raises(BackendUnavailableError, match="mlp_fwd: backend 'native' cannot compute this call"):
        SparseMLP.from_dense(Plain(), backend="native").double()(torch.randn(1, D, dtype=torch.float64))


def test_shape_and_threshold_of_a_printed_module():
    sparse = SparseMLP.from_dense(Plain(), threshold=0.125)
    assert "activation='gelu', threshold=0.125, backend='auto'" in repr(sparse)
    sparse.set_thresholds(torch.zeros(N), torch.zeros(N))
    assert f"threshold=({N}), skipped_mean" in repr(sparse)
    assert not isinstance(sparse, SparseGatedMLP)
