"""What the tests of every fused family need: its operation in a program, kernels of the tests, compiled programs."""

import re

import jax
import jax.numpy as jnp

import aicf_jax
from aicf_jax.cache import build_plan
from aicf_jax.derived import backward_program
from aicf_jax.fuse import make_context
from aicf_jax.kernels import ANY, Kernel
from experiments.benchmarks.compare import canonical_hlo
from tests.transformations import scalar


def fused_op(f, *args):
    """The only fused operation of a program."""
    context = make_context(aicf_jax.Policy(), aicf_jax.FUSION_PATTERNS, aicf_jax.KERNELS)
    (found,) = build_plan(jax.make_jaxpr(f)(*args).jaxpr, context).rewritten.fusions
    return found.op


def plain_kernels(f, *args):
    """Kernels for the operation of a program and for its backward that evaluate the equations, on a CPU.

    They cost nothing, so that they are taken, and the operation is kept whole as with a kernel that gains something.
    """
    op = fused_op(f, *args)
    backward = backward_program(op, tuple(range(len(op.in_avals)))).op
    return tuple(
        Kernel(
            f"plain_{o.semantic.name}",
            o.semantic.name,
            ("cpu",),
            dict.fromkeys(o.requirements(), ANY),
            run=lambda op, *xs: op.reference(*xs),
            cost_bytes=lambda op: 0,
        )
        for o in (op, backward)
    )


def instructions(f, *args):
    """The optimized instructions of a compiled program, sorted, without their names.

    The order of those that do not depend on each other follows that of the traced program, which may differ.
    """
    text = canonical_hlo(jax.jit(f).lower(*args).compile().as_text())
    return sorted(re.sub(r"%\d+", "%", line) for line in text.splitlines())


def differentiated(f, where):
    return jax.value_and_grad(scalar(f), where)


def assert_identical_programs(f, *args, where):
    """Fused and unfused compile to the same instructions: value, gradient, tangent."""
    fused = aicf_jax.fuse(f)
    for transform in (
        lambda g: g,
        lambda g: differentiated(g, where),
        lambda g: lambda *a: jax.jvp(g, a, jax.tree.map(jnp.ones_like, a)),
    ):
        assert instructions(transform(fused), *args) == instructions(transform(f), *args)
