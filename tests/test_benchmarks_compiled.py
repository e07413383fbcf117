"""The dense peer that torch.compile makes: compiled for every layer, right, and left out in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks import shapes
from benchmarks.compiled import SETTINGS, compile_dense
from benchmarks.gated_mlp import GatedMlp, dense_mlp


def test_no_compiler_is_one_sentence() -> None:
    def broken(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        raise OSError("no compiler\nand more")

    with pytest.raises(RuntimeError, match=r"^torch\.compile is left out .*") as error:
        compile_dense(broken, [(torch.zeros(1),) * 3], lambda: [torch.zeros(1)])
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_compiled_peer_is_compiled_for_every_layer_and_right() -> None:
    """More layers than Dynamo's recompilation limit: a layer beyond it would silently run eagerly."""
    work = GatedMlp(shapes.get("tiny"), torch.float32, 1, "silu", layers=10)
    weights = [(w.w_gate, w.w_up, w.w_down) for w in work.layers]
    counters.clear()
    with torch.inference_mode():
        frozen = {name: s for name, s in SETTINGS.items() if s}
        compiled = compile_dense(dense_mlp("silu"), weights, work.fresh, frozen)
        assert counters["stats"]["unique_graphs"] == len(weights)
        assert not counters["recompile_limit"]
        for i, x in enumerate(work.fresh()):
            expected = dense_mlp("silu")(x, *weights[i])
            torch.testing.assert_close(compiled.call(i, x), expected)
        assert counters["stats"]["unique_graphs"] == len(weights)
