"""Fused linen modules: the same fields, the same parameters, fused ``apply`` and fused calls inside other modules."""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn
from flax.core import lift

from aicf_jax.engine import Context
from aicf_jax.fronts.function import FusedFunction
from aicf_jax.fronts.nnx_module import keep_class_attributes


def fuse_module(module: nn.Module, context: Context) -> nn.Module:
    """A module of a subclass of the module's type with the same fields.

    ``init`` gives the unfused parameters bit for bit. ``apply`` (with rngs, mutable, method, keyword arguments) runs
    fused. Used inside another module, its call is lifted and fused there; names in the parameter tree do not change.
    """
    cls = _fused_class(type(module), context)
    if module.scope is not None or module.parent is not None:
        # Already inside another module, or bound to variables: the same object in every respect but its class, so that
        # its place in the parent and its name stay taken by it.
        fused = object.__new__(cls)
        object.__setattr__(fused, "__dict__", module.__dict__)
        return fused
    return cls(**_fields(module), name=module.name, parent=None)


def is_fused(module: Any) -> bool:
    """Whether a module came out of `fuse_module`."""
    return "_aicf_context" in vars(type(module))


def unfused(module: Any) -> nn.Module:
    """The original module of a fused one."""
    cls = type(module).__mro__[1] if is_fused(module) else type(module)
    return cls(**_fields(module), name=module.name, parent=None)


def _fields(module: Any) -> dict[str, Any]:
    """What a module of the same kind is made of."""
    return {
        name: getattr(module, name)
        for name, field in module.__dataclass_fields__.items()
        if field.init and name not in ("parent", "name")
    }


@functools.lru_cache(maxsize=256)
def _fused_class(cls: type, context: Context) -> Any:
    if "_aicf_context" in vars(cls):
        cls = cls.__mro__[1]

    def apply(self: Any, /, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        if not is_fused(self):
            return cls.apply(self, *args, method=method, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        original = unfused(self)
        method = method.__name__ if getattr(method, "__self__", None) is self else method
        return FusedFunction(original.apply, context)(*args, method=_original(cls, method), **kwargs)

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or self.is_initializing() or not is_fused(self):
            return cls.__call__(self, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        return _lifted(cls, context)(self, *args, **kwargs)

    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_aicf_context": context,
        "__reduce__": lambda self: (fuse_module, (unfused(self), context)),
        "apply": functools.wraps(cls.apply)(apply),
        **{name: _delegate(cls, name) for name in _UNFUSED if hasattr(cls, name)},
    }
    if "__call__" in dir(cls):
        body["__call__"] = functools.wraps(cls.__call__)(call)
    for name in ("__eq__", "__hash__"):
        # flax makes dataclasses of modules, which would put methods of its own in the place of a model's.
        if name in vars(cls) and not getattr(vars(cls)[name], "__qualname__", "").startswith("_process_class"):
            body.setdefault(name, vars(cls)[name])
    return keep_class_attributes(type(cls)(cls.__name__, (cls,), body), body)


#: Methods that make parameters or tables: nothing to fuse, and the result must be the original's to the bit.
_UNFUSED = ("init", "init_with_output", "lazy_init", "tabulate", "module_paths")


def _delegate(cls: type, name: str) -> Any:
    @functools.wraps(getattr(cls, name))
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_fused(self):
            return getattr(cls, name)(self, *args, **kwargs)
        return getattr(unfused(self), name)(*args, **kwargs)

    return method


def _original(cls: type, method: Any) -> Any:
    """A method given as a function of the fused class is that of the original class."""
    return getattr(cls, method) if isinstance(method, str) and hasattr(cls, method) else method


@functools.lru_cache(maxsize=256)
def _lifted(cls: type, context: Context) -> Any:
    """The module's call as a pure function of its variables and rngs, fused: flax lifts it as it does for `nn.jit`."""

    def transform(fn: Any, variables: bool = True, rngs: bool = True) -> Any:
        def inner(
            scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, *args: Any, **kwargs: Any
        ) -> Any:
            def pure(variable_groups: Any, rng_groups: Any, args: Any, kwargs: Any) -> Any:
                scope = scope_fn(variable_groups, rng_groups)
                return fn(scope, *args, **kwargs), repack_fn(scope)

            return FusedFunction(pure, context, lifted=True)(variable_groups, rng_groups, args, kwargs)

        return lift.pack(inner, (variables,), (variables,), (rngs,), name="fuse", enable_kwargs=True)

    return nn.transforms.decorator_lift_transform(transform, cls.__call__, multi_scope=True)  # pyright: ignore[reportAttributeAccessIssue]
