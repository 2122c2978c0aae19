"""The families layer_norm and rms_norm: what becomes one operation, what is refused, and what is said of it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import aicf_jax
from aicf_jax import ops
from aicf_jax.pattern import LAYER_NORM, RESIDUAL, Pattern, opt, shared, star
from tests.aicf_jax.norm_support import KERNELS, NEAR_MISSES, B, G, X, Z, layer_norm, mean, rms_norm

NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}


def fusions(f, *args, **options):
    return [(x.op, x.attrs) for x in aicf_jax.explain(f, *args, **options).fusions]


def attrs_of(f, *args):
    ((_, attrs),) = fusions(f, *args)
    return dict(pair.split("=") for pair in attrs.split())


# -- what is one operation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_operation(name):
    report = aicf_jax.explain(NORMS[name], X, G, B)
    (fusion,) = report.fusions
    assert (fusion.op, fusion.pattern, fusion.kernel, report.refusals) == (name, name, "xla", ())
    assert fusion.bytes_after == 2 * X.nbytes + G.nbytes + B.nbytes
    assert fusion.bytes_before > fusion.bytes_after and fusion.launches_before > fusion.launches_after == 1
    assert f"{name}_grad" in fusion.backward


def test_attributes():
    attrs = attrs_of(lambda x, g, b: layer_norm(x, g, b, variance="from moments, clamped"), X, G, B)
    assert attrs == {
        "axes": "1",
        "eps": "1e-05",
        "variance": "moments",
        "clamped": "1",
        "statistics": "float32",
        "has_scale": "1",
        "scale_axes": "1",
        "has_bias": "1",
        "bias_axes": "1",
        "has_residual": "0",
    }
    attrs = attrs_of(lambda x: layer_norm(x, G, B, affine="neither"), X)
    assert (attrs["has_scale"], attrs["has_bias"], attrs["scale_axes"]) == ("0", "0", "0")


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sum_used", [False, True])
def test_a_residual_addition_belongs_to_the_norm(name, sum_used):
    def block(x, z, g, b):
        s = x + z
        return (NORMS[name](s, g, b), s) if sum_used else NORMS[name](s, g, b)

    report = aicf_jax.explain(block, X, Z, G, B)
    (fusion,) = report.fusions
    assert "has_residual=1" in fusion.attrs and report.refusals == ()
    read = 2 * X.nbytes + G.nbytes + B.nbytes
    assert fusion.bytes_after == read + (2 if sum_used else 1) * X.nbytes
    assert fusion.backward.startswith("dX, dR, dscale, dbias = ")
    assert ("S, " in fusion.backward, "dS" in fusion.backward) == (sum_used, sum_used)


def test_two_norms_of_one_sum():
    def parallel(x, z, g, b):
        s = x + z
        return layer_norm(s, g, b), layer_norm(s, b, g), s

    found = fusions(parallel, X, Z, G, B)
    assert [op for op, _ in found] == ["layer_norm"] * 2
    assert ["has_residual=1" in attrs for _, attrs in found] == [True, False]


def test_a_scale_that_rests_on_the_sum():
    def modulated(x, z, b):
        s = x + z
        return layer_norm(s, jnp.sum(s, (0, 1)), b)

    assert "has_residual=0" in fusions(modulated, X, Z, B)[0][1]


def test_blocks_of_a_transformer():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = x + nn.Dense(6)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(x))))
            return nn.RMSNorm()(x)

    module = Block()
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    found = fusions(module, variables, X)
    assert [op for op, _ in found if op.endswith("norm")] == ["layer_norm", "layer_norm", "rms_norm"]
    assert ["has_residual=1" in attrs for op, attrs in found if op.endswith("norm")] == [False, True, True]


def test_fusing_twice_changes_nothing():
    once = aicf_jax.fuse(layer_norm)
    assert fusions(once, X, G, B) == fusions(layer_norm, X, G, B)
    assert fusions(aicf_jax.fuse(lambda *a: once(*a)), X, G, B) == fusions(layer_norm, X, G, B)


def test_inside_of_control_flow():
    def scanned(x, g, b):
        return lax.scan(lambda c, _: (layer_norm(c, g, b) + c, None), x, None, length=3)[0]

    assert [op for op, _ in fusions(scanned, X, G, B)] == ["layer_norm"]
    assert [op for op, _ in fusions(jax.checkpoint(layer_norm), X, G, B)] == ["layer_norm"]


def test_the_report(golden):
    def block(x, z, g, b):
        s = x + z
        return layer_norm(s, g, b), s

    lines = str(aicf_jax.explain(block, X, Z, G, B)).splitlines()
    golden("\n".join(line for line in lines if " at " not in line))


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_once_and_left_as_written(name):
    f, code = NEAR_MISSES[name]
    report = aicf_jax.explain(f, X, G, B, Z)
    assert report.fusions == ()
    (refusal,) = report.refusals
    assert (refusal.code, refusal.stage) == (code, "match")
    assert refusal.expected and refusal.found and "norm_support.py" in refusal.site
    assert "fused" not in report.program


def codes(f, *args, **options):
    return [r.code for r in aicf_jax.explain(f, *args, **options).refusals]


@pytest.mark.parametrize("f", [layer_norm, lambda x, g, b: layer_norm(x + jnp.sin(x), g, b)])
def test_illegal_matches_are_refused_once(f):
    assert codes(f, X, G, B, policy=aicf_jax.Policy(numerics="bitwise")) == ["numerics"]
    assert codes(f, X[:0], G, B) == ["empty"]


def test_other_contexts():
    def f(x, g, b):
        with set_xla_metadata(key="value"):
            return layer_norm(x, g, b)

    assert codes(f, X, G, B) == ["context"]


def test_whole_numbers_are_not_normalized():
    assert fusions(lambda x, g, b: layer_norm(x.astype(jnp.float32), g, b), X.astype(jnp.int32), G, B) != []
    assert fusions(lambda x: x // (1 + mean(x).astype(jnp.int32)), X.astype(jnp.int32)) == []


# -- the mechanism ---------------------------------------------------------------------------------------


def test_a_sequence_may_start_with_what_need_not_be_there():
    pattern = Pattern("mine", (opt(shared(RESIDUAL)), LAYER_NORM), rewrite=ops.layer_norm)
    assert pattern.prefix == 1
    assert fusions(lambda x, z, g, b: layer_norm(x + z, g, b), X, Z, G, B, patterns=(pattern,))
    with pytest.raises(ValueError, match="one test cannot be optional"):
        Pattern("none", (opt(LAYER_NORM),), rewrite=ops.layer_norm)
    with pytest.raises(ValueError, match="one test cannot be optional"):
        Pattern("star", (star(RESIDUAL), LAYER_NORM), rewrite=ops.layer_norm)


def test_a_kernel_for_a_norm_is_taken_forward_and_backward():
    report = aicf_jax.explain(lambda x, z, g, b: layer_norm(x + z, g, b), X, Z, G, B, kernels=KERNELS)
    (fusion,) = report.fusions
    assert fusion.kernel == "plain_layer_norm"
    assert "plain_layer_norm_grad" in fusion.backward


def test_norms_of_a_pattern_without_one():
    pattern = Pattern("wrong", (RESIDUAL,), rewrite=ops.rms_norm)
    with pytest.raises(aicf_jax.FuseError, match="sequence needs LAYER_NORM"):
        aicf_jax.explain(
            lambda x, z, g, b: layer_norm(x + z, g, b),
            X,
            Z,
            G,
            B,
            patterns=(pattern,),
            policy=aicf_jax.Policy(on_failure="raise"),
        )
