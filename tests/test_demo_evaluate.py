"""Perplexity, sparsity and speed against independent computations, on tiny random models."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsemlp.demo import evaluate, stack
from sparsemlp.integrations.transformers import find_mlps, sparsify
from tests import tiny_models


def windows(count: int = 2, length: int = 24, vocabulary: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(count)]


# Quality


def test_perplexity_is_that_of_the_definition():
    model, found = tiny_models.make(), 0.0
    texts = windows(3)
    with torch.no_grad():
        for ids in texts:
            log_p = model(input_ids=ids).logits.double().log_softmax(-1)
            found -= sum(float(log_p[0, i, ids[0, i + 1]]) for i in range(ids.shape[1] - 1))
    expected = math.exp(found / (3 * 23))
    assert evaluate.perplexity(model, texts) == pytest.approx(expected, rel=1e-5)
    assert evaluate.quality(model, texts).tokens == 3 * 23


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    model = tiny_models.make()
    nn.init.zeros_(model.lm_head.weight)
    assert evaluate.perplexity(model, windows()) == pytest.approx(64, rel=1e-5)


@pytest.mark.parametrize("texts", [[], [torch.zeros(1, 1, dtype=torch.int64)]])
def test_windows_too_short_for_a_prediction(texts: list[torch.Tensor]):
    with pytest.raises(ValueError, match="two tokens or more"):
        evaluate.perplexity(tiny_models.make(), texts)


def test_perplexity_survives_a_loss_beyond_exp():
    model = tiny_models.make()
    model.lm_head.weight.data.mul_(1e6)
    assert evaluate.perplexity(model, windows()) == math.inf


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_sparsity_is_what_the_thresholds_skip(family: str):
    model = tiny_models.make(family, num_hidden_layers=1)
    mlp = next(iter(find_mlps(model).values()))
    inputs = []
    hook = mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        for ids in windows():
            model(input_ids=ids)
        hook.remove()
        weight = (
            mlp.gate_proj.weight
            if family == "Llama"
            else mlp.gate_up_proj.weight[: mlp.down_proj.in_features]
        )
        act = F.silu(torch.cat(inputs, 1).double() @ weight.double().T).abs()
    assert evaluate.mlp_sparsity(model, windows()) == 0.0  # dense
    sparsify(model, threshold=0.5)
    expected = float((act < 0.5).double().mean())
    assert 0.1 < expected < 0.9  # so that the next line can fail
    assert evaluate.mlp_sparsity(model, windows()) == pytest.approx(expected, abs=1e-3)


def test_sparsity_is_a_mean_over_layers_and_knows_exact_zeros_and_means():
    model = sparsify(tiny_models.make("Llama", hidden_act="relu"))
    zeros = evaluate.mlp_sparsity(model, windows())
    assert 0.3 < zeros < 0.7  # ReLU of symmetric pre-activations
    first, second = find_mlps(model).values()
    first.set_thresholds(math.inf)
    second.set_thresholds(0.0, torch.ones(second.down_proj.in_features))  # with a mean a zero is kept
    assert evaluate.mlp_sparsity(model, windows()) == 0.5


def test_sparsity_of_wrapped_layers_is_none():
    model = sparsify(tiny_models.make(), threshold=math.inf)
    first, _ = find_mlps(model).values()
    first.up_proj.register_forward_hook(lambda module, args, out: out)  # now it runs dense
    with pytest.warns(UserWarning, match="runs dense"):
        assert evaluate.mlp_sparsity(model, windows()) == 0.5


# Speed


def test_decoding_is_greedy_with_a_cache():
    model = tiny_models.make()
    prompt, fed = windows(1, 10)[0], []
    hook = model.register_forward_pre_hook(
        lambda m, args, kwargs: fed.append(kwargs["input_ids"]), with_kwargs=True
    )
    speed = evaluate.decode_speed(model, prompt, tokens=5)
    hook.remove()
    mask = torch.ones_like(prompt)  # without it, generate takes token 0 for padding
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=7, do_sample=False)
    assert torch.equal(torch.cat(fed, 1), expected)
    assert [ids.shape[1] for ids in fed] == [10, 1, 1, 1, 1, 1, 1, 1]
    assert speed.samples == 5
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in find_mlps(model).values())


def test_mlp_time_is_the_time_inside_the_mlps():
    model = tiny_models.make()
    for mlp in find_mlps(model).values():
        mlp.up_proj.register_forward_hook(lambda module, args, out: time.sleep(0.02))
    speed = evaluate.decode_speed(model, windows(1)[0], tokens=3)
    assert 40 <= speed.mlp_ms < speed.ms
    model.lm_head.register_forward_hook(lambda module, args, out: time.sleep(0.1))
    slower = evaluate.decode_speed(model, windows(1)[0], tokens=3)
    assert slower.ms >= 140
    assert slower.mlp_ms < 100
    assert slower.tokens_per_second == pytest.approx(1000 / slower.ms)


def test_configurations_take_turns():
    model, order = tiny_models.make(), []

    def named(name: str):
        return lambda: order.append(name) or model

    found = evaluate.compare_decoding([named("a"), named("b"), named("c")], windows(1)[0], tokens=2, rounds=3)
    assert "".join(order) == "abcbcacab"
    assert [speed.samples for speed in found] == [6, 6, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stack_reaches_its_targets_on_fresh_tokens(dtype: torch.dtype):
    points = stack.measure_stack(dtype, d=256, f=512, layers=2, targets=(0.0, 0.5, 0.9), rounds=6)
    assert [(p.activation, p.target) for p in points] == [
        ("silu", None), ("silu", 0.0), ("silu", 0.5), ("silu", 0.9), ("silu", 0.5), ("silu", 0.9), ("relu", None),
        ("relu", 0.9),
    ]  # fmt: skip
    assert [p.indicator for p in points] == [*["gate"] * 4, "screen", "screen", "gate", "gate"]
    for point in points:
        assert abs(point.sparsity - (point.target or 0.0)) < 0.04
        assert point.ms > 0
    eps = torch.finfo(dtype).eps
    assert [p.error is None for p in points] == [True, False, *[True] * 5, False]
    assert all(p.error < 4 * eps * 512**0.5 for p in points if p.error is not None)


def test_stack_tokens_are_fresh_every_call(monkeypatch: pytest.MonkeyPatch):
    seen = []
    run_one = stack.gated_mlp
    monkeypatch.setattr(stack, "gated_mlp", lambda x, *a, **k: seen.append(x) or run_one(x, *a, **k))
    stack.measure_stack(torch.float32, d=16, f=32, layers=2, targets=(0.5,), rounds=3)
    assert (
        len({tuple(x[0].tolist()) for x in seen}) >= 2 * 2 * 4
    )  # layers × (silu, relu) × (warm-up and rounds)
