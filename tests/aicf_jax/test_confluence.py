"""Rules in any order that their `after` allows give one normal form, and applied to it they change nothing.

The normal form of a program is its canonical nodes: operations, flags, inputs, outputs, the equations they cover and
their attributes.
"""

import contextlib
import functools
import importlib
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aicf_jax import _compat
from aicf_jax.graph import build
from aicf_jax.normalize import RULES, normalize
from tests.aicf_jax import norm_support
from tests.conv import test_conv_epilogue as convolutions
from tests.corpus import attention_spellings
from tests.linear_cross_entropy.spellings import SPELLINGS as LOSSES
from tests.linear_cross_entropy.spellings import totalled
from tests.norms import test_batch_norm as batch_norms
from tests.support import ACTIVATIONS, dense, dense_args

CASES = Path(attention_spellings.__file__).parent / "cases"


def programs_in(jaxpr):
    """A program and those inside of its equations."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                opened = _compat.open_jaxpr(inner)
                if opened is not None:
                    yield from programs_in(opened[0])


def traced(functions):
    """The programs of ``{name: (function, arguments)}`` that are long enough to hold anything."""
    found = []
    for f, args in functions.values():
        jaxpr = jax.make_jaxpr(f)(*args).jaxpr
        found += [_compat.without_constants(p) for p in programs_in(jaxpr) if 2 < len(p.eqns) < 200]
    return found


def losses():
    args = jnp.ones((4, 12, 5)), jnp.ones((5, 37)), jnp.zeros((4, 12), int)
    return {k: (lambda h, w, y, f=f: totalled(f)(h @ w, y), args) for k, f in LOSSES.items()}


def norms():
    x, g, b, z = norm_support.X, norm_support.G, norm_support.B, norm_support.Z
    found = {
        (v, r): (functools.partial(norm_support.layer_norm, variance=v, root=r), (x, g, b))
        for v in norm_support.VARIANCES
        for r in norm_support.ROOTS
    }
    near = {k: (f, (x, g, b, z)) for k, (f, _) in norm_support.NEAR_MISSES.items()}
    return {**found, **near, **{k: (f, (x, g, b, z)) for k, f in norm_support.BATCH_NORMS.items()}}


def after_convolutions():
    args = convolutions.arguments(convolutions.with_norm)
    found = {
        (k, bias): (convolutions.Program("silu", k, bias, False, (1, 1), "nothing"), args)
        for k in convolutions.NORMS
        for bias in ("none", "first", "over rows")
    }
    forms = {v: (batch_norms.normalized("silu", v), batch_norms.arguments()) for v in (batch_norms.clamped,)}
    return {**found, **forms}


def products():
    x, w, b = dense_args()
    gates = {
        ("gate", k): (lambda x, w, b, act=act: act(x @ w + b) * (x @ (2 * w)), (x, w, b))
        for k, act in ACTIVATIONS.items()
    }

    def two_of_one_value(x, w, b):
        z = x @ w + b
        return jax.nn.relu(z) + jax.nn.silu(z) * z

    more = {"two of one value": (two_of_one_value, (x, w, b))}
    return {**{k: (dense(k), (x, w, b)) for k in ACTIVATIONS}, **gates, **more}


def attentions():
    return {name: (f, args) for name, f, args, _ in attention_spellings.CASES}


def corpus(name):
    """The programs of one case file."""
    folder = str(CASES.parent)
    sys.path[:0] = [folder, str(CASES)]
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
            if getattr(module, "X64", False):
                stack.enter_context(jax.enable_x64(True))
            built = module.build()
            return traced(built if isinstance(built, dict) else {"": built})
    finally:
        sys.path.remove(folder)
        sys.path.remove(str(CASES))


GROUPS = {
    "losses": losses,
    "norms": norms,
    "convolutions": after_convolutions,
    "products": products,
    "attention": attentions,
}
QUICK = {"losses", "norms", "convolutions", "products", "attention", "a01_multi_user", "g03_gelu_variants"}
FILES = [
    *("a01_multi_user", "a02_conv_shared_bn_one_path", "a03_softmax_axis", "a05_transposes", "a07_mask_forms"),
    *("a08_norm_affine_shapes", "a10_shared_modulation", "a12_unit_dims", "b04_low_precision_masks", "e07_gqa"),
    *("e08_mask_shapes", "f10_mha_variants", "f13_conv_norm_variants", "g03_gelu_variants", "g04_large_logits"),
]


@functools.cache
def programs(name):
    return traced(GROUPS[name]()) if name in GROUPS else corpus(name)


def normal_form(jaxpr, rules):
    """As text: the fill of a mask may be NaN, which is not equal to itself."""
    graph = normalize(build(jaxpr), rules)
    return [repr((n.op, n.flags, n.inputs, n.outputs, n.covers, n.attrs)) for n in graph.nodes]


def allowed(preference):
    """The order of rules that takes, of those whose turn it may be, the one that is preferred."""
    left, order = list(preference), []
    while left:
        done = {rule.name for rule in order}
        rule = next(r for r in left if done.issuperset(r.after))
        left.remove(rule)
        order.append(rule)
    return tuple(order)


NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*GROUPS, *FILES)]


@pytest.mark.parametrize("name", NAMES)
def test_any_order_of_rules_gives_one_normal_form(name):
    expected = [normal_form(p, RULES) for p in programs(name)]

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(st.permutations(RULES))
    def holds(preference):
        order = allowed(preference)
        for jaxpr, want in zip(programs(name), expected, strict=True):
            assert normal_form(jaxpr, order) == want, [r.name for r in order]

    holds()


@pytest.mark.parametrize("name", NAMES)
def test_a_normal_form_is_left_alone(name):
    for jaxpr in programs(name):
        assert normal_form(jaxpr, (*RULES, *RULES)) == normal_form(jaxpr, RULES)


def test_the_order_numbers_respect_what_comes_after_what():
    order = {rule.name: rule.order for rule in RULES}
    for rule in RULES:
        assert set(rule.after) <= order.keys()
        assert all(order[name] < rule.order for name in rule.after), rule
