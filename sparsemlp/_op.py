"""One `Op(...)` is an operator's whole contract: schema, fake, reference, backends, autograd, autocast.

Registered are `sparsemlp::<name>(<args>, str backend)`, which the public function calls and which is what a compiled
graph, a profiler and a checkpointing policy see, and nothing else here: a backend's own operators are defined beside
its launcher. The backend is part of the schema, so an explicit choice survives `torch.compile` without global state.
Selection happens inside the operator, at run time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsemlp._reasons import spelled

__all__ = ["Backend", "BackendUnavailableError", "Op"]

_lib = torch.library.Library("sparsemlp", "FRAGMENT")

_VALUE_ERROR = "sparsemlp: "
"""A compiled kernel marks errors about argument *values* with this prefix; they are raised again as ValueError."""


_AUTOCAST = ("cpu", "cuda")
PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = PLAIN_TENSORS | {type(None), str}
# Under names of their own: looking them up in torch costs a tenth of a microsecond a call.
_modes = torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack


def autocasts(device: str) -> bool:
    """Whether the operators' autocast rules apply on this device."""
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def is_plain_eager(device: str) -> bool:
    """No tracing, mode, transform or autocast wants to see this call; the caller has asked `is_compiling` itself."""
    return (
        _modes() == 0 and _interpreter() is None and forward_ad._current_level < 0 and not autocasts(device)
    )


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether autograd, forward-mode differentiation or a `torch.func` transform needs to see inside this call."""
    return (not torch.compiler.is_compiling() and transformed()) or _requires_grad(tensors)


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation sees this call; asked outside of tracing."""
    return _interpreter() is not None or forward_ad._current_level >= 0


def raise_value_error(error: RuntimeError, prefix: str = "") -> None:
    """Raises a compiled kernel's complaint about values as Python's; does nothing where it is another error."""
    _, mark, text = str(error).partition(_VALUE_ERROR)
    if mark:
        raise ValueError(prefix + text.splitlines()[0]) from None


class BackendUnavailableError(RuntimeError):
    """The backend asked for by name cannot compute this call; the message lists every backend and its reason."""


@dataclass(frozen=True)
class Backend:
    """Who can compute an operator, where, and why not."""

    name: str
    devices: tuple[str, ...]
    run: str
    """`module:function`, imported on first use; called with the operator's tensors and strings in order."""
    machine: Callable[[], str | None] = lambda: None
    """Why this machine cannot, or None."""
    call: Callable[..., str | None] = lambda *args: None
    """Why this call's arguments, of which the first is a tensor, cannot, or None."""
    unasked: tuple[str, ...] = ()
    """Devices on which `auto` passes this backend over: there it is right, but slow."""
    _loaded: list[Callable[..., Any]] = field(default_factory=list, compare=False, repr=False)

    def why_not(self, args: tuple[Any, ...]) -> str | None:
        device = args[0].device.type
        if device not in self.devices:
            return f"computes on {' and '.join(self.devices)}, the tensors are on {device}"
        return self.machine() or self.call(*args)

    def __call__(self, *args: Any) -> Any:
        if not self._loaded:
            module, name = self.run.split(":")
            self._loaded.append(getattr(importlib.import_module(module), name))
        return self._loaded[0](*args)


class Op:
    """An operator of the package; calling it dispatches through PyTorch.

    Args:
        name: the operator's name in `torch.ops.sparsemlp`.
        args: its schema without the backend, e.g. `"Tensor x, Tensor? bias, str activation"`.
        returns: its outputs in the schema.
        fake: shapes and strides of the outputs, from the same arguments.
        reference: the PyTorch reference, same arguments.
        backends: fastest first; `auto` takes the first without a reason against it, else the reference.
        castable: positions of the arguments that autocast converts (x, weights, biases; never thresholds or means).
        derivative: (setup_context, backward) as `torch.library.register_autograd` wants them; None: there is none, and
            differentiating raises.
        derivative_hint: what to do where there is none.
        route: for `auto`, asked with the arguments where the native backend would compute them: another function of
            the same arguments that computes this call faster, or None for the backend's own choice.
    """

    def __init__(
        self,
        name: str,
        args: str,
        *,
        returns: str = "Tensor",
        fake: Callable[..., Any],
        reference: Callable[..., Any],
        backends: tuple[Backend, ...],
        castable: tuple[int, ...],
        derivative: tuple[Callable[..., None], Callable[..., Any]] | None = None,
        derivative_hint: str = "",
        route: Callable[[tuple[Any, ...]], Callable[..., Any] | None] | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self.backends = backends
        self._castable = frozenset(castable)
        self.route = route
        self._hint = derivative_hint
        self._derivative = derivative
        setup_context, backward = derivative or (lambda *a, **k: None, self._backward)
        _lib.define(f"{name}({args}, str backend) -> {returns}", tags=(torch.Tag.needs_exact_strides,))
        qualified = f"sparsemlp::{name}"
        torch.library.register_fake(qualified, lambda *a: fake(*a[:-1]), lib=_lib)
        _lib.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_lib)
        for device in _AUTOCAST:
            _lib.impl(name, self._autocast(device), f"Autocast{device.upper()}")
        self.overload = getattr(torch.ops.sparsemlp, name).default

    def __call__(self, *args: Any, backend: str) -> Any:
        """Through PyTorch's dispatcher where anything but a plain eager call is going on, else straight to the backend.

        The straight way saves 10 µs a call, and the backend's own operator is still a registered one. The caller of an
        operator without a derivative has seen to gradients: none of `args` needs one here.
        """
        if (
            torch.compiler.is_compiling()
            or not is_plain_eager(args[0].device.type)
            or not all(type(a) in _PLAIN for a in args)
            or (self._derivative is not None and _requires_grad(args))
        ):
            return self.overload(*args, backend)
        return self._run(*args, backend)

    def function(self, name: str) -> type[torch.autograd.Function]:
        """The operator as a `torch.autograd.Function` of that name, of the same derivative; `apply(*args, backend)`."""
        assert self._derivative is not None, f"{self.name} has no derivative"
        setup_context, backward = self._derivative
        members = {
            "forward": staticmethod(self._run),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
        }
        return type(name, (torch.autograd.Function,), members)

    @property
    def choices(self) -> tuple[str, ...]:
        """What `backend=` may be."""
        return ("auto", *(b.name for b in self.backends), "reference")

    def check_backend(self, backend: str) -> None:
        if not isinstance(backend, str) or backend not in self.choices:
            raise ValueError(f"backend is {spelled(backend)}, expected one of: {', '.join(self.choices)}")

    def select(self, args: tuple[Any, ...], backend: str) -> Callable[..., Any]:
        """The function that computes this call; an explicit backend never falls back."""
        if backend == "reference":
            return self.reference
        if backend == "auto":
            device = args[0].device.type
            for b in self.backends:
                if device not in b.unasked and b.why_not(args) is None:
                    routed = self.route(args) if self.route is not None and b.name == "native" else None
                    return routed or b
            return self.reference
        self.check_backend(backend)
        chosen = next(b for b in self.backends if b.name == backend)
        if chosen.why_not(args) is not None:
            listed = "; ".join(f"{b.name}: {b.why_not(args) or 'available'}" for b in self.backends)
            raise BackendUnavailableError(
                f"{self.name}: backend {backend!r} cannot compute this call ({listed}; reference: available); "
                "use backend='auto' or another one"
            )
        return chosen

    def _run(self, *args: Any) -> Any:
        arguments = args[:-1]
        try:
            return self.select(arguments, args[-1])(*arguments)
        except RuntimeError as error:
            raise_value_error(error)
            raise

    def _backward(self, ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"sparsemlp::{self.name} has no derivative; {self._hint}")

    def _autocast(self, device: str) -> Callable[..., Any]:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

        def run(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)
            cast = [
                a.to(dtype)
                if i in self._castable
                and isinstance(a, Tensor)
                and a.is_floating_point()
                and a.dtype != torch.float64
                else a
                for i, a in enumerate(args)
            ]
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return self.overload(*cast)

        return run
