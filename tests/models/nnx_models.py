"""Small nnx models, each with one habit of real ones: what the nnx tests fuse."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.support import key, normal


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(7, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)])
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.features(x))

    def features(self, x):
        return nnx.relu(self.layers[1](nnx.gelu(self.layers[0](x))))


class DropoutMLP(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(7, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.gelu(self.inner(x))))


class Mixer(nnx.Module):
    """MLP-Mixer, https://arxiv.org/abs/2105.01601: one MLP over tokens (transposed), one over channels."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(4, rngs=rngs) for _ in range(2)])
        self.tokens = nnx.List([nnx.Linear(5, 6, rngs=rngs), nnx.Linear(6, 5, rngs=rngs)])
        self.channels = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])

    def __call__(self, x):
        h = jnp.swapaxes(self.norms[0](x), 1, 2)
        x = x + jnp.swapaxes(self.tokens[1](nnx.gelu(self.tokens[0](h))), 1, 2)
        return x + self.channels[1](nnx.gelu(self.channels[0](self.norms[1](x))))


class ResNetBlock(nnx.Module):
    def __init__(self, rngs):
        self.convs = nnx.List(
            [nnx.Conv(2, 4, (3, 3), use_bias=False, rngs=rngs), nnx.Conv(4, 4, (3, 3), use_bias=False, rngs=rngs)]
        )
        self.norms = nnx.List([nnx.BatchNorm(4, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.shortcut = nnx.Conv(2, 4, (1, 1), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        return self.head(nnx.relu(y + self.shortcut(x)).mean(axis=(1, 2)))


class DenseBatchNorm(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(7, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.norm(self.inner(x))))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class ScannedStack(nnx.Module):
    """Three blocks with stacked parameters under nnx.scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Block(rngs)

        self.blocks, self.head = create(rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.head(run(x, self.blocks))


class RematStack(nnx.Module):
    """Three blocks in a Python loop, each under nnx.remat."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


class LSTM(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(5, 6, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.rnn(x)))


class MixtureOfExperts(nnx.Module):
    """Top-2 router over three experts; https://arxiv.org/abs/1701.06538."""

    def __init__(self, rngs):
        self.router = nnx.Linear(4, 3, rngs=rngs)
        self.w1, self.b1 = nnx.Param(normal(1, 3, 4, 8, scale=0.4)), nnx.Param(normal(2, 3, 8))
        self.w2 = nnx.Param(normal(3, 3, 8, 4, scale=0.4))

    def __call__(self, x):
        weights, chosen = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        gates = jnp.einsum("tke,tk->te", jax.nn.one_hot(chosen, 3), weights)
        h = nnx.silu(jnp.einsum("td,edf->tef", x, self.w1[...]) + self.b1[...])
        return jnp.einsum("tef,efd,te->td", h, self.w2[...], gates)


# name: (module class, shape of the input, roundings on the longest path: sum of the reduction lengths + ~24 per
# activation or normalization; backward passes double it)
MODELS = {
    "mlp": (MLP, (5, 7), 100),
    "dropout_mlp": (DropoutMLP, (5, 7), 60),
    "mixer": (Mixer, (2, 5, 4), 200),
    "resnet_block": (ResNetBlock, (3, 4, 4, 2), 400),  # batch statistics sum over 48 positions, twice
    "dense_batch_norm": (DenseBatchNorm, (6, 7), 150),
    "scanned_stack": (ScannedStack, (5, 4), 300),
    "remat_stack": (RematStack, (5, 4), 300),
    "lstm": (LSTM, (3, 4, 5), 250),  # four steps
    "mixture_of_experts": (MixtureOfExperts, (6, 4), 100),
}


def create(name, train=False):
    """A new model, equal to every other one of that name, and an input for it."""
    cls, shape, _ = MODELS[name]
    model = cls(nnx.Rngs(key(0)))
    model.train() if train else model.eval()
    return model, normal(0, *shape)
