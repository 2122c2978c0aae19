"""How far two loss curves of one model may lie apart when they differ only by the order of float32 sums.

One step. Loss and gradient pass through chains of L additions. In the worst case a sum of n terms is off by n u
relative to their sizes (u = 2^-24); its errors behave like independent ones, so it stays below lambda sqrt(n) u but
with a probability of 2 exp(-lambda^2 / 2) (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
2019). Both programs err:

    eps = 2 lambda sqrt(L) u, lambda = 8;   worst case: 2 L u.

Many steps. A gradient g of a leaf with n entries, off by eps ||g||_2 / sqrt(n) in each, moves adamw's step, which
divides by the size of g, by lr times twice that over |g| at most (numerator and denominator), hence the loss by
2 lr eps sqrt(n) ||g||_2 to first order. With the mass M = sum over leaves of sqrt(n) ||g||_2 (at least the 1-norm):

    |loss_fused(t) - loss_unfused(t)| <= eps loss(t) + 2 eps sum_{s < t} lr_s M_s.

What curvature adds is not in the formula; its room is the gap between the sum of absolute values over all entries
and what independent errors of either sign add up to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.text_lm.config import TextConfig

UNIT_ROUNDOFF = 2.0**-24
LAMBDA = 8.0


def chain_length(config: TextConfig, vocabulary: int) -> int:
    """Additions behind one entry of a gradient.

    Forward and backward each, a layer: four projections and two norms over the width, two products over 4 width and
    width, the scores over width / heads, the softmax and its product over the sequence; the head over width and
    vocabulary. The gradient of a weight then sums over batch x sequence positions.
    """
    layer = 11 * config.width + config.width // config.heads + 2 * config.sequence
    return 2 * (config.layers * layer + config.width + vocabulary) + config.batch * config.sequence


def usual_error(config: TextConfig, vocabulary: int) -> float:
    """The relative error eps = 2 lambda sqrt(L) u of one step."""
    return 2 * LAMBDA * float(np.sqrt(chain_length(config, vocabulary))) * UNIT_ROUNDOFF


def gradient_bound(config: TextConfig, vocabulary: int) -> float:
    """The worst case 2 L u, for gradients at the same parameters.

    The worst case, because a leaf that is zero in exact arithmetic (the bias of a key projection: softmax does not see
    it) holds nothing but noise, and is compared too (see `compare.relative_difference`).
    """
    return 2 * chain_length(config, vocabulary) * UNIT_ROUNDOFF


def curve_bounds(
    error: float, losses: Sequence[float], learning_rates: Sequence[float], masses: Sequence[float]
) -> np.ndarray:
    """The bound of every step (steps,): `error` is eps, the others are values of the unfused run at each step."""
    moved = np.cumsum([0.0, *(rate * mass for rate, mass in zip(learning_rates, masses, strict=True))])[:-1]
    return error * np.asarray(losses) + 2 * error * moved


def curve_differences(unfused: Sequence[float], fused: Sequence[float]) -> np.ndarray:
    """`|fused - unfused|` at every step; infinite where either is not finite."""
    difference = np.abs(np.asarray(fused, float) - np.asarray(unfused, float))
    return np.where(np.isfinite(difference), difference, np.inf)
