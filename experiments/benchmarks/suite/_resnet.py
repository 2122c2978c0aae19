"""The residual block that the train and eval programs share."""

import flax.linen as nn

from experiments.benchmarks.program import scaled
from experiments.benchmarks.suite._data import linen_variables, normal


class ResNetBlock(nn.Module):
    """conv, norm, relu, conv, norm, residual, relu (He et al. 2016, arXiv:1512.03385)."""

    channels: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train)(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        return nn.relu(x + nn.BatchNorm(use_running_average=not train)(y))


def block_and_args(seed, scale):
    """The module and `(params, batch_stats, x)`."""
    channels = scaled(32, scale)
    module = ResNetBlock(channels)
    x = normal(seed, scaled(16, scale), 16, 16, channels)
    variables = linen_variables(module, seed, x, train=False)
    return module, (variables["params"], variables["batch_stats"], x)
