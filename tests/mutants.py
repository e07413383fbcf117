"""Changes that break the Triton kernels, and what of the conformance tests must notice each: `python -m tests.mutants`.

A mask dropped, a tail one off, a select that multiplies, a sum that ends early. Every row is tried on a copy of
`kernels/`, imported under another name and put in the place of the operator's backend. A broken kernel may read where
there is no memory and end the process, so rows are tried in a process of their own: `test_mutations.py` runs it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import sparsemlp
from sparsemlp._op import Op
from sparsemlp.kernels import _configs
from sparsemlp.ops.activation import BACKWARD, COUNTED
from sparsemlp.ops.activation import OP as FORWARD
from sparsemlp.ops.gated_mlp import OP as GATED_MLP
from tests import test_conformance_activation as of_activations
from tests import test_conformance_gated_mlp as conformance
from tests.blocks import TILES
from tests.cases import CASES, build

KERNELS = Path(sparsemlp.__file__).resolve().parents[1] / "kernels"
Check = Callable[[], object]


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in a file of `kernels/`; `check` is to fail then, and passes now."""

    file: str
    old: str
    new: str
    check: Check
    ops: tuple[Op, ...] = (GATED_MLP,)
    functions: tuple[str, ...] = ("forward",)

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())} → {' '.join(self.new.split())}"


def cases(*names: str) -> Check:
    """The named cases, one dtype after another."""

    def run() -> None:
        for name in names:
            case = next(c for c in CASES if c.name == name)
            for dtype in (torch.float32, torch.float16):
                conformance.check(build(case, dtype), "triton")

    return run


def call(test: str, *args: object) -> Check:
    """A conformance test by name."""
    return lambda: getattr(conformance, test)(*args, backend="triton")


def tiles(*names: str) -> Check:
    """The named cases through products of active tiles."""

    def run() -> None:
        with _configs.use("gated_mlp_prefill", TILES):
            cases(*names)()

    return run


def of_activation(test: str) -> Callable[[str], Check]:
    """A conformance test of `activation`, by the row's name."""
    return lambda name: lambda: getattr(of_activations, test)(name, torch.float32, backend="triton")


shapes, ranges = of_activation("test_shapes"), of_activation("test_the_whole_range")
nans, selects = of_activation("test_nan_and_infinity"), of_activation("test_a_mask_selects")
ACTIVATION = (
    (FORWARD, COUNTED, BACKWARD),
    ("forward", "counted", "backward"),
)
SELECTS = selects("relu")
SOME_TILES = tiles("density-0.1-T36", "bias-gud-silu-T40", "x-strided-T34")
HALF = torch.float16
TAILS = cases("w-guarded-T1", "w-guarded-T5")
MATES = call("test_rows_count_for_the_tokens_that_want_them", "w_down_t", torch.inf, 4, HALF)
MANY_MATES = call("test_rows_count_for_the_tokens_that_want_them", "w_down_t", torch.inf, 40, HALF)
EDGE = call("test_the_threshold_itself_is_kept", 4, torch.float32)
PERCENT = call("test_a_threshold_one_percent_off_fails", torch.float32, 24)
NAN_WEIGHT = call("test_nan_before_the_decision_is_never_hidden", "w_gate", 4, torch.float32)
NAN_TOKEN = call("test_nan_before_the_decision_is_never_hidden", "x", 4, torch.float32)
MANY_ZEROS = call("test_exact_zeros_are_skipped", "relu", 40, torch.float32)
ZEROS = call("test_exact_zeros_are_skipped", "relu", 4, torch.float32)
DENSE = call("test_scale_zero_is_the_dense_mlp", "mean", 4, torch.float32)

_GATED = (
    ("_tiles.py", "mask = wanted[:, None] & inside[None, :]", "mask = wanted[:, None]", TAILS),
    ("_tiles.py", "inside = d < D", "inside = d < D - 1", TAILS),
    ("_tiles.py", "inside = d < D", "inside = d <= D", TAILS),
    ("_tiles.py", "range(0, D, BLOCK_D):", "range(0, D - BLOCK_D, BLOCK_D):", TAILS),
    ("_tiles.py", "tl.abs(m) < limit", "tl.abs(m) <= limit", EDGE),
    ("_tiles.py", "tl.abs(m) < limit", "m < limit", cases("density-0.5-T6")),
    ("_tiles.py", "tl.abs(m) < limit", "tl.abs(m) < limit * 1.01", PERCENT),
    (
        "_tiles.py",
        "tl.where(scale == 0, 0.0, scale * limit)",
        "tl.where(scale == 0, limit, scale * limit)",
        DENSE,
    ),
    ("gated_mlp.py", "active & (act != 0)", "active", ZEROS),
    ("_tiles.py", "(tl.abs(m) < limit) == 0", "tl.abs(m) >= limit", NAN_WEIGHT),
    (
        "_tiles.py",
        "acc += tl.where(t[None, :] == i, sums[:, None], 0.0)",
        "acc += (t[None, :] == i) * sums[:, None]",
        NAN_TOKEN,
    ),
    ("gated_mlp.py", "inside = j < F", "inside = j < F - 1", TAILS),
    ("gated_mlp.py", "inside = j < F", "inside = j <= F", cases("w-end-T1", "w-end-T5")),
    ("gated_mlp.py", "h = tl.where(active, h, 0.0)", "h = h + 0.0", cases("density-0.1-T6")),
    (
        "gated_mlp.py",
        "if bias is not None:",
        "if bias is None:",
        cases("bias-g-silu-T4"),
    ),
    ("gated_mlp.py", "tl.store(arrived + c,", "tl.store(arrived + c + 1,", cases("w-plain-T1")),
    (
        "_gated_mlp_down.py",
        "before = ends[None, :] <= item[:, None]",
        "before = ends[None, :] < item[:, None]",
        TAILS,
    ),
    ("_gated_mlp_down.py", "+ (item - begin)", "+ item", TAILS),
    ("_gated_mlp_down.py", "segment < segments, other=0)", "segment < segments - 1, other=0)", TAILS),
    ("_gated_mlp_down.py", "live = item < total", "live = item < total - 1", TAILS),
    ("_gated_mlp_down.py", "live = item < total", "live = item <= total", TAILS),
    ("_gated_mlp_down.py", "if wrong != 0:", "if wrong > 1:", MATES),
    ("_gated_mlp_down.py", "(((bits >> i) & 1) != 0)", "(bits != 0)", MATES),
    ("_gated_mlp_down.py", "for s in range(SPLITS):", "for s in range(SPLITS - 1):", TAILS),
    (
        "_gated_mlp_down.py",
        "if skipped_out is not None:",
        "if skipped_out is None:",
        cases("mean+out--0.5--T4"),
    ),
    ("gated_mlp.py", "h -= tl.load(skipped_mean", "h += tl.load(skipped_mean", cases("mean+out--0.5--T4")),
    (
        "gated_mlp_prefill.py",
        "tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)",
        "h.to(hidden.dtype.element_ty), mask=mask)",
        cases("density-0.5-T36"),
    ),
    (
        "gated_mlp_prefill.py",
        "mask = (j < F) & (t >= 0)",
        "mask = (j < F - 1) & (t >= 0)",
        cases("w-guarded-T33"),
    ),
    ("gated_mlp.py", "m = act * up if", "m = act if", cases("product-silu-0.5---T5")),
    ("gated_mlp.py", 'if INDICATOR != "up" and skipped_mean is None:', "if skipped_mean is not None:", ZEROS),
    ("_gated_mlp_rule.py", "m = act * m", "m = act", cases("product-silu-0.5---T36")),
    ("_gated_mlp_rule.py", "active & (act != 0)", "active", MANY_ZEROS),
    ("gated_mlp_prefill.py", "if wrong != 0:", "if wrong > 1:", MANY_MATES),
    (
        "gated_mlp_prefill.py",
        "mask=column & inside[None, :]",
        "mask=tl.trans(mask) & inside[None, :]",
        MANY_MATES,
    ),
    (
        "gated_mlp_prefill.py",
        "for start in range(0, F, BLOCK_F):",
        "for start in range(0, F - BLOCK_F, BLOCK_F):",
        MANY_MATES,
    ),
)

_TILES = (
    ("tl.store(flags + tl.program_id(0)", "tl.store(flags + 0 * tl.program_id(0)", SOME_TILES),
    ("tl.store(listed + row + place - 1, i,", "tl.store(listed + row + place - 1, 0 * i,", SOME_TILES),
    ("for i in range(tl.load(counts + tile)):", "for i in range(tl.load(counts + tile) - 1):", SOME_TILES),
    ("mask=(t < T) & (d < D)[None, :]", "mask=(t < T) & (d < D - 1)[None, :]", SOME_TILES),
    ("mask = (t < T) & (j < F)", "mask = (t < T) & (j < F - 1)", SOME_TILES),
    ("tl.where(active, h, 0.0)", "h", SOME_TILES),
    ("if b_up is not None:", "if b_up is None:", SOME_TILES),
)
_ACTIVATION = (
    ("activation.py", "inside = at < n", "inside = at < n - 1", shapes("silu")),
    (
        "activation.py",
        "tl.program_id(0).to(tl.int64) * BLOCK +",
        "tl.program_id(0).to(tl.int64) * (BLOCK - 1) +",
        shapes("relu"),
    ),
    ("activation.py", "tl.where(slope == 0, 0.0, wide * slope)", "wide * slope", SELECTS),
    (
        "activation.py",
        "((result.to(tl.float32) != 0) & inside)",
        "(result.to(tl.float32) != 0)",
        shapes("weird"),
    ),
    (
        "_activations.py",
        "return tl.where(p <= 0, 0.0, p + 1)",
        "return tl.where(p < 0, 0.0, p + 1)",
        ranges("jsrelu"),
    ),
    (
        "_activations.py",
        "return tl.where(p < tau, 0.0, p)",
        "return tl.where(p <= tau, 0.0, p)",
        shapes("fatrelu"),
    ),
    (
        "_activations.py",
        "tl.where(p <= 0, 0.0, tl.where(p > 0, 1.0, p))",
        "tl.where(p > 0, 1.0, 0.0)",
        nans("relu"),
    ),
    (
        "_activations.py",
        "def _identity(p, a, b, c):\n    return p",
        "def _identity(p, a, b, c):\n    return tl.where(tl.abs(p) < 1e-7, 0.0, p)",
        ranges("identity"),
    ),
)

MUTANTS = [
    *(Mutant(*row) for row in _GATED),
    *(Mutant("gated_mlp_tiles.py", *row) for row in _TILES),
    *(Mutant(*row, *ACTIVATION) for row in _ACTIVATION),
]
"""All of them, in the order in which they are tried."""


def noticed(mutant: Mutant) -> str | None:
    """How the check failed on the changed kernels, or None: it did not."""
    name = "mutant_kernels"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, name)
        shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for path in copy.glob("*.py"):
            path.write_text(path.read_text().replace("sparsemlp.kernels", name))
        text = (copy / mutant.file).read_text()
        if mutant.old not in text:
            raise ValueError(f"{mutant.file} has no {mutant.old!r} any more: change the row with it")
        (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[module]
        importlib.invalidate_caches()
        sys.path.insert(0, folder)
        backends = [next(b for b in op.backends if b.name == "triton") for op in mutant.ops]
        real = [list(backend._loaded) for backend in backends]
        try:
            module = importlib.import_module(f"{name}.{mutant.ops[0].name}")
            sys.modules[
                f"{name}._configs"
            ].find = _configs.find  # one place for the blocks that tests ask for
            for backend, function in zip(backends, mutant.functions, strict=True):
                backend._loaded[:] = [getattr(module, function)]
            mutant.check()
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            for backend, loaded in zip(backends, real, strict=True):
                backend._loaded[:] = loaded
            sys.path.remove(folder)
    return None


def main(first: int) -> int:
    """Tries the mutants from number `first` on; prints number, tab and how it was noticed, "" if it was not."""
    for i, mutant in enumerate(MUTANTS[first:], first):
        print(f"{i}\ttrying", flush=True)
        print(f"{i}\t{noticed(mutant) or ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
