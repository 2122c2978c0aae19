"""Small linen models, each with one habit of real ones: what the linen tests fuse."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

# uniform instead of flax's truncated normal, which takes most of the time that tests of `init` spend compiling
Dense = functools.partial(nn.Dense, kernel_init=nn.initializers.lecun_uniform())


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.gelu(Dense(8)(x))
        x = nn.relu(Dense(6)(x))
        return Dense(3)(x)


class DropoutMLP(nn.Module):
    rate: float = 0.4

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        x = nn.gelu(Dense(16)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return Dense(3)(x) * scale


class SetupMLP(nn.Module):
    def setup(self):
        self.encoder, self.decoder = Dense(6), Dense(4, use_bias=False)

    def __call__(self, x, train=False):
        return self.decode(self.encode(x))

    def encode(self, x):
        return nn.silu(self.encoder(x))

    def decode(self, h):
        return nn.sigmoid(self.decoder(h))


class Mixer(nn.Module):
    """MLP-Mixer, https://arxiv.org/abs/2105.01601: one MLP over tokens (transposed), one over channels."""

    @nn.compact
    def __call__(self, x, train=False):
        def mlp(y, width):
            return Dense(y.shape[-1])(nn.gelu(Dense(width)(y)))

        y = nn.LayerNorm()(x)
        x = x + jnp.swapaxes(mlp(jnp.swapaxes(y, 1, 2), 6), 1, 2)
        x = x + mlp(nn.LayerNorm()(x), 8)
        return Dense(3)(x.mean(axis=1))


class ResNetBlock(nn.Module):
    channels: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(nn.Conv, self.channels, use_bias=False, kernel_init=nn.initializers.lecun_uniform())
        y = nn.relu(norm()(conv((3, 3))(x)))
        y = norm(scale_init=nn.initializers.constant(0.7))(conv((3, 3))(y))
        shortcut = conv((1, 1))(x)
        return Dense(3)(nn.relu(y + shortcut).mean(axis=(1, 2)))


class DenseBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(Dense(6)(x))
        return Dense(3)(nn.relu(x))


class ScannedStack(nn.Module):
    """Three blocks with stacked parameters, rematerialized in the backward pass."""

    @nn.compact
    def __call__(self, x, train=False):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                h = nn.gelu(Dense(8)(nn.LayerNorm()(x)))
                return x + Dense(x.shape[-1])(h), None

        stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = stack()(x, None)
        return Dense(3)(x)


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        cell = nn.scan(
            nn.OptimizedLSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )(6)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        _, y = cell(carry, x)
        return Dense(3)(nn.relu(y))


class MixtureOfExperts(nn.Module):
    """Top-2 router over three experts; https://arxiv.org/abs/1701.06538."""

    @nn.compact
    def __call__(self, x, train=False):
        experts, width, d = 3, 8, x.shape[-1]
        kernel = nn.initializers.lecun_uniform()
        weights, chosen = jax.lax.top_k(nn.softmax(Dense(experts, name="router")(x)), 2)
        gates = jnp.einsum("tke,tk->te", jax.nn.one_hot(chosen, experts), weights)
        w1 = self.param("w1", kernel, (experts, d, width))
        b1 = self.param("b1", nn.initializers.uniform(), (experts, width))
        w2 = self.param("w2", kernel, (experts, width, d))
        h = nn.silu(jnp.einsum("td,edf->tef", x, w1) + b1)
        return jnp.einsum("tef,efd,te->td", h, w2, gates)


# name: (module, shape of the input, roundings on the longest path: sum of the reduction lengths + ~24 per activation
# or normalization; backward passes double it)
MODELS = {
    "mlp": (MLP(), (5, 7), 100),
    "dropout_mlp": (DropoutMLP(), (5, 7), 60),
    "setup_mlp": (SetupMLP(), (5, 7), 60),
    "mixer": (Mixer(), (2, 5, 4), 200),
    "resnet_block": (ResNetBlock(), (3, 4, 4, 2), 400),  # batch statistics sum over 48 positions, twice
    "dense_batch_norm": (DenseBatchNorm(), (6, 7), 150),
    "scanned_stack": (ScannedStack(), (5, 4), 300),
    "lstm": (LSTM(), (3, 4, 5), 250),  # four steps
    "mixture_of_experts": (MixtureOfExperts(), (6, 4), 100),
}
