"""Activations on a GPU, one pass each way: φ(p), on request with counts of what is not zero, and grad · φ'(p).

Every program takes `BLOCKS` runs of `BLOCK` entries of the flat memory. Counts are sums of integers, which are the
same in whatever order the programs add them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemlp import activations
from sparsemlp._layout import dense, float32_run, laid_out_like
from sparsemlp.kernels import _activations, _configs
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run
from sparsemlp.reference.activation import check, check_bwd

__all__ = ["DEFAULT", "backward", "backward_launches", "counted", "forward", "forward_launches"]

DEFAULT: _configs.Config = {"block": 2048, "warps": 4, "counted_blocks": 8}
"""At least 16 bytes a thread and load, on 128 threads (NVIDIA) as on 256 (AMD). With counts a program takes more, since
all add to two numbers."""


@triton.jit
def _activation_fwd_kernel(
    p,
    params,
    out,
    counts,
    n,
    ACT: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    N_PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    a, b, c = _activations.params(params, N_PARAMS)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    kept = tl.zeros((BLOCK,), tl.int32)
    sloped = tl.zeros((BLOCK,), tl.int32)
    for i in range(BLOCKS):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        value = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        result = ACT(value, a, b, c).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=inside)
        if counts is not None:  # NaN != 0; φ(0) need not be 0, so `inside`
            kept += ((result.to(tl.float32) != 0) & inside).to(tl.int32)
            sloped += ((DERIVATIVE(value, a, b, c) != 0) & inside).to(tl.int32)
    if counts is not None:
        tl.atomic_add(counts, tl.sum(kept, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 1, tl.sum(sloped, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _activation_bwd_kernel(
    grad,
    p,
    params,
    out,
    n,
    DERIVATIVE: tl.constexpr,
    N_PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    a, b, c = _activations.params(params, N_PARAMS)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slope = DERIVATIVE(tl.load(p + at, mask=inside, other=0.0).to(tl.float32), a, b, c)
    wide = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    product = tl.where(slope == 0, 0.0, wide * slope)  # 0·inf is not wanted
    tl.store(out + at, product.to(out.dtype.element_ty), mask=inside)


def _config(p: Tensor) -> _configs.Config:
    return _configs.find("activation", p.device, {"n": p.numel(), "dtype": DTYPE_NAMES[p.dtype]}, DEFAULT)


def forward_launches(
    p: Tensor, params: Tensor | None, name: str, *, counts: bool
) -> tuple[Tensor, Tensor | None, list[Launch]]:
    """The output and the counts, not yet computed, and what computes them; p dense, params float32."""
    config, n = _config(p), p.numel()
    blocks = config["counted_blocks"] if counts else 1
    out = torch.empty_like(p)
    found = torch.zeros(2, dtype=torch.int64, device=p.device) if counts else None
    launch = Launch(
        _activation_fwd_kernel,
        (triton.cdiv(n, config["block"] * blocks),),
        (p, params, out, found, n),
        {
            "ACT": _activations.FORWARD[name],
            "DERIVATIVE": _activations.DERIVATIVE[name],
            "N_PARAMS": len(activations.get(name).params),
            "BLOCK": config["block"],
            "BLOCKS": blocks,
        },
        config["warps"],
    )
    return out, found, [launch]


def backward_launches(
    grad: Tensor, p: Tensor, params: Tensor | None, name: str
) -> tuple[Tensor, list[Launch]]:
    """The gradient, not yet computed, and what computes it; p and grad dense and laid out alike, params float32."""
    config, n = _config(p), p.numel()
    out = torch.empty_like(p)
    launch = Launch(
        _activation_bwd_kernel,
        (triton.cdiv(n, config["block"]),),
        (grad, p, params, out, n),
        {
            "DERIVATIVE": _activations.DERIVATIVE[name],
            "N_PARAMS": len(activations.get(name).params),
            "BLOCK": config["block"],
        },
        config["warps"],
    )
    return out, [launch]


def forward(p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """The operator's arguments in order."""
    check(p, params, name)
    out, _, launches = forward_launches(dense(p), float32_run(params), name, counts=False)
    run(launches)
    return out


def counted(p: Tensor, params: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The same, and the counts."""
    check(p, params, name)
    out, counts, launches = forward_launches(dense(p), float32_run(params), name, counts=True)
    run(launches)
    assert counts is not None
    return out, counts


def backward(grad: Tensor, p: Tensor, params: Tensor | None, name: str) -> Tensor:
    """The backward operator's arguments in order."""
    check_bwd(grad, p, params, name)
    p = dense(p)
    out, launches = backward_launches(laid_out_like(grad, p), p, float32_run(params), name)
    run(launches)
    return out
