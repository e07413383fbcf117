"""Which share of an operator's weight bytes a call must read."""

from __future__ import annotations

__all__ = ["copy_share", "share_read"]


def copy_share(itemsize: int, bits: int = 4, group: int = 32) -> float:
    """Bytes of a low-bit copy for each byte of its weight, whose entries have `itemsize` bytes."""
    return (bits + 16 / group) / (8 * itemsize)


def share_read(
    op: str, union: float, channels: float = 1.0, indicator: str = "gate", copies: float = 0.0
) -> float:
    """The share of a dense call's weight bytes.

    Args:
        op: "gated_mlp", "mlp" or "sparse_linear".
        union: fraction of the neurons (of a linear layer's input channels) that some token of the call wants.
        channels: fraction of the input channels that the gate reads; below 1 under input sparsity.
        indicator: of a gated MLP. "gate" spares up and down rows, "up" gate and down rows (with input sparsity down
            rows only: the gate is then computed first, of every neuron), "product" down rows, "screen" all rows for
            the low-bit copies of gate and up.
        copies: by the screen, `copy_share`.
    """
    if op == "sparse_linear":
        return union
    if op == "mlp":
        return (1 + union) / 2
    if indicator == "screen":
        return (2 * copies + 3 * union) / 3
    gate, up = channels, 1.0
    if indicator == "gate":
        up = union
    elif indicator == "up" and channels == 1:
        gate = union
    return (gate + up + union) / 3
