"""Every transformation of jax as a function `(f, args) -> result`, to hold a fused f against the unfused one."""

import importlib.util

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import aicf_jax
from tests.support import assert_same, is_inexact, normal, quick_jit, tangents_like

TRANSFORMS = {}  # name -> function (f, args) -> result


def transform(passes, name=None, compiled=False):
    """Register a transformation that evaluates f, or its transpose, so many times in a row.

    Those that are `compiled` run under one jit, because op by op they would only be slow.
    """

    def register(run):
        run.passes, run.compiled = passes, compiled
        assert TRANSFORMS.setdefault(name or run.__name__, run) is run
        return run

    return register


def transformed(names, f, args):
    """The result of one transformation; or, for a tuple of names, the list of results of one compiled program."""
    if isinstance(names, tuple):
        return quick_jit(lambda *a: [TRANSFORMS[name](f, a) for name in names])(*args)
    run = TRANSFORMS[names]
    return quick_jit(lambda *a: run(f, a))(*args) if run.compiled else run(f, args)


def assert_fused_same(f, args, names="value", *, roundings, dtype=None):
    """Transformations of `fuse(f)` equal those of `f`; `roundings` counts one evaluation of f."""
    passes = max(TRANSFORMS[name].passes for name in ((names,) if isinstance(names, str) else names))
    fused = aicf_jax.fuse(f)
    assert_same(transformed(names, fused, args), transformed(names, f, args), roundings=passes * roundings, dtype=dtype)


def scalar(f):
    """A loss that weighs every output element differently, so that no two gradient entries can be swapped unseen."""

    def loss(*args):
        total = jnp.zeros((), jnp.float32)
        for i, out in enumerate(x for x in jax.tree.leaves(f(*args)) if is_inexact(x)):
            out = out.astype(jnp.promote_types(out.dtype, jnp.float32))
            weight = normal(100 + i, *out.shape, dtype=out.dtype)
            total = total.astype(out.dtype) + jnp.sum(weight * (out + 0.5 * out * out))
        return total

    return loss


def gradient(f, args):
    return jax.grad(scalar(f), argnums=tuple(range(len(args))))(*args)


def stacked(args, which):
    """Three variants of the chosen arguments on a new leading axis, and `in_axes` for them."""

    def stack(x):
        return jnp.stack([x, x * jnp.asarray(0.75, x.dtype), x * jnp.asarray(-0.5, x.dtype)])

    chosen = [i in which for i in range(len(args))]
    batched = tuple(jax.tree.map(stack, a) if c else a for a, c in zip(args, chosen, strict=True))
    return batched, tuple(0 if c else None for c in chosen)


def everything(n):
    return range(n)


def only_first(n):
    return range(1)


def only_parameters(n):
    return range(1, n)


@transform(1)
def value(f, args):
    return f(*args)


@transform(1)
def jit(f, args):
    return jax.jit(f)(*args)


@transform(1)
def nested_jit(f, args):
    return jax.jit(lambda *a: jax.jit(f)(*a))(*args)


@transform(2)
def grad(f, args):
    return gradient(f, args)


@transform(2)
def value_and_grad_jit(f, args):
    return jax.jit(jax.value_and_grad(scalar(f), argnums=tuple(range(len(args)))))(*args)


@transform(2)
def vjp(f, args):
    out, pullback = jax.vjp(f, *args)
    return out, pullback(tangents_like(out))


@transform(2)
def jvp(f, args):
    return jax.jvp(f, args, tangents_like(args))


@transform(2)
def jvp_first(f, args):
    """The other arguments have symbolic zero tangents."""
    return jax.jvp(lambda x: f(x, *args[1:]), args[:1], tangents_like(args[:1]))


for _which in (everything, only_first, only_parameters):

    @transform(1, f"vmap_{_which.__name__}", compiled=True)
    def _vmap(f, args, which=_which):
        batched, in_axes = stacked(args, which(len(args)))
        return jax.vmap(f, in_axes)(*batched)

    @transform(2, f"vmap_of_grad_{_which.__name__}", compiled=True)
    def _vmap_of_grad(f, args, which=_which):
        batched, in_axes = stacked(args, which(len(args)))
        return jax.vmap(lambda *a: gradient(f, a), in_axes)(*batched)

    @transform(2, f"grad_of_vmap_{_which.__name__}", compiled=True)
    def _grad_of_vmap(f, args, which=_which):
        batched, in_axes = stacked(args, which(len(args)))
        return gradient(jax.vmap(f, in_axes), batched)


@transform(4, compiled=True)
def hessian_vector_product(f, args):
    """Forward over reverse."""
    return jax.jvp(lambda *a: gradient(f, a), args, tangents_like(args))


@transform(4, compiled=True)
def grad_of_grad(f, args):
    """Reverse over reverse."""

    def directional(*a):
        products = jax.tree.map(lambda g, t: jnp.sum(g * t), gradient(f, a), tangents_like(a))
        return jax.tree.reduce(jnp.add, products)

    return jax.grad(directional, argnums=tuple(range(len(args))))(*args)


@transform(4, compiled=True)
def jacrev_of_jacfwd(f, args):
    """Reverse over forward; only the last argument (the bias, the smallest), for a small Hessian."""
    return jax.jacrev(jax.jacfwd(scalar(f), len(args) - 1), len(args) - 1)(*args)


@transform(4, compiled=True)
def jacfwd_of_grad(f, args):
    return jax.jacfwd(jax.grad(scalar(f), len(args) - 1), tuple(range(len(args))))(*args)


@transform(2)
def linearize(f, args):
    out, linear = jax.linearize(f, *args)
    return out, linear(*tangents_like(args)), linear(*tangents_like(args, seed=70))


def _scaled(args, s):
    return jax.tree.map(lambda x: x * s.astype(x.dtype), args)


@transform(3, compiled=True)
def scan_body(f, args):
    def loss(*a):
        def body(total, s):
            return total + scalar(f)(*_scaled(a, s)), f(*_scaled(a, s))

        zero = jnp.zeros((), jax.eval_shape(scalar(f), *a).dtype)
        return jax.lax.scan(body, zero, jnp.asarray([1.0, 0.75, -0.5], jnp.float32))

    return jax.value_and_grad(loss, argnums=tuple(range(len(args))), has_aux=True)(*args)


@transform(3, compiled=True)
def while_loop(f, args):
    """Reverse mode does not exist through while_loop; forward mode does."""

    def run(*a):
        def body(carry):
            i, total = carry
            return i + 1, total + scalar(f)(*_scaled(a, 0.5 * i.astype(jnp.float32)))

        zero = jnp.zeros((), jax.eval_shape(scalar(f), *a).dtype)
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (jnp.zeros((), jnp.int32), zero))[1]

    return jax.jvp(run, args, tangents_like(args))


@transform(2, compiled=True)
def cond_branch(f, args):
    finite = jnp.isfinite(jnp.sum(jax.tree.leaves(args)[0]))  # True, and the compiler does not know

    def branch(pred, *a):
        return jax.lax.cond(pred, f, lambda *b: jax.tree.map(lambda y: 2 * y, f(*b)), *a)

    return [(branch(p, *args), gradient(lambda *b, p=p: branch(p, *b), args)) for p in (finite, ~finite)]


REMAT_POLICIES = {
    "default": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "save_only_these_names": jax.checkpoint_policies.save_only_these_names("activation"),
}
for _name, _policy in REMAT_POLICIES.items():

    @transform(3, f"remat_{_name}", compiled=True)
    def _remat(f, args, policy=_policy):
        def named(*a):
            return jax.tree.map(lambda y: checkpoint_name(y, "activation"), f(*a))

        return gradient(jax.checkpoint(named, policy=policy), args)


@transform(1)
def donation(f, args):
    """`x + 1` gives the donated buffer a use; the donated argument is gone afterwards in both programs."""
    first = jax.tree.map(lambda x: jnp.array(x, copy=True), args[0])
    run = jax.jit(lambda x, *rest: (f(x, *rest), jax.tree.map(lambda y: y + 1, x)), donate_argnums=0)
    out = run(first, *args[1:])
    return out, [x.is_deleted() for x in jax.tree.leaves(first)]


@transform(1)
def export(f, args):
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    exported = jax.export.export(jax.jit(f))(*specs)
    if importlib.util.find_spec("flatbuffers"):  # jax needs it to serialize, and does not depend on it
        exported = jax.export.deserialize(exported.serialize())
    return exported.call(*args)
