"""Equal programs have equal keys, whatever objects tracing made them of; different programs have different ones."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from aicf_jax.fingerprint import Uncacheable, program_key

X = jnp.ones(3)


def key(f, *args):
    # A new lambda each time: jax must trace again instead of handing out the same jaxpr.
    return program_key(jax.make_jaxpr(lambda *a: f(*a))(*(args or (X,))).jaxpr)


@jax.custom_vjp
def clipped(x):
    return x * 1


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, s):
    return x


scaled.defvjp(lambda x, s: (x, None), lambda s, _, g: (g * s,))


def local_rule(c):
    """A custom rule made anew at every call, as modules with closures do."""

    @jax.custom_jvp
    def h(x):
        return x + 1

    h.defjvp(lambda p, t: (h(*p), c * t[0]))
    return h


PROGRAMS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "custom_vjp": clipped,
    "custom_vjp with a static argument": lambda x: scaled(x, 0.25),
    "local custom_jvp": lambda x: local_rule(2.0)(x),
    "scan": lambda x: jax.lax.scan(lambda c, t: (jax.nn.relu(c + t), None), x, jnp.ones((3, 3))),
    "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "remat": lambda x: jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable)(x),
    "remat with names": lambda x: jax.checkpoint(
        jnp.sin, policy=jax.checkpoint_policies.save_only_these_names("a", "b")
    )(x),
    "dropout": lambda x: nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": jax.random.key(0)}),
    "vmap of a rule": jax.vmap(jax.nn.relu),
    "nested vmap of a rule": lambda x: jax.vmap(jax.vmap(jax.nn.relu))(x[None]),
    "inner jit": lambda x: jax.jit(lambda y: jnp.sin(y) * 2)(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_tracing_twice_gives_one_key(name):
    first, second = key(PROGRAMS[name]), key(PROGRAMS[name])
    assert first == second
    assert hash(first) == hash(second)


DIFFERENT = {
    "constant": (lambda x: x * 2.0, lambda x: x * 3.0),
    "static argument of a rule": (lambda x: scaled(x, 0.25), lambda x: scaled(x, 0.5)),
    "closure of a rule": (lambda x: local_rule(2.0)(x), lambda x: local_rule(3.0)(x)),
    "order of operands": (lambda x: x - 2 * x, lambda x: 2 * x - x),
    "parameter": (lambda x: x.sum(0, keepdims=True), lambda x: x.max(0, keepdims=True)),
    "policy": (
        lambda x: jax.checkpoint(jnp.sin)(x),
        lambda x: jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.everything_saveable)(x),
    ),
    "result": (lambda x: (x + 1, x + 2)[0], lambda x: (x + 1, x + 2)[1]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_programs_have_different_keys(name):
    a, b = DIFFERENT[name]
    assert key(a) != key(b)


@pytest.mark.parametrize("other", [jnp.ones(4), jnp.ones(3, jnp.bfloat16), jnp.ones((3, 1)), jnp.asarray(1.0)])
def test_types_are_part_of_the_key(other):
    assert key(lambda x: x * 2, X) != key(lambda x: x * 2, other)


def test_weak_types_are_part_of_the_key():
    assert key(lambda x: x * 2, 1.0) != key(lambda x: x * 2, jnp.float32(1.0))


def test_values_of_constants_are_not():
    a, b = jnp.arange(3.0), jnp.ones(3)
    assert key(lambda x: x * a) == key(lambda x: x * b)


def test_shared_bodies_are_walked_once():
    g = jax.jit(lambda x: jnp.sin(x))
    for _ in range(30):
        g = jax.jit(lambda x, g=g: g(x) + g(x * 0.5))
    key(g)  # 2**30 bodies if each call were walked


def test_a_rule_that_closes_over_a_tracer_cannot_be_cached():
    found = []

    def outer(s):
        @jax.custom_jvp
        def h(x):
            return x

        h.defjvp(lambda p, t: (p[0], s * t[0]))
        jaxpr = jax.make_jaxpr(lambda x: h(x) + 0)(X).jaxpr
        try:
            program_key(jaxpr)
        except Uncacheable as error:
            found.append(str(error))
        return s

    jax.jit(outer)(2.0)
    assert "tracer" in found[0]
