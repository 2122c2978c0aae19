"""Spellings of softmax as people write them: functions of scores and an axis."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tests.aicf_jax.attention_support import normal

LOG2E = math.log2(math.e)


def peak(x, axis):
    return x.max(axis=axis, keepdims=True)


def manual(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e / e.sum(axis=axis, keepdims=True)


def keepdims_by_index(x, axis):
    e = jnp.exp(x - jnp.expand_dims(x.max(axis), axis))
    return e / jnp.expand_dims(jnp.sum(e, axis), axis)


def multiplied_by_the_reciprocal(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e * (1 / e.sum(axis=axis, keepdims=True))


def multiplied_by_reciprocal_power(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e.sum(axis=axis, keepdims=True) ** -1 * e


def stopped(x, axis):
    e = jnp.exp(x - lax.stop_gradient(peak(x, axis)))
    return e / jnp.sum(e, axis=axis, keepdims=True)


def exp_of_log_softmax(x, axis):
    return jnp.exp(jax.nn.log_softmax(x, axis=axis))


def minus_logsumexp(x, axis):
    return jnp.exp(x - jax.nn.logsumexp(x, axis=axis, keepdims=True))


def minus_logsumexp_by_hand(x, axis):
    m = peak(x, axis)
    lse = m + jnp.log(jnp.exp(x - m).sum(axis, keepdims=True))
    return jnp.exp(x - lse)


def minus_maximum_minus_log(x, axis):
    z = x - peak(x, axis)
    return jnp.exp(z - jnp.log(jnp.sum(jnp.exp(z), axis, keepdims=True)))


def negated_maximum(x, axis):
    e = jnp.exp(x + -peak(x, axis))
    return e / e.sum(axis=axis, keepdims=True)


def base_two_inside(x, axis):
    e = jnp.exp2((x - peak(x, axis)) * LOG2E)
    return e / e.sum(axis=axis, keepdims=True)


def base_two_outside(x, axis):
    e = jnp.exp2(x * LOG2E - peak(x, axis) * LOG2E)
    return e / e.sum(axis=axis, keepdims=True)


def guarded_maximum(x, axis):
    m = peak(x, axis)
    e = jnp.exp(x - jnp.where(jnp.isfinite(m), m, 0))
    return e / e.sum(axis=axis, keepdims=True)


def guarded_against_minus_infinity(x, axis):
    m = peak(x, axis)
    e = jnp.exp(x - jnp.where(m == -jnp.inf, 0, m))
    return e / e.sum(axis=axis, keepdims=True)


def never_below_minus_infinity(x, axis):
    e = jnp.exp(x - jnp.maximum(peak(x, axis), -jnp.inf))
    return e / e.sum(axis=axis, keepdims=True)


def broadcast_in_full(x, axis):
    e = jnp.exp(x - jnp.broadcast_to(peak(x, axis), x.shape))
    return e / jnp.broadcast_to(e.sum(axis=axis, keepdims=True), x.shape)


def summed_in_float32(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e / e.astype(jnp.float32).sum(axis=axis, keepdims=True).astype(x.dtype)


def float32_inside(x, axis):
    m = peak(x, axis).astype(jnp.float32)
    e = jnp.exp(x.astype(jnp.float32) - m)
    return (e / e.sum(axis=axis, keepdims=True)).astype(x.dtype)


SPELLINGS = [
    jax.nn.softmax,
    nn.softmax,
    nnx.softmax,
    jax.jit(jax.nn.softmax, static_argnames="axis"),
    manual,
    keepdims_by_index,
    multiplied_by_the_reciprocal,
    multiplied_by_reciprocal_power,
    stopped,
    exp_of_log_softmax,
    minus_logsumexp,
    minus_logsumexp_by_hand,
    minus_maximum_minus_log,
    negated_maximum,
    base_two_inside,
    base_two_outside,
    guarded_maximum,
    guarded_against_minus_infinity,
    never_below_minus_infinity,
    broadcast_in_full,
    summed_in_float32,
    float32_inside,
]
IDS = [f"{i}-{getattr(f, '__name__', 'f')}" for i, f in enumerate(SPELLINGS)]
X = normal(0, 3, 4, 5)
