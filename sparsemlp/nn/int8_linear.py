"""`Int8Linear`: a linear layer whose weight is stored as int8, with one float32 scale per output or per input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparsemlp.nn import _dense_gated_mlp as dense_gated_mlp
from sparsemlp.quantization import check_rows, dequantize_rows, quantize_rows
from sparsemlp.reference import int8

__all__ = ["Int8Linear", "check_quantizable", "check_quantize", "quantized"]


class Int8Linear(nn.Module):
    """A linear layer over int8 weights; made by `from_linear`.

    Equivalent to::

        weight = qweight * scale[:, None]            # a scale per output; per input: qweight * scale
        out = x @ weight.T + bias

    The weight's key in the state dict is `qweight`, not `weight`: whatever would read the integers as weights fails.

    Attributes:
        qweight: int8 buffer (out_features, in_features).
        scale: float32 buffer, (out_features,) or (in_features,); keeps its dtype in `.to(dtype)`.
        bias: the layer's own Parameter, or None.
        per: "output" or "input", what has a scale of its own.
        dtype: of the activations it is for and of what `to_linear` makes; follows `.to(dtype)`.
    """

    qweight: Tensor
    scale: Tensor
    bias: nn.Parameter | None
    _float: Tensor

    def __init__(
        self, qweight: Tensor, scale: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, per: str
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = qweight.shape
        self.per = per
        self._trainable = True
        self.register_buffer("qweight", qweight)
        self.register_buffer("scale", scale)
        self.register_parameter("bias", bias)
        self.register_buffer("_float", torch.empty(0, dtype=dtype, device=qweight.device), persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, per: str = "output") -> Int8Linear:
        """The layer with its weight rounded to int8; `linear` is not changed, and its bias is shared.

        Args:
            linear: a layer with a finite floating-point weight.
            per: "output" for gate and up projections: a neuron is a row; "input" for down projections: a neuron is a
                column, and the weight is stored column by column.

        Raises:
            ValueError: the weight holds NaN or inf, or `per` is something else.
        """
        if per not in ("output", "input"):
            raise ValueError(f"per is {per!r}, expected 'output' or 'input'")
        weight = linear.weight
        if per == "output":
            qweight, scale = quantize_rows(weight)
        else:
            rows, scale = quantize_rows(weight.t())
            qweight = rows.t()
        made = cls(qweight, scale, linear.bias, weight.dtype, per)
        made._trainable = weight.requires_grad
        return made.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A float layer with the values that the int8 ones stand for, rounded to `dtype`; the bias is shared.

        The former weight is gone: what rounding to int8 lost does not come back.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=self.dtype)
        if self.per == "output":
            weight = dequantize_rows(self.qweight, self.scale, self.dtype)
        else:
            weight = dequantize_rows(self.qweight.t(), self.scale, self.dtype).t().contiguous()
        linear.weight = nn.Parameter(weight, requires_grad=self._trainable)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear.train(self.training)

    @property
    def dtype(self) -> torch.dtype:
        return self._float.dtype

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features) in x's dtype; sums in float32, rounded once."""
        flat = x.reshape(-1, self.in_features) if x.dim() != 2 else x
        if self.per == "output":
            out = int8.rows_linear(flat, self.qweight, self.scale, self.bias)
        else:
            out = int8.neuron_linear(flat, self.qweight.t(), self.scale, self.bias)
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scale per {self.per}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """`.to()`, `.half()` …: the scales move but stay float32, as they were."""
        before = self.scale
        super()._apply(fn, recurse)
        after = self.scale
        kept = after.float() if before.device.type == "meta" else before.to(after.device)
        self._buffers["scale"] = kept
        return self


def quantized(
    module: nn.Module, names: tuple[str, ...], down: str, quantize: str | None
) -> dict[str, Int8Linear]:
    """The layers `names` of the module that are not int8 yet as int8 ones; `down` is the one with a scale per input.

    The module is not changed.

    Raises:
        ValueError: a layer is not a plain `nn.Linear` or cannot be rounded, or `quantize` is not None or "int8".
    """
    if quantize is None:
        return {}
    check_quantize(quantize)
    made = {}
    for name in names:
        layer = module._modules[name]
        if type(layer) is Int8Linear:
            continue
        check_layer(name, layer)
        assert isinstance(layer, nn.Linear)
        try:
            made[name] = Int8Linear.from_linear(layer, per="input" if name == down else "output")
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
    return made


def check_quantize(quantize: str | None) -> None:
    if quantize not in (None, "int8"):
        raise ValueError(f"quantize is {quantize!r}, expected None or 'int8'")


def check_layer(name: str, layer: nn.Module | None) -> None:
    """Whether nothing is lost by taking only the layer's weight and bias."""
    reason = dense_gated_mlp.obstacle(layer)
    if reason is not None:
        raise ValueError(
            f"quantize is 'int8' and {name} {reason}, expected plain nn.Linear layers; merge or remove what changes it "
            "first"
        )


def check_quantizable(module: nn.Module, names: tuple[str, ...], prefix: str) -> None:
    """Raises `quantized`'s errors for the layers without rounding anything; messages name them with the prefix."""
    for name in names:
        layer = module._modules[name]
        if type(layer) is not Int8Linear:
            check_layer(f"{prefix}{name}", layer)
            assert isinstance(layer, nn.Linear)
            check_rows(layer.weight, f"{prefix}{name}.weight")
