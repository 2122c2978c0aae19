"""Random data and parameters for the programs."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal values; equal seeds give equal values on every platform."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def random_leaves(shapes: Any, seed: int) -> Any:
    """Arrays for a tree of shapes of a flax model, none of them constant.

    Scales and variances are `1 + 0.1 n`, biases and means `0.1 n`, everything else `n / sqrt(fan_in)`, n standard
    normal. Flax starts biases as zeros and scales as ones, and a compiler or a kernel may be fast, or right, for just
    those; compiling the initializers of a deep model would also take longer than timing it. fan_in counts every axis
    but the last, which is too much for stacked or multi-head kernels: their outputs are smaller, never exploding.
    """
    generator = np.random.default_rng(seed)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        values = generator.standard_normal(leaf.shape, dtype=np.float32)
        if "scale" in name or "var" in name:
            values = 1 + 0.1 * values
        elif "bias" in name or "mean" in name:
            values = 0.1 * values
        else:
            values = values / math.sqrt(math.prod(leaf.shape[:-1]))
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def linen_variables(module: nn.Module, seed: int, *inputs: Any, **kwargs: Any) -> dict[str, Any]:
    """All variable collections of a linen module, filled by `random_leaves`; nothing of the model is run."""
    key = jax.random.key(seed)
    shapes = jax.eval_shape(lambda *arrays: module.init({"params": key, "dropout": key}, *arrays, **kwargs), *inputs)
    return random_leaves(shapes, seed + 1)


def linen_program(module: nn.Module, seed: int, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
    """`(target, args)` of a module with parameters only: `target(params, *inputs)` applies it."""
    params = linen_variables(module, seed, *inputs)["params"]

    def target(params, *inputs):
        return module.apply({"params": params}, *inputs)

    return target, (params, *inputs)
