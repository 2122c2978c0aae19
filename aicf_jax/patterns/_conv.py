"""What the patterns of a convolution share: what may stand between its parts."""

from aicf_jax.pattern import AFFINE, BIAS, CAST, LAYOUT, opt, shared, star

BETWEEN = star(CAST | LAYOUT)

#: A convolution's result that others use too: followed all the same, to say what stands in the way.
SHARED_BETWEEN = star(shared(CAST | LAYOUT))
SHARED_BIAS = opt(shared(BIAS))
SHARED_AFFINE = opt(shared(AFFINE))
