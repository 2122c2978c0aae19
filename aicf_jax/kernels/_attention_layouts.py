"""How the arrays of an attention lie in memory, as the Mosaic GPU kernels take them and give them back."""

from __future__ import annotations

from typing import Any

from aicf_jax.ops._attention_variant import Array, Variant


def order(v: Variant) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Batch axes as ``(batch, heads)``: heads are those between rows and depth where there are some, else the last."""
    batch = v.roles.batch
    for array, row in ((v.q, v.roles.query), (v.k, v.roles.key), (v.v, v.roles.key)):
        inner = [a for a in array.axes[array.axes.index(row) :] if a in batch]
        if inner and batch[len(batch) - len(inner) :] == tuple(inner):
            return batch[: len(batch) - len(inner)], tuple(inner)
    return batch[:-1], batch[-1:]


def layouts(v: Variant, array: Array) -> dict[str, tuple[str, ...]]:
    """The orders of axes that the kernel takes for Q or the result, or for K or V."""
    r, (batch, heads) = v.roles, order(v)
    if r.query in array.axes:
        heads, row = (*heads, *r.group), r.query
    else:
        row = r.key
    depth = r.value_depth if r.value_depth in array.axes else r.depth
    return {"bshd": (*batch, row, *heads, depth), "bhsd": (*batch, *heads, row, depth)}


def chosen(v: Variant, array: Array) -> tuple[str, bool]:
    """The layout an array has, and whether it has one of the kernel's; without, it is transposed."""
    for name, axes in layouts(v, array).items():
        if axes == array.axes:
            return name, True
    return (chosen(v, v.q)[0], False) if array is v.out else ("bhsd", False)


def four(v: Variant, layout: str, array: Array) -> tuple[int, ...]:
    """The shape of an array as the kernel has it."""
    r, (batch, heads) = v.roles, order(v)
    is_q = r.query in array.axes
    depth = r.value_depth if r.value_depth in array.axes else r.depth
    sizes = {"b": batch, "h": (*heads, *r.group) if is_q else heads, "s": (r.query if is_q else r.key,), "d": (depth,)}
    return tuple(v.size(*sizes[d]) for d in layout)


def along_axes(v: Variant, array: Array, x: Any) -> Any:
    """The operation's array with a dimension for each of its axes."""
    return x.reshape([v.size(a) for a in array.axes])


def given(v: Variant, array: Array, x: Any) -> Any:
    """An array with a dimension for each of its axes as the kernel wants it."""
    layout, there = chosen(v, array)
    if not there:
        wanted = layouts(v, array)[layout]
        x = x.transpose([array.axes.index(a) for a in wanted])
    return x.reshape(four(v, layout, array))


def laid_out(v: Variant, axes: tuple[str, ...], array: Array, x: Any) -> Any:
    """What the kernel found with these axes in the order of the operation's array, with a dimension for each axis."""
    x = x.reshape([v.size(a) for a in axes])
    return x.transpose([axes.index(a) for a in array.axes])


def row_axes(v: Variant) -> tuple[str, ...]:
    """The axes of what there is one of for each query of each head, in the kernels' order."""
    batch, heads = order(v)
    return (*batch, *heads, *v.roles.group, v.roles.query)


def rows_given(v: Variant, x: Any) -> Any:
    """Statistics of the rows, ``[B, H, S]``, from an array with a dimension for each axis."""
    axes, (batch, heads) = row_axes(v), order(v)
    x = x.transpose([v.rows.axes.index(a) for a in axes])
    return x.reshape(v.size(*batch), v.size(*heads, *v.roles.group), v.size(v.roles.query))
