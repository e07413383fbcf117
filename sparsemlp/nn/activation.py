"""`Activation`: a row of the activation table as a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sparsemlp import activations
from sparsemlp.ops.activation import OP, activation

__all__ = ["Activation"]


class Activation(nn.Module):
    """φ(x) by `sparsemlp.activation`.

    Args:
        name: a row of `sparsemlp.activations.ACTIVATIONS`.
        params: the row's parameters in its order. They are a buffer, `params`, float32 whatever the module is converted
            to; change them between steps with `module.params.copy_(...)`, which does not compile again.
        backend: as in `sparsemlp.activation`.
    """

    params: Tensor | None

    def __init__(
        self, name: str, params: Sequence[float] | Tensor | None = None, backend: str = "auto"
    ) -> None:
        super().__init__()
        OP.check_backend(backend)
        names = activations.get(name, "name").params
        values = None if params is None else torch.as_tensor(params, dtype=torch.float32).detach().clone()
        if (0 if values is None else values.numel()) != len(names) or (
            values is not None and values.dim() != 1
        ):
            raise ValueError(
                f"params is {params!r}, expected {len(names)} numbers for activation {name!r}: ({', '.join(names)})"
            )
        self.name, self.backend = name, backend
        self.register_buffer("params", values if names else None)

    def forward(self, x: Tensor) -> Tensor:
        return activation(x, self.name, params=self.params, backend=self.backend)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Activation:
        """`.to(dtype)` and the like move the parameters and leave them float32."""
        before = self.params
        super()._apply(fn, recurse)
        if before is not None and self.params is not None and self.params.dtype != torch.float32:
            self.params = before.to(self.params.device)
        return self

    def extra_repr(self) -> str:
        return self.name if self.params is None else f"{self.name}, params={self.params.tolist()}"
