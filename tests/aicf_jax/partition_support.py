"""Programs on several devices whose kernels have stand-ins: where arrays lie, what is sent, what ran on the parts."""

import dataclasses
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import aicf_jax

#: Of what ran on parts there is a rounding in the compiled program: to more bits than bfloat16 has.
FORWARD_BITS, BACKWARD_BITS = 20, 19
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def rounded(x, bits):
    return None if x is None else jax.lax.reduce_precision(x.astype("float32"), 8, bits).astype(x.dtype)


def stand_in(kernel, library, **functions):
    """The kernel on a CPU, with other functions in its library's place, where nothing moves less than the equations."""

    def patched(f):
        def run(*args, **options):
            with mock.patch.multiple(library, **functions):
                return f(*args, **options)

        return f and run

    return dataclasses.replace(
        kernel, platforms=("cpu",), targets=None, run=patched(kernel.run), save=patched(kernel.save),
        partition=lambda op, saving: patched(kernel.partition(op, saving)), cost_bytes=lambda op: 0,
    )  # fmt: skip


def on_mesh(args, axes, specs):
    """Arrays split over the first devices, `axes`: names and sizes."""
    mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values())), tuple(axes))
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]


def value_and_gradients(f):
    """By all that is no integer and no truth value."""

    def both(*args):
        numbers = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

        def g(*xs):
            replaced = dict(zip(numbers, xs, strict=True))
            return f(*(replaced.get(i, x) for i, x in enumerate(args)))

        y, pull = jax.vjp(g, *(args[i] for i in numbers))
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))

    return jax.jit(both)


def compare(f, kernels, args, split, forward_only=False):
    """Values and gradients on several devices are those on one. Returns collectives, fused and of the plain program."""
    fused = aicf_jax.fuse(f, kernels=kernels, policy=aicf_jax.Policy(on_failure="raise"))
    program = jax.jit if forward_only else value_and_gradients
    compiled, plain = (program(g).lower(*split).compile() for g in (fused, f))
    text = compiled.as_text()
    assert f"mantissa_bits={FORWARD_BITS}" in text and (forward_only or f"mantissa_bits={BACKWARD_BITS}" in text)
    found, want = (jax.tree.leaves(x) for x in (compiled(*split), program(fused)(*args)))
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        # Parts of sums are rounded to 8 bits, and their sum.
        assert np.max(np.abs(a - b)) <= 4 * 2.0**-8 * np.max(np.abs(b))
    return [re.findall(rf" ({_COLLECTIVES})(?:-start)?\(", c.as_text()) for c in (compiled, plain)]
