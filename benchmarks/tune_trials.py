"""What `benchmarks.tune` times for an operator: one entry in `TRIALS` each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import sparsemlp
from benchmarks import registry
from benchmarks.gpu_device import Device, Replay, median, timed
from benchmarks.gpu_skipping import Checked, Walk, layers_for
from benchmarks.shapes import Shape
from benchmarks.shapes import get as shape_of
from benchmarks.tune_spaces import DTYPES, SPACES
from benchmarks.workload import Workload
from sparsemlp import activations
from sparsemlp.kernels import _configs, _rows
from sparsemlp.testing import assert_within_budget

__all__ = ["TRIALS", "call"]

Config = dict[str, Any]
Key = dict[str, Any]

_SPARSITIES = (0.5, 0.9)
_WIN = 0.97
"""Skipping tiles must save 3 % of the dense time, and looking for them may not cost more."""


def _shape(op: str, key: Key) -> Shape:
    d, f = (key["k"], key["n"]) if "k" in key else (key["d"], key["f"])
    activation = {"gated_mlp": "silu", "mlp": "relu", "sparse_linear": "identity"}[op]
    return Shape(f"{d}x{f}", d, f, activation, registry.get(op).workload.kind)


class SkippingTrial:
    """Few tokens: an operator's launches at 50 % and 90 % sparsity, in graphs, with fresh masks."""

    op: ClassVar[str] = "gated_mlp"
    sparsities: tuple[float, ...] = _SPARSITIES
    _shared: ClassVar[dict[tuple[str, Shape, str], Workload]] = {}  # the weights of the last sizes

    def __init__(self, where: Device, key: Key) -> None:
        self.where, self.key = where, key
        shape = _shape(self.op, key)
        sizes = self.op, shape, key["dtype"]
        share = self._shared.get(sizes)
        self._shared.clear()
        self.work = registry.get(self.op).workload(
            shape, DTYPES[key["dtype"]], key["tokens"], shape.activation, layers_for(where, self.op, shape),
            share=share, device=where.torch_device,
        )  # fmt: skip
        self._shared[sizes] = self.work
        self.checks = [Checked(self.work, s) for s in self.sparsities]

    def problem(self, config: Config) -> str:
        return next((p for p in (check.problem() for check in self.checks) if p), "")

    def replays(self, config: Config) -> list[Replay]:
        return [
            Walk(self.where, self.work, self.work.own(s, "triton"), f"{s}").replay for s in self.sparsities
        ]

    def finish(self, config: Config) -> Config:
        return config


class MlpTrial(SkippingTrial):
    op = "mlp"


class MlpPrefillTrial(MlpTrial):
    """Many tokens: the mask between the vendor's products."""

    sparsities = (0.5,)


class LinearTrial(SkippingTrial):
    op = "sparse_linear"


class LinearPrefillTrial(LinearTrial):
    """Many tokens: the mask before the vendor's product."""

    sparsities = (0.5,)


class PrefillTrial(SkippingTrial):
    """Many tokens: what is around the vendor's products; at the end whether skipping tiles ever wins."""

    sparsities = (0.5,)

    def _skipping(self, config: Config, share: float, below: float) -> float:
        """Seconds of a call in which `share` of the neuron tiles is active, eagerly: the host may have to wait."""
        work, layer = self.work, self.work.layers[0]
        tile = config["tile_f"]
        f = self.key["f"]
        tiles = torch.arange(-(-f // tile), device=self.where.torch_device).repeat_interleave(tile)[:f]
        active = torch.randperm(-(-f // tile), device=self.where.torch_device)[tiles] < share * -(-f // tile)
        threshold = torch.where(active, 0.0, torch.inf)
        x = work.fresh()[0]

        def run() -> None:
            sparsemlp.gated_mlp(
                x,
                layer.w_gate,
                layer.w_up,
                layer.w_down_t,
                threshold=threshold,
                activation="silu",
                backend="triton",
            )

        with _configs.use("gated_mlp_prefill", {**config, "skip_below": below}):
            run()
            samples = timed(self.where, [Replay("skip", run)], 1 if self.where.dry else 9)
        return median(samples["skip"])

    def _right(self, config: Config) -> bool:
        with _configs.use("gated_mlp_prefill", {**config, "skip_below": 2.0}):
            return not self.problem(config)

    def finish(self, config: Config) -> Config:
        """`skip_below`: the largest measured share of active tiles at which skipping wins, if looking costs nothing."""
        dense = self._skipping(config, 1.0, 0.0)
        if _WIN * self._skipping(config, 1.0, 1e-9) > dense:
            return config
        together = SPACES["gated_mlp_prefill"].together[: 2 if self.where.dry else None]
        tried = [{**config, **change} for change in together]
        tiled = min(filter(self._right, tried), key=lambda c: self._skipping(c, 0.25, 2.0), default=None)
        if tiled is None:
            return config
        shares = (0.5,) if self.where.dry else (0.1, 0.25, 0.5, 0.75)
        wins = [s for s in shares if self._skipping(tiled, s, 2.0) < _WIN * dense]
        return {**tiled, "skip_below": max(wins)} if wins else config


class ActivationTrial:
    """Forward with and without counts."""

    def __init__(self, where: Device, key: Key) -> None:
        self.where, self.key = where, key
        self.p = torch.randn(key["n"], device=where.torch_device).to(DTYPES[key["dtype"]])
        wide = self.p[:5000].double()
        self.truth = activations.apply(wide, "jsrelu")
        self.peer = activations.apply(self.p[:5000], "jsrelu")

    def _run(self, counts: bool, p: Tensor | None = None) -> Any:
        p = self.p if p is None else p
        return sparsemlp.activation(p, "jsrelu", counts=counts, backend="triton")

    def problem(self, config: Config) -> str:
        out, counts = self._run(True, self.p[:5000])
        try:
            assert_within_budget(out, self.peer, self.truth)
        except AssertionError as error:
            return str(error)
        wanted = [int((out != 0).sum()), int((self.p[:5000] > 0).sum())]
        return "" if counts.tolist() == wanted else f"counts are {counts.tolist()}, expected {wanted}"

    def replays(self, config: Config) -> list[Replay]:
        return [
            Replay(f"counts={counts}", self.where.graph(lambda counts=counts: self._run(counts)))
            for counts in (False, True)
        ]

    def finish(self, config: Config) -> Config:
        return config


@dataclass(frozen=True)
class _Made:
    """How an operator is tuned: its share of the time, its keys in order of worth, and its trial."""

    weight: float
    keys: Callable[[Device, Sequence[Shape], Sequence[int] | None], list[Key]]
    build: Callable[[Device, Key], Any]


def _skipping_keys(
    op: str, tokens: tuple[int, ...]
) -> Callable[[Device, Sequence[Shape], Sequence[int] | None], list[Key]]:
    """Of the operator's kind among the shapes asked for; where there are none, its own list."""
    kind = registry.get(op).workload.kind
    own = {"mlp": ("opt-1.3b",), "sparse_linear": ("llama3-8b-up", "llama3-8b-down")}
    first, second = ("k", "n") if op == "sparse_linear" else ("d", "f")

    def keys(where: Device, shapes: Sequence[Shape], chosen: Sequence[int] | None) -> list[Key]:
        found = [s for s in shapes if s.kind == kind] or [shape_of(name) for name in own.get(op, ())]
        sizes = [(64, 48)] if where.dry else [(s.d, s.f) for s in found]
        few = tokens[0] <= _rows.MOST_TOKENS
        fit = [t for t in chosen or tokens if (t <= _rows.MOST_TOKENS) == few]
        if where.dry:
            fit = [min(t, 24) for t in fit[:1]]
        return [{"tokens": t, first: d, second: f, "dtype": "bf16"} for t in fit for d, f in sizes]

    return keys


def _activation_keys(where: Device, shapes: Sequence[Shape], chosen: Sequence[int] | None) -> list[Key]:
    sizes = (600,) if where.dry else (8192 * 14336, 512 * 14336)
    return [{"n": n, "dtype": dtype} for n in sizes for dtype in ("bf16", "fp32")]


TRIALS: dict[str, _Made] = {
    "gated_mlp": _Made(0.60, _skipping_keys("gated_mlp", (1, 8, 4, 16)), SkippingTrial),
    "gated_mlp_prefill": _Made(0.12, _skipping_keys("gated_mlp", (512, 2048)), PrefillTrial),
    "mlp": _Made(0.08, _skipping_keys("mlp", (1, 8)), MlpTrial),
    "mlp_prefill": _Made(0.02, _skipping_keys("mlp", (512,)), MlpPrefillTrial),
    "sparse_linear": _Made(0.08, _skipping_keys("sparse_linear", (1, 8)), LinearTrial),
    "sparse_linear_prefill": _Made(0.02, _skipping_keys("sparse_linear", (512,)), LinearPrefillTrial),
    "activation": _Made(0.08, _activation_keys, ActivationTrial),
}
"""By the operator's name in configurations."""


def call(op: str, key: Key) -> None:
    """One call with the configuration `op` for a key, for compiling: weights are zeros."""
    dtype = DTYPES[key["dtype"]]

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    limit = zeros(dtype=torch.float32)
    if op == "activation":
        for counts in (False, True):
            sparsemlp.activation(zeros(key["n"]), "jsrelu", counts=counts, backend="triton")
    elif "k" in key:
        x, weight_t = zeros(key["tokens"], key["k"]), zeros(key["k"], key["n"])
        sparsemlp.sparse_linear(x, weight_t, threshold=limit, backend="triton")
    else:
        x, w = zeros(key["tokens"], key["d"]), zeros(key["f"], key["d"])
        if op.startswith("gated"):
            sparsemlp.gated_mlp(x, w, w, w, threshold=limit, activation="silu", backend="triton")
        else:
            b_in, b_out = zeros(key["f"]), zeros(key["d"])
            sparsemlp.mlp(
                x, w, w, threshold=limit, activation="relu", b_in=b_in, b_out=b_out, backend="triton"
            )
