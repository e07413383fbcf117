"""Up-aware thresholds: one value per neuron, larger where the up projection makes the neuron matter less."""

from __future__ import annotations

from torch import Tensor

from sparsemlp.calibration.histogram import Cumulative, LayerStatistics, divide, float32_at_least

__all__ = ["ROUNDS", "thresholds"]

ROUNDS = 2
"""Times that rms(u_j) is taken again over the tokens on which the last thresholds skip neuron j."""


def thresholds(layer: LayerStatistics, target: float, *, rounds: int = ROUNDS) -> Tensor:
    """t_j = τ / rms(u_j), τ the target's percentile of |a_j|·rms(u_j) over the layer.

    What skipping costs is |h_j| = |a_j|·|u_j|, but u_j is not known when the gate decides: its rms stands in. u_j is
    correlated with a_j, and what matters is u_j where the neuron is skipped, so the rms is first taken over all tokens
    and then `rounds` times over those the last thresholds skip.

    Args:
        layer: the layer's statistics.
        target: share of activations to skip, in (0, 1).
        rounds: how often the rms is conditioned on being skipped; 0 uses all tokens.

    Returns:
        t, (F,) float32. 0 where exact zeros alone reach the target. +inf, never active, only for a neuron whose u was
        exactly 0 on every calibration token: its h was 0 as well, so skipping it changed nothing there. A neuron that
        no threshold skips, or whose u is 0 only on the skipped tokens, keeps the rms over all tokens.

    Source: this package (docs/calibration.md); the same rule with ‖W_down[:, j]‖ in place of rms(u_j) is WINA's.
    """
    cumulative = Cumulative(layer)
    everywhere = (cumulative.total.sum_u2 / cumulative.total.tokens.clamp(min=1)).sqrt()
    rms = everywhere
    for _ in range(rounds):
        part = cumulative.below(divide(cumulative.scaled_quantile(target, rms), rms))
        usable = (part.tokens > 0) & (part.sum_u2 > 0)
        rms = (part.sum_u2 / part.tokens).sqrt().where(usable, everywhere)
    return float32_at_least(divide(cumulative.scaled_quantile(target, rms), rms))
