"""Perplexity by rule and sparsity, with the kernels that compute it: `python -m benchmarks.quality`.

The model is the demo's (SmolLM2-135M-Instruct), or any Hugging Face folder or GGUF file. Calibrated on the demo's texts
and evaluated on its held-out ones, every case by the real kernels in --dtype. With --noise up to half a step of 4-bit
rounding is added to the MLPs' weights first, and that model is the dense reference: weights that were 4-bit once would
flatter a 4-bit copy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import machine, measure
from benchmarks.report import write_atomic
from benchmarks.weight_bytes import copy_share, share_read
from sparsemlp.calibration import collect
from sparsemlp.calibration.statistics import Statistics
from sparsemlp.demo import data, evaluate
from sparsemlp.integrations.transformers import densify, find_mlps, sparsify

__all__ = ["Row", "main", "run", "table", "with_noise"]

RESULTS = Path(__file__).resolve().parent / "results"
WINDOW = 1024
RULES = ("cats", "upaware", "screen8", "screen4", "screen3")


@dataclass(frozen=True)
class Row:
    """One rule at one target; `bytes` are the MLPs' weight bytes of one token over the dense ones in 16 bits."""

    rule: str
    target: float
    sparsity: float
    perplexity: float
    ratio: float
    bytes: float

    @property
    def bound(self) -> float:
        """How many times faster one token could be at most."""
        return 1 / self.bytes


def with_noise(model: nn.Module, seed: int = 0) -> None:
    """Adds to every MLP weight a uniform number of up to half a step of 4-bit rounding in groups of 32 of a row."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mlp in find_mlps(model).values():
            for layer in mlp.children():
                if isinstance(layer, nn.Linear):
                    layer.weight.add_(_noise(layer.weight, generator))


def _noise(w: Tensor, generator: torch.Generator) -> Tensor:
    groups = w.float().unflatten(1, (-1, 32))
    step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    return ((torch.rand(groups.shape, generator=generator) - 0.5) * step).flatten(1).to(w.dtype)


def _load(source: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of "smollm2", a Hugging Face folder or a GGUF file."""
    if source == "smollm2":
        folder = data.model_folder()
        return data.load_model(folder, dtype), data.load_tokenizer(folder)
    path = Path(source)
    if path.is_dir():
        return data.load_model(path, dtype), data.load_tokenizer(path)
    if not path.is_file():
        raise ValueError(
            f"--model is {source!r}, expected smollm2, a Hugging Face folder or a GGUF file; check the path"
        )
    import transformers

    options: dict[str, Any] = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path.parent, **options)


def _begun(windows: list[Tensor], tokenizer: Any) -> list[Tensor]:
    """With the token that the tokenizer puts before every text in place of the first, where it does: Gemma needs it."""
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("a").input_ids[0] != bos:
        return windows
    return [torch.cat([torch.full_like(ids[:, :1], bos), ids[:, 1:]], dim=1) for ids in windows]


def run(
    model: nn.Module,
    calibration: Sequence[Tensor],
    held_out: Sequence[Tensor],
    targets: Sequence[float],
    rules: Sequence[str] = RULES,
) -> list[Row]:
    """Calibrates and measures; the first row is the dense model. The model is dense again afterwards."""
    dense = evaluate.quality(model, held_out)
    rows = [Row("dense", 0.0, 0.0, dense.perplexity, 1.0, 1.0)]
    print(table(rows), flush=True)
    collected: dict[int, Statistics] = {}
    for rule in rules:
        bits = int(rule.removeprefix("screen")) if rule.startswith("screen") else 0
        if bits not in collected:
            screen = (bits, 32) if bits else None
            collected[bits] = collect(model, calibration, screen=screen, progress=False)
        for target in targets:
            plan = collected[bits].plan(target, "screen" if bits else rule)
            found = evaluate.quality(sparsify(model, plan), held_out)
            kind = "screen" if bits else "gate"
            share = share_read(
                "gated_mlp", 1 - found.sparsity, indicator=kind, copies=copy_share(2, bits or 4)
            )
            ratio = found.perplexity / dense.perplexity
            rows.append(Row(rule, target, found.sparsity, found.perplexity, ratio, share))
            print(table(rows).splitlines()[-1], flush=True)
        densify(model)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows for a console."""
    lines = [
        f"{'rule':<10} {'target':>7} {'sparsity':>9} {'perplexity':>11} {'/ dense':>8} {'bytes':>6} {'bound':>6}"
    ]
    lines += [
        f"{r.rule:<10} {r.target:>7.0%} {r.sparsity:>9.1%} {r.perplexity:>11.3f} {r.ratio:>8.3f} {r.bytes:>6.2f} "
        f"{r.bound:>5.2f}×"
        for r in rows
    ]
    return "\n".join(lines)


def _write(rows: Sequence[Row], facts: dict[str, Any], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*facts, *(f.name for f in fields(Row))])
    for row in rows:
        cells = [f"{v:.6g}" if isinstance(v, float) else v for v in asdict(row).values()]
        writer.writerow([*facts.values(), *cells])
    write_atomic(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a Hugging Face folder or a GGUF file")
    parser.add_argument("--name", help="of the result's file (default: the model's)")
    parser.add_argument("--dtype", default="bf16", choices=tuple(measure.DTYPES), help="default: %(default)s")
    parser.add_argument("--noise", action="store_true", help="perturb the MLPs' weights first")
    parser.add_argument("--target", default="50,70,80", help="percentages (default: %(default)s)")
    parser.add_argument("--rule", default=",".join(RULES), help="default: %(default)s")
    parser.add_argument(
        "--windows", type=int, default=8, help=f"of {WINDOW} tokens, of either text (default: 8)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    rules = args.rule.split(",")
    if unknown := [rule for rule in rules if rule not in RULES]:
        parser.error(f"--rule is {unknown[0]!r}, expected some of: {', '.join(RULES)}")
    try:
        model, tokenizer = _load(args.model, measure.DTYPES[args.dtype])
    except (ValueError, data.DemoDataError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.noise:
        with_noise(model)
    texts = data.load_texts()
    calibration, held_out = (
        _begun(data.token_windows(tokenizer, part, length=WINDOW, count=args.windows), tokenizer)
        for part in (texts.calibration, texts.held_out)
    )
    targets = [float(part) / 100 for part in args.target.split(",")]
    rows = run(model, calibration, held_out, targets, rules)
    name = args.name or Path(args.model).stem
    facts = {
        "model": name, "noise": "yes" if args.noise else "no", "dtype": args.dtype,
        "calibration_tokens": len(calibration) * WINDOW, "held_out_tokens": len(held_out) * (WINDOW - 1),
        "isa": machine.isa(), "torch": torch.__version__, "version": machine.commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    folder = args.out / machine.device(torch.get_num_threads()) / "quality"
    path = folder / f"{name}{'-noise' if args.noise else ''}_{args.dtype}.csv"
    _write(rows, facts, path)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
