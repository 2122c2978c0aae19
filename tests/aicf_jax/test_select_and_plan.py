"""Stage 6 and the ExecPlan: requirements against capabilities, ranking, order, lifetimes, in-place marks."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from aicf_jax import FuseError, Kernel, Policy
from aicf_jax.cache import build_plan
from aicf_jax.fuse import make_context
from aicf_jax.kernels import XLA, triton_attention_grad
from aicf_jax.select import cost_of
from tests.support import EVERY_GEMM_EPILOGUE

X, W, B = jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones(6)
ALL = EVERY_GEMM_EPILOGUE


def dense(x, w, b):
    return jax.nn.relu(x @ w + b)


def kernel(name="mine", **changes):
    base = Kernel(name, "gemm_epilogue", ("cpu",), ALL, lambda op, x, w, b: (dense(x, w, b),))
    return dataclasses.replace(base, **changes)


def explain(*kernels, f=dense, args=(X, W, B), **policy):
    return aicf_jax.explain(f, *args, kernels=aicf_jax.KERNELS + kernels, policy=Policy(**policy))


class TestSelection:
    def test_xla_is_always_a_candidate(self):
        assert explain().fusions[0].kernel == XLA

    def test_a_capable_kernel_that_moves_fewer_bytes_wins(self):
        assert explain(kernel()).fusions[0].kernel == "mine"

    def test_a_kernel_that_moves_more_bytes_than_the_equations_loses(self):
        assert explain(kernel(cost_bytes=lambda op: 1 << 40)).fusions[0].kernel == XLA

    def test_the_cheaper_of_two_wins(self):
        cheap = kernel("cheap", cost_bytes=lambda op: 1)
        assert explain(kernel(), cheap).fusions[0].kernel == "cheap"

    def test_what_a_kernel_moves_and_launches_by_its_own_account_is_reported(self):
        (mine,) = explain(kernel(cost_bytes=lambda op: 9, launches=lambda op: len(op.steps))).fusions
        assert (mine.bytes_after, mine.launches_before, mine.launches_after) == (9, 3, 3)
        (mine,) = explain(kernel(cost_bytes=lambda op: 9, moved_bytes=lambda op: 7, launches=2)).fusions
        assert (mine.bytes_after, mine.launches_after) == (7, 2)

    def test_kernels_are_chosen_for_each_platform(self):
        cuda = kernel("on_gpu", platforms=("cuda",))
        assert dict(explain(cuda).fusions[0].kernels) == {"cpu": XLA, "cuda": "on_gpu"}
        assert dict(explain(cuda, target="h200").fusions[0].kernels) == {"cuda": "on_gpu"}
        assert explain(cuda, target="h200").fusions[0].kernel == "on_gpu"
        assert explain(cuda, target="cpu").fusions[0].kernel == XLA

    @pytest.mark.parametrize(
        ("changes", "policy", "code", "expected", "found"),
        [
            ({"capabilities": {**ALL, "activation": {"gelu_tanh"}}}, {}, "capability", "'gelu_tanh'", "'relu'"),
            ({"capabilities": {}}, {}, "capability", "activation declared", "'relu'"),
            ({"deterministic": False}, {"deterministic": True}, "deterministic", "a deterministic kernel", "is not"),
            ({"numerics": "approximate"}, {}, "numerics", "reassociated or stricter", "approximate"),
        ],
    )
    def test_refusals_say_what_was_expected_and_found(self, changes, policy, code, expected, found):
        report = explain(kernel(**changes), **policy)
        (refusal,) = report.refusals
        assert (refusal.stage, refusal.code) == ("select", code)
        assert expected in refusal.expected and found in refusal.found
        assert report.fusions[0].kernel == XLA

    def test_equal_operations_are_one_key(self):
        report = [explain(kernel()).fusions[0].attrs for _ in range(2)]
        assert report[0] == report[1]
        f = aicf_jax.fuse(lambda x, w, b: dense(dense(x, w, b), w.T @ w @ w.T @ w, b), kernels=aicf_jax.KERNELS)
        eqns = [e for e in jax.make_jaxpr(f)(X, W, B).eqns if e.primitive.name == "fused"]
        assert len(eqns) == 2 and eqns[0].params["op"] != eqns[1].params["op"]  # other shapes
        g = aicf_jax.fuse(lambda x, w, b: (dense(x, w, b), dense(x + 1, w, b)))
        eqns = [e for e in jax.make_jaxpr(g)(X, W, B).eqns if e.primitive.name == "fused"]
        assert eqns[0].params["op"] == eqns[1].params["op"]
        assert hash(eqns[0].params["op"]) == hash(eqns[1].params["op"])


class TestKernelFailures:
    def test_fall_back_to_the_equations_and_are_logged_once(self, caplog):
        def broken(op, *args):
            raise RuntimeError("no such instruction (test)")

        f = aicf_jax.fuse(dense, kernels=aicf_jax.KERNELS + (kernel(run=broken),))
        for _ in range(3):
            assert jnp.array_equal(jax.jit(lambda *a: f(*a))(X, W, B), dense(X, W, B))
        assert sum("no such instruction (test)" in r.message for r in caplog.records) == 1

    def test_are_refusals_in_the_report(self):
        report = explain(kernel(run=lambda op, *args: (jnp.zeros((2, 2)),)))
        (refusal,) = report.refusals
        assert (refusal.stage, refusal.code) == ("select", "kernel_failed")
        assert "expected results" in refusal.found
        assert report.fusions[0].kernel == XLA

    def test_a_kernel_for_an_operation_nobody_knows_is_named(self):
        message = r"mine implements 'gemm_epilog', expected one of \['attention', 'attention_grad', .*'gemm_ep"
        with pytest.raises(ValueError, match=message):
            aicf_jax.fuse(dense, kernels=(kernel(op="gemm_epilog"),))

    def test_raise_when_asked_to(self):
        f = aicf_jax.fuse(
            dense,
            kernels=aicf_jax.KERNELS + (kernel(run=lambda op, x, w, b: (x @ w,) * 2),),
            policy=Policy(on_failure="raise"),
        )
        with pytest.raises(FuseError, match="kernel mine: expected results"):
            f(X, W, B)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"name": "xla"}, "expected a name other than 'xla'"),
            ({"platforms": ()}, "platforms"),
            ({"platforms": ("vax",)}, "vax"),
            ({"numerics": "sloppy"}, "sloppy"),
        ],
    )
    def test_invalid_kernels_cannot_be_built(self, changes, message):
        with pytest.raises(ValueError, match=message):
            kernel(**changes)


def test_cost_counts_what_each_step_reads_and_writes():
    (found,) = plan_of(dense, X, W, B).rewritten.fusions
    cost = cost_of(found.op)
    x, w, b, y = 8 * 4 * 4, 4 * 6 * 4, 6 * 4, 8 * 6 * 4
    assert cost.bytes_before == (x + w + y) + (y + b + y) + (y + y)
    assert cost.bytes_after == x + w + b + y
    assert (cost.launches_before, cost.launches_after) == (3, 1)


def plan_of(f, *args):
    context = make_context(Policy(), aicf_jax.FUSION_PATTERNS, aicf_jax.KERNELS)
    return build_plan(jax.make_jaxpr(f)(*args).jaxpr, context)


def names(plan):
    return [e.primitive.name for e in plan.rewritten.plan.eqns]


class TestExecPlan:
    def test_dead_code_is_gone_and_effects_stay(self):
        def f(x, w, b):
            _ = jnp.sin(x) + jnp.cos(x)
            jax.debug.print("{}", b)
            return dense(x, w, b)

        assert names(plan_of(f, X, W, B)) == ["debug_print", "fused"] or names(plan_of(f, X, W, B)) == [
            "debug_callback",
            "fused",
        ]

    def test_a_fused_operation_waits_for_its_last_input(self):
        def f(x, w, b):
            y = x @ w
            return jax.nn.relu(y + jnp.cumsum(b * 2))

        assert names(plan_of(f, X, W, B))[-1] == "fused"
        assert jnp.array_equal(jax.jit(aicf_jax.fuse(f))(X, W, B), jax.jit(f)(X, W, B))

    def test_calls_nothing_was_fused_across_are_calls_again(self):
        plan = plan_of(lambda x: jax.nn.silu(x), X)
        assert names(plan) in (["jit"], ["pjit"])

    def test_a_broadcast_used_elsewhere_is_kept_for_the_others(self):
        def f(x, w, b):
            wide = jnp.broadcast_to(b, (8, 6))
            return jax.nn.relu(x @ w + wide), wide * 2

        assert names(plan_of(f, X, W, B)) == ["broadcast_in_dim", "fused", "mul"] or "fused" in names(
            plan_of(f, X, W, B)
        )
        got, want = jax.jit(aicf_jax.fuse(f))(X, W, B), jax.jit(f)(X, W, B)
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, got, want)))

    def test_lifetimes_run_from_definition_to_last_use(self):
        plan = plan_of(lambda x: jnp.cos(jnp.sin(x)) + jnp.sin(x) * 0, X).rewritten.plan
        (argument,) = plan.arguments
        assert plan.lifetimes[argument][0] == -1
        for k, eqn in enumerate(plan.eqns):
            assert plan.lifetimes[eqn.outvars[0]][0] == k
        assert plan.lifetimes[plan.results[0]][1] == len(plan.eqns)

    def test_in_place_only_where_the_operand_is_dead_and_not_the_callers(self):
        plan = plan_of(lambda x: jnp.cos(jnp.sin(x)), X).rewritten.plan
        assert plan.in_place == {1: {0: 0}}  # cos over sin's result; never over the argument

    def test_not_in_place_when_the_operand_is_used_later_or_escapes(self):
        later = plan_of(lambda x: (lambda s: jnp.cos(s) * s)(jnp.sin(x)), X).rewritten.plan
        assert 1 not in later.in_place
        escapes = plan_of(lambda x: (lambda s: (jnp.cos(s), s))(jnp.sin(x)), X).rewritten.plan
        assert 1 not in escapes.in_place

    def test_not_in_place_of_another_type_or_of_a_products_operand(self):
        cast = plan_of(lambda x: jnp.sin(x).astype(jnp.bfloat16), X).rewritten.plan
        assert 1 not in cast.in_place
        square = plan_of(lambda x: jnp.tanh(jnp.sin(x) @ jnp.cos(x)), jnp.ones((4, 4))).rewritten.plan
        assert 2 not in square.in_place

    def test_peak_bytes(self):
        n = 8 * 4 * 4
        assert plan_of(lambda x: jnp.cos(jnp.sin(x)), X).rewritten.plan.peak_bytes() == 3 * n


# -- kernels for some machines ---------------------------------------------------------------------------------------


HOPPER = kernel("hopper", platforms=("cuda",), targets=("h100", "h200"))


@pytest.mark.parametrize(
    ("target", "chosen", "codes"),
    [
        ("h200", "hopper", []),
        ("h100", "hopper", []),
        ("a100", "xla", ["target"]),
        ("b200", "xla", ["target"]),
        ("gpu", "xla", ["target"]),
        # Nobody asked for Hopper, and no GPU is here.
        (None, "xla", []),
        ("cpu", "xla", []),
    ],
)
def test_a_kernel_for_some_machines_needs_one_of_them(target, chosen, codes):
    report = aicf_jax.explain(dense, X, W, B, policy=Policy(target=target), kernels=(HOPPER,))
    (fusion,) = report.fusions
    assert dict(fusion.kernels).get("cuda", "xla") == chosen
    assert [r.code for r in report.refusals] == codes
    if codes:
        (refusal,) = report.refusals
        named = {"gpu": ("a target that names the machine, one of h100, h200", "'gpu', which names none", "")}
        told = named.get(target, ("one of the machines h100, h200", target, "hopper"))
        assert (refusal.expected, refusal.found, refusal.kernel) == told
        assert f"kernel {refusal.kernel} at" in str(refusal) or not refusal.kernel


def test_a_machine_of_another_platform_is_refused():
    with pytest.raises(ValueError, match=r"Kernel\('hopper', targets=...\): expected machines of its platforms, found"):
        dataclasses.replace(HOPPER, targets=("cpu",))


class TestLaunches:
    """Kernels that are several say so."""

    @staticmethod
    def attention_gradient(*wanted):
        x, b = jax.ShapeDtypeStruct((2, 1024, 8, 64), "bfloat16"), jax.ShapeDtypeStruct((2, 8, 1024, 1024), "bfloat16")
        policy = Policy(target="h200")

        def attention(q, k, v, bias):
            return jax.nn.dot_product_attention(q, k, v, bias)

        def gradient(*args):
            return jax.grad(lambda *a: aicf_jax.fuse(attention, policy=policy)(*a).astype("float32").sum(), wanted)(
                *args
            )

        found = aicf_jax.explain(gradient, x, x, x, b, policy=policy).fusions
        return next(f for f in found if f.op == "attention_grad")

    def test_of_the_gradient_of_attention(self):
        plain = self.attention_gradient(0, 1, 2)
        with_bias = self.attention_gradient(0, 1, 2, 3)
        assert [f.kernel for f in (plain, with_bias)] == ["mosaic_attention_grad"] * 2
        assert (plain.launches_after, with_bias.launches_after) == (2, 3)
        assert with_bias.bytes_after > plain.bytes_after > 8 * 2 * 2 * 1024 * 8 * 64  # Q, K, V, Y, their cotangents
        assert triton_attention_grad.KERNEL.launches == 3

    def test_of_a_vocabulary_loss(self):
        """Of each block of classes the logits' gradient, and a product for h and one for W."""
        args = [jax.ShapeDtypeStruct(s, d) for s, d in (((2048, 256), "bfloat16"), ((256, 32768), "bfloat16"))]

        def losses(h, w, label):
            logits = (h @ w).astype("float32")
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1)[:, 0]

        def gradient(h, w, label, ct):
            fused = aicf_jax.fuse(losses, policy=Policy(target="h200"))
            return jax.vjp(lambda h, w: fused(h, w, label), h, w)[1](ct)

        label, ct = (jax.ShapeDtypeStruct((2048,), d) for d in ("int32", "float32"))
        forward, backward = aicf_jax.explain(gradient, *args, label, ct, policy=Policy(target="h200")).fusions
        assert (forward.kernel, forward.launches_after) == ("mosaic_linear_cross_entropy", 2)
        assert backward.kernel == "mosaic_linear_cross_entropy_grad"
        assert backward.launches_after > 3 and backward.launches_after % 3 == 0
        assert forward.bytes_after < forward.bytes_before and backward.bytes_after < backward.bytes_before
