"""The dense peer that torch.compile makes: compiled for every layer, right, and left out in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks import registry, shapes
from benchmarks.compiled import SETTINGS, compile_dense
from benchmarks.gated_mlp import GatedMlp, dense_mlp


def test_no_compiler_is_one_sentence() -> None:
    def broken(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        raise OSError("no compiler\nand more")

    with pytest.raises(RuntimeError, match=r"^torch\.compile is left out .*") as error:
        compile_dense(broken, [(torch.zeros(1),) * 3], lambda: [torch.zeros(1)])
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_compiled_peer_is_compiled_once_for_all_layers_and_right() -> None:
    """More layers than Dynamo's recompilation limit: a layer beyond it would silently run eagerly."""
    for op, shape in (("gated_mlp", "tiny"), ("mlp", "tiny-mlp")):
        row, entry = shapes.get(shape), registry.get(op)
        work = entry.workload(row, torch.float32, 1, row.activation, layers=10)
        function, weights = entry.compiled(work)
        counters.clear()
        with torch.inference_mode():
            frozen = {name: s for name, s in SETTINGS.items() if s}
            compiled = compile_dense(function, weights, work.fresh, frozen)
            assert counters["stats"]["unique_graphs"] == 1
            assert not counters["recompile_limit"]
            xs = work.fresh()
            for x, w, out in zip(xs, weights, compiled.sweep(xs), strict=True):
                torch.testing.assert_close(out, function(x, *w))
            assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_default_setting_compiles_once_for_every_layer() -> None:
    work = GatedMlp(shapes.get("tiny"), torch.float32, 1, "silu", layers=10)
    weights = [(w.w_gate, w.w_up, w.w_down) for w in work.layers]
    counters.clear()
    with torch.inference_mode():
        compiled = compile_dense(dense_mlp("silu"), weights, work.fresh, {"default": {}})
        xs = work.fresh()
        for x, w, out in zip(xs, weights, compiled.sweep(xs), strict=True):
            torch.testing.assert_close(out, dense_mlp("silu")(x, *w))
    assert counters["stats"]["unique_graphs"] == 1
