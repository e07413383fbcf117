"""`collect` and `calibrate` on models: what they see, what they leave as it was, and what they refuse."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from sparsemlp.calibration import METHODS, Statistics, calibrate, collect
from sparsemlp.calibration.histogram import Cumulative
from sparsemlp.integrations.transformers import densify, sparsify
from sparsemlp.nn import SparseGatedMLP
from tests.calibration_samples import SCREEN, layer_of


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # the default initialisation leaves |a| near 0 everywhere
        for parameter in model.model.layers.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def tiny_phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3))


def same(one: Statistics, other: Statistics) -> bool:
    pairs = zip(one.layers.values(), other.layers.values(), strict=True)
    tables = (zip(a.tables(), b.tables(), strict=True) for a, b in pairs)
    return one.fingerprint == other.fingerprint and all(torch.equal(x, y) for pair in tables for x, y in pair)


def activations_of(model: nn.Module, batches: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """a and u in float64 from the MLPs' inputs and their own weights."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: seen.setdefault(name, []).append(args[0]))
        for name, module in model.named_modules()
        if name.endswith(".mlp")
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    out = {}
    for name, inputs in seen.items():
        mlp, x = model.get_submodule(name), torch.cat([x.flatten(0, -2) for x in inputs]).double()
        if hasattr(mlp, "gate_up_proj"):
            p, u = (x @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
        else:
            p, u = x @ mlp.gate_proj.weight.double().T, x @ mlp.up_proj.weight.double().T
        out[name] = (nn.functional.silu(p).detach(), u.detach())
    return out


@pytest.mark.parametrize("make", [tiny_llama, tiny_phi3])
def test_collect_sees_every_mlp(make) -> None:
    model, batches = make(), [ids(2, 30), ids(1, 17)]
    statistics = collect(model, batches, progress=False)
    assert statistics.tokens == 77
    truth = activations_of(model, batches)
    assert list(statistics.layers) == list(truth) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for name, (a, u) in truth.items():
        cumulative = Cumulative(statistics.layers[name])
        torch.testing.assert_close(
            cumulative.total.sum_h, (a * u).sum(0), rtol=1e-4, atol=1e-4 * float((a * u).abs().max())
        )
        torch.testing.assert_close(cumulative.total.sum_u2, (u**2).sum(0), rtol=1e-4, atol=0)
        edge = cumulative.edges[[80, 100, 110]]
        for value in edge:
            near = ((a.abs() - value).abs() < 1e-4 * value).sum(0)  # float32 may put these on the other side
            off = (cumulative.count_below(value.expand(a.shape[1])) - (a.abs() < value).sum(0)).abs()
            assert bool((off <= near).all())


def test_one_pass_is_the_merge_of_two() -> None:
    model, batches = tiny_llama(), [ids(2, 20), ids(1, 31), ids(3, 5)]
    whole, *halves = (
        collect(model, part, screen=SCREEN, progress=False) for part in (batches, batches[:1], batches[1:])
    )
    merged = halves[0].merge(halves[1])
    assert merged.tokens == whole.tokens == 86
    both = [*whole.layers.values(), *whole.screened.values()]
    for one, other in zip(both, [*merged.layers.values(), *merged.screened.values()], strict=True):
        assert torch.equal(one.count, other.count)
        torch.testing.assert_close(one.sum_h2, other.sum_h2, rtol=1e-5, atol=0)
    for method in METHODS:
        for one, other in zip(
            whole.plan(0.5, method).layers.values(), merged.plan(0.5, method).layers.values(), strict=True
        ):
            torch.testing.assert_close(one.threshold, other.threshold, rtol=1e-5, atol=0)
    with pytest.raises(
        ValueError, match=r"other is of another model \(2 layers in these statistics, 1 in the others"
    ):
        whole.merge(collect(tiny_llama(num_hidden_layers=1), batches, progress=False))


def test_padding_is_left_out() -> None:
    model = tiny_llama()
    text = ids(2, 12)
    mask = torch.ones_like(text)
    mask[0, 8:] = 0
    padded = collect(model, [{"input_ids": text, "attention_mask": mask}], progress=False)
    assert padded.tokens == 20
    alone = collect(model, [text[:1, :8], text[1:]], progress=False)
    for one, other in zip(padded.layers.values(), alone.layers.values(), strict=True):
        # The same values up to attention's summation order, so nearly all of them in the same bins.
        assert int((one.count - other.count).abs().sum()) <= 8
        torch.testing.assert_close(one.sum_u2.sum(0), other.sum_u2.sum(0), rtol=1e-4, atol=0)
    full = collect(model, [{"input_ids": text, "attention_mask": torch.ones_like(text)}], progress=False)
    assert full.tokens == 24


@pytest.mark.parametrize("make", [tiny_llama, tiny_phi3])
def test_sparse_model_gives_the_dense_statistics(make) -> None:
    model, batches = make(), [ids(2, 20)]
    dense = collect(model, batches, progress=False)
    sparsify(model, dense.plan(0.7))
    before = model(batches[0]).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # our hooks must not count as a reason to run dense for good
        assert same(collect(model, batches, progress=False), dense)
    assert torch.equal(model(batches[0]).logits, before), "sparse again afterwards"
    assert all("forward" not in module.__dict__ for module in model.modules())
    densify(model)


def test_plain_model_of_sparse_mlps() -> None:
    mlp = tiny_llama().model.layers[0].mlp
    model = nn.Sequential(nn.Linear(6, 24), SparseGatedMLP.from_dense(mlp, threshold=0.3))
    statistics = collect(model, [torch.randn(4, 9, 6), torch.randn(2, 6)], progress=False)
    assert statistics.tokens == 38
    plan = statistics.plan(0.5, "cats")
    assert list(plan.layers) == ["1"]
    plan.check(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype)
    statistics = collect(model, [ids(2, 40)], progress=False)
    for layer in statistics.plan(0.5).layers.values():
        assert layer.sparsity == pytest.approx(0.5, abs=1e-6)
        assert layer.threshold.dtype == torch.float32


def test_model_is_left_as_it_was() -> None:
    model = tiny_llama(attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    sparsify(model)
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = hooks()

    def failing():
        yield ids(1, 8)
        raise KeyboardInterrupt

    first = collect(model, [ids(1, 8)], progress=False)
    assert same(first, collect(model, [ids(1, 8)], progress=False)), "dropout must be off"
    with pytest.raises(KeyboardInterrupt):
        collect(model, failing(), progress=False)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert hooks() == before
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)


def test_only_one_row_of_logits_is_computed() -> None:
    model, seen = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    collect(
        model,
        [ids(2, 9), {"input_ids": ids(2, 9)}, {"input_ids": ids(2, 9), "labels": ids(2, 9)}],
        progress=False,
    )
    assert seen == [(2, 1, 50), (2, 1, 50), (2, 9, 50)]


def test_calibrate_is_collect_and_plan() -> None:
    model, batches = tiny_llama(), [ids(2, 20)]
    assert calibrate(model, batches, 0.3, "cats", progress=False) == collect(
        model, batches, progress=False
    ).plan(0.3, "cats")


def test_planned_sparsity_is_what_the_operator_skips() -> None:
    model, batches = tiny_llama(), [ids(4, 100)]
    truth = activations_of(model, batches)
    for method in ("cats", "upaware"):
        plan = calibrate(model, batches, 0.5, method, progress=False)
        for name, (a, _) in truth.items():
            skipped = float((a.abs() < plan.layers[name].threshold).double().mean())
            assert skipped == pytest.approx(0.5, abs=0.02)
    sparsify(model, plan)
    mlp = model.model.layers[0].mlp
    assert torch.equal(mlp.threshold, plan.layers["model.layers.0.mlp"].threshold)
    assert bool(model(batches[0]).logits.isfinite().all())


def test_bad_method_is_named_before_the_pass() -> None:
    with pytest.raises(ValueError, match="method is 'best', expected one of: cats, upaware"):
        calibrate(tiny_llama(), iter([]), method="best")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches is empty, expected at least one"),
        ([ids(1, 4), ids(1, 0)], r"batch 1 has shape \(1, 0\) and no token"),
        ([{"input_ids": ids(1, 0)}], "batch 0 has no token that counts"),
        ([{"input_ids": ids(1, 4), "attention_mask": torch.zeros(1, 4)}], "batch 0 has no token that counts"),
        (
            [{"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)}],
            r"attention_mask of batch 0 is shape \(1, 1, 4, 4\), expected \(B, S\)",
        ),
        (ids(2, 4), r"batch 0 has shape \(4,\), expected \(B, S\) token ids"),
        (["some text"], "batch 0 is str, expected a .* tokenize the text first"),
    ],
)
def test_bad_batches(batches, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect(tiny_llama(), batches, progress=False)


def test_not_finite_activations_name_the_layer() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
    with pytest.raises(
        ValueError, match=r"^layer model.layers.1.mlp: u holds NaN.*check the model's weights and dtype$"
    ):
        collect(model, [ids(1, 4)], progress=False)


def test_model_without_mlp() -> None:
    with pytest.raises(ValueError, match="model is Sequential without an MLP of a known form"):
        collect(nn.Sequential(nn.Linear(3, 3)), [torch.ones(1, 3)], progress=False)


class UpFirst(nn.Module):
    """Calls its up layer before its gate layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def test_order_of_gate_and_up_does_not_matter() -> None:
    torch.manual_seed(0)
    mlp, x = UpFirst(), torch.randn(7, 6)
    layer = collect(nn.Sequential(mlp), [x, x[:3]], progress=False).layers["0"]
    assert layer.tokens == 10
    both = torch.cat([x, x[:3]])
    truth = layer_of(mlp.act_fn(mlp.gate_proj(both)), mlp.up_proj(both))
    torch.testing.assert_close(layer.sum_h2.sum(0), truth.sum_h2.sum(0), rtol=1e-5, atol=0)


class Detour(nn.Module):
    """Has a gated MLP that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = tiny_llama().model.layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_mlp_that_never_runs() -> None:
    with pytest.raises(ValueError, match="layer mlp saw no token"):
        collect(Detour(), [torch.ones(1, 24)], progress=False)


def test_progress_bar_is_optional(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = tiny_llama(), [ids(1, 4)]
    collect(model, batches, progress=False)
    assert capsys.readouterr() == ("", "")
    collect(model, batches)
    assert "calibrating: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert collect(model, batches).tokens == 4
    assert capsys.readouterr() == ("", "")


def test_example_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    example = Path(__file__).parent.parent / "examples" / "calibrate_model.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path / "plan")])
    runpy.run_path(str(example), run_name="__main__")
    assert "sparsity" in capsys.readouterr().out
    assert (tmp_path / "plan" / "plan.json").is_file()
