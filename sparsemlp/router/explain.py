"""What `backend="auto"` would do with a call, and why: put `sparsemlp.explain` in front of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsemlp._op import Op
from sparsemlp.router import decide, training
from sparsemlp.router.model import CHUNK, MARGIN, ROUTES, seconds

__all__ = ["Explanation", "explain", "explain_calls"]

_DOES = {
    "sparse": "the kernel that reads the rows of active neurons only, 32 tokens at a time",
    "dense": "this package's dense products",
    "pytorch": "PyTorch's matrix products around a fused mask",
    "native": "the compiled kernels",
    "triton": "the Triton kernels",
    "reference": "plain PyTorch, which skips nothing",
    "differentiable": "a composition of PyTorch functions that has a derivative, which skips nothing",
}


@dataclass(frozen=True)
class Explanation:
    """What computes a call, and why; printed as a few lines.

    Args:
        operator: its name. backend: as the call asked.
        route: "sparse", "dense" or "pytorch" on a CPU, else the backend: "native" (of an operator with one way only),
            "triton", "reference", or "differentiable".
        why: a sentence.
        sizes: of the call, e.g. `{"T": 64, "D": 4096, "F": 14336}`.
        kind: the dtype of x and, where they are int8, of the weights.
        milliseconds: predicted, by route; `sparse` at `density`. Empty where nothing was measured or chosen.
        density: the mean fraction of active neurons a token that `sparse` was predicted with.
        density_source: where that comes from, in words.
        break_even: below this density rows are skipped (0: never; inf: always); NaN where nothing was chosen.
        profile: which measured times the prediction used, in words.
        router: the mode, see `sparsemlp.set_router`.
        others: for each route and backend not taken, the reason.
    """

    operator: str
    backend: str
    route: str
    why: str
    sizes: Mapping[str, int]
    kind: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    density: float = math.nan
    density_source: str = ""
    break_even: float = math.nan
    profile: str = ""
    router: str = "auto"
    others: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines = [
            f"{self.operator}, {sizes}, {self.kind}, backend={self.backend!r}",
            f"  {'route':<11}{self.route}: {_DOES[self.route]}",
            f"  {'why':<11}{self.why}",
        ]
        if self.milliseconds:
            times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.milliseconds.items())
            lines.append(f"  {'predicted':<11}{times}")
        for name in ("density_source", "profile", "router"):
            if text := getattr(self, name):
                lines.append(f"  {name.removesuffix('_source'):<11}{text}")
        lines += [f"  {'not':<11}{name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says what would compute a call of an operator or a module, and why; nothing of it is computed.

    Equivalent to::

        sparsemlp.gated_mlp(x, w_gate, w_up, w_down_t, threshold=t)                              # a call
        print(sparsemlp.explain(sparsemlp.gated_mlp, x, w_gate, w_up, w_down_t, threshold=t))    # its explanation
        print(sparsemlp.explain(module, x))                                                      # of a SparseGatedMLP

    Args:
        call: an operator of this package, or anything that makes one call of one, such as a sparse module; for a whole
            model see `sparsemlp.router.explain_calls`.
        *args, **kwargs: its arguments. Their values do not matter, so x may be `torch.empty(T, D)`.

    Returns:
        An `Explanation`, to print or to read.
    Raises:
        ValueError: an argument is wrong, as the call itself would say; or there is no call of an operator, or several.
        BackendUnavailableError: the backend asked for cannot compute it.
    Source: docs/router.md, the model.
    """
    found = explain_calls(call, *args, **kwargs)
    if len(found) != 1:
        raise ValueError(
            f"call makes {len(found)} calls of this package's operators, expected one; use "
            "sparsemlp.router.explain_calls for a whole model"
        )
    return found[0]


def explain_calls(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Explanation]:
    """The explanations of all calls of this package's operators that a call makes, e.g. a model's layers, in order.

    Everything else runs, and those calls return zeros: the call's own result means nothing and is dropped.

    Args:
        call, *args, **kwargs: as of `sparsemlp.explain`.
    """
    recorder = _Recorder(differentiable=False)
    with recorder:
        call(*args, **kwargs)
    if not recorder.found and torch.is_grad_enabled():
        # Where an input requires grad there is no operator in the call; without grad mode there is.
        recorder = _Recorder(differentiable=True)
        with torch.no_grad(), recorder:
            call(*args, **kwargs)
    return recorder.found


class _Recorder(TorchDispatchMode):
    """Sees the package's operators instead of running them."""

    def __init__(self, *, differentiable: bool) -> None:
        super().__init__()
        from sparsemlp import info  # imports the operators, which import this package

        self._operators = {op.overload: op for op in info.operators()}
        self._differentiable = differentiable
        self.found: list[Explanation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        op = self._operators.get(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        self.found.append(_explained(op, args[:-1], args[-1], differentiable=self._differentiable))
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.zeros_like, _outputs(op, args))


def _outputs(op: Op, args: tuple[Any, ...]) -> Any:
    """Tensors of the outputs' shapes, dtypes and device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = op.overload(*args)
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=args[0].device), fakes
    )


def _explained(op: Op, args: tuple[Any, ...], backend: str, *, differentiable: bool) -> Explanation:
    reasons = {b.name: b.why_not(args) for b in op.backends}
    routed = op.route is not None and backend in ("auto", "native") and reasons["native"] is None
    if routed and not differentiable and 0 not in (*args[0].shape, args[1].shape[0]):
        return _routed(op, args, backend, reasons)  # without `select`, which would freeze a choice
    chosen = op.select(args, backend)  # raises where an explicit backend cannot
    name = next((b.name for b in op.backends if b is chosen), "reference")
    return _unrouted(op, args, backend, "differentiable" if differentiable else name, reasons)


def _other_backends(
    op: Op, args: tuple[Any, ...], taken: str, reasons: Mapping[str, str | None], free: str = "not asked for"
) -> dict[str, str]:
    """Why not, for each backend; `free`: of one without a reason of its own."""
    device = args[0].device.type
    unasked = f"auto passes it over on {device}, where it is slow"
    return {
        b.name: reasons[b.name] or (unasked if device in b.unasked else free)
        for b in op.backends
        if b.name != taken
    }


def _unrouted(
    op: Op, args: tuple[Any, ...], backend: str, route: str, reasons: Mapping[str, str | None]
) -> Explanation:
    device = args[0].device.type
    if route == "differentiable":
        why = "grad mode is on and an input requires grad; call it under torch.inference_mode() to skip rows"
    elif backend != "auto":
        why = f"the call asks for backend={backend!r}, which never falls back"
    elif route == "reference":
        why = "no backend computes this call"
    else:
        why = f"the first backend without a reason against a call on {device}"
    if route == "native" and op.name.endswith("mlp_fwd"):
        limit = training.break_even(args[0].dtype)
        density = "whatever their density" if limit >= 1 else f"below a density of {100 * limit:.3g} %"
        why += f"; a gradient is wanted: products go by lists of entries {density}, counted in every call"
    free = "has no derivative" if route == "differentiable" else "not asked for"
    others = _other_backends(op, args, route, reasons, free)
    x = args[0]
    sizes = (
        {"T": math.prod(x.shape[:-1]), "D": x.shape[-1]}
        if op.name != "activation"
        else {"entries": x.numel()}
    )
    return Explanation(op.name, backend, route, why, sizes, _kind(x.dtype), others=others)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _routed(op: Op, args: tuple[Any, ...], backend: str, reasons: Mapping[str, str | None]) -> Explanation:
    router: decide.Router = op.route  # type: ignore[assignment]
    made = router.decision(args)
    problem, choice = made.problem, made.choice
    few, measured = problem.tokens <= CHUNK, decide.current_profile()
    route, why = made.route, ""
    if backend == "native":
        route = "sparse" if few else "dense"
        why = "backend='native' depends on nothing but the number of tokens: rows up to 32, dense products above"
    density = 1.0 if math.isnan(made.density) else made.density
    milliseconds = {}
    if measured is not None and choice is not None and choice.known:
        for name in ROUTES:
            if not (few and name == "dense"):
                predicted = seconds(measured, problem, name, density)
                milliseconds[name] = 1e3 * (predicted or math.nan)
    others = _other_backends(op, args, "native", reasons)
    if few:
        others["dense"] = "for at most 32 tokens the kernel that skips rows is the dense one too"
    for name, ms in milliseconds.items():
        if name != route and name not in others:
            others[name] = f"predicted {_against(ms, milliseconds[route])}"
    return Explanation(
        op.name,
        backend,
        route,
        why or _why(made, milliseconds),
        {"T": problem.tokens, "D": problem.d, "F": problem.f},
        problem.kind,
        milliseconds,
        density,
        _source(made.density),
        math.nan if choice is None else choice.break_even,
        "nothing was measured for this kind of call" if not milliseconds else measured.source,  # type: ignore[union-attr]
        decide.mode(),
        others,
    )


def _source(density: float) -> str:
    if math.isnan(density):
        return "no call of this layer seen yet: 100 % assumed"
    return f"{100 * density:.3g} % of the neurons active, the mean of recent calls of this layer"


def _against(ms: float, best: float) -> str:
    return f"{ms:.3g} ms, {ms / best:.3g} times as long"


def _why(made: decide.Decision, milliseconds: Mapping[str, float]) -> str:
    few = made.problem.tokens <= CHUNK
    if made.choice is None:
        return "the router is off: rows are skipped up to 32 tokens, dense products above"
    if made.frozen:
        return f"frozen: the first call of this layer with {made.problem.tokens} tokens took it"
    if not milliseconds:
        return "there are no measured times: rows are skipped up to 32 tokens, dense products above"
    limit = made.choice.break_even
    if limit > 1:
        return "predicted fastest whatever the density"
    if made.route == "sparse":
        return f"predicted fastest below a density of {100 * limit:.3g} %"
    if limit > 0:
        return f"rows are worth skipping below a density of {100 * limit:.3g} %; at more, this is predicted fastest"
    own = made.route == ("sparse" if few else "dense")
    by = "" if own else f", by more than the {100 * MARGIN:.0f} % that measured times may be off"
    return f"predicted fastest at every density{by}"
