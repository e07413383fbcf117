"""What a gated MLP with a low-bit screen computes: whom the copies keep, the truth in float64, same-dtype peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsemlp.nn import Int8Linear
from sparsemlp.reference import screen
from sparsemlp.screen import PackedWeight, pack


def value(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """A layer's weight; of an int8 one the values it stands for."""
    if isinstance(layer, Int8Linear):
        return (layer.qweight.to(dtype) * layer.scale.to(dtype)[:, None]).detach()
    return layer.weight.detach().to(dtype)


class Screened:
    """A gated MLP, dense or sparse, with every number of it at hand.

    Args:
        module: a module of `tests.gated_mlp_modules.KINDS`, or a sparse one over its layers.
        bits, group: of the copies.
    """

    def __init__(self, module: nn.Module, bits: int = 4, group: int = 32):
        self.merged = hasattr(module, "gate_up_proj")
        layers = [module.gate_up_proj] if self.merged else [module.gate_proj, module.up_proj]
        self.act = module.activation_fn if self.merged else module.act_fn
        self.name = "gelu_tanh" if "GELU" in repr(self.act) else "silu"
        self.layers, self.down = layers, module.down_proj
        rows = [part for layer in layers for part in self._parts(value(layer, torch.float32))]
        self.copies = [pack(w, bits, group) for w in rows]

    def _parts(self, tensor: Tensor | None) -> tuple[Tensor | None, ...]:
        if tensor is None:
            return (None, None) if self.merged else (None,)
        return tensor.chunk(2) if self.merged else (tensor,)

    def scores(self, x: Tensor) -> Tensor:
        """By what the copies decide, in float64."""
        biases = [
            part
            for layer in self.layers
            for part in self._parts(None if layer.bias is None else layer.bias.detach().double())
        ]
        neurons = self.down.in_features
        return screen.scores(x.double(), *self.copies, neurons, *biases, None, self.name)

    def threshold(self, x: Tensor, share: float = 0.5) -> Tensor:
        """A threshold below which about this share of the scores lies, in the widest gap there: none is borderline."""
        values = self.scores(x).abs().flatten().sort().values
        at = int(share * len(values))
        values = values[max(0, at - len(values) // 10) : at + len(values) // 10]
        i = (values[1:] - values[:-1]).argmax()
        return ((values[i] + values[i + 1]) / 2).float()

    def out(self, x: Tensor, kept: Tensor, mean: Tensor | None, dtype: torch.dtype, order: Tensor) -> Tensor:
        """The output in a dtype, summed over the neurons in some order."""
        x = x.to(dtype)
        halves = []
        for layer in self.layers:
            bias = None if layer.bias is None else layer.bias.detach().to(dtype)
            halves += nn.functional.linear(x, value(layer, dtype), bias).chunk(
                2 if self.merged else 1, dim=-1
            )
        replaced = torch.zeros(()) if mean is None else mean
        hidden = torch.where(kept, self.act(halves[0]) * halves[1], replaced.to(dtype))[..., order]
        bias = None if self.down.bias is None else self.down.bias.detach().to(dtype)
        return nn.functional.linear(hidden, value(self.down, dtype)[:, order], bias)

    def truth_and_peers(
        self, x: Tensor, kept: Tensor, mean: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """In float64, and in x's dtype in three orders of summation."""
        n = self.down.in_features
        generator = torch.Generator().manual_seed(0)
        orders = [torch.arange(n), *(torch.randperm(n, generator=generator) for _ in range(2))]
        peers = [self.out(x, kept, mean, x.dtype, order) for order in orders]
        return self.out(x, kept, mean, torch.float64, orders[0]), peers


def held(module: nn.Module) -> list[PackedWeight | None]:
    """The copies that a sparse module holds, of gate and up."""
    pairs = [
        (module.screen_gate, module.screen_scale_gate),
        (module.screen_up, module.screen_scale_up),
    ]
    return [None if codes is None else PackedWeight(codes, scale) for codes, scale in pairs]


def same(ours: list[PackedWeight | None], theirs: list[PackedWeight | None]) -> bool:
    """Bit for bit (scales are never NaN here)."""
    pairs = zip(ours, theirs, strict=True)
    return all(
        a is not None
        and b is not None
        and torch.equal(a.codes, b.codes)
        and a.scale.dtype == b.scale.dtype == torch.bfloat16
        and torch.equal(a.scale, b.scale)
        for a, b in pairs
    )
