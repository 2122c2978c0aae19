"""Fused nnx modules: the same type, the same state, a fused ``__call__``."""

from __future__ import annotations

import functools
from typing import Any

from aicf_jax.engine import Context
from aicf_jax.fronts.function import FusedFunction


def fuse_module(module: Any, context: Context) -> Any:
    """An instance of a subclass of the module's type that *is* the module: both see the same attributes and variables.

    ``isinstance``, `nnx.state` paths, `nnx.split`, `nnx.grad` and `nnx.Optimizer` work as on the original; an update of
    either is an update of both. Only ``__call__`` is fused; for another method use ``fuse(module.method)``.
    """
    cls = _fused_class(type(module), context)
    fused = object.__new__(cls)
    object.__setattr__(fused, "__dict__", module.__dict__)
    return fused


def is_fused(module: Any) -> bool:
    """Whether a module came out of `fuse_module`."""
    return "_aicf_context" in vars(type(module))


def plain_call(module: Any) -> Any:
    """The unfused call of a module, fused or not, as a function of the call's arguments."""
    cls = _original_class(type(module))

    def call(*args: Any, **kwargs: Any) -> Any:
        return cls.__call__(module, *args, **kwargs)

    return call


def _as_original(module: Any) -> Any:
    """The module itself as an instance of the model's own class."""
    original = object.__new__(_original_class(type(module)))
    object.__setattr__(original, "__dict__", module.__dict__)
    return original


def _original_class(cls: type) -> Any:
    """The model's own class behind a fused one."""
    return cls.__mro__[1] if "_aicf_context" in vars(cls) else cls


@functools.lru_cache(maxsize=256)
def _fused_class(cls: type, context: Context) -> type:
    """One subclass per type and context, so that graph definitions of two fused copies are equal."""
    original = _original_class(cls)
    if "__call__" not in dir(original):
        raise TypeError(f"fuse(target=...): expected an nnx module with a __call__ method, found {original.__name__}")

    @functools.wraps(original.__call__)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original.__call__(self, *args, **kwargs)

    fused = FusedFunction(call, context)

    @functools.wraps(original.__call__)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return fused(self, *args, **kwargs)

    body = {
        "__call__": __call__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_aicf_context": context,
        "__reduce__": lambda self: (fuse_module, (_as_original(self), context)),
    }
    fused_cls = type(original)(original.__name__, (original,), body, **_class_options(original))
    return keep_class_attributes(fused_cls, body)


def _class_options(original: Any) -> dict[str, Any]:
    """What a model's class was declared with and its subclasses do not inherit: ``pytree=False``."""
    return {} if getattr(original, "_pytree__is_pytree", True) else {"pytree": False}


def keep_class_attributes(cls: Any, body: dict[str, Any]) -> Any:
    """Takes back what the model's ``__init_subclass__`` set on the new class: its class attributes are the model's."""
    for name in [n for n in vars(cls) if n not in body and not n.startswith("_")]:
        delattr(cls, name)
    return cls
