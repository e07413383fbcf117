"""A training step of one MLP on a GPU, forward and backward, each way of the kernels against PyTorch's dense layers.

ReLU, whose a and derivative have one pattern; the bias of the first layer sets the density of entries that are not 0,
or leaves half of the neurons dead. x is drawn anew before every step: masks never repeat. Steps are timed as they are
called, without a graph, because the way by lists lets the host wait for a count. From these rows `gather_below` and
`compact` of a GPU are to be set; until then both are off.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

import sparsemlp
from benchmarks import gpu_rows
from benchmarks.gpu_device import Device, Replay, median, options, start, timed
from benchmarks.gpu_rows import Row
from benchmarks.timing import quantile
from sparsemlp.kernels import training
from sparsemlp.testing import assert_within_budget
from tests.blocks import training_path

__all__ = ["main"]

_SHAPE = ("llama3-8b", 4096, 4096, 14336)
_TINY = ("tiny", 6, 16, 24)
_DENSITIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_PATHS = ("dense", "compact", "lists")


class _Step:
    """One MLP and its step.

    density: the share of entries that the first layer's bias makes positive, or None: half of the neurons are dead, of
        the others every second entry.
    """

    def __init__(self, where: Device, density: float | None, dtype: torch.dtype) -> None:
        self.shape, self.tokens, self.d, self.f = _TINY if where.dry else _SHAPE
        g = self.generator = torch.Generator(where.torch_device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            t = torch.randn(*size, generator=g, device=where.torch_device) * scale
            return t.to(dtype).requires_grad_(True)

        self.x, self.grad = normal(self.tokens, self.d), normal(self.tokens, self.d).detach()
        self.w_in = normal(self.f, self.d, scale=self.d**-0.5)
        self.w_out_t = normal(self.f, self.d, scale=self.f**-0.5)
        shift = 0.0 if density is None else float(torch.special.ndtri(torch.tensor(density)))
        bias = torch.full((self.f,), shift, device=where.torch_device)
        if density is None:
            bias[::2] = -100.0
        self.b_in = bias.to(dtype).requires_grad_(True)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.w_in, self.w_out_t, self.b_in

    def refill(self) -> None:
        with torch.no_grad():
            self.x.normal_(generator=self.generator)

    def dense(self) -> Tensor:
        return torch.relu(F.linear(self.x, self.w_in, self.b_in)) @ self.w_out_t

    def own(self) -> Tensor:
        return sparsemlp.mlp(
            self.x,
            self.w_in,
            self.w_out_t,
            b_in=self.b_in,
            activation="relu",
            threshold=0.0,
            backend="triton",
        )

    def gradients(self, function: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(), self.leaves, self.grad)

    def density(self) -> float:
        with torch.no_grad():
            return float((F.linear(self.x, self.w_in, self.b_in) > 0).double().mean())

    def wrong(self, path: str) -> str:
        """What is wrong with a way's gradients, held against float64 by the stored pre-activations, or ""."""
        with training_path(path, small=False):
            found = self.gradients(self.own)
        with torch.no_grad():
            pre = F.linear(self.x, self.w_in, self.b_in)
            peers = self.gradients_by_hand(self.x.dtype, pre)
            truth = self.gradients_by_hand(torch.float64, pre)
        try:
            for g, peer, t in zip(found, peers, truth, strict=True):
                assert_within_budget(g, peer, t, what="gradient")
        except AssertionError as error:
            return f"WRONG: {error}"
        return ""

    def gradients_by_hand(self, dtype: torch.dtype, pre: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_out_t, grad, p = (t.to(dtype) for t in (self.x, self.w_in, self.w_out_t, self.grad, pre))
        step = torch.where(p > 0, grad @ w_out_t.t(), 0)
        return step @ w_in, step.t() @ x, torch.relu(p).t() @ grad, step.sum(0)


def _measure(where: Device, step: _Step, what: str, label: str) -> list[Row]:
    def own(path: str) -> Callable[[], None]:
        def run() -> None:
            with training_path(path, small=False):
                step.gradients(step.own)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(step.dense, dynamic=False, **({"backend": "eager"} if where.dry else {}))
    runs: dict[str, Callable[[], object]] = {
        "eager": lambda: step.gradients(step.dense),
        "compiled": lambda: step.gradients(compiled),
        **{f"own_{path}": own(path) for path in _PATHS},
    }
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[step.x.dtype]
    row = Row(where.status, "mlp_fwd", what, label, step.shape, step.d, step.f, dtype, step.tokens, "")
    row = replace(row, density=step.density())
    notes, replays = {}, []
    for name, run in runs.items():
        try:
            notes[name] = step.wrong(name.removeprefix("own_")) if name.startswith("own") else ""
            if not notes[name]:
                run()
                replays.append(Replay(name, functools.partial(_ignore, run), step.refill))
        except Exception as error:  # the others are still worth their time
            notes[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    samples = timed(where, replays, 1 if where.dry else 10)
    return [_filled(replace(row, alternative=name, note=notes[name]), samples) for name in runs]


def _ignore(run: Callable[[], object]) -> None:
    run()


def _filled(row: Row, samples: dict[str, list[float]]) -> Row:
    seconds = samples.get(row.alternative)
    if seconds is None:
        return row

    def over(other: str) -> float | None:
        pairs = zip(samples.get(other, ()), seconds, strict=False)
        return median(ratios) if (ratios := [a / b for a, b in pairs]) else None

    low, middle, high = (1e6 * quantile(seconds, q) for q in (0.2, 0.5, 0.8))
    config = ""
    if row.alternative.startswith("own"):
        config = json.dumps(training.default(torch.float32 if row.dtype == "fp32" else torch.bfloat16))
    return replace(
        row, calls=1, rounds=len(seconds), us_p20=low, us=middle, us_p80=high,
        vs_eager=over("eager"), vs_compiled=over("compiled"), config=config,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measures every density until the time is over."""
    parser = options(__doc__)
    parser.add_argument("--label", default="default")
    args = parser.parse_args(argv)
    where, deadline = start(args)
    path = args.out / f"training_{args.label}.csv"
    densities: tuple[float | None, ...] = (0.1,) if where.dry else (*_DENSITIES, None)
    for density in densities:
        what = "train half dead" if density is None else f"train {density:.1%}"
        if deadline.over():
            print(f"{what}: left out, the time was over")
            continue
        rows = _measure(where, _Step(where, density, torch.bfloat16), what, args.label)
        gpu_rows.append(path, rows)
        print(gpu_rows.table(rows), flush=True)
        where.free()
    rows = gpu_rows.read(path)
    return 0 if rows and not any(row.note.startswith(("WRONG", "failed")) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
