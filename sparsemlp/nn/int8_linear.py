"""`Int8Linear`: a linear layer whose weight is stored as int8, with one float32 scale per output."""

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

        weight = qweight * scale[:, None]
        out = x @ weight.T + bias

    The weight's key in the state dict is `qweight`, not `weight`: whatever would read the integers as weights fails.

    Attributes:
        qweight: int8 buffer (out_features, in_features); of a down projection it is stored column by column.
        scale: float32 buffer (out_features,); keeps its dtype in `.to(dtype)`.
        bias: the layer's own Parameter, or None.
        dtype: of the activations it is for and of what `to_linear` makes; follows `.to(dtype)`.
    """

    qweight: Tensor
    scale: Tensor
    bias: nn.Parameter | None
    _float: Tensor

    def __init__(self, qweight: Tensor, scale: Tensor, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        if scale.shape != qweight.shape[:1]:
            raise ValueError(
                f"scale is shape {tuple(scale.shape)}, expected (out_features,) = ({qweight.shape[0]},); pass what "
                "quantize_rows returned"
            )
        self.out_features, self.in_features = qweight.shape
        self._trainable = True
        self.register_buffer("qweight", qweight)
        self.register_buffer("scale", scale)
        self.register_parameter("bias", bias)
        self.register_buffer("_float", torch.empty(0, dtype=dtype, device=qweight.device), persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, by_column: bool = False) -> Int8Linear:
        """The layer with its weight rounded to int8; `linear` is not changed, and its bias is shared.

        Args:
            linear: a layer with a finite floating-point weight.
            by_column: stores the weight column by column, as down projections are, whose columns are the neurons.

        Raises:
            ValueError: the weight holds NaN or inf.
        """
        weight = linear.weight
        qweight, scale = quantize_rows(weight)
        if by_column:
            qweight = qweight.t().contiguous().t()
        made = cls(qweight, scale, linear.bias, weight.dtype)
        made._trainable = weight.requires_grad
        return made.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A float layer with the values that the int8 ones stand for, rounded to `dtype`; the bias is shared.

        The former weight is gone: what rounding to int8 lost does not come back.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=self.dtype)
        weight = dequantize_rows(self.qweight, self.scale, self.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=self._trainable)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear.train(self.training)

    @property
    def dtype(self) -> torch.dtype:
        return self._float.dtype

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features) in x's dtype; sums in float32, rounded once."""
        flat = x.reshape(-1, self.in_features) if x.dim() != 2 else x
        out = int8.linear(flat, self.qweight, self.scale, self.bias)
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
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
    """The layers `names` of the module that are not int8 yet as int8 ones; `down` is the one stored column by column.

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
            made[name] = Int8Linear.from_linear(layer, by_column=name == down)
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
