"""The conformance cases of the operators' Triton kernels, as plain functions to call: (dry) -> groups of cases."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import sparsemlp
from sparsemlp import activations
from sparsemlp.testing import assert_within_budget
from tests import mlp_cases, screen_cases, sparse_linear_cases, training_cases
from tests.backends import decided_from
from tests.blocks import TRAINING_PATHS, small_blocks, training_path
from tests.cases import CASES, DTYPES, PARAMS, Case, Truth, build
from tests.devices import device_of

__all__ = ["activation", "gated_mlp", "gated_mlp_training", "mlp", "mlp_training", "sparse_linear"]

_DRY_ELEMENTS = 3 * 65 * 100
_SIZES = ((), (0,), (1,), (5, 7), (1025,), (3, 1000), (4097,))


@dataclass(frozen=True)
class _Named:
    name: str
    function: Callable[..., None]
    args: tuple[Any, ...]

    def __call__(self) -> None:
        self.function(*self.args)


def _gated_mlp(case: Case, dtype: torch.dtype, small: bool) -> None:
    sample = build(case, dtype)
    truth = Truth(sample)
    with small_blocks(sample, "triton") if small else contextlib.nullcontext():
        out = sample.run(sparsemlp.gated_mlp, backend="triton")
    assert out.shape == sample.x.shape, f"shape {tuple(out.shape)}, expected {tuple(sample.x.shape)}"
    flips = truth.flips(decided_from("triton", truth.x.shape[0], dtype))
    assert_within_budget(out.reshape(truth.out.shape), truth.peers(), truth.out, flips=flips)


def _mlp(case: mlp_cases.Case, dtype: torch.dtype, small: bool) -> None:
    sample = mlp_cases.build(case, dtype)
    truth = mlp_cases.Truth(sample)
    out = sample.run(sparsemlp.mlp, backend="triton")
    assert out.shape == sample.x.shape, f"shape {tuple(out.shape)}, expected {tuple(sample.x.shape)}"
    flips = truth.flips(decided_from("triton", truth.x.shape[0], dtype))
    assert_within_budget(out.reshape(truth.out.shape), truth.peers(), truth.out, flips=flips)


def _sparse_linear(case: sparse_linear_cases.Case, dtype: torch.dtype, small: bool) -> None:
    sample = sparse_linear_cases.build(case, dtype)
    truth = sparse_linear_cases.Truth(sample)
    with sparse_linear_cases.small_blocks(sample, "triton") if small else contextlib.nullcontext():
        out = sample.run(sparsemlp.sparse_linear, backend="triton")
    assert_within_budget(out.reshape(truth.out.shape), truth.peers(), truth.out)


def _groups(
    cases: list[Any], function: Callable[..., None], size: Callable[[Any], int], dry: bool
) -> list[list[_Named]]:
    """Grouped by the first word of a case's name, dtypes in turn; half of them with several blocks of everything.

    Without int8 weights, which these kernels do not have.
    """
    groups: dict[str, list[_Named]] = collections.defaultdict(list)
    for i, case in enumerate(cases):
        if case.int8 or (dry and size(case) > _DRY_ELEMENTS):
            continue
        for j in range(len(DTYPES)):
            dtype = DTYPES[(i + j) % len(DTYPES)]
            name = f"{function.__name__[1:]} {case.name} {str(dtype).removeprefix('torch.')}"
            groups[f"{case.name.partition('-')[0]} {j}"].append(
                _Named(name, function, (case, dtype, (i + j) % 2 == 0))
            )
    return list(groups.values())


def gated_mlp(dry: bool) -> list[list[_Named]]:
    """The cases of `tests.cases`, and of the screen what must have the reference's bits."""
    groups = _groups(CASES, _gated_mlp, lambda case: case.tokens * case.d * case.f, dry)
    for check, cases in (
        (screen_cases.check_tokens, screen_cases.TOKENS),
        (screen_cases.check_places, screen_cases.PLACES),
    ):
        named = [_Named(f"screen {check.__name__} {' '.join(map(str, case))}", check, case) for case in cases]
        groups.append(named[:: 6 if dry else 1])
    return groups


def mlp(dry: bool) -> list[list[_Named]]:
    """The cases of `tests.mlp_cases`."""
    return _groups(mlp_cases.CASES, _mlp, lambda case: case.tokens * case.d * case.f, dry)


def sparse_linear(dry: bool) -> list[list[_Named]]:
    """The cases of `tests.sparse_linear_cases`."""
    return _groups(sparse_linear_cases.CASES, _sparse_linear, lambda case: case.tokens * case.k * case.n, dry)


def _training(kind: training_cases.Kind, case: Any, dtype: torch.dtype, path: str, small: bool) -> None:
    with training_path(path, small=small):
        training_cases.check(kind, kind.cases.build(case, dtype), "triton")


def _training_groups(kind: training_cases.Kind, dry: bool) -> list[list[_Named]]:
    """Forward and backward, every way through the kernels: a group each."""
    sizes = {"tokens": 5, "d": 10, "f": 18} if dry else {"tokens": 70, "d": 264, "f": 600}
    cases = [
        kind.case(f"{name}-{mean or density}", activation=name, density=density, mean=mean, **sizes)
        for name in activations.ACTIVATIONS
        for density, mean in ((1, ""), ("neurons", ""), ("some_inf", "mean+out"))
    ]
    return [
        [
            _Named(
                f"{kind} training by {path} {case.name} {str(dtype).removeprefix('torch.')}",
                _training,
                (kind, case, dtype, path, dry or i % 2 == 0),
            )
            for i, case in enumerate(cases)
            for dtype in (DTYPES[i % len(DTYPES)],)
        ]
        for path in TRAINING_PATHS
    ]


def mlp_training(dry: bool) -> list[list[_Named]]:
    """Calls of the ungated MLP with gradients."""
    return _training_groups(training_cases.UNGATED, dry)


def gated_mlp_training(dry: bool) -> list[list[_Named]]:
    """Calls of the gated MLP with gradients."""
    return _training_groups(training_cases.GATED, dry)


def _activation(name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    device = device_of("triton")
    generator = torch.Generator().manual_seed(len(name))
    p = (3 * torch.randn(size, generator=generator)).to(dtype)
    flat = p.view(-1)
    for i, special in enumerate((0.0, -0.0, torch.nan)[: flat.numel() // 3]):
        flat[i] = special
    grad = torch.randn(size, generator=generator).to(dtype)
    params = torch.tensor(PARAMS[name]) if name in PARAMS else None
    q = p.detach().clone().to(device).requires_grad_(True)
    moved = None if params is None else params.to(device)
    out, counts = sparsemlp.activation(q, name, params=moved, counts=True, backend="triton")
    (gradient,) = torch.autograd.grad(out, q, grad.to(device))
    out, gradient = out.detach().cpu(), gradient.cpu()
    truth = activations.apply(p.double(), name, params)
    slope = activations.apply(p.double(), name, params, derivative=True)
    peer = activations.apply(p, name, params)
    assert_within_budget(out, peer, truth)
    slopes = activations.apply(p, name, params, derivative=True)
    wanted = torch.where(slope == 0, 0.0, grad.double() * slope)
    assert_within_budget(gradient, torch.where(slope == 0, 0, grad * slopes), wanted, what="grad")
    wide = activations.apply(p.float(), name, params, derivative=True)
    expected = [int((out != 0).sum()), int((wide != 0).sum())]
    assert counts.tolist()[0] == expected[0], f"counts are {counts.tolist()}, expected {expected}"
    if activations.get(name).zero_at_negative:
        assert counts.tolist() == expected, f"counts are {counts.tolist()}, expected {expected}"


def activation(dry: bool) -> list[list[_Named]]:
    """A group for every dtype."""
    sizes = _SIZES[:4] if dry else _SIZES
    return [
        [
            _Named(
                f"activation {name} {str(dtype).removeprefix('torch.')} {size}",
                _activation,
                (name, dtype, size),
            )
            for size in reversed(sizes)
            for name in activations.ACTIVATIONS
        ]
        for dtype in DTYPES
    ]
