"""Runs a model over batches and shows what its MLPs take and compute; nothing of it is kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp import activations
from sparsemlp.integrations._mlps import parts_of
from sparsemlp.nn import SparseGatedMLP, SparseMLP

__all__ = ["Batch", "Call", "Visit", "run"]

Batch = Tensor | Mapping[str, Any]
"""(B, S) int64 token ids, or the keyword arguments of the model's forward."""

_CHUNK = 1 << 19
"""Entries of a in one part of a call: the wide copy of the gate stays in a cache."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an MLP, with the tokens that count only.

    Args:
        name: the MLP's.
        x: (T, D), what its gate (or first) layer took.
        pre: (T, F), what that layer gave.
        up: (T, F), what the up layer gave; ones of an ungated MLP.
        activation, params: the MLP's.
    """

    name: str
    x: Tensor
    pre: Tensor
    up: Tensor
    activation: str
    params: Tensor | None

    def parts(self, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """(a, u, *more) of some tokens at a time, a in float32; `more` are (T, ...)."""
        rows = max(1, _CHUNK // max(1, self.pre.shape[1]))
        for pre, *others in zip(*(t.split(rows) for t in (self.pre, self.up, *more)), strict=True):
            yield activations.apply(pre.float(), self.activation, self.params), *others


Visit = Callable[[Call], None]


def run(
    model: nn.Module,
    mlps: Mapping[str, nn.Module],
    fingerprint: Mapping[str, Any],
    batches: Iterable[Batch],
    visit: Visit,
    *,
    progress: bool,
) -> None:
    """Runs the model over the batches and calls `visit` for every call of an MLP.

    The model runs in eval mode without gradients, its MLPs dense; modes and hooks are put back, also after an error.

    Args:
        model, mlps, fingerprint: a model, its `mlps_of` and its `fingerprint`.
        batches: as for `collect`.
        visit: may raise ValueError with what is wrong with the values; the layer's name is then put before it.
        progress: show a bar.

    Raises:
        ValueError: no batch, one without tokens or of another type, an MLP that never ran, or what `visit` finds.
    """
    recorder = _Recorder(visit)
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        for name, module in mlps.items():
            stack.enter_context(recorder.watching(name, module, fingerprint["layers"][name]["activation"]))
        position = -1
        for position, batch in enumerate(_with_bar(batches, progress)):
            arguments, keywords, recorder.mask = _arguments(model, batch, position)
            model(*arguments, **keywords)
    if position < 0:
        raise ValueError(
            "batches is empty, expected at least one batch of token ids; a generator can be used only once"
        )
    for name in mlps:
        if name not in recorder.seen:
            raise ValueError(f"layer {name} saw no token, expected every MLP to run; check the batches")


class _Recorder:
    """Forward hooks on gate and up (or first) layers."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.seen: set[str] = set()
        """MLPs that saw a token."""
        self.mask: Tensor | None = None
        """(B, S) bool of the running batch: which positions count; None: all."""

    @contextmanager
    def watching(self, name: str, module: nn.Module, activation: str) -> Iterator[None]:
        """Shows the module's x, p and u while the context lasts; a sparse module runs dense."""
        parts = parts_of(module)
        first, params = parts.inputs[0], getattr(module, "activation_params", None)
        halves: dict[str, tuple[Tensor, Tensor]] = {}

        def half_hook(half: str) -> Callable[..., None]:
            def hook(child: nn.Module, args: Any, keywords: Any, out: Tensor) -> None:
                halves[half] = _only(args, keywords), out
                if len(halves) == 2:  # in whichever order the module calls them
                    (x, pre), (_, up) = halves.pop("gate"), halves.pop("up")
                    self._record(Call(name, x, pre, up, activation, params))

            return hook

        def merged_hook(child: nn.Module, args: Any, keywords: Any, out: Tensor) -> None:
            pre, up = out.chunk(2, dim=-1)
            self._record(Call(name, _only(args, keywords), pre, up, activation, params))

        def ungated_hook(child: nn.Module, args: Any, keywords: Any, out: Tensor) -> None:
            up = out.new_ones(()).expand_as(out)
            self._record(Call(name, _only(args, keywords), out, up, activation, params))

        hooks: dict[nn.Module, Callable[..., None]]
        if not parts.gated:
            hooks = {first: ungated_hook}
        elif len(parts.inputs) == 1:
            hooks = {first: merged_hook}
        else:
            hooks = {first: half_hook("gate"), parts.inputs[1]: half_hook("up")}
        with ExitStack() as stack:
            for layer, hook in hooks.items():
                stack.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
            if isinstance(module, (SparseGatedMLP, SparseMLP)):
                stack.enter_context(_running_dense(module))
            yield

    def _record(self, call: Call) -> None:
        x, pre, up = (t.reshape(-1, t.shape[-1]) for t in (call.x, call.pre, call.up))
        if self.mask is not None:
            keep = self.mask.flatten().to(pre.device)
            if len(keep) != len(pre):
                raise ValueError(
                    f"attention_mask has {len(keep)} positions and layer {call.name} ran on {len(pre)}, expected one "
                    "each; pass a mask of input_ids' shape"
                )
            x, pre, up = x[keep], pre[keep], up[keep]
        if len(pre):
            self.seen.add(call.name)
        try:
            self.visit(Call(call.name, x, pre, up, call.activation, call.params))
        except ValueError as error:
            raise ValueError(
                f"layer {call.name}: {error}, expected finite activations; check the model's weights and dtype"
            ) from None


def _only(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """A linear layer's input, however it was passed."""
    x: Tensor = args[0] if args else next(iter(keywords.values()))
    return x


@contextmanager
def _running_dense(module: SparseGatedMLP | SparseMLP) -> Iterator[None]:
    """The module's dense composition through its children, in place of its forward."""
    if isinstance(module, SparseMLP):
        module._dense_only = True
        try:
            yield
        finally:
            module._dense_only = False
        return
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda x, token_scale=None: module._forward_dense(x)
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _arguments(
    model: nn.Module, batch: Batch, position: int
) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """Positional and keyword arguments of the call, and the mask of positions that count."""
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    known = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in known:
        extra["use_cache"] = False
    if "logits_to_keep" in known:  # the output layer is not needed: it is a fifth of a small model's work
        extra["logits_to_keep"] = 1
    if isinstance(batch, Tensor):
        if batch.numel() == 0:
            raise ValueError(
                f"batch {position} has shape {tuple(batch.shape)} and no token, expected (B, S); leave it out"
            )
        if batch.dim() != 2 and not batch.is_floating_point():
            raise ValueError(
                f"batch {position} has shape {tuple(batch.shape)}, expected (B, S) token ids; reshape it"
            )
        return [batch.to(device)], extra, None
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"batch {position} is {type(batch).__name__}, expected a (B, S) int64 tensor of token ids or a dict for "
            "model(**batch); tokenize the text first"
        )
    keywords = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    mask, ids = keywords.get("attention_mask"), keywords.get("input_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        what = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask of batch {position} is {what}, expected (B, S) with 0 at padding; pass it so"
        )
    empty = isinstance(ids, Tensor) and ids.numel() == 0
    if empty or (mask is not None and not bool(mask.any())):
        raise ValueError(
            f"batch {position} has no token that counts, expected at least one; leave the batch out"
        )
    if "labels" in keywords:  # a loss needs every logit
        extra.pop("logits_to_keep", None)
    return [], {**extra, **keywords}, None if mask is None or bool(mask.all()) else mask.bool()


def _with_bar(batches: Iterable[Batch], progress: bool) -> Iterable[Batch]:
    if not progress:
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc="calibrating", unit="batch")
