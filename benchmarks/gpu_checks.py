"""What only a GPU can show about the kernels: graphs, streams, waiting, repeatability, offsets beyond 2³¹.

A check takes the device and raises AssertionError in words; `Skip` says why it cannot be made. `benchmarks.gpu_check`
and `tests/test_triton_cuda.py` run all of `CHECKS`; without a GPU the same code runs at tiny sizes in Triton's
interpreter, where a graph is a plain call, so that a slip of the pen is found there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import sparsemlp
from benchmarks.gpu_device import Device
from sparsemlp.kernels import _configs
from sparsemlp.ops.gated_mlp_training import BACKWARD, FORWARD
from sparsemlp.screen import pack
from sparsemlp.testing import assert_within_budget
from tests.backends import decided_from
from tests.blocks import training_path
from tests.cases import Sample
from tests.truth import Truth

__all__ = ["CHECKS", "Skip"]


class Skip(Exception):
    """A check that cannot be made here, and why."""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and bool((a.contiguous().view(kind) == b.contiguous().view(kind)).all())


@dataclass
class _Call:
    """An operator on inputs that stay in place: `run()` computes, `refill()` puts new values into the inputs."""

    run: Callable[[], Tensor]
    refill: Callable[[], None]


def _gated_mlp(where: Device, tokens: int, dtype: torch.dtype, *, screened: bool = False) -> _Call:
    d, f = (32, 20) if where.dry else (1024, 3000)
    g = torch.Generator(where.torch_device).manual_seed(tokens)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device=where.torch_device) * size).to(dtype)

    x, scale = normal(tokens, d), torch.ones(tokens, device=where.torch_device)
    gate, up, down = (normal(f, d, size=n**-0.5) for n in (d, d, f))
    threshold = torch.rand(f, generator=g, device=where.torch_device)
    screen = {"indicator": "screen", "screen_gate": pack(gate), "screen_up": pack(up)} if screened else {}

    def run() -> Tensor:
        return sparsemlp.gated_mlp(
            x,
            gate,
            up,
            down,
            threshold=threshold,
            token_scale=scale,
            activation="silu",
            backend="triton",
            **screen,
        )

    def refill() -> None:
        x.normal_(generator=g)
        scale.uniform_(generator=g)
        threshold.uniform_(0, 1.5, generator=g)

    return _Call(run, refill)


def _mlp(where: Device, tokens: int, dtype: torch.dtype) -> _Call:
    d, f = (32, 20) if where.dry else (1024, 3000)
    g = torch.Generator(where.torch_device).manual_seed(tokens)
    x = torch.randn(tokens, d, generator=g, device=where.torch_device).to(dtype)
    w_in, w_out_t = (
        (torch.randn(f, d, generator=g, device=where.torch_device) * n**-0.5).to(dtype) for n in (d, f)
    )
    threshold = torch.rand(f, generator=g, device=where.torch_device)

    def run() -> Tensor:
        return sparsemlp.mlp(x, w_in, w_out_t, threshold=threshold, activation="gelu", backend="triton")

    def refill() -> None:
        x.normal_(generator=g)
        threshold.uniform_(0, 1.5, generator=g)

    return _Call(run, refill)


def _sparse_linear(where: Device, tokens: int, dtype: torch.dtype) -> _Call:
    k, n = (40, 24) if where.dry else (3000, 1024)
    g = torch.Generator(where.torch_device).manual_seed(tokens)
    x = torch.randn(tokens, k, generator=g, device=where.torch_device).to(dtype)
    weight_t = torch.randn(k, n, generator=g, device=where.torch_device).to(dtype)
    threshold = torch.rand(k, generator=g, device=where.torch_device)

    def run() -> Tensor:
        return sparsemlp.sparse_linear(x, weight_t, threshold=threshold, backend="triton")

    def refill() -> None:
        x.normal_(generator=g)
        threshold.uniform_(0, 1.5, generator=g)

    return _Call(run, refill)


def _training(where: Device, path: str, dtype: torch.dtype) -> _Call:
    """Forward and backward of a gated MLP; never by lists, whose length the host waits for."""
    tokens, d, f = (5, 16, 20) if where.dry else (300, 1024, 3000)
    g = torch.Generator(where.torch_device).manual_seed(tokens)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device=where.torch_device) * size).to(dtype)

    x, grad = normal(tokens, d), normal(tokens, d)
    weights = [normal(f, d, size=n**-0.5) for n in (d, d, f)]
    threshold = torch.rand(f, generator=g, device=where.torch_device)
    threshold[::2] = torch.inf  # dead neurons

    def run() -> Tensor:
        no, names = [None] * 7, "x,w_gate,w_up,w_down_t,b_gate,b_up"
        with training_path(path, small=where.dry):
            out, *saved = FORWARD(x, *weights, threshold, *no, "relu", "gate", backend="triton")
            found = BACKWARD(
                grad, x, *weights, *saved, threshold, *no[:3], "relu", "gate", names, backend="triton"
            )
        return torch.cat([t.flatten() for t in (out, *found[:6])])

    def refill() -> None:
        x.normal_(generator=g)
        threshold[1::2].uniform_(0, 1.5, generator=g)

    return _Call(run, refill)


def _activation(where: Device, dtype: torch.dtype) -> _Call:
    p = torch.randn(300 if where.dry else 100_003, device=where.torch_device).to(dtype)

    def run() -> Tensor:
        out, counts = sparsemlp.activation(p, "jsrelu", counts=True, backend="triton")
        return torch.cat([out.float(), counts.float()])

    def refill() -> None:
        p.normal_()

    return _Call(run, refill)


def _calls(where: Device) -> dict[str, _Call]:
    """Every way through the kernels once: one token, tensor-core tiles, float32 tiles, many tokens, activations."""
    made = {
        "gated_mlp, T = 1": functools.partial(_gated_mlp, where, 1, torch.bfloat16),
        "gated_mlp, T = 8": functools.partial(_gated_mlp, where, 8, torch.bfloat16),
        "gated_mlp, T = 3, float32": functools.partial(_gated_mlp, where, 3, torch.float32),
        "gated_mlp, T = 40": functools.partial(_gated_mlp, where, 40, torch.float16),
        "gated_mlp by a screen, T = 1": functools.partial(
            _gated_mlp, where, 1, torch.bfloat16, screened=True
        ),
        "gated_mlp by a screen, T = 8": functools.partial(
            _gated_mlp, where, 8, torch.bfloat16, screened=True
        ),
        "gated_mlp by a screen, T = 40": functools.partial(
            _gated_mlp, where, 40, torch.bfloat16, screened=True
        ),
        "mlp, T = 8": functools.partial(_mlp, where, 8, torch.bfloat16),
        "mlp, T = 40": functools.partial(_mlp, where, 40, torch.float16),
        "sparse_linear, T = 1": functools.partial(_sparse_linear, where, 1, torch.bfloat16),
        "sparse_linear, T = 40": functools.partial(_sparse_linear, where, 40, torch.bfloat16),
        "training": functools.partial(_training, where, "dense", torch.bfloat16),
        "training of living neurons": functools.partial(_training, where, "compact", torch.bfloat16),
        "activation": functools.partial(_activation, where, torch.bfloat16),
    }
    return {name: make() for name, make in made.items()}


@torch.inference_mode()
def graph_replay(where: Device) -> None:
    """A captured graph computes from the inputs that it finds at replay: x, thresholds and scales changed in place."""
    for name, call in _calls(where).items():
        holder: list[Tensor] = []

        def body(call: _Call = call, holder: list[Tensor] = holder) -> None:
            holder[:] = [call.run()]

        replay = where.graph(body)
        for round_ in range(1 if where.dry else 5):
            call.refill()
            replay()
            got = holder[0].clone()
            assert _same_bits(got, call.run()), (
                f"{name}: replay {round_} of the graph differs from a plain call"
            )


@torch.inference_mode()
def own_stream(where: Device) -> None:
    """Kernels run on the current stream, in its order."""
    for name, call in _calls(where).items():
        call.refill()
        want = call.run()
        where.synchronize()
        with where.stream():
            where.keep_busy()
            call.refill()  # queued behind the delay: a kernel on another stream would read the old values
            got = call.run()
            again = call.run()
        where.synchronize()
        assert _same_bits(got, again), (
            f"{name}: a call on a stream of its own overtook what was queued before it"
        )
        assert not _same_bits(got, want), f"{name}: new inputs gave the old output"


@torch.inference_mode()
def streams_side_by_side(where: Device) -> None:
    """Calls on two streams at once do not share scratch memory."""
    for (name, one), (_, two) in zip(_calls(where).items(), reversed(_calls(where).items()), strict=True):
        calls = [one, two]
        wanted = [call.run() for call in calls]
        where.synchronize()
        results: list[list[Tensor]] = [[], []]
        streams = where.streams(2)
        for _ in range(1 if where.dry else 20):
            for call, stream, kept in zip(calls, streams, results, strict=True):
                with stream:
                    kept.append(call.run())
        where.synchronize()
        for want, kept in zip(wanted, results, strict=True):
            assert all(_same_bits(want, got) for got in kept), (
                f"{name}: differs beside work on another stream"
            )


@torch.inference_mode()
def no_waiting(where: Device) -> None:
    """The host never waits for the GPU inside a call."""
    for name, call in _calls(where).items():
        with _configs.use("gated_mlp_prefill", {}):
            call.run()
        where.synchronize()
        try:
            with (
                _configs.use("gated_mlp_prefill", {}),
                where.no_waiting(),
            ):  # the default never looks at the data
                call.run()
        except RuntimeError as error:
            raise AssertionError(f"{name}: the host waits for the GPU ({error})") from error


@torch.inference_mode()
def repeats(where: Device) -> None:
    """The same call gives the same bits, whatever ran before it."""
    for name, call in _calls(where).items():
        want = call.run()
        disturbance = torch.empty(2**10 if where.dry else 2**26, device=where.torch_device)
        for i in range(1, 2 if where.dry else 21):
            if i % 2:
                disturbance.fill_(i)  # other values in freed memory and in the cache
            assert _same_bits(want, call.run()), f"{name}: run {i} differs from the first"


@torch.inference_mode()
def offsets_of_rows(where: Device) -> None:
    """Rows that lie more than 2³¹ elements apart."""
    d, f, step = (16, 20, 256) if where.dry else (64, 2100, 2**20)
    if where.free_bytes() < 3 * f * step:
        raise Skip(f"needs {3 * f * step / 1e9:.0f} GB of free GPU memory")
    for tokens, dtype in ((1, torch.bfloat16), (8, torch.bfloat16), (40, torch.bfloat16)):
        buffer = torch.empty(f * step, dtype=dtype, device=where.torch_device)
        views = [buffer.as_strided((f, d), (step, 1), i * d) for i in range(3)]
        for i, view in enumerate(views):
            view.copy_(torch.randn(f, d, device=where.torch_device) * (d if i < 2 else f) ** -0.5)
        x = torch.randn(tokens, d, device=where.torch_device).to(dtype)
        threshold = torch.full((), 0.3, device=where.torch_device)
        run = functools.partial(sparsemlp.gated_mlp, threshold=threshold, backend="triton")
        weights = [view.contiguous() for view in views]
        far, near = run(x, *views), run(x, *weights)
        if tokens > 16:  # the GEMM may choose another order of additions for other strides
            sample = Sample(x.cpu(), *(w.cpu() for w in weights), "silu", threshold.cpu())
            truth = Truth(sample)
            flips = truth.flips(decided_from("triton", tokens, dtype))
            assert_within_budget(far.cpu(), truth.peers(), truth.out, flips=flips)
        else:
            assert _same_bits(far, near), f"T = {tokens}: rows far apart give another result"
        del buffer, views
        where.free()


@torch.inference_mode()
def offsets_of_tokens(where: Device) -> None:
    """T · F beyond 2³¹: the last tokens of many get what they get alone."""
    tokens, d, f = (40, 16, 20) if where.dry else (36_000, 32, 60_000)
    if where.free_bytes() < 10 * tokens * f:
        raise Skip(f"needs {10 * tokens * f / 1e9:.0f} GB of free GPU memory")
    x = torch.randn(tokens, d, device=where.torch_device).bfloat16()
    gate, up, down = ((torch.randn(f, d, device=where.torch_device) * n**-0.5).bfloat16() for n in (d, d, f))
    run = functools.partial(
        sparsemlp.gated_mlp, threshold=torch.zeros((), device=where.torch_device), backend="triton"
    )
    out, alone = run(x, gate, up, down)[-20:], run(x[-20:], gate, up, down)
    size = alone.float().abs().max()
    assert bool(((out.float() - alone.float()).abs() <= size / 32).all()), "the last tokens of many differ"


CHECKS: dict[str, Callable[[Device], None]] = {
    check.__name__: check
    for check in (
        graph_replay, own_stream, streams_side_by_side, no_waiting, repeats, offsets_of_rows, offsets_of_tokens,
    )
}  # fmt: skip
"""Every check by name."""
