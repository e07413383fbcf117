"""Trains a small GPT-like decoder on English text, with PyTorch's dense MLPs and with this package's, side by side.

    python examples/train_charlm.py --quick                 # seconds, on a text that Python brings along
    python examples/train_charlm.py --activation relu --l1 0,0.1 --steps 400
    python examples/train_charlm.py --docs                  # the run of docs/training_run.md

Both start from the same weights and see the same batches, step by step in turn. Written into --out: steps.csv,
density.csv, summary.csv, curves.png.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from charlm import report, text
from charlm.model import Decoder, DenseL1, Sizes, with_sparse_kernels
from torch import Tensor

import sparsemlp
from sparsemlp import activations
from sparsemlp.metrics import densities, l1_penalty

SIZES = Sizes(width=512, layers=3, heads=8, length=256)  # 9.7 M parameters
BATCH = 8  # T = 2,048 tokens
QUICK = Sizes(
    width=128, layers=2, heads=2, length=160
)  # as large as calls of the operators must be: T·D·F ≥ 2²⁶
PAGE = Path(__file__).resolve().parent.parent / "docs" / "training_run.md"
KERNELS = ("dense", "sparse")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--activation", default="relu,jsrelu", help="one or several (default: %(default)s)")
    made.add_argument("--l1", default="0", help="factors of the L1 term, one run each (default: %(default)s)")
    made.add_argument("--kernels", default="both", choices=(*KERNELS, "both"), help="default: %(default)s")
    made.add_argument("--steps", type=int, default=400, help="default: %(default)s")
    made.add_argument("--every", type=int, default=10, help="steps between densities (default: %(default)s)")
    made.add_argument(
        "--lr", type=float, default=1e-3, help="AdamW's, after a warm-up (default: %(default)s)"
    )
    made.add_argument(
        "--text", default="wikipedia", help="wikipedia, python, or a file (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("build/charlm"), help="folder (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="a tiny model, a few steps, --text python")
    made.add_argument(
        "--docs", action="store_true", help="write into docs/training_run and put the table into the page"
    )
    made.add_argument(
        "--render",
        action="store_true",
        help="train nothing: put the table of docs/training_run into the page",
    )
    return made


class Trained:
    """A model in training by one kind of kernels."""

    def __init__(self, model: Decoder, kernels: str, lr: float, l1: float) -> None:
        self.model, self.kernels, self.l1 = model, kernels, l1
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        warm_up: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 20)  # noqa: E731, one line is enough
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)

    def step(self, batch: Tensor) -> dict[str, float]:
        """One step; the loss without the L1 term, that term, and the step's seconds."""
        penalties: Any = contextlib.nullcontext()
        if self.l1:
            penalties = DenseL1(self.model) if self.kernels == "dense" else l1_penalty(self.model)
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with penalties as penalty:
            loss = self.model.loss(batch)
            term = penalty() if self.l1 else loss.new_zeros(())
            (loss + self.l1 * term).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        seconds = time.perf_counter() - start
        return {"loss": loss.item(), "l1": term.item(), "seconds": seconds}

    def held_out(self, batches: list[Tensor]) -> float:
        """The mean loss on what is held out."""
        with torch.inference_mode():
            return sum(self.model.loss(batch).item() for batch in batches) / len(batches)

    def densities(self, run: str, step: int, batch: Tensor) -> list[report.Density]:
        """Of every layer, on the batch."""
        if self.kernels == "sparse":
            found = densities(self.model, batch[:, :-1]).layers
            pairs = [(d.activation_density, d.derivative_density) for d in found]
        else:  # φ and φ' of these activations are not 0 at the same entries
            with torch.no_grad(), DenseL1(self.model) as hidden:
                self.model(batch[:, :-1])
                pairs = [(d, d) for d in hidden.densities()]
        return [report.Density(run, step, f"block {i}", *pair) for i, pair in enumerate(pairs)]


def train(
    args: argparse.Namespace, source: text.Bytes, sizes: Sizes, batch_size: int, activation: str, l1: float
) -> tuple[list[report.Step], list[report.Density], report.Summary]:
    """One run: one activation and one factor of L1, by the kernels that were asked for."""
    torch.manual_seed(args.seed)
    base = Decoder(sizes, activation)
    wanted = KERNELS if args.kernels == "both" else (args.kernels,)
    models = {"sparse": with_sparse_kernels(base, activation), "dense": base}
    trained = [Trained(model, kernels, args.lr, l1) for kernels, model in models.items() if kernels in wanted]
    generator = torch.Generator().manual_seed(args.seed + 1)
    run = f"{activation}, L1 {l1:g}"
    steps: list[report.Step] = []
    found: list[report.Density] = []
    with progress(args.steps, run) as bar:
        for step in range(args.steps):
            batch = source.batch(batch_size, sizes.length, generator)
            order = trained if step % 2 else trained[::-1]
            values = {f"{name}_{t.kernels}": value for t in order for name, value in t.step(batch).items()}
            steps.append(report.Step(run, step, **values))
            if step % args.every == 0 or step == args.steps - 1:
                found += trained[0].densities(run, step, batch)
            bar.set_postfix(
                loss=f"{values[f'loss_{wanted[-1]}']:.3f}", density=f"{found[-1].derivative_density:.0%}"
            )
            bar.update()
    batches = source.held_out(2 if args.quick else 16, batch_size, sizes.length)
    losses = {t.kernels: t.held_out(batches) for t in trained}
    facts = describe(base, source, sizes, batch_size, args)
    return steps, found, report.summarize(run, activation, l1, steps, found, losses, facts)


def progress(total: int, name: str) -> Any:
    """A progress bar on stderr."""
    try:
        from tqdm import tqdm
    except ImportError:
        sys.exit("this example needs tqdm, not installed; install it with `pip install 'sparsemlp[demo]'`")
    return tqdm(total=total, desc=name, unit="step", file=sys.stderr)


def describe(
    model: Decoder, source: text.Bytes, sizes: Sizes, batch_size: int, args: argparse.Namespace
) -> str:
    """What the figures depend on, in one sentence."""
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    where = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        where = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), where)
    return (
        f"{millions:.1f} M parameters ({sizes.layers} layers, D {sizes.width}, F {4 * sizes.width}), "
        f"{batch_size} × {sizes.length} bytes a step, {args.steps} steps of AdamW at {args.lr:g}, seed {args.seed}, "
        f"text {source.name} ({len(source) / 1e6:.1f} MB), float32; {where}, {torch.get_num_threads()} threads, "
        f"PyTorch {torch.__version__}, sparsemlp {sparsemlp.__version__}, {datetime.date.today()}"
    )


def put_into_page(folder: Path) -> None:
    """The stored table and plot into docs/training_run.md."""
    rows = report.read(folder / "summary.csv", report.Summary)
    picture = f"{folder.name}/curves.png" if (folder / "curves.png").is_file() else ""
    PAGE.write_text(report.render(PAGE.read_text(encoding="utf-8"), rows, picture), encoding="utf-8")


def chosen(args: argparse.Namespace) -> list[tuple[str, float]]:
    """The runs: every activation with every factor."""
    names = args.activation.split(",")
    for name in names:
        row = activations.get(name, "--activation")
        if row.params or not row.zero_at_negative:
            sys.exit(f"--activation is {name}, expected relu, relu2 or jsrelu: whose zeros are exact")
    return [(name, float(l1)) for name in names for l1 in args.l1.split(",")]


def main() -> None:
    args = parser().parse_args()
    folder = PAGE.with_suffix("") if args.docs else args.out
    if args.render:
        put_into_page(PAGE.with_suffix(""))
        return
    sizes, batch_size = SIZES, BATCH
    if args.quick:
        sizes = QUICK
        args.steps, args.every, args.text = min(args.steps, 12), min(args.every, 4), "python"
    source = text.load(args.text)
    steps: list[report.Step] = []
    found: list[report.Density] = []
    rows: list[report.Summary] = []
    for activation, l1 in chosen(args):
        more = train(args, source, sizes, batch_size, activation, l1)
        steps += more[0]
        found += more[1]
        rows.append(more[2])
        report.write(folder / "steps.csv", steps)  # after each run: an interrupted one keeps what is done
        report.write(folder / "density.csv", found)
        report.write(folder / "summary.csv", rows)
    drawn = report.draw(folder / "curves.png", steps, found)
    if args.docs:
        put_into_page(folder)
    print(rows[0].facts + "\n\n" + report.table(rows))
    print(f"\nwrote steps.csv, density.csv, summary.csv{' and curves.png' if drawn else ''} into {folder}")


if __name__ == "__main__":
    main()
