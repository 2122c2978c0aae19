"""``rms_norm``: ``Y = S / sqrt(E[S^2] + eps) * scale + bias`` over the trailing axes of ``S = X + R``.

As `ops.layer_norm` without a mean: residual, scale and bias are optional, S may be a further result. Backward, from
``rstd = 1 / sqrt(E[S^2] + eps)`` of each row::

    N = S rstd     g = dY scale     dscale = sum dY N     dbias = sum dY     dX = dR = rstd (g - N E[g N]) + dS

Zhang and Sennrich, "Root mean square layer normalization", 2019.
"""

from __future__ import annotations

from aicf_jax.ops._norm import norm

OP = norm("rms_norm", 6)
