"""Kernels that XLA cannot see into, on several devices: each runs one on its part of the arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aicf_jax import _compat

#: A function of parts, as a primitive: `custom_partitioning` itself cannot lower what writes to refs of its own.
part_p = _compat.new_primitive("part", multiple_results=True)
part_p.def_abstract_eval(lambda *avals, f: _compat.abstract_result(lambda *xs: list(f(*xs)), *avals))
mlir.register_lowering(part_p, mlir.lower_fun(lambda *xs, f: list(f(*xs)), multiple_results=True))

#: For each array a name for each dimension; None for one that a kernel needs whole.
Names = tuple[tuple[str | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Partition:
    """Along which dimensions the arrays of a kernel may be split; those of one name are split alike.

    Attributes:
      inputs, results: names of dimensions.
      sums: results that are the sum over the parts: along names that they do not have, inputs were split.
      contracted: ``contracted(axes, *inputs) -> results``, what runs on a part where a name that no result has is
        split, over these axes of the mesh; it adds up over them what it has to. None: each result is in `sums`, or
        there are no such names.
      most: of some names, into how many parts they may be split.
    """

    inputs: Names
    results: Names
    sums: tuple[int, ...] = ()
    contracted: Callable[..., Sequence[Any]] | None = None
    most: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def inner(self) -> frozenset[str]:
        """Names that no result has, where what runs sums over them itself."""
        if self.contracted is None:
            return frozenset()
        outer = {name for names in self.results for name in names}
        return frozenset(name for names in self.inputs for name in names if name is not None and name not in outer)

    def rule(self) -> tuple[str, tuple[str, ...]]:
        """The sharding rule as `custom_partitioning` wants it, and the names of what has to be whole."""
        whole: list[str] = []

        def named(names: Sequence[str | None]) -> Iterator[str]:
            for name in names:
                if name is None:
                    whole.append(f"w{len(whole)}")
                yield whole[-1] if name is None else name

        left, right = (", ".join(" ".join(named(a)) for a in arrays) for arrays in (self.inputs, self.results))
        return f"{left} -> {right}", tuple(whole)


def split(f: Callable[..., Sequence[Any]], partition: Partition) -> Callable[..., list[Any]]:
    """``f``, which is right for any part of its arrays, as a function of whole arrays that XLA may split.

    Arrays stay where they are along named dimensions; what is needed whole is gathered, and sums of half precision
    are added up in float32.
    """

    def on_devices(mesh: Any, arguments: Any, results: Any) -> Any:
        mesh, specs = _placed(mesh, [*arguments, *results])
        axes = _axes(partition, mesh, [a.shape for a in (*arguments, *results)], specs)

        def sharding(names: Sequence[str | None]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(n or "") for n in names)))

        def lower(*inputs: Any) -> tuple[Any, ...]:
            inner = tuple(a for name in sorted(partition.inner) for a in _flat(axes.get(name)))
            summed = partition.contracted if inner else None
            found = list(part_p.bind(*inputs, f=f) if summed is None else summed(inner, *inputs))
            over = {k: _beyond(axes, partition.results[k]) for k in partition.sums}
            for axes_of in sorted({a for a in over.values() if a}):
                where = [k for k, a in over.items() if a == axes_of]
                for k, total in zip(where, _added([found[k] for k in where], axes_of), strict=True):
                    found[k] = total
            return tuple(found)

        return mesh, lower, tuple(map(sharding, partition.results)), tuple(map(sharding, partition.inputs))

    rule, whole = partition.rule()
    whole_arrays = custom_partitioning(lambda *inputs: tuple(f(*inputs)))
    whole_arrays.def_partition(on_devices, sharding_rule=rule, need_replication_factors=whole, decode_shardings=False)
    return lambda *inputs: list(whole_arrays(*inputs))


def _placed(mesh: Any, arrays: Sequence[Any]) -> tuple[Any, list[Sequence[Any]]]:
    """A mesh and over which of its axes each dimension of the arrays is split.

    XLA may split over a part of an axis, as heads that several share over 2 of 8 devices: then axes become several.
    """
    for candidate in () if mesh.empty else _refined(mesh):
        specs = [_compat.spec_on(candidate, a.sharding) for a in arrays]
        if None not in specs:
            return candidate, specs
    return mesh, [()] * len(arrays)


def _refined(mesh: Any) -> Iterator[Any]:
    """A mesh, then those of its devices in which each axis is one axis for each prime factor, in any order."""
    yield mesh
    orders = [list(_factors(n)) for n in mesh.shape.values()]
    for found in itertools.product(*orders):
        parts = [(f"{name}.{k}", n) for name, of in zip(mesh.shape, found, strict=True) for k, n in enumerate(of)]
        yield Mesh(mesh.devices.reshape([n for _, n in parts]), [name for name, _ in parts])


def _factors(number: int) -> Iterator[tuple[int, ...]]:
    """The prime factors of a number, in every order."""
    if number == 1:
        yield ()
    for prime in (k for k in range(2, number + 1) if number % k == 0 and all(k % i for i in range(2, k))):
        yield from ((prime, *rest) for rest in _factors(number // prime))


def _axes(
    partition: Partition, mesh: Any, shapes: Sequence[Sequence[int]], specs: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """The mesh axes that each name is split over: as the first array that has it is, where that leaves no rest."""
    found: dict[str, Any] = {}
    used: set[Any] = set()
    for names, shape, spec in zip((*partition.inputs, *partition.results), shapes, specs, strict=True):
        for name, size, part in zip(names, shape, spec, strict=False):
            over = _flat(part)
            count = math.prod(mesh.shape[a] for a in over)
            if name is None or not over or name in found or used.intersection(over):
                continue
            if size % count == 0 and count <= partition.most.get(name, count):
                found[name] = part
                used.update(over)
    return found


def _flat(part: Any) -> tuple[Any, ...]:
    if part is None:
        return ()
    return tuple(part) if isinstance(part, tuple) else (part,)


def _beyond(axes: dict[str, Any], names: Sequence[str | None]) -> tuple[Any, ...]:
    """The mesh axes that other names are split over."""
    return tuple(a for name, part in axes.items() if name not in names for a in _flat(part))


def _added(parts: list[Any], axes: tuple[Any, ...]) -> list[Any]:
    """Arrays added up over devices, all at once, in float32 or wider."""
    wide = tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in parts)
    return [total.astype(x.dtype) for total, x in zip(jax.lax.psum(wide, axes), parts, strict=True)]
