"""A residual block with the running statistics: BatchNorm is affine and can be folded."""

from experiments.benchmarks.program import Program
from experiments.benchmarks.suite._resnet import block_and_args


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    module, args = block_and_args(seed, scale)

    def target(params, batch_stats, x):
        return module.apply({"params": params, "batch_stats": batch_stats}, x, train=False)

    return target, args


PROGRAM = Program("resnet_eval", build)
