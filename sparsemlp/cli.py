"""The command line: `sparsemlp calibrate | bench | info | tune | demo`. Results go to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsemlp import _arguments

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sparsemlp.calibration import Plan

__all__ = ["main"]

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130
PROMPT_TOKENS = 64
PROMPT = (
    "The history of the English language begins with the arrival of Germanic settlers in Britain. Over the centuries "
    "it took up words from Latin, Norse and French, lost most of its endings, and spread with trade and printing. "
    "Today it is spoken on every continent, and it goes on changing. A language changes because"
)
"""Where decoding starts when no --text is given."""


class InputError(Exception):
    """What the user gave cannot be used; the message is one sentence for stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 fine, 2 bad usage or input (one sentence on stderr), 130 Ctrl-C.

    Args:
        argv: the arguments after the program's name; None: the process's own.
    """
    try:
        args = _arguments.parser(COMMANDS).parse_args(argv)
    except SystemExit as stop:  # argparse: --help (0) or bad usage (2), already printed
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
    try:
        return args.command(args)
    except InputError as error:
        print(f"sparsemlp {args.name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout went away (`| head`): nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _calibrate(args: argparse.Namespace) -> int:
    import torch

    from sparsemlp.calibration import calibrate

    if args.method != "screen" and (args.bits, args.group) != (None, None):
        name = "--bits" if args.bits is not None else "--group"
        raise InputError(
            f"{name} is given with --method {args.method}, expected it with --method screen only"
        )
    if args.output.exists() and not args.output.is_dir():
        raise InputError(f"--output {args.output} is a file, expected a folder to write into; name another")
    model, tokenizer = _load(args.model, torch.float32)
    windows = _windows(model, tokenizer, args)
    tokens = sum(w.shape[1] for w in windows)
    if tokens < args.tokens:
        _say(
            f"whole windows of {windows[0].shape[1]} give {tokens:,} tokens of the text, fewer than --tokens "
            f"{args.tokens:,}"
        )
    plan = _sentence(
        lambda: calibrate(
            model,
            windows,
            args.target,
            args.method,
            bits=args.bits,
            group=args.group,
            progress=not args.quiet,
        )
    )
    _sentence(lambda: plan.save(args.output))
    screen = f" of {plan.bits} bits in groups of {plan.group}" if plan.method == "screen" else ""
    print(
        f"{args.output}: {plan.method}{screen}, target {plan.target:.0%}, {plan.sparsity:.1%} of {len(plan.layers)} "
        f"MLPs' neurons skipped on {tokens:,} calibration tokens"
    )
    return OK


def _bench(args: argparse.Namespace) -> int:
    import torch

    from sparsemlp.demo import evaluate
    from sparsemlp.integrations.transformers import sparsify

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    plans = [_load_plan(path) for path in args.plan]
    dense, tokenizer = _load(args.model, dtype)
    for path, made in zip(args.plan, plans, strict=True):
        _sentence(functools.partial(made.check, dense), f"--plan {path}")
    windows = _windows(dense, tokenizer, args) if args.text else None
    prompt = windows[0][:, :PROMPT_TOKENS] if windows else _prompt(tokenizer)
    sparse = _sentence(
        lambda: sparsify(_load(args.model, dtype)[0], quantize=args.quantize), f"MODEL_DIR {args.model}"
    )
    say = _say if not args.json else lambda message: None

    names = ["dense", "threshold 0", *map(str, args.plan)]
    models: list[Callable[[], PreTrainedModel]] = [lambda: dense]
    models += [functools.partial(sparsify, sparse, plan) for plan in (None, *plans)]
    speeds = evaluate.compare_decoding(models, prompt, tokens=args.decode, rounds=args.rounds, progress=say)
    texts = windows or [_continuation(dense, prompt, args.decode)]
    results, base = [], speeds[0]
    for name, plan, model, speed in zip(names, (None, None, *plans), models, speeds, strict=True):
        say(f"  {'perplexity and sparsity' if windows else 'sparsity'}: {name}")
        found = evaluate.quality(model(), texts)
        results.append(
            {
                "name": name,
                "method": plan.method if plan else None,
                "target": plan.target if plan else None,
                "sparsity": found.sparsity,
                "perplexity": found.perplexity if windows else None,
                "mlp_ms": speed.mlp_ms,
                "mlp_speedup": base.mlp_ms / speed.mlp_ms,
                "tokens_per_s": speed.tokens_per_second,
                "speedup": base.ms / speed.ms,
            }
        )
    _print_bench(args, results, found.tokens if windows else 0)
    return OK


def _print_bench(args: argparse.Namespace, results: list[dict[str, Any]], tokens: int) -> None:
    from sparsemlp import info
    from sparsemlp.demo.report import format_table

    where = info.machine()
    if args.json:
        document = {
            "model": str(args.model),
            "dtype": args.dtype,
            "quantize": args.quantize,
            "machine": where,
            "perplexity_tokens": tokens,
        }
        # JSON has no NaN and no inf
        finite = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            for row in results
        ]
        print(json.dumps({**document, "results": finite}, indent=1, allow_nan=False))
        return
    rows = []
    for r in results:
        cells = [r["name"], "–" if r["name"] == "dense" else f"{100 * r['sparsity']:.1f} %"]
        cells += ["–" if r["perplexity"] is None else f"{r['perplexity']:.2f}"]
        cells += [
            f"{r['mlp_ms']:.2f}",
            f"{r['mlp_speedup']:.2f}",
            f"{r['tokens_per_s']:.1f}",
            f"{r['speedup']:.2f}",
        ]
        rows.append(cells)
    weights = args.dtype if args.quantize is None else f"{args.dtype}, sparse MLPs {args.quantize}"
    print(f"{args.model}, {weights}; {where['cpu']}, {where['threads']} threads, kernels: {where['isa']}")
    header = ("model", "sparsity", "perplexity", "MLP ms/token", "×", "tok/s", "×")
    print("\n".join(format_table(header, rows)))
    print("× faster than dense; medians of greedy decoding at batch 1, all rows in turns")
    if tokens:
        print(f"sparsity and perplexity on {tokens:,} tokens of the text")
    else:
        print("no --text: sparsity on a short continuation, no perplexity")


def _info(args: argparse.Namespace) -> int:
    from sparsemlp import info

    return info.main() or OK


def _tune(args: argparse.Namespace) -> int:
    import torch

    from sparsemlp.router import decide, host, profile, tune

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    load = tune.busy()
    if load is not None and load > 0.5:
        _say(f"other programs keep {load:.1f} CPUs busy: times on an idle machine would be better")
    shapes = args.shape or tune.SHAPES
    try:
        measured = tune.tune(args.seconds, shapes, _say)
    except RuntimeError as error:
        raise InputError(_line(error)) from None
    file = args.output or profile.path(host.this())
    try:
        profile.save(measured, file)
    except OSError as error:
        hint = "name another --output" if args.output else "set SPARSEMLP_CACHE_DIR to a folder you can write"
        raise InputError(f"{file} cannot be written: {error.strerror}; {hint}") from None
    decide.forget()
    print(tune.summary(measured))
    print(f"written: {file}")
    return OK


def _demo(args: argparse.Namespace) -> int:
    from sparsemlp.demo import data, run

    try:
        print(run.run_demo(args.out, quick=args.quick), end="")
    except (data.DemoDataError, ImportError, OSError) as error:
        raise InputError(_line(error)) from None
    _say(f"written: {args.out}/demo.txt, demo.csv, demo.png")
    return OK


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _line(error: BaseException) -> str:
    """An error's first line; other packages write paragraphs."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text or type(error).__name__


def _sentence(call: Callable[[], Any], what: str = "") -> Any:
    """Runs a call whose ValueError, OSError or ImportError is about the user's input."""
    try:
        return call()
    except (ValueError, OSError, ImportError) as error:
        raise InputError(f"{what}: {_line(error)}" if what else _line(error)) from None


def _load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from sparsemlp.demo import data

    if not folder.is_dir():
        raise InputError(
            f"MODEL_DIR is {folder}, which is not a folder; expected a Hugging Face model folder"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"MODEL_DIR {folder} has no config.json, expected a Hugging Face model folder")
    try:
        return data.load_model(folder, dtype), data.load_tokenizer(folder)
    except data.DemoDataError as error:
        raise InputError(str(error)) from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a dozen types from three libraries, and the panics of a Rust one
        raise InputError(
            f"MODEL_DIR {folder} cannot be loaded as a causal language model with safetensors weights and a "
            f"tokenizer: {_line(error)}"
        ) from None


def _load_plan(path: Path) -> Plan:
    from sparsemlp.calibration import Plan

    if not path.is_dir():
        raise InputError(
            f"--plan is {path}, which is not a folder; expected what `sparsemlp calibrate -o` wrote"
        )
    return _sentence(lambda: Plan.load(path), f"--plan {path}")


def _windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> list[Tensor]:
    """The text files as windows of tokens, together --tokens at most; an error where they do not fill one."""
    from sparsemlp.demo import data

    limit = getattr(model.config, "max_position_embeddings", None)
    if args.window < 2 or (limit is not None and args.window > limit):
        raise InputError(
            f"--window is {args.window}, expected 2 to {limit or 'the positions'} that the model can read"
        )
    if args.tokens < 2:
        raise InputError(f"--tokens is {args.tokens}, expected 2 or more: a token and the one to predict")
    texts = []
    for path in args.text:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"--text {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"--text {path} is not UTF-8, expected a plain text file") from None
    length = min(args.window, args.tokens)
    windows = data.token_windows(tokenizer, texts, length=length, count=args.tokens // length)
    if not windows:
        raise InputError(
            f"--text is too short: no file fills one window of {length} tokens; give longer text or a smaller "
            "--window"
        )
    return windows


def _prompt(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    import torch

    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"][:PROMPT_TOKENS]
    if len(ids) < 2:
        raise InputError("the model's tokenizer makes no tokens of English text; give --text")
    return torch.tensor([ids], dtype=torch.int64)


def _continuation(model: PreTrainedModel, prompt: Tensor, tokens: int) -> Tensor:
    """The prompt and what the dense model goes on with."""
    import torch

    with torch.inference_mode():
        generate: Any = model.generate
        mask = torch.ones_like(prompt)
        return generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


COMMANDS = {"calibrate": _calibrate, "bench": _bench, "info": _info, "tune": _tune, "demo": _demo}

if __name__ == "__main__":
    sys.exit(main())
