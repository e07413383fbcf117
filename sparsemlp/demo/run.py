"""The demo: a real language model's MLPs made sparse, and what it bought. See docs/demo.md."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsemlp.demo import data, evaluate, report, stack
from sparsemlp.demo.files import write_file

if TYPE_CHECKING:
    from sparsemlp.calibration import Plan

__all__ = ["FULL", "QUICK", "Settings", "run_demo"]

METHODS = ("cats", "upaware", "screen")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCREEN = 4, 32
"""Bits and group of the low-bit copies."""
WINDOW = 1024
PROMPT = 64
"""Tokens of the held-out text that every decoding turn starts from."""


@dataclass(frozen=True)
class Settings:
    """How much the demo measures."""

    targets: tuple[float, ...]
    calibration_windows: int
    held_out_windows: int
    decode_tokens: int
    decode_rounds: int
    stack_dtypes: tuple[str, ...]
    stack_rounds: int


FULL = Settings((0.3, 0.5, 0.7), 8, 8, 16, 6, ("bf16", "fp32"), 10)
QUICK = Settings((0.5,), 4, 4, 16, 4, ("bf16",), 6)


class Phases:
    """Wall-clock seconds of named parts of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        data.say(f"{name} ...")
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        data.say(f"{name}: {elapsed:.1f} s")

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        return f"Time: {sum(self.seconds.values()):.0f} s ({parts})"


@dataclass(frozen=True)
class _Case:
    method: str
    target: float
    plan: Plan | None


def run_demo(out: Path, *, quick: bool = False, settings: Settings | None = None) -> str:
    """Calibrates, evaluates and times SmolLM2-135M-Instruct; writes demo.txt, demo.csv and demo.png.

    Args:
        out: the folder to write into; made where missing.
        quick: measure less; the report says so.
        settings: how much to measure; None: `QUICK` or `FULL`.

    Returns:
        The report's text.
    Raises:
        DemoDataError: a wheel or package that the demo needs is missing.
        OSError: a folder cannot be written.
    """
    data.check_installed()
    chosen = settings or (QUICK if quick else FULL)
    out.mkdir(parents=True, exist_ok=True)
    phases = Phases()
    with phases("model and texts"):
        folder = data.model_folder()
        texts = data.load_texts()
        tokenizer = data.load_tokenizer(folder)
        calibration = data.token_windows(
            tokenizer, texts.calibration, length=WINDOW, count=chosen.calibration_windows
        )
        held_out = data.token_windows(tokenizer, texts.held_out, length=WINDOW, count=chosen.held_out_windows)
    cases, qualities, layers = _quality(folder, calibration, held_out, chosen, phases)
    speeds = {name: _speed(folder, name, cases, held_out[0][:, :PROMPT], chosen, phases) for name in DTYPES}
    stacks = {}
    for name in chosen.stack_dtypes:
        with phases(f"8B-shaped stack {name}"):
            stacks[name] = stack.measure_stack(DTYPES[name], rounds=chosen.stack_rounds)
    rows = [
        report.ModelRow(
            method,
            target,
            qualities[i].sparsity,
            qualities[i].perplexity,
            {name: found[i] for name, found in speeds.items()},
        )
        for i, (method, target) in enumerate(
            [(report.DENSE, None), *((case.method, case.target) for case in cases)],
        )
    ]
    notes = [phases.line()]
    if chosen != FULL:
        notes.insert(0, "This is a shortened run: fewer targets, tokens and rounds than the full demo.")
    result = report.Report(
        title=f"{data.MODEL_NAME}, {layers} MLPs; calibrated on {len(calibration) * WINDOW:,} tokens of other texts",
        layers=layers,
        perplexity_dtype="fp32",
        perplexity_tokens=qualities[0].tokens,
        rows=rows,
        stacks=stacks,
        notes=notes,
    )
    text = report.table_text(result)
    write_file(out / "demo.txt", text.encode())
    report.write_csv(result, out / "demo.csv")
    report.plot(result, out / "demo.png")
    return text


def _quality(
    folder: Path, calibration: list[Tensor], held_out: list[Tensor], settings: Settings, phases: Phases
) -> tuple[list[_Case], list[evaluate.Quality], int]:
    """Calibrates, then measures the dense model and every case, in fp32; also the number of MLPs."""
    from sparsemlp.calibration import collect
    from sparsemlp.integrations.transformers import find_mlps, sparsify

    model = data.load_model(folder, torch.float32)
    with phases("calibration"):
        found = collect(model, calibration, screen=SCREEN)
        cases = [_Case("threshold 0", 0.0, None)]
        cases += [_Case(m, t, found.plan(t, m)) for m in METHODS for t in settings.targets]
    with phases("perplexity and sparsity"):
        qualities = [evaluate.quality(model, held_out)]
        for case in cases:
            qualities.append(evaluate.quality(sparsify(model, case.plan), held_out))
            data.say(
                f"  {case.method} at {case.target:.0%}: perplexity {qualities[-1].perplexity:.2f}, "
                f"sparsity {qualities[-1].sparsity:.1%}"
            )
    return cases, qualities, len(find_mlps(model))


def _speed(
    folder: Path, name: str, cases: list[_Case], prompt: Tensor, settings: Settings, phases: Phases
) -> list[evaluate.DecodeSpeed]:
    """Decoding speed of the untouched dense model and of every case, in turns."""
    from sparsemlp.integrations.transformers import sparsify

    gc.collect()  # the models of the phase before
    with phases(f"decoding {name}"):
        dense = data.load_model(folder, DTYPES[name])
        sparse = sparsify(data.load_model(folder, DTYPES[name]))
        models: list[Callable[[], nn.Module]] = [lambda: dense]
        models += [functools.partial(sparsify, sparse, case.plan) for case in cases]
        return evaluate.compare_decoding(
            models,
            prompt,
            tokens=settings.decode_tokens,
            rounds=settings.decode_rounds,
            progress=data.say,
        )
