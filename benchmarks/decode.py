"""Latency of decoding with whole models at equal perplexity: `python -m benchmarks.decode`.

Batch 1 with a KV cache, in transformers: the dense model, this package at threshold 0, CATS, and the 4-bit screen, both
rules at the sparsities where the demo's model has the same perplexity (interpolated in a file of `benchmarks.quality`,
and on that model measured again). The models are the demo's, fed with held-out text, and a stack of a few layers of
Llama 3 8B's shape with random weights, calibrated on random inputs. Every turn decodes tokens that are new.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bandwidth, gate, machine, registry, shapes
from benchmarks.decode_models import (
    DEMO,
    RULES,
    Configuration,
    Subject,
    configurations,
    demo,
    stack,
    target_at,
)
from benchmarks.report import write_atomic
from benchmarks.timing import Timed, interleave, median_interval, paired_ratio
from sparsemlp.demo import data, evaluate
from sparsemlp.integrations.transformers import find_mlps
from sparsemlp.nn import SparseGatedMLP

__all__ = ["Row", "check", "main", "run", "table"]

RESULTS = Path(__file__).resolve().parent / "results"
_MODELS = ("llama3-8b", DEMO)
_WARMUP = 2
"""Untimed tokens of a turn: they refill the caches, and the router sees how dense they are."""
LONGEST = 1000
"""Tokens of a turn: pieces of the texts have 1,024."""
_CHECKED = 4
"""Turns whose sparsity is reported."""
_DIFFERENCE = 0.05
"""In norm, of an MLP's output for the median token: rounding to bfloat16 stays far below, a wrong layout, mask or
activation far above. (A token whose value meets a threshold to that rounding may be further off.)"""


@dataclass(frozen=True)
class Row:
    """One configuration; ms of a token and in it of all MLPs, ratios above 1: faster; None where there is none.

    `at` is the perplexity over dense that `target` was chosen for, `perplexity_ratio` the measured one; `sparsity` that
    of tokens like the timed ones. Intervals are 95 % bootstrap ones of medians over rounds; ratios are within a round.
    """

    configuration: str
    at: float | None
    target: float
    sparsity: float
    perplexity_ratio: float | None
    ms: float
    ms_low: float
    ms_high: float
    mlp_ms: float
    mlp_ms_low: float
    mlp_ms_high: float
    mlp_share: float
    vs_dense: float | None = None
    vs_dense_low: float | None = None
    vs_dense_high: float | None = None
    vs_threshold_0: float | None = None
    vs_threshold_0_low: float | None = None
    vs_threshold_0_high: float | None = None
    vs_cats: float | None = None
    vs_cats_low: float | None = None
    vs_cats_high: float | None = None
    mlp_vs_dense: float | None = None
    mlp_vs_dense_low: float | None = None
    mlp_vs_dense_high: float | None = None


class _Decoder:
    """Decodes given tokens with a model, one at a time, after a context that is read at once."""

    def __init__(self, subject: Subject, model: nn.Module, context: int, steps: int) -> None:
        self.subject, self.model, self.context, self.steps = subject, model, context, steps
        self.cache = evaluate.cache_argument(model)

    def prepare(self) -> tuple[Any, Tensor]:
        """The KV cache after new tokens, and those to come."""
        tokens = self.subject.draw(self.context + _WARMUP + self.steps)
        head, rest = tokens[:, : self.context], tokens[:, self.context :]
        out = self.model(**{self.subject.key: head}, use_cache=True, logits_to_keep=1)
        cache, _ = self.sweep((getattr(out, self.cache), rest[:, :_WARMUP]))
        return cache, rest[:, _WARMUP:]

    def sweep(self, inputs: tuple[Any, Tensor]) -> tuple[Any, list[Tensor]]:
        """The KV cache afterwards, and the logits of every token."""
        cache, tokens = inputs
        logits = []
        for token in tokens.split(1, dim=1):
            out = self.model(**{self.subject.key: token, self.cache: cache}, use_cache=True)
            cache = getattr(out, self.cache)
            logits.append(out.logits)
        return cache, logits


def check(subject: Subject, found: Sequence[Configuration], context: int) -> None:
    """Every MLP computes what it should of what it is given while its model decodes, or nothing is timed.

    That is, in float32, what the dense model's computes where nothing is skipped, and else the reference in PyTorch.

    Raises:
        GateError: one of them is off.
    """
    dense = find_mlps(subject.model)
    for one in found[1:]:
        decoder, mlps = _Decoder(subject, one.model, context, _CHECKED), find_mlps(one.model)
        taken: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in mlps}
        inputs = decoder.prepare()
        with ExitStack() as hooks:
            for name, mlp in mlps.items():
                hooks.callback(mlp.register_forward_hook(_taking(taken[name])).remove)
            decoder.sweep(inputs)
        for name, calls in taken.items():
            x, out = (torch.cat(tensors).float() for tensors in zip(*calls, strict=True))
            right = _wide(dense[name] if one.rule == "threshold_0" else mlps[name])(x)
            off = ((out - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).median().item()
            if not off <= _DIFFERENCE:
                raise gate.GateError(
                    f"{subject.name}: no result is reported because {name} of {one.name} is {off:.1%} off in norm, "
                    f"expected at most {_DIFFERENCE:.0%}; run the conformance tests"
                )


def _taking(calls: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    return lambda module, args, out: calls.append((args[0], out))


def _wide(mlp: nn.Module) -> nn.Module:
    """A copy in float32; a screen's low-bit copies stay what they are."""
    wide = copy.deepcopy(mlp).float()
    if isinstance(wide, SparseGatedMLP):
        wide.backend = "reference"
    return wide


def _sparsity(decoder: _Decoder) -> float:
    with evaluate.sparsity_meter(decoder.model) as meter:
        for _ in range(_CHECKED):
            decoder.sweep(decoder.prepare())
    return meter.sparsity


def _perplexities(subject: Subject, found: Sequence[Configuration]) -> list[float | None]:
    """Over the dense model's; None where there is no text."""
    if not subject.held_out:
        return [None] * len(found)
    values = [evaluate.quality(one.model, subject.held_out).perplexity for one in found]
    return [value / values[0] for value in values]


def run(
    subject: Subject, found: Sequence[Configuration], *, rounds: int, steps: int, context: int
) -> list[Row]:
    """Checks and times the configurations, the dense model first, in turns.

    Args:
        rounds: turns of each configuration.
        steps: tokens timed in a turn.
        context: tokens that a turn begins with, not timed.
    Raises:
        GateError: see `check`.
    """
    with torch.inference_mode():
        check(subject, found, context)
        decoders = {one.name: _Decoder(subject, one.model, context, steps) for one in found}
        inside: dict[str, list[float]] = {name: [] for name in decoders}
        with ExitStack() as timers:
            timed = []
            for name, decoder in decoders.items():
                timer = timers.enter_context(evaluate.mlp_timer(decoder.model))
                timed.append(Timed(name, decoder.prepare, _watched(decoder, timer, inside[name]), steps))
            samples = interleave(timed, rounds)
        sparsities = [_sparsity(decoder) for decoder in decoders.values()]
    mlps = {name: values[-rounds:] for name, values in inside.items()}
    rows = zip(found, sparsities, _perplexities(subject, found), strict=True)
    return [_row(one, sparsity, ratio, samples, mlps) for one, sparsity, ratio in rows]


def _watched(decoder: _Decoder, timer: evaluate.Timer, inside: list[float]) -> Callable[[Any], None]:
    """The sweep that is timed; the MLPs' milliseconds of a token go to `inside`."""

    def sweep(inputs: tuple[Any, Tensor]) -> None:
        timer.ms = 0.0
        decoder.sweep(inputs)
        inside.append(timer.ms / decoder.steps)

    return sweep


def _row(
    one: Configuration,
    sparsity: float,
    perplexity: float | None,
    samples: dict[str, list[float]],
    mlps: dict[str, list[float]],
) -> Row:
    ms = {name: [1e3 * s for s in values] for name, values in samples.items()}
    against = {"dense": "dense", "threshold_0": "threshold_0"}
    if one.at is not None:
        against["cats"] = f"cats_at_{one.at:g}"
    ratios: dict[str, float] = {}
    for key, other in against.items():
        if other != one.name and other in ms:
            ratios |= _interval(f"vs_{key}", paired_ratio(ms[other], ms[one.name]))
    if one.rule != "dense":
        ratios |= _interval("mlp_vs_dense", paired_ratio(mlps["dense"], mlps[one.name]))
    whole, part = median_interval(ms[one.name]), median_interval(mlps[one.name])
    share = paired_ratio(mlps[one.name], ms[one.name]).median
    return Row(
        one.name, one.at, one.target, sparsity, perplexity, whole.median, whole.low, whole.high,
        part.median, part.low, part.high, share, **ratios,
    )  # fmt: skip


def _interval(name: str, found: Any) -> dict[str, float]:
    return {name: found.median, f"{name}_low": found.low, f"{name}_high": found.high}


def table(rows: Sequence[Row]) -> str:
    """The rows for a console."""

    def cell(value: float | None, low: float | None, high: float | None) -> str:
        return "–" if value is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"

    lines = [
        f"{'':<16} {'target':>7} {'sparsity':>9} {'ppl/dense':>9}  {'ms a token':<20} {'MLPs':>7} {'share':>6}  "
        f"{'× dense':<18} {'MLPs × dense':<18} {'× CATS':<18}"
    ]
    for r in rows:
        ratio = "–" if r.perplexity_ratio is None else f"{r.perplexity_ratio:.3f}"
        lines.append(
            f"{r.configuration:<16} {r.target:>7.1%} {r.sparsity:>9.1%} {ratio:>9}  "
            f"{cell(r.ms, r.ms_low, r.ms_high):<20} {r.mlp_ms:>7.2f} {r.mlp_share:>6.0%}  "
            f"{cell(r.vs_dense, r.vs_dense_low, r.vs_dense_high):<18} "
            f"{cell(r.mlp_vs_dense, r.mlp_vs_dense_low, r.mlp_vs_dense_high):<18} "
            f"{cell(r.vs_cats, r.vs_cats_low, r.vs_cats_high):<18}".rstrip()
        )
    return "\n".join(lines)


def _write(rows: Sequence[Row], facts: dict[str, str | int | float], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*facts, *(f.name for f in fields(Row))])
    for row in rows:
        cells = ["" if v is None else f"{v:.5g}" if isinstance(v, float) else v for v in asdict(row).values()]
        writer.writerow([*(f"{v:.4g}" if isinstance(v, float) else v for v in facts.values()), *cells])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--model", default=",".join(_MODELS), help=f"{DEMO} or gated shapes (default: %(default)s)"
    )
    parser.add_argument("--at", default="1.05,1.2", help="perplexities over dense (default: %(default)s)")
    parser.add_argument(
        "--quality", type=Path, metavar="FILE", help="of benchmarks.quality (default: this machine's)"
    )
    parser.add_argument("--rounds", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=16, help="timed in a turn (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="tokens before them (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, help="of a stack (default: enough to leave the last-level cache)"
    )
    parser.add_argument(
        "--windows", type=int, default=8, help="of 1024 tokens of text, for calibration and perplexity (8)"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument(
        "--no-gate", dest="gate", action="store_false", help="no conformance tests; written only with --out"
    )
    return parser


def _gate() -> str:
    """The operator's conformance tests and those of its use in transformers."""
    entry = registry.get("gated_mlp")
    models = tuple(f"tests/test_transformers{part}.py" for part in ("", "_screen"))
    tests = gate.Conformance((*entry.conformance.paths, *models), entry.conformance.select)
    return gate.check(entry.name, tests)


def _targets(args: argparse.Namespace, device: str) -> dict[tuple[str, float], float]:
    for name in ("rounds", "tokens", "context"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, expected 1 or more")
    if args.context + args.tokens > LONGEST:
        raise ValueError(
            f"--context and --tokens are {args.context + args.tokens} together, expected at most {LONGEST}"
        )
    quality = args.quality or RESULTS / device / "quality" / f"{DEMO}_bf16.csv"
    if not quality.is_file():
        raise ValueError(
            f"--quality {quality} is no file, expected one of benchmarks.quality; run that first"
        )
    ratios = [float(part) for part in args.at.split(",")]
    return {(rule, ratio): target_at(quality, rule, ratio) for ratio in ratios for rule in RULES}


def _subject(name: str, args: argparse.Namespace) -> Subject:
    if name == DEMO:
        return demo(args.windows)
    shape = shapes.get(name)
    if shape.kind != "gated":
        raise ValueError(
            f"--model is {name!r}, {shape.what}, expected {shapes.KINDS['gated']}; see shapes.py"
        )
    return stack(shape, args.layers)


def main(argv: list[str] | None = None, tested: Callable[[], str] = _gate) -> int:
    """Runs the command line; returns 0, 1 where something is not computed right, or 2: bad arguments."""
    args = _parser().parse_args(argv)
    threads = torch.get_num_threads()
    device, folder = machine.device(threads), args.out or (RESULTS if args.gate else None)
    try:
        targets = _targets(args, device)
        if args.gate:
            print(tested(), flush=True)
        for name in args.model.split(","):
            subject = _subject(name, args)
            found = configurations(subject, targets)
            neighbours = machine.Neighbours()
            rows = run(subject, found, rounds=args.rounds, steps=args.tokens, context=args.context)
            others = neighbours.share()
            print(f"{name}, {len(find_mlps(subject.model))} layers, bf16, {threads} threads\n{table(rows)}")
            if others > 0.05:
                print(f"NOTE: others used {others:.0%} of the CPUs; run again on an idle machine")
            if folder is not None:
                path = folder / device / "decode" / f"{name}_bf16.csv"
                _write(rows, _facts(subject, args, others), path)
                print(f"wrote {path}", flush=True)
    except gate.GateError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, data.DemoDataError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _facts(subject: Subject, args: argparse.Namespace, others: float) -> dict[str, str | int | float]:
    config: Any = subject.model.config
    return {
        "model": subject.name, "layers": config.num_hidden_layers, "D": config.hidden_size,
        "F": config.intermediate_size, "dtype": "bf16", "threads": torch.get_num_threads(),
        "rounds": args.rounds, "tokens": args.tokens, "context": args.context, "isa": machine.isa(),
        "others_cpu": others, "huge_pages": bandwidth.page_mode(), "cpu": machine.cpu(),
        "torch": torch.__version__, "version": machine.commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "status": "verified" if args.gate else "unverified",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
