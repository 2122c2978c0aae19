"""The only file of this package that names `jax._src`: one function per fact that no public API offers.

Each is a few lines, was tried on jax 0.10.2, 0.11.2 and 0.12.0.1, and says what it stands in for.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import linear_util as _lu
from jax._src import mesh as _mesh
from jax._src import named_sharding as _named_sharding
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info
from jax._src import util as _util
from jax._src.interpreters import partial_eval as _pe
from jax.extend import core as jex

#: Inner jit is called ``pjit`` in one release and ``jit`` in the next.
JIT_NAMES = frozenset({"jit", "pjit"})

#: Whether XLA's CPU compiler makes one kernel of two products around a softmax. It does before, which is slower there.
XLA_FUSES_ATTENTION = jax.__version_info__ >= (0, 11)

Jaxpr = jex.Jaxpr
Equation = jex.JaxprEqn
Literal = jex.Literal
Var = jex.Var
DropVar = _core.DropVar
no_effects = _core.no_effects
Tracer = _core.Tracer


def jit_disabled() -> bool:
    """Whether `jax.disable_jit` is on."""
    return bool(getattr(jax.config, "jax_disable_jit"))  # noqa: B009 - a flag pyright does not know


def x64_enabled() -> bool:
    """Whether 64-bit types are on."""
    return bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009


def open_jaxpr(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """``(jaxpr, consts)`` of a Jaxpr or ClosedJaxpr, None for anything else.

    jax 0.12 has one class for both, earlier releases two.
    """
    if isinstance(value, jex.ClosedJaxpr):
        return value.jaxpr, value.consts
    return (value, ()) if isinstance(value, jex.Jaxpr) else None


def close_like(old: Any, jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    """`jaxpr` in the form `old` has: closed stays closed, open stays open."""
    return jex.ClosedJaxpr(jaxpr, list(consts)) if isinstance(old, jex.ClosedJaxpr) else jaxpr


def make_jaxpr_object(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], effects: Any) -> Any:
    """A jaxpr without constants from its parts."""
    return _empty().replace(invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects)


@functools.cache
def _empty() -> Any:
    """A jaxpr to make others from: its debug information is what jax expects of every jaxpr."""
    traced = jax.make_jaxpr(lambda: ())()
    return open_jaxpr(traced)[0]  # pyright: ignore[reportOptionalSubscript]


def new_var(aval: Any) -> Any:
    return jex.Var(aval)


def as_function(jaxpr: Any) -> Any:
    """A Python function that evaluates a constant-free jaxpr, keeping source lines, name scopes and contexts."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, []))


def base_value(x: Any) -> Any:
    """What is left of a tracer when grad, jvp and vmap are peeled off: an array, or the tracer of a staged program."""
    while isinstance(x, Tracer) and not isinstance(x, _pe.DynamicJaxprTracer):
        inner = getattr(x, "primal", None)
        if inner is None:
            inner = getattr(x, "val", None)
        if inner is None:
            return x
        x = inner
    return x


def is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)


def is_staged(x: Any) -> bool:
    """Whether `x` belongs to a program that is being traced to a jaxpr (jit, scan, remat, export, ...)."""
    return isinstance(base_value(x), _pe.DynamicJaxprTracer)


def at_top_level() -> bool:
    """Whether no transformation is going on: jit, grad, vmap, scan, ... all have a trace of their own."""
    return _core.trace_state_clean()


def site_of(eqn: Any) -> str:
    """``file.py:line (function)`` of the user's code that wrote the equation.

    jax hides its own frames; those of flax and of this package are passed over too, as long as one is left.
    """
    traceback = eqn.source_info.traceback
    frames = list(_source_info.user_frames(traceback)) if traceback is not None else []
    if not frames:
        return "unknown"
    inner = _library_folders()
    frame = next((f for f in frames if not f.file_name.startswith(inner)), frames[0])
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def _library_folders() -> tuple[str, ...]:
    folders = [os.path.dirname(__file__)]
    flax = sys.modules.get("flax")
    if flax is not None and flax.__file__:
        folders.append(os.path.dirname(flax.__file__))
    return tuple(f + os.sep for f in folders)


def rule_function(params: dict[str, Any], name: str) -> Any:
    """The user's differentiation rule behind a custom_jvp/custom_vjp parameter.

    Tracing wraps the rule in fresh closures every time; the rule itself sits in a cell of them, named `name`
    (``"jvp"``, ``"fwd"``). Returns the parameter itself when the nesting is not the known one.
    """
    outer = params[next(k for k in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk") if k in params)]
    todo, seen = [outer], 0
    while todo and seen < 16:
        f, seen = todo.pop(), seen + 1
        if isinstance(f, _lu.WrappedFun):
            todo.append(f.f)
        elif isinstance(f, types.FunctionType):
            for cell_name, value in closure_of(f):
                if cell_name == name:
                    return value
                if isinstance(value, (types.FunctionType, _lu.WrappedFun)):
                    todo.append(value)
    return outer


def unbatched_rule(rule: Any) -> Any:
    """A differentiation rule as its user wrote it, without the wrappers `jax.vmap` put around it.

    For comparing the rules of pointwise functions, which batching does not change.
    """
    if not isinstance(rule, _lu.WrappedFun):
        return rule
    kept = tuple(t for t in rule.transforms if t[0].__name__ != "batch_custom_jvp_subtrace")
    return (rule.f, kept, tuple(rule.params))


def closure_of(f: types.FunctionType) -> list[tuple[str, Any]]:
    """Names and contents of a function's closure cells; cells not yet filled are left out."""
    found = []
    for cell_name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            found.append((cell_name, cell.cell_contents))
        except ValueError:
            continue
    return found


def wrapped_parts(f: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None:
    """``(function, transforms, params)`` of jax's WrappedFun, None for anything else."""
    return (f.f, tuple(f.transforms), tuple(f.params)) if isinstance(f, _lu.WrappedFun) else None


def rule_parts(x: Any) -> tuple[Any, ...] | None:
    """The parts of jax's carriers of differentiation rules that decide what they compute, None for other objects."""
    if isinstance(x, (_lu.Store, _lu.EqualStore)):
        return ()  # a place for a result of tracing, not an input of it
    if isinstance(x, _core.TraceTag):
        return ()  # tells traces apart while they run; means nothing afterwards
    if isinstance(x, (_util.Hashable, _util.Unhashable)):
        return (x.val,)
    if isinstance(x, jax.custom_jvp):
        return (x.fun, x.jvp, x.nondiff_argnums, x.symbolic_zeros)
    if isinstance(x, jax.custom_vjp):
        return (x.fun, x.fwd, x.bwd, x.nondiff_argnums, x.symbolic_zeros)
    return None


def traceback_scope(eqn: Any) -> Any:
    """Context in which newly bound equations inherit an equation's source line and name scope."""
    name_stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    return _source_info.user_context(eqn.source_info.traceback, name_stack=name_stack)


def extended_jit_params(params: dict[str, Any], jaxpr: Any, extra: int) -> dict[str, Any]:
    """Parameters of an inner jit whose body takes `extra` further leading arguments."""
    new = dict(params, jaxpr=jaxpr)
    for name, fill in (("in_shardings", _named_sharding.UNSPECIFIED), ("in_layouts", None), ("donated_invars", False)):
        if name in new:
            new[name] = (fill,) * extra + tuple(new[name])
    return new


def is_plain_jit(params: dict[str, Any]) -> bool:
    """Whether an inner jit says nothing beyond "call this": no shardings, layouts, donation or compiler options."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        all(isinstance(s, _named_sharding.UnspecifiedValue) for s in shardings)
        and all(layout is None for layout in layouts)
        and not any(params.get("donated_invars", ()))
        and not params.get("compiler_options_kvs")
        and not params.get("keep_unused")
    )


def new_primitive(name: str, multiple_results: bool = False) -> Any:
    primitive = jex.Primitive(name)
    primitive.multiple_results = multiple_results
    return primitive


def abstract_result(f: Any, *avals: Any) -> list[Any]:
    """Types of a function's results, with weak types, shardings and varying manual axes, which `eval_shape` drops."""
    traced = jax.make_jaxpr(lambda *xs: f(*xs))(*avals)
    return [v.aval for v in traced.jaxpr.outvars]


def trace(f: Any, *avals: Any) -> Any:
    """A constant-free jaxpr of a function of these types; raises ValueError if the function closes over arrays."""
    traced = jax.make_jaxpr(lambda *xs: f(*xs))(*avals)
    jaxpr, consts = open_jaxpr(traced)  # pyright: ignore[reportGeneralTypeIssues]
    if traced.consts or consts:
        raise ValueError("expected a function without closed-over arrays")
    return without_constants(jaxpr)


def plain_aval(aval: Any) -> Any:
    """Shape and dtype of a type, without sharding and varying manual axes, which mean nothing outside of their mesh."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def without_constants(jaxpr: Any) -> Any:
    """The same jaxpr with its constants as leading arguments."""
    return make_jaxpr_object([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr.effects)


def typeof(x: Any) -> Any:
    """The abstract type of an array or tracer."""
    return jax.typeof(x)


def new_equation(
    anchor: Any, invars: Sequence[Any], outvars: Sequence[Any], primitive: Any, params: dict[str, Any]
) -> Any:
    """An effect-free equation with the source line and context of another."""
    return jex.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, no_effects, anchor.source_info, anchor.ctx)


def hoist_constants(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The same program with its own constants, and those hidden in inner jits, as leading arguments.

    Returns the constant-free jaxpr and the values of the hidden ones, which come first. (Constants of other
    constructs are already operands: jax hoists them out of scan, while and cond bodies when it traces those.)
    """
    eqns, hidden = _hoist(jaxpr, {})
    variables = [v for v, _ in hidden]
    invars = [*variables, *jaxpr.constvars, *jaxpr.invars]
    return make_jaxpr_object(invars, jaxpr.outvars, eqns, jaxpr.effects), [x for _, x in hidden]


def _hoist(jaxpr: Any, memo: dict[int, Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Equations with hidden constants as operands, and those: ``(variable, value)``, each value once."""
    found: dict[int, tuple[Any, Any]] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in JIT_NAMES:
            eqns.append(eqn)
            continue
        old = eqn.params["jaxpr"]
        if id(old) not in memo:
            memo[id(old)] = _hoisted_body(old, memo)
        body, values = memo[id(old)]
        if not values:
            eqns.append(eqn)
            continue
        operands = []
        for value in values:
            if id(value) not in found:
                found[id(value)] = (new_var(_core.typeof(value)), value)
            operands.append(found[id(value)][0])
        params = extended_jit_params(eqn.params, body, len(values))
        eqns.append(eqn.replace(invars=[*operands, *eqn.invars], params=params))
    return eqns, list(found.values())


def _hoisted_body(old: Any, memo: dict[int, Any]) -> tuple[Any, list[Any]]:
    jaxpr, consts = open_jaxpr(old)  # pyright: ignore[reportGeneralTypeIssues]
    eqns, hidden = _hoist(jaxpr, memo)
    values = [*(x for _, x in hidden), *consts]
    if not values:
        return old, []
    invars = [*(v for v, _ in hidden), *jaxpr.constvars, *jaxpr.invars]
    return close_like(old, make_jaxpr_object(invars, jaxpr.outvars, eqns, jaxpr.effects)), values


def places_arrays(jaxpr: Any) -> bool:
    """Whether a program puts arrays on devices or shardings of its own choice, which one compiled program cannot do."""
    todo, seen = [jaxpr], set()
    while todo:
        body = todo.pop()
        if id(body) in seen:
            continue
        seen.add(id(body))
        for eqn in body.eqns:
            if eqn.primitive.name == "device_put" and any(d is not None for d in eqn.params.get("devices", ())):
                return True
            todo.extend(jex.jaxprs_in_params(eqn.params))
    return False


def plain_context(eqn: Any) -> bool:
    """Whether an equation was written outside of `compute_on` and `set_xla_metadata`."""
    return eqn.ctx.compute_type is None and not eqn.ctx.xla_metadata


def context_of(eqn: Any) -> Hashable:
    """What an equation was written under, apart from metadata, and from a mesh over which XLA decides all by itself.

    jax sets that of arguments for some equations that it makes of batches, for no others beside them.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    names = [n for n in type(eqn.ctx).__slots__ if n not in ("cur_abstract_mesh", "xla_metadata", "__weakref__")]
    decides = not (mesh.manual_axes or mesh.explicit_axes)
    return (None if decides else mesh, *(getattr(eqn.ctx, n, None) for n in names))


def register_checkify(primitive: Any, equations: Any) -> None:
    """Lets `checkify` look into a primitive: ``equations(*avals, **params)`` is the jaxpr it stands for."""
    from jax._src import checkify as _checkify

    def rule(*args: Any, **params: Any) -> Any:
        # jax 0.12 passes its own context before the error.
        context = () if isinstance(args[0], _checkify.Error) else args[:1]
        error, enabled_errors, *inputs = args[len(context) :]
        jaxpr = jex.ClosedJaxpr(equations(*map(typeof, inputs), **params), [])
        new_error, out = _checkify.checkify_jaxpr(*context, jaxpr, enabled_errors, error, *inputs)
        return new_error, out if primitive.multiple_results else out[0]

    _checkify.error_checks[primitive] = rule


def is_split_by_xla(ctx: Any) -> bool:
    """Whether what is being lowered is the program of several devices, which XLA splits.

    Not so inside a `jax.shard_map` over all axes of its mesh, nor for one device.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.SPMDAxisContext):
        return set(context.manual_axes) != set(context.mesh.axis_names)
    return isinstance(context, _sharding_impls.ShardingContext) and context.num_devices > 1


def spec_on(mesh: Any, sharding: Any) -> Any:
    """How the sharding of an array in a compiled program splits it over a mesh.

    None where it takes other axes than the mesh has, as where XLA splits over a part of an axis.
    """
    if sharding is None:
        return jax.sharding.PartitionSpec()
    try:
        (spec,) = _sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)
    except (AssertionError, KeyError, NotImplementedError, ValueError):  # all that it raises then
        return None
    return spec


def lowers_with_devices(primitive: Any) -> None:
    """Ask that jax tells what a program with this primitive runs on when it lowers it, as it does for its own."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def has_devices() -> bool:
    """Whether there are several devices for XLA to split over, and they are no mere description that is compiled for.

    A mesh that `jax.set_mesh` sets describes its devices, too. Over manual and explicit axes XLA decides nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_described = mesh.abstract_device is not None and _mesh.get_concrete_mesh().empty
    return not is_described and not (mesh.manual_axes or mesh.explicit_axes) and jax.device_count() > 1
