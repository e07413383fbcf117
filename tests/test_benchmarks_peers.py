"""The peers compute what this package computes; one that does not is never timed; the fixed cost's arithmetic."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import overhead, peer_ggml, peer_torch, peers, registry, shapes
from benchmarks.alternatives import Alternative
from benchmarks.workload import Workload

SHAPES = {"gated_mlp": "tiny", "mlp": "tiny-mlp", "sparse_linear": "tiny-linear"}


def work(op: str, dtype: torch.dtype = torch.float32, tokens: int = 3) -> Workload:
    shape = shapes.get(SHAPES[op])
    return registry.get(op).workload(shape, dtype, tokens, shape.activation, 2)


@pytest.mark.parametrize("op", sorted(SHAPES))
@pytest.mark.parametrize("sparsity", [0.7, 0.9])
@pytest.mark.parametrize("make", [peer_torch.index_select, peer_torch.csr])
def test_sparse_peers_compute_the_thresholded_layer(op: str, sparsity: float, make: Any) -> None:
    w = work(op)
    peer, dense = make(w, sparsity), peer_torch.masked(w, sparsity)
    with torch.inference_mode():
        own = w.own(sparsity)
        for i, x in enumerate(w.fresh()):
            torch.testing.assert_close(peer(i, x), dense(i, x))
            torch.testing.assert_close(own(i, x), dense(i, x))
            everything = peer_torch.masked(w, 0.0)(i, x)
            assert (peer(i, x) - everything).norm() > 0.1 * everything.norm()  # something was skipped


@pytest.mark.parametrize("op", sorted(SHAPES))
def test_peers_have_names_and_bytes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_dense", lambda *_: {})
    w = work(op, torch.bfloat16)
    found = peers.build(registry.get(op), w, (0.0, 0.9), lambda line: None)
    assert set(found) == {"index_select_90", "csr_90"}
    density = w.densities({0.9: [w.fresh() for _ in range(20)]})[0.9]
    read = {name: a.bytes_read(density) for name, a in found.items() if a.bytes_read is not None}
    last = w.bytes_dense / w.matrices
    assert read["index_select_90"] == pytest.approx(w.bytes_read(density.union))
    assert read["csr_90"] == pytest.approx((w.matrices - 1) * last + 2 * last * density.union)


@pytest.mark.parametrize("module", ["openvino", "ggml"])
@pytest.mark.parametrize("op", sorted(SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_installed_dense_peers_compute_the_layer(op: str, dtype: torch.dtype, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install 'sparsemlp[peers]'")
    w = work(op, dtype)
    make = peer_ggml.sweep if module == "ggml" else peers._openvino
    entry = registry.get(op)
    function, weights = entry.compiled(w)
    with torch.inference_mode():
        sweep = make(op, w.activation, weights, w.tokens, w.shape.d, dtype)
        for _ in range(2):  # the second walk's inputs are not the first's
            xs = w.fresh()
            peers._check(module, sweep(xs), [function(x, *ws) for x, ws in zip(xs, weights, strict=True)])


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("No module named 'ggml'")

    monkeypatch.setattr(peers, "_openvino", missing)
    monkeypatch.setattr(peer_ggml, "sweep", missing)
    said: list[str] = []
    assert peers._dense(registry.get("gated_mlp"), work("gated_mlp", torch.bfloat16), said.append) == {}
    assert "OpenVINO is left out: No module named 'ggml'; pip install 'sparsemlp[peers]'" in said


def test_a_wrong_peer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> Any:
        return lambda xs: [2 * x for x in xs]

    monkeypatch.setattr(peers, "_openvino", wrong)
    with pytest.raises(ValueError, match=r"OpenVINO \(float32\) is off by \d+%, expected PyTorch's result"):
        peers._dense(registry.get("gated_mlp"), work("gated_mlp"), lambda line: None)
    nothing = [torch.full((2, 2), float("nan"))]
    with pytest.raises(ValueError, match="is off by nan"):
        peers._check("peer", nothing, [torch.ones(2, 2)])


def test_the_faster_of_ggmls_half_precisions_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    w, entry = work("gated_mlp", torch.bfloat16), registry.get("gated_mlp")
    function, weights = entry.compiled(w)

    def make(*args: Any) -> Any:
        def sweep(xs: list[Tensor]) -> list[Tensor]:
            return [function(x, *ws) for x, ws in zip(xs, weights, strict=True)]

        return sweep

    monkeypatch.setattr(peers, "_openvino", make)
    monkeypatch.setattr(peer_ggml, "sweep", make)
    monkeypatch.setattr(
        peers, "trial", lambda timed, *_: {t.name: {"ggml": 2.0, "other": 1.0}[t.name] for t in timed}
    )
    found: dict[str, Alternative] = peers._dense(entry, w, lambda line: None)
    assert {name: a.label for name, a in found.items()} == {
        "openvino": "OpenVINO (bfloat16)",
        "ggml": "ggml (float16)",
    }


# What a call costs beyond computing


def test_the_intercept_is_the_lines_value_at_none() -> None:
    assert overhead.intercept([1, 2, 4], [5.0, 7.0, 11.0]) == pytest.approx(3.0)


def test_the_fixed_cost_leaves_the_computing_out(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """A clock on which a call takes 7 µs and 0.01 µs a neuron."""
    monkeypatch.setattr(overhead, "_ways", lambda d, f: {"sparsemlp.gated_mlp": lambda: calls.append(f)})
    calls: list[int] = []

    def interleave(timed: Any, rounds: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {}
        for t in timed:
            calls.clear()
            t.sweep(None)
            assert len(calls) == t.calls == 3
            samples[t.name] = [1e-6 * (7 + 0.01 * calls[0])] * rounds
        return samples

    monkeypatch.setattr(overhead, "interleave", interleave)
    rows = overhead.measure(threads=1, rounds=2, calls=3)
    assert [(r.what, r.mode) for r in rows] == [
        ("sparsemlp.gated_mlp", "inference_mode"),
        ("sparsemlp.gated_mlp", "no_grad"),
    ]
    assert overhead.fixed_us(rows) == pytest.approx(7.0)
    assert rows[0].call_us == pytest.approx(7 + 0.01 * overhead.SIZE[1])
    assert "7.0" in overhead.table(rows)


def test_every_way_into_the_kernel_computes_the_same() -> None:
    with torch.inference_mode():
        ways = overhead._ways(64, 96)
        public = ways.pop("sparsemlp.gated_mlp")()
        for what, way in ways.items():
            if not what.startswith(("SparseGatedMLP", "PyTorch")):  # weights of its own; other functions
                assert torch.equal(way(), public), what
        assert (
            ways["SparseGatedMLP"]().shape == ways["PyTorch, dense MLP (5 operators)"]().shape == public.shape
        )


def test_overhead_is_written_and_printed(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], threads: None
) -> None:
    assert overhead.main(["--no-gate", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("overhead/gated_mlp.csv")
    lines = path.read_text().splitlines()
    assert "call_us,fixed_us,fixed_us_low,fixed_us_high" in lines[0]
    assert len(lines) - 1 == len(overhead.MODES) * len(overhead._ways(64, 96))
    assert "of it fixed" in capsys.readouterr().out
