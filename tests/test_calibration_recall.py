"""Recall against an oracle: sorted |h| in float64, better screens and worse ones, chance, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from sparsemlp.calibration import LayerPlan, LayerRecall, Plan, Recall, calibrate, collect, recall, screen
from sparsemlp.screen import PackedWeight, pack
from tests.test_calibration_collect import ids, tiny_llama
from tests.test_calibration_screen import WIDE, truth_of, wide_llama
from tests.tiny_ungated_models import make

BATCHES = [ids(2, 60), ids(1, 41)]


def plans_of(model: nn.Module, targets: tuple[float, ...] = (0.5,)) -> dict[str, Plan]:
    """Of every method, and screens of every number of bits."""
    plans = {}
    for bits in (3, 4, 8):
        statistics = collect(model, BATCHES, screen=(bits, 32), progress=False)
        for target in targets:
            plans[f"screen{bits} {target}"] = statistics.plan(target, "screen")
    for target in targets:
        for method in ("cats", "upaware"):
            plans[f"{method} {target}"] = statistics.plan(target, method)
    return plans


def exact_recall(h: Tensor, kept: Tensor) -> tuple[float, float]:
    """Of the largest |h|, as many as are kept, the share that is kept; and the share of those near the last of them."""
    size, flat = h.abs().flatten(), kept.flatten()
    n = int(flat.sum())
    order = size.argsort(descending=True)[:n]
    last = size[order[-1]]
    near = (size > last / (1 + 1 / 64)) & (size < last * (1 + 1 / 64))
    return float(flat[order].double().mean()), float((near & flat).sum()) / n


def test_recall_is_the_sorted_ones() -> None:
    model = wide_llama()
    plans = plans_of(model, (0.3, 0.5, 0.8))
    found = recall(model, BATCHES, plans, progress=False)
    assert found.tokens == 161
    assert list(found.plans) == list(plans)
    for bits in (3, 4, 8):
        for name, (a, u, m, _) in truth_of(model, BATCHES, bits, 32).items():
            for label, plan in plans.items():
                if plan.bits not in (None, bits):
                    continue
                kept = ~((a if plan.bits is None else m).abs() < plan.layers[name].threshold)
                exact, unsure = exact_recall(a * u, kept)
                assert unsure < 0.03, "the check must see the difference between two screens"
                layer = found.plans[label][name]
                assert abs(layer.recall - exact) <= unsure
                assert layer.sparsity == pytest.approx(1 - float(kept.double().mean()), abs=1e-3)


def test_more_bits_find_more_of_the_oracles_neurons() -> None:
    model = wide_llama()
    plans = plans_of(model, (0.5, 0.8))
    found = recall(model, BATCHES, plans, progress=False)
    for target in (0.5, 0.8):
        by_bits = [found.mean(f"screen{bits} {target}").recall for bits in (3, 4, 8)]
        assert by_bits[0] < by_bits[1] < by_bits[2]
        # 8 bits leave errors of about 1 % of a score, and near the oracle's threshold lie few pairs.
        assert by_bits[2] > 0.97
        assert by_bits[0] < 0.93
        assert found.mean(f"cats {target}").recall < by_bits[0]


def test_a_screen_of_shuffled_weights_finds_what_chance_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama()
    generator = torch.Generator().manual_seed(5)

    def shuffled(weight: Tensor, bits: int, group: int) -> PackedWeight:
        entries = weight.flatten()[torch.randperm(weight.numel(), generator=generator)]
        return pack(entries.view_as(weight), bits, group)

    monkeypatch.setattr(screen, "pack", shuffled)
    plan = calibrate(model, BATCHES, 0.5, "screen", progress=False)
    generator.manual_seed(5)  # the same permutations again
    found = recall(model, BATCHES, {"shuffled": plan}, progress=False).mean("shuffled")
    assert found.sparsity == pytest.approx(0.5, abs=0.01)
    assert found.recall == pytest.approx(0.5, abs=0.06)
    monkeypatch.undo()
    plan = calibrate(model, BATCHES, 0.5, "screen", progress=False)
    assert recall(model, BATCHES, {"right": plan}, progress=False).mean("right").recall > 0.85


def test_batches_do_not_matter() -> None:
    model = wide_llama()
    plans = plans_of(model)
    whole = recall(model, [ids(4, 30)], plans, progress=False)
    parts = recall(model, ids(4, 30).split(1), plans, progress=False)
    assert whole.tokens == parts.tokens == 120
    for label in plans:
        for name, one in whole.plans[label].items():
            assert one.recall == pytest.approx(parts.plans[label][name].recall, abs=2e-3)


def test_padding_is_left_out() -> None:
    model, text = wide_llama(), ids(2, 30)
    plans, mask = plans_of(model), torch.ones_like(text)
    mask[0, 5:] = 0
    padded = recall(model, [{"input_ids": text, "attention_mask": mask}], plans, progress=False)
    alone = recall(model, [text[:1, :5], text[1:]], plans, progress=False)
    assert padded.tokens == alone.tokens == 35
    for label in plans:
        assert padded.mean(label).recall == pytest.approx(alone.mean(label).recall, abs=5e-3)


def test_ungated_mlps_are_chosen_by_h_itself() -> None:
    """h = |a|: one threshold on |a| is the oracle's, up to the pairs in its histogram's last bin."""
    model, text = make("Phi"), torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(3))
    plan = calibrate(model, [text], 0.7, "cats", progress=False)
    found = recall(model, [text], {"cats": plan}, progress=False)
    for layer in found.plans["cats"].values():
        assert layer.recall > 0.985
        assert layer.sparsity == pytest.approx(0.7, abs=0.02)


def test_the_oracle_keeps_no_zeros() -> None:
    """ReLU: at threshold 0 a plan keeps all pairs, and all that are not 0 are among them."""
    model = tiny_llama(**WIDE, hidden_act="relu")
    statistics = collect(model, BATCHES, screen=(8, 32), progress=False)
    plans = {"all": statistics.plan(0, "cats"), "most": statistics.plan(0.4, "screen")}
    found = recall(model, BATCHES, plans, progress=False)
    assert found.mean("all") == LayerRecall(1.0, 0.0)
    most = found.mean("most")
    assert most.sparsity >= 0.4
    assert 0.95 < most.recall <= 1


def test_more_pairs_kept_than_are_not_zero() -> None:
    """ReLU, the quarter of the neurons that is active most often never kept: the oracle's share is of all active."""
    model = tiny_llama(**WIDE, hidden_act="relu")
    plan = calibrate(model, BATCHES, 0.5, "cats", progress=False)
    active = {name: silu > 0 for name, (silu, *_) in truth_of(model, BATCHES, 8, 32).items()}
    for name, layer in plan.layers.items():
        often = active[name].sum(0).argsort(descending=True)[:18]
        limits = torch.zeros(72)
        limits[often] = float("inf")
        plan.layers[name] = LayerPlan(limits, None, layer.sparsity)
    for name, layer in recall(model, BATCHES, {"x": plan}, progress=False).plans["x"].items():
        kept = plan.layers[name].threshold == 0
        assert float(active[name].double().mean()) < 0.7, "fewer than are kept"
        exact = float(active[name][:, kept].sum() / active[name].sum())
        assert exact < 0.72
        assert layer.recall == pytest.approx(exact, abs=1e-3)
        assert layer.sparsity == 0.25


def test_a_plan_that_keeps_nothing() -> None:
    model = wide_llama()
    plan = calibrate(model, BATCHES, 0.5, "cats", progress=False)
    for layer in plan.layers.values():
        layer.threshold.fill_(float("inf"))
    assert recall(model, BATCHES, {"none": plan}, progress=False).mean("none") == LayerRecall(1.0, 1.0)


def test_the_table() -> None:
    layers = [LayerRecall(0.9, 0.5), LayerRecall(0.7, 0.52)]
    plans = {label: dict(zip(("a.mlp", "b.mlp"), layers, strict=True)) for label in ("4 bits", "another")}
    found = Recall(plans, 9)
    assert found.mean("4 bits") == LayerRecall(pytest.approx(0.8), pytest.approx(0.51))
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "recall (sparsity)"
    assert [line.split()[0] for line in lines[1:]] == ["a.mlp", "b.mlp", "mean"]
    assert re.fullmatch(r"mean +80\.0 \(51\.0\) +80\.0 \(51\.0\)", lines[3])
    assert len({len(line) for line in lines}) == 1


def test_what_it_refuses() -> None:
    model = wide_llama()
    plan = calibrate(model, BATCHES, 0.5, "screen", progress=False)
    with pytest.raises(ValueError, match=r"plans is empty, expected a dict of label to sparsemlp\.Plan"):
        recall(model, BATCHES, {}, progress=False)
    with pytest.raises(ValueError, match=r"plans is list, expected a dict of label to sparsemlp\.Plan"):
        recall(model, BATCHES, [plan], progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plans\['x'\] is str, expected a sparsemlp.Plan"):
        recall(model, BATCHES, {"x": "plan50"}, progress=False)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"plans\['x'\]: the plan is for another model"):
        recall(tiny_llama(num_hidden_layers=1, **WIDE), BATCHES, {"x": plan}, progress=False)
    with pytest.raises(ValueError, match="batches is empty"):
        recall(model, [], {"x": plan}, progress=False)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
        model.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
    with pytest.raises(
        ValueError, match=r"^layer model.layers.1.mlp: h holds NaN or infinity, expected finite"
    ):
        recall(model, BATCHES, {"x": plan}, progress=False)
