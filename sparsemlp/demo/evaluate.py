"""Quality and speed of a causal language model: perplexity, sparsity of its MLPs, time of a decoding step.

Speed is compared in turns: every configuration decodes a few tokens in each of several rounds of one run, and medians
are reported, so a neighbour on a shared machine slows all of them alike.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsemlp import activations
from sparsemlp.integrations.transformers import find_mlps
from sparsemlp.nn import SparseGatedMLP, SparseMLP, _screens
from sparsemlp.reference.gated_mlp import input_kept

__all__ = [
    "DecodeSpeed",
    "Meter",
    "Quality",
    "Timer",
    "cache_argument",
    "compare_decoding",
    "decode_speed",
    "mlp_sparsity",
    "mlp_timer",
    "perplexity",
    "quality",
    "sparsity_meter",
]

_WARMUP = 2
"""Untimed tokens at the start of each turn: they refill the caches and recompute what a module caches per plan."""


@dataclass(frozen=True)
class Quality:
    """What `quality` measured on one set of windows."""

    perplexity: float
    sparsity: float
    """Mean over layers of the fraction of neurons skipped, in [0, 1]."""
    tokens: int
    """Predictions that the perplexity averages over."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Medians over the timed tokens of one configuration."""

    ms: float
    """Milliseconds of a decoding step."""
    mlp_ms: float
    """Milliseconds of a step spent inside the MLPs, all layers together."""
    samples: int

    @property
    def tokens_per_second(self) -> float:
        return 1000 / self.ms


def perplexity(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """exp of the mean cross-entropy of the next token; a window's first token is context only.

    Args:
        model: a causal language model of transformers, in any dtype; the loss is computed in float32.
        windows: (1, S) int64 token ids each, S ≥ 2, independent of one another.

    Raises:
        ValueError: no window, or one of fewer than two tokens.
    """
    return quality(model, windows).perplexity


def mlp_sparsity(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """The fraction of MLP neurons that the model's thresholds skip, per token and mean over layers, in [0, 1].

    It is measured from the inputs that the MLPs really get, layers below made sparse too: |m| < threshold, m being the
    module's indicator (and, where no mean stands in for skipped neurons, a = 0). A model without sparse MLPs skips
    nothing: 0.

    Args:
        model, windows: as in `perplexity`.
    """
    with sparsity_meter(model) as meter, torch.inference_mode():
        for ids in windows:
            model(input_ids=ids, use_cache=False)
    return meter.sparsity


def quality(model: nn.Module, windows: Sequence[Tensor]) -> Quality:
    """`perplexity` and `mlp_sparsity` from one pass over the same tokens."""
    if not windows or min(w.shape[-1] for w in windows) < 2:
        raise ValueError("windows holds no window of two tokens or more, expected some; give a longer text")
    loss, count = 0.0, 0
    with sparsity_meter(model) as meter, torch.inference_mode():
        for ids in windows:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[-1] - 1
    return Quality(math.inf if loss / count >= 700 else math.exp(loss / count), meter.sparsity, count)


def decode_speed(model: nn.Module, prompt: Tensor, *, tokens: int = 32) -> DecodeSpeed:
    """The speed of greedy decoding with a KV cache at batch 1, in `torch.inference_mode`.

    Args:
        model: a causal language model of transformers.
        prompt: (1, S) int64; reading it is not timed.
        tokens: how many steps to time.

    Returns:
        Medians over the steps. The MLPs' share is measured in place, by hooks around each of them while the model
        decodes: its weights come from memory as they do in use, and the hooks cost some microseconds a layer.
    """
    return compare_decoding([lambda: model], prompt, tokens=tokens, rounds=1)[0]


def compare_decoding(
    models: Sequence[Callable[[], nn.Module]],
    prompt: Tensor,
    *,
    tokens: int = 16,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda message: None,
) -> list[DecodeSpeed]:
    """`decode_speed` of several configurations that take turns, starting with another one each round.

    Args:
        models: functions that get a configuration ready and return it.
        prompt: (1, S) int64, where every turn starts.
        tokens: steps timed in a turn.
        rounds: turns of each configuration.
        progress: gets a line a round.

    Returns:
        One a configuration, in their order.
    """
    steps: list[list[float]] = [[] for _ in models]
    inside: list[list[float]] = [[] for _ in models]
    for r in range(rounds):
        for k in range(len(models)):
            i = (r + k) % len(models)
            total, mlp = _decode(models[i](), prompt, tokens)
            steps[i] += total
            inside[i] += mlp
        progress(f"  decoding, round {r + 1} of {rounds}")
    median = statistics.median
    return [DecodeSpeed(median(a), median(b), len(a)) for a, b in zip(steps, inside, strict=True)]


def _decode(model: nn.Module, prompt: Tensor, tokens: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each timed step, and of the MLPs in it."""
    steps, inside = [], []
    name = cache_argument(model)
    with torch.inference_mode(), mlp_timer(model) as timer:
        out = model(input_ids=prompt, use_cache=True)
        for i in range(-_WARMUP, tokens):
            timer.ms = 0.0
            start = time.perf_counter()
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, use_cache=True, **{name: getattr(out, name)})
            elapsed = 1000 * (time.perf_counter() - start)
            if i >= 0:
                steps.append(elapsed)
                inside.append(timer.ms)
    return steps, inside


def cache_argument(model: nn.Module) -> str:
    """What the model's forward calls its KV cache, as an argument and in its output."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"  # its name before transformers 5.24


@dataclass
class Timer:
    """Milliseconds spent in the MLPs since `ms` was last set to 0."""

    ms: float = 0.0
    start: float = 0.0

    def enter(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def leave(self, *args: Any) -> None:
        self.ms += 1000 * (time.perf_counter() - self.start)


@contextlib.contextmanager
def mlp_timer(model: nn.Module) -> Iterator[Timer]:
    """Adds up the time spent in the model's MLPs, sparse or dense, while the context is open."""
    timer = Timer()
    hooks = []
    for module in find_mlps(model).values():
        hooks += [module.register_forward_pre_hook(timer.enter), module.register_forward_hook(timer.leave)]
    try:
        yield timer
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Meter:
    """Neurons skipped, and neurons asked, by the MLP's name."""

    skipped: dict[str, int] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)

    @property
    def sparsity(self) -> float:
        """Mean over layers of the fraction skipped."""
        layers = [self.skipped[name] / self.entries[name] for name in self.skipped]
        return statistics.fmean(layers) if layers else 0.0


@contextlib.contextmanager
def sparsity_meter(model: nn.Module) -> Iterator[Meter]:
    """Counts what the sparse MLPs skip while the context is open, from their inputs and thresholds."""
    meter = Meter()

    def watch(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            skipped = _skipped(module, x)
            meter.skipped[name] = meter.skipped.get(name, 0) + int(skipped.sum())
            meter.entries[name] = meter.entries.get(name, 0) + skipped.numel()

        return hook

    hooks = [
        module.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, module in find_mlps(model).items()
        if isinstance(module, (SparseGatedMLP, SparseMLP))
    ]
    try:
        yield meter
    finally:
        for hook in hooks:
            hook.remove()


def _skipped(module: SparseGatedMLP | SparseMLP, x: Tensor) -> Tensor:
    """Where the module skips a neuron, (..., F) bool: the complement of *active* in docs/ops/gated_mlp.md."""
    if isinstance(module, SparseMLP):
        return module.skipped(x)
    children, t = module._modules, module.input_threshold
    gate_layer: Any = children.get("gate_proj", children.get("gate_up_proj"))
    up_layer: Any = children.get("up_proj", gate_layer)
    gate = gate_layer(x if t is None else torch.where(input_kept(x, t), x, 0))
    merged = up_layer is gate_layer
    if merged:
        gate, up = gate.chunk(2, dim=-1)
    screens = module.indicator == "screen"
    if screens:
        _screens.ensure(module)
    if not module._fusable():  # its layers are wrapped (LoRA, hooks): it runs dense
        return torch.zeros(gate.shape, dtype=torch.bool)
    act = activations.apply(gate, module.activation, module.activation_params).float()
    indicator = act
    if screens and module._is_long(x):
        return act == 0
    if screens:
        indicator = _screens.scores(module, x)
    elif module.indicator != "gate":
        up = (up if merged else up_layer(x)).float()
        indicator = up if module.indicator == "up" else act * up
    skipped = indicator.abs() < module.threshold
    return skipped if module.skipped_mean is not None else skipped | (act == 0)
