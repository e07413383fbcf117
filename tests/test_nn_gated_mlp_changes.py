"""Changes to a module that leave no trace in tensor versions, tracing by torch.export, moves to other devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsemlp
from sparsemlp.nn import SparseGatedMLP
from tests.gated_mlp_modules import D, N, Separate


def fresh(sparse: SparseGatedMLP, x: torch.Tensor) -> torch.Tensor:
    """What the operator gives for the module's tensors of now, with nothing cached."""
    gate, up, down = sparse.gate_proj, sparse.up_proj, sparse.down_proj
    return sparsemlp.gated_mlp(
        x,
        gate.weight,
        up.weight,
        down.weight.t(),
        threshold=sparse.threshold,
        skipped_mean=sparse.skipped_mean,
        b_gate=gate.bias,
        b_up=up.bias,
        b_down=down.bias,
    )


@pytest.fixture
def sparse() -> SparseGatedMLP:
    return SparseGatedMLP.from_dense(Separate(), threshold=0.3, skipped_mean=torch.randn(N))


def test_a_fused_optimizer_step_is_seen(sparse: SparseGatedMLP) -> None:
    x = torch.randn(3, D)
    with torch.no_grad():
        sparse(x)
    sparse(x).square().mean().backward()
    torch.optim.AdamW(sparse.parameters(), lr=0.1, fused=True).step()
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), fresh(sparse, x))


def test_a_layer_put_back_is_seen(sparse: SparseGatedMLP) -> None:
    """As adapters do when they are merged: written through `.data`, then the same layer set again."""
    x = torch.randn(3, D)
    with torch.no_grad():
        sparse(x)
        down = sparse.down_proj
        down.weight.data += 1.0
        sparse.down_proj = down
        torch.testing.assert_close(sparse(x), fresh(sparse, x))


def test_a_change_of_mode_is_seen(sparse: SparseGatedMLP) -> None:
    x = torch.randn(3, D)
    with torch.no_grad():
        sparse(x)
        sparse.down_proj.weight.data += 1.0
        sparse.train().eval()
        torch.testing.assert_close(sparse(x), fresh(sparse, x))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(sparse: SparseGatedMLP, strict: bool) -> None:
    x = torch.randn(3, D)
    with torch.no_grad():
        program = torch.export.export(sparse, (x,), strict=strict)
        assert any("sparsemlp.gated_mlp" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x), sparse(x))


def test_thresholds_survive_empty_memory() -> None:
    sparse = SparseGatedMLP.from_dense(Separate(), threshold=torch.rand(N), skipped_mean=torch.randn(N))
    limits, mean = sparse.threshold.clone(), sparse.skipped_mean.clone()
    sparse.to_empty(device="cpu")
    assert torch.equal(sparse.threshold, limits)
    assert torch.equal(sparse.skipped_mean, mean)


def test_a_gate_stored_column_by_column_runs_dense_with_a_warning() -> None:
    dense = Separate()
    dense.gate_proj.weight = nn.Parameter(torch.randn(D, N).t())
    x = torch.randn(2, D)
    with torch.no_grad():
        expected = dense(x)
        sparse = SparseGatedMLP.from_dense(dense, threshold=1.0)
        with pytest.warns(UserWarning, match="gate_proj.weight is not stored row by row"):
            torch.testing.assert_close(sparse(x), expected)
