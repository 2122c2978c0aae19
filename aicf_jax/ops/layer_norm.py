"""``layer_norm``: ``Y = (S - mean) / sqrt(variance + eps) * scale + bias`` over the trailing axes of ``S = X + R``.

Shapes: ``X``, ``R`` and ``Y`` are one, scale and bias any that vary along the normalized axes only. Residual, scale and
bias are optional; S may be a further result. The variance is ``E[(S - mean)^2]`` or ``E[S^2] - mean^2``, whichever the
equations compute, perhaps clamped at 0. Accumulation: as in the equations; what the backward keeps is float32 or wider.
Memory moved by one kernel: inputs read once, results written once; as written each equation reads and writes.

Backward, from S (or X and R) and for each row mean and ``rstd = 1 / sqrt(variance + eps)``, in float32 or wider::

    N = (S - mean) rstd     g = dY scale     dscale = sum dY N     dbias = sum dY
    dX = dR = rstd (g - E[g] - a N E[g N]) + dS

with a = 1, or the derivative of the clamp (1/2 at a variance of 0, 0 below). It follows from the algebra in which the
norm was recognized: all spellings are one function of S, so their derivatives are one too.

Ba, Kiros and Hinton, "Layer normalization", 2016.
"""

from __future__ import annotations

from aicf_jax.ops._norm import norm

OP = norm("layer_norm", 5)
