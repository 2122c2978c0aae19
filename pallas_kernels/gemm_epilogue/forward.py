"""``Y = act(A @ B + b)`` on Hopper, with the pre-activation ``Z`` as a second result where the backward wants it.

One persistent kernel: a warpgroup loads tiles of A and B by TMA, two multiply them by wgmma into float32 registers, add
the bias, apply the activation in float32, and write each result once, by TMA. Loads of the next tile go on while the
last one is finished. Read: A and B once for each tile of the result that needs them (mostly from L2), b once a tile;
written: Y, and Z if asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels._arguments import expect
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS
from pallas_kernels.gemm_epilogue.arguments import product
from pallas_kernels.gemm_epilogue.config import (
    ATOM_ROWS,
    ForwardConfig,
    default_forward,
    itemsize_of,
    swizzle_of,
)

#: Registers of a thread of the warpgroup that loads; the others get the rest.
_MEMORY_REGISTERS = 40

#: Rows of what is stored at a time.
_STORED_ROWS = 64


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Everything the kernel is specialized on."""

    batch: int | None
    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    dtype: Any
    bias: tuple[str, Any] | None
    activation: str
    alpha: float
    outputs: tuple[tuple[str, Any], ...]
    config: ForwardConfig

    @property
    def swizzle(self) -> int:
        contiguous = (self.m if self.trans_a else self.k, self.k if self.trans_b else self.n)
        found = swizzle_of(itemsize_of(self.dtype), *contiguous)
        assert found is not None
        return found

    def transforms(self, swizzle: int, dtype: Any) -> tuple[Any, Any]:
        gpu = _mosaic.mosaic().gpu
        return (
            gpu.TilingTransform((ATOM_ROWS, swizzle // itemsize_of(dtype))),
            gpu.SwizzleTransform(swizzle),
        )


def forward(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "none",
    alpha: float = 0.0,
    trans_a: bool = False,
    trans_b: bool = False,
    bias_along: str = "n",
    out_dtype: Any = None,
    z_dtype: Any = None,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """``Y = act(A @ B + b)``, accumulated, biased and activated in float32.

    Args:
      a: ``[M, K]``, or ``[K, M]`` if `trans_a`; with a leading batch dimension if `b` has one. bfloat16 or float16.
      b: ``[K, N]``, or ``[N, K]`` if `trans_b`; of a's dtype.
      bias: ``[N]``, or ``[M]`` if `bias_along` is ``"m"``.
      activation: a name in `ACTIVATIONS`.
      alpha: its parameter.
      trans_a: how a is stored.
      trans_b: how b is stored.
      bias_along: the dimension of the result that the bias varies along, ``"n"`` or ``"m"``.
      out_dtype: of Y; a's dtype unless told otherwise.
      z_dtype: of Z, the input of the activation, which is a further result unless this is None.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Returns:
      ``(Y,)`` or ``(Y, Z)``.

    Raises:
      ValueError: naming the argument, what was expected, what was found. Lengths of the contiguous dimensions of a, b
        and Y must be multiples of 16 elements, of the others of 8: a TMA descriptor tiles the whole array by atoms of
        shared memory, and only whole atoms can lie outside of it.
    """
    problem = _problem(a, b, bias, activation, alpha, trans_a, trans_b, bias_along, out_dtype, z_dtype, config)
    return tuple(_call(problem, interpret)(a, b, *(() if bias is None else (bias,))))


def _problem(
    a: Any,
    b: Any,
    bias: Any,
    activation: str,
    alpha: float,
    trans_a: bool,
    trans_b: bool,
    bias_along: str,
    out_dtype: Any,
    z_dtype: Any,
    config: ForwardConfig | None,
) -> _Problem:
    found = product(a, b, bias, activation=activation, trans_a=trans_a, trans_b=trans_b, bias_along=bias_along)
    outputs = [("y", jnp.dtype(out_dtype or a.dtype))]
    if z_dtype is not None:
        outputs.append(("z", jnp.dtype(z_dtype)))
    for name, x in (("a", a), ("b", b)):
        expect("forward", name, x.shape[-1] % 16 == 0, "a multiple of 16 as its last dimension", x.shape)
        expect("forward", name, x.shape[-2] % ATOM_ROWS == 0, f"a multiple of {ATOM_ROWS} before it", x.shape)
    expect("forward", "b", found.n % 16 == 0, "a multiple of 16 columns of the result", found.n)
    sizes = [itemsize_of(dtype) for _, dtype in outputs]
    config = config or default_forward((found.batch or 1, found.m, found.n), itemsize_of(a.dtype), sizes)
    along_and_dtype = None if bias is None else (bias_along, jnp.dtype(bias.dtype))
    return _Problem(
        found.batch, found.m, found.n, found.k, trans_a, trans_b, jnp.dtype(a.dtype), along_and_dtype, activation,
        float(alpha), tuple(outputs), config,
    )  # fmt: skip


def _call(p: _Problem, interpret: Any) -> Any:
    gpu = _mosaic.mosaic().gpu
    shape = (p.m, p.n) if p.batch is None else (p.batch, p.m, p.n)
    name = f"gemm_{p.activation}" if p.bias is None else f"gemm_bias_{p.activation}"
    tiles = (p.batch or 1) * _cdiv(p.m, p.config.tile_m) * _cdiv(p.n, p.config.tile_n)
    return gpu.kernel(
        functools.partial(_body, p),
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for _, dtype in p.outputs],
        grid=(min(_mosaic.sm_count(p.config.sm_count), tiles),),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
        interpret=interpret,
    )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _body(p: _Problem, a_gmem: Any, b_gmem: Any, *rest: Any) -> None:
    """The kernel: allocate for all tiles, then make this CTA's tiles one by one."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    c = p.config
    bias_gmem, outs = (None, rest) if p.bias is None else (rest[0], rest[1:])
    m_tiles, n_tiles = _cdiv(p.m, c.tile_m), _cdiv(p.n, c.tile_n)
    nothing = lambda *_, **__: None  # noqa: E731 - the body does not matter for what is allocated
    first = (a_gmem, b_gmem) if p.batch is None else (a_gmem.at[0], b_gmem.at[0])
    shape = (2, 2, _STORED_ROWS, c.store_n)
    allocations: dict[str, Any] = {
        "pipeline": _pipeline(p, nothing, nothing).get_allocations(*first),
        "stored": [gpu.SMEM(shape, d, transforms=_stored_transforms(p, d)) for _, d in p.outputs],
    }
    if p.bias is not None:
        along, dtype = p.bias
        allocations["bias"] = gpu.SMEM((2, p.config.warpgroup_tile["mn".index(along)]), dtype)
        allocations["bias_barrier"] = gpu.Barrier(num_barriers=2)

    @functools.partial(pl.run_scoped, collective_axes="wg", **allocations)
    def _scope(pipeline: Any, stored: Any, bias: Any = None, bias_barrier: Any = None) -> None:
        @gpu.nd_loop(((p.batch or 1) * m_tiles * n_tiles,), collective_axes="cta")
        def _tiles(info: Any) -> None:
            (index,) = info.index
            each = jnp.int32(m_tiles * n_tiles)
            batch, rest = (
                (index, jnp.int32(0))
                if m_tiles * n_tiles == 1
                else (jax.lax.div(index, each), jax.lax.rem(index, each))
            )
            mi, ni = gpu.planar_snake(rest, (m_tiles, n_tiles), 0, min(c.group, n_tiles))
            at = (lambda ref: ref) if p.batch is None else (lambda ref: ref.at[batch])
            _tile(p, (mi, ni), at(a_gmem), at(b_gmem), bias_gmem, list(map(at, outs)), pipeline, stored, bias,
                  bias_barrier)  # fmt: skip

    gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _stored_transforms(p: _Problem, dtype: Any) -> tuple[Any, Any]:
    swizzle = swizzle_of(itemsize_of(dtype), p.n, p.config.store_n)
    assert swizzle is not None
    return p.transforms(swizzle, dtype)


def _pipeline(p: _Problem, body: Any, context: Any) -> Any:
    """Loads of one tile's operands, a step for each `tile_k`."""
    gpu = _mosaic.mosaic().gpu
    c = p.config
    transforms = p.transforms(p.swizzle, p.dtype)
    m, k, n = c.tile_m, c.tile_k, c.tile_n
    # No delayed release: what is delayed is not awaited before the loads of the next tile begin.
    spec = functools.partial(gpu.BlockSpec, transforms=transforms, memory_space=gpu.SMEM)
    return gpu.emit_pipeline_warp_specialized(
        body,
        grid=(_cdiv(p.k, k),),
        memory_registers=_MEMORY_REGISTERS,
        in_specs=[
            spec((k, m), lambda i: (i, 0)) if p.trans_a else spec((m, k), lambda i: (0, i)),
            spec((n, k), lambda i: (0, i)) if p.trans_b else spec((k, n), lambda i: (i, 0)),
        ],
        wg_axis="wg",
        num_compute_wgs=2,
        max_concurrent_steps=c.stages,
        compute_context=context,
    )


def _tile(
    p: _Problem, tile: tuple[Any, Any], a: Any, b: Any, bias_gmem: Any, outs: list[Any], pipeline: Any, stored: Any,
    bias: Any, bias_barrier: Any,
) -> None:  # fmt: skip
    """One tile of the result: load and multiply, then the epilogue."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    c, (mi, ni) = p.config, tile
    wg = jax.lax.axis_index("wg")
    rows, columns = c.warpgroup_tile
    own_m = pl.ds(wg * rows, rows) if c.split == "m" else slice(None)
    own_n = pl.ds(wg * columns, columns) if c.split == "n" else slice(None)
    first_row = mi * c.tile_m + (wg * rows if c.split == "m" else 0)
    first_column = ni * c.tile_n + (wg * columns if c.split == "n" else 0)

    def context(run: Any) -> None:
        if bias is not None:
            start, length = (first_column, columns) if p.bias[0] == "n" else (first_row, rows)  # pyright: ignore[reportOptionalSubscript]
            gpu.copy_gmem_to_smem(bias_gmem.at[pl.ds(start, length)], bias.at[wg], bias_barrier.at[wg])

        @functools.partial(pl.run_scoped, acc=gpu.ACC((rows, columns), jnp.float32))
        def _accumulate(acc: Any) -> None:
            run(acc)
            total = acc[...]
            if bias is not None:
                gpu.barrier_wait(bias_barrier.at[wg])
            _store(p, total, (first_row, first_column), bias, outs, stored)

    def multiply(_: Any, a_smem: Any, b_smem: Any, acc: Any) -> Any:
        left = _compat.transposed(a_smem.at[:, own_m]) if p.trans_a else a_smem.at[own_m]
        right = _compat.transposed(b_smem.at[own_n]) if p.trans_b else b_smem.at[:, own_n]
        gpu.wgmma(acc, left, right)
        gpu.wgmma_wait(0)
        return acc

    _pipeline(p, multiply, context)(
        a.at[:, pl.ds(mi * c.tile_m, c.tile_m)] if p.trans_a else a.at[pl.ds(mi * c.tile_m, c.tile_m)],
        b.at[pl.ds(ni * c.tile_n, c.tile_n)] if p.trans_b else b.at[:, pl.ds(ni * c.tile_n, c.tile_n)],
        allocations=pipeline,
    )


def _store(p: _Problem, total: Any, first: tuple[Any, Any], bias: Any, outs: list[Any], stored: Any) -> None:
    """The epilogue, some columns of 64 rows at a time: bias, activation, and through shared memory to the results."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    wg = jax.lax.axis_index("wg")
    value = ACTIVATIONS[p.activation].value
    rows, columns = p.config.warpgroup_tile
    high, wide = _STORED_ROWS, p.config.store_n
    parts = [(i * high, j * wide) for i in range(rows // high) for j in range(columns // wide)]
    for turn, (i, j) in enumerate(parts):
        here = slice(i, i + high), slice(j, j + wide)
        z = total[here]
        if p.bias is not None:
            z = z + _bias(p, bias, wg, here)
        results = {"y": value(z, p.alpha), "z": z}
        slot = turn % 2
        # The store before the last one has been read from its slot: each part is one group of copies.
        gpu.wait_smem_to_gmem(1, wait_read_only=True)
        for (name, dtype), smem in zip(p.outputs, stored, strict=True):
            smem[wg, slot] = results[name].astype(dtype)
        gpu.commit_smem()
        at = pl.ds(first[0] + i, high), pl.ds(first[1] + j, wide)
        for smem, out in zip(stored, outs, strict=True):
            gpu.copy_smem_to_gmem(smem.at[wg, slot], out.at[at], commit_group=False)
        gpu.commit_smem_to_gmem_group()
    # Slots alternate within a tile: with an odd number of parts the next tile would start with the last one's slot.
    if len(parts) % 2:
        gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _bias(p: _Problem, bias: Any, wg: Any, here: tuple[slice, slice]) -> Any:
    """The bias of one part, broadcast to it."""
    assert p.bias is not None
    along = "mn".index(p.bias[0])
    part = bias[wg, here[along]].astype(jnp.float32)
    return jax.lax.broadcast_in_dim(part, (_STORED_ROWS, p.config.store_n), (along,))
