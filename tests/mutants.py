"""Changes that break the Triton kernels, and what of the conformance tests must notice each: `python -m tests.mutants`.

A mask dropped, a tail one off, a select that multiplies, a sum that ends early. Every row is tried on a copy of
`kernels/`, imported under another name and put in the place of the operator's backend. A broken kernel may read where
there is no memory and end the process, so rows are tried in a process of their own: `test_mutations.py` runs it.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import sparsemlp
from sparsemlp._op import Op
from sparsemlp.kernels import _configs
from sparsemlp.ops.activation import BACKWARD, COUNTED
from sparsemlp.ops.activation import OP as FORWARD
from sparsemlp.ops.gated_mlp import OP as GATED_MLP
from sparsemlp.ops.mlp import OP as MLP
from sparsemlp.ops.sparse_linear import OP as SPARSE_LINEAR
from tests import cases as gated_mlp_cases
from tests import mlp_cases, screen_mutants, sparse_linear_cases, training_mutants
from tests import test_conformance_activation as of_activations
from tests import test_conformance_gated_mlp as of_gated_mlp
from tests import test_conformance_gated_mlp_inputs as of_inputs
from tests import test_conformance_gated_mlp_screen as of_screen
from tests import test_conformance_mlp as of_mlp
from tests import test_conformance_sparse_linear as of_sparse_linear
from tests import test_triton_launches as of_launches
from tests.blocks import TILES

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

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())} → {' '.join(self.new.split())}"


def _cases_of(module: ModuleType, conformance: ModuleType) -> Callable[..., Check]:
    """Of a module's cases the named ones, one dtype after another, held as a conformance test holds them."""

    def named(*names: str) -> Check:
        def run() -> None:
            for name in names:
                case = next(c for c in module.CASES if c.name == name)
                for dtype in (torch.float32, torch.float16):
                    conformance.check(module.build(case, dtype), "triton")

        return run

    return named


cases = _cases_of(gated_mlp_cases, of_gated_mlp)
mlps = _cases_of(mlp_cases, of_mlp)
linears = _cases_of(sparse_linear_cases, of_sparse_linear)


def call(test: str, *args: object, of: ModuleType = of_gated_mlp) -> Check:
    """A conformance test by name."""
    return lambda: getattr(of, test)(*args, backend="triton")


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
ACTIVATION = (FORWARD, COUNTED, BACKWARD)
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
    ("_select.py", "active & (act != 0)", "active", ZEROS),
    ("_tiles.py", "(tl.abs(m) < limit) == 0", "tl.abs(m) >= limit", NAN_WEIGHT),
    (
        "_tiles.py",
        "acc += tl.where(t[None, :] == i, sums[:, None], 0.0)",
        "acc += (t[None, :] == i) * sums[:, None]",
        NAN_TOKEN,
    ),
    ("_select.py", "inside = j < F", "inside = j < F - 1", TAILS),
    ("_select.py", "inside = j < F", "inside = j <= F", cases("w-end-T1", "w-end-T5")),
    ("_select.py", "h = tl.where(active, h, 0.0)", "h = h + 0.0", cases("density-0.1-T6")),
    (
        "_select.py",
        "if bias is not None:",
        "if bias is None:",
        cases("bias-g-silu-T4"),
    ),
    ("_select.py", "tl.store(arrived + c,", "tl.store(arrived + c + 1,", cases("w-plain-T1")),
    (
        "_rows.py",
        "before = ends[None, :] <= item[:, None]",
        "before = ends[None, :] < item[:, None]",
        TAILS,
    ),
    ("_rows.py", "+ (item - begin)", "+ item", TAILS),
    ("_rows.py", "segment < segments, other=0)", "segment < segments - 1, other=0)", TAILS),
    ("_rows.py", "live = item < total", "live = item < total - 1", TAILS),
    ("_rows.py", "live = item < total", "live = item <= total", TAILS),
    ("_rows.py", "if wrong != 0:", "if wrong > 1:", MATES),
    ("_rows.py", "(((bits >> i) & 1) != 0)", "(bits != 0)", MATES),
    ("_rows.py", "for s in range(SPLITS):", "for s in range(SPLITS - 1):", TAILS),
    (
        "_rows.py",
        "if skipped_out is not None:",
        "if skipped_out is None:",
        cases("mean+out--0.5--T4"),
    ),
    ("_select.py", "h -= tl.load(skipped_mean", "h += tl.load(skipped_mean", cases("mean+out--0.5--T4")),
    (
        "_masked.py",
        "tl.where(active, h, 0.0).to(hidden.dtype.element_ty), mask=mask)",
        "h.to(hidden.dtype.element_ty), mask=mask)",
        cases("density-0.5-T36"),
    ),
    (
        "_masked.py",
        "mask = (j < F) & (t >= 0)",
        "mask = (j < F - 1) & (t >= 0)",
        cases("w-guarded-T33"),
    ),
    ("_select.py", "m = act * up if", "m = act if", cases("product-silu-0.5---T5")),
    ("_select.py", "if not LATE and skipped_mean is None:", "if skipped_mean is not None:", ZEROS),
    ("_rule.py", "m = act * m", "m = act", cases("product-silu-0.5---T36")),
    ("_rule.py", "active & (act != 0)", "active", MANY_ZEROS),
    ("_masked.py", "if wrong != 0:", "if wrong > 1:", MANY_MATES),
    (
        "_masked.py",
        "mask=column & inside[None, :]",
        "mask=tl.trans(mask) & inside[None, :]",
        MANY_MATES,
    ),
    (
        "_masked.py",
        "for start in range(0, F, BLOCK_F):",
        "for start in range(0, F - BLOCK_F, BLOCK_F):",
        MANY_MATES,
    ),
)

ROUNDED = call("test_the_gate_by_input_sparsity_is_not_rounded", 4, HALF, of=of_launches)
UNSEEN = call(
    "test_columns_that_the_gate_does_not_see_are_not_read", torch.inf, 40, torch.float32, of=of_inputs
)
MANY_MATES_OF_LINEAR = call(
    "test_rows_count_for_the_tokens_that_want_them", torch.inf, 40, HALF, of=of_sparse_linear
)
MANY_MATES_OF_MLP = call("test_rows_count_for_the_tokens_that_want_them", torch.inf, 40, HALF, of=of_mlp)
_INPUTS = (
    (
        "gated_mlp.py",
        "_channels.few(x, w_gate.t(), input_threshold,",
        "_channels.few(x, w_gate.t(), threshold,",
        cases("inputs-0.5-gate-0.5-silu--T5"),
    ),
    (
        "gated_mlp_prefill.py",
        "input_threshold, None, b_gate)",
        "input_threshold, None, None)",
        cases("inputs-0-gate-0.5-gelu--T36"),
    ),
    (
        "_select.py",
        "act = ACT(_plus(act, b_gate, j, wanted), a, b, c)",
        "act = ACT(act, a, b, c)",
        cases("inputs-channels-up-0.5-silu-mean-T5"),
    ),
    (
        "gated_mlp.py",
        "input_threshold, None, None, torch.float32)",
        "input_threshold, None, None, x.dtype)",
        ROUNDED,
    ),
    ("_channels.py", "run([_masked.repair(", "([_masked.repair(", UNSEEN),
)
_LINEAR = (
    ("_select.py", "* stride_pre + j[:, None]", "* 1 + j[:, None]", linears("x-guarded-T6")),
    ("_select.py", "tl.load(pre + t", "tl.load(pre + 1 + t", linears("density-0.5-T6")),
    (
        "_channels.py",
        "weight_t, bias, None, out_dtype",
        "weight_t, None, None, out_dtype",
        linears("density-0.5-T1"),
    ),
    (
        "_channels.py",
        "F.linear(h, weight_t.t(), bias)",
        "F.linear(h, weight_t.t())",
        linears("density-0.5-T36"),
    ),
    ("_channels.py", "token_scale), x.contiguous()", "token_scale), x", linears("x-guarded-T34")),
    ("_channels.py", "Rule(threshold, token_scale,", "Rule(threshold, None,", linears("scale-varied-0.5-T5")),
    ("_channels.py", "run([_masked.repair(", "([_masked.repair(", MANY_MATES_OF_LINEAR),
)
_MLP = (
    (
        "_select.py",
        'h = act if INDICATOR == "ungated"',
        'h = act * act if INDICATOR == "ungated"',
        mlps("density-0.5-T6"),
    ),
    ("_masked.py", "h = act\n", "h = act * act\n", mlps("density-0.5-T36")),
    ("mlp.py", "w_in, None, None, b_in,", "w_in, None, None, None,", mlps("bias-i-gelu-T4")),
    ("mlp.py", "F.linear(x, w_in, b_in)", "F.linear(x, w_in)", mlps("bias-i-gelu-T40")),
    (
        "mlp.py",
        "w_out_t, b_out, skipped_out, x.dtype",
        "w_out_t, None, skipped_out, x.dtype",
        mlps("bias-o-gelu-T4"),
    ),
    ("mlp.py", "gemm_bias(b_out, skipped_out,", "gemm_bias(b_out, None,", mlps("mean+out--0.5--T34")),
    ("mlp.py", "run([_masked.repair(", "([_masked.repair(", MANY_MATES_OF_MLP),
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
    *(Mutant(*row) for row in _INPUTS),
    *(Mutant(*row) for row in screen_mutants.rows(cases, functools.partial(call, of=of_screen))),
    *(Mutant(*row, (SPARSE_LINEAR,)) for row in _LINEAR),
    *(Mutant(*row, (MLP,)) for row in _MLP),
    *(Mutant("gated_mlp_tiles.py", *row) for row in _TILES),
    *(Mutant(*row, ACTIVATION) for row in _ACTIVATION),
    *(Mutant(*row, training_mutants.OPS) for row in training_mutants.rows()),
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
            for backend in backends:
                module, function = backend.run.replace("sparsemlp.kernels", name).split(":")
                backend._loaded[:] = [getattr(importlib.import_module(module), function)]
            sys.modules[
                f"{name}._configs"
            ].find = _configs.find  # one place for the blocks that tests ask for
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
