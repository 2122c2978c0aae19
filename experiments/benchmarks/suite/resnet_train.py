"""A residual block in training: BatchNorm with the statistics of the batch, which are updated."""

from experiments.benchmarks.program import Program
from experiments.benchmarks.suite._resnet import block_and_args


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    module, args = block_and_args(seed, scale)

    def target(params, batch_stats, x):
        variables = {"params": params, "batch_stats": batch_stats}
        output, updates = module.apply(variables, x, train=True, mutable=["batch_stats"])
        return output, updates["batch_stats"]

    return target, args


PROGRAM = Program("resnet_train", build, has_aux=True)
