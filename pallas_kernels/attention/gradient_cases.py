"""Shapes and variants of attention's backward: for the simulator, compiled, and for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.gradient_problem import BackwardConfig

_HEADS_FIRST = ("bhsd",) * 4

#: What programs in float32 fill with.
_LOWEST = float(jnp.finfo(jnp.float32).min)

#: In the simulator, on every run.
QUICK: Mapping[str, Case] = {
    "ragged, causal to the last key, shared heads": Case(1, 72, 136, 2, 1, upper=64),
    "causal, padding, segments, a query that sees nothing, low fill": Case(
        1, 40, 136, upper=0, padding=True, segments=True, blind=True, fill=_LOWEST
    ),
    "dropout drawn in the kernel, causal, shared heads, ragged": Case(
        1, 40, 72, 2, 1, upper=32, keep="bhst", drawn=True
    ),
    "heads of 144, causal": Case(1, 40, 72, head_dim=144, upper=32),
}

#: In the simulator, the rest.
SLOW: Mapping[str, Case] = {
    "dropout drawn, causal, shared heads, batches": Case(2, 72, 136, 2, 1, upper=64, keep="bhst", drawn=True),
    "dropout from an array": Case(2, 136, 72, 2, keep="bhst"),
    "dropout from an array that all share, odd lengths, shared heads": Case(2, 75, 101, 4, 2, upper=30, keep="11st"),
    "dropout from an array, mask, bias, low fill": Case(
        2, 72, 136, 2, mask="b1st", bias="1hst", fill=_LOWEST, keep="1hst", layouts=_HEADS_FIRST
    ),
    "dropout drawn, that all share, half of it": Case(2, 130, 77, 2, keep="11st", drawn=True, keep_probability=0.5),
    "dropout drawn for each batch, padding, heads of 128": Case(
        2, 64, 200, 2, 1, 128, padding=True, keep="b1st", drawn=True
    ),
    "dropout drawn, almost none": Case(1, 72, 72, 2, upper=0, keep="1hst", drawn=True, keep_probability=1 - 2.0**-23),
    "dropout drawn, float16, window, softcap": Case(
        1, 200, 200, 2, dtype="float16", lower=-50, upper=20, softcap=2.0, keep="bhst", drawn=True
    ),
    "dropout drawn, heads of 192, shared, causal": Case(1, 72, 136, 2, 1, 192, upper=64, keep="bhst", drawn=True),
    "dropout from an array, heads of 256": Case(1, 72, 136, 2, 1, 256, keep="bhst"),
    "dropout drawn, bias of all": Case(2, 72, 72, 2, bias="11st", keep="bhst", drawn=True),
    "one query, dropout drawn": Case(2, 1, 130, 4, 2, keep="bhst", drawn=True),
    "window, softcap, float16": Case(
        1, 72, 136, dtype="float16", lower=-20, upper=40, softcap=2.0, layouts=_HEADS_FIRST
    ),
    "whole blocks": Case(1, 128, 128),
    "many blocks": Case(1, 384, 320),
    "causal, several CTAs": Case(1, 300, 300, upper=0),
    "keys that no query sees": Case(1, 70, 300, upper=0),
    "causal to the first key": Case(1, 300, 136, upper=0),
    "lengths that are padded": Case(2, 101, 77),
    "one query": Case(1, 1, 130),
    "one key": Case(1, 70, 1),
    "several heads and batches": Case(2, 64, 64, 6, 2),
    "mixed layouts": Case(2, 72, 136, 4, 2, layouts=("bshd", "bhsd", "bshd", "bhsd")),
    "window without causal": Case(1, 200, 200, lower=-30, upper=30),
    "window, shared heads": Case(1, 264, 264, 3, 1, lower=-30, upper=0),
    "lower limit alone": Case(1, 200, 264, lower=50),
    "narrow window": Case(1, 300, 300, lower=0, upper=0),
    "window far from the diagonal": Case(1, 130, 300, lower=100, upper=180),
    "softcap, causal, shared heads": Case(1, 136, 136, 2, 1, upper=0, softcap=30.0, scale=2.0),
    "heads of 128": Case(1, 128, 200, head_dim=128, upper=72),
    "heads of 128, softcap, window": Case(1, 136, 136, 2, 1, 128, lower=-50, upper=0, softcap=5.0),
    "large scores": Case(1, 64, 128, scale=100.0),
    "padding": Case(2, 72, 136, 2, padding=True),
    "padding, low fill": Case(2, 72, 136, 2, padding=True, fill=_LOWEST),
    "segments, causal": Case(2, 136, 136, upper=0, segments=True, fill=_LOWEST),
    "segments, a query that sees nothing, low fill": Case(1, 72, 136, segments=True, blind=True, fill=_LOWEST),
    "segments, window, low fill, shared heads": Case(
        1, 300, 300, 2, 1, lower=-60, upper=30, segments=True, blind=True, fill=_LOWEST
    ),
    "segments in layouts by heads, shared heads": Case(2, 72, 136, 4, 2, segments=True, layouts=_HEADS_FIRST),
    "mask of each batch": Case(2, 72, 136, 2, mask="b1st"),
    "mask of each head, odd lengths, low fill": Case(1, 75, 101, 2, mask="1hst", fill=_LOWEST),
    "mask, softcap, shared heads": Case(1, 128, 256, 2, 1, mask="bhst", softcap=2.0),
    "mask, causal, heads of 128": Case(1, 136, 136, 2, 1, 128, mask="b1st", upper=0, fill=_LOWEST),
    "mask, one key": Case(1, 70, 1, mask="b1st", fill=_LOWEST),
    "bias of all": Case(2, 72, 136, 2, bias="11st"),
    "bias of each head and batch, odd lengths": Case(2, 75, 101, 2, bias="bhst"),
    "bias of each batch, shared heads": Case(2, 72, 72, 4, 2, bias="b1st", bias_dtype="float16"),
    "bias of keys": Case(2, 72, 200, key_bias=True),
    "bias of keys, shared heads, causal": Case(2, 72, 136, 2, 1, key_bias=True, upper=0),
    "narrow bias, factor, softcap": Case(
        1, 72, 128, 2, bias="1hst", bias_dtype="bfloat16", bias_factor=3.0, softcap=2.0
    ),
    "bias, shared heads, causal": Case(1, 136, 136, 4, 2, bias="1hst", upper=0),
    "biases, window, segments, low fill": Case(
        1, 200, 200, 2, lower=-50, upper=0, bias="1hst", key_bias=True, segments=True, blind=True, fill=_LOWEST
    ),
    "bias, mask, heads of 128": Case(1, 72, 136, 2, 2, 128, bias="1hst", mask="b1st", fill=_LOWEST),
    "bias, one query": Case(1, 1, 130, bias="1hst"),
    "segments, bias of keys, shared heads, heads of 80": Case(
        1, 72, 136, 2, 1, 80, segments=True, key_bias=True, fill=_LOWEST, upper=40
    ),
    "bias, mask, shared heads, heads of 192": Case(1, 72, 72, 2, 1, 192, bias="11st", mask="b1st", fill=_LOWEST),
    "bias, padding, causal, heads of 256": Case(
        1, 72, 72, head_dim=256, bias="1hst", bias_dtype="bfloat16", key_bias=True, padding=True, fill=_LOWEST, upper=0
    ),
    "heads of 16, causal, shared": Case(1, 300, 300, 4, 2, 16, upper=0),
    "heads of 32, softcap": Case(1, 72, 136, head_dim=32, softcap=5.0),
    "heads of 48": Case(1, 72, 136, head_dim=48),
    "heads of 80, window": Case(1, 136, 136, 2, 2, 80, lower=-50, upper=10, layouts=_HEADS_FIRST),
    "heads of 96, shared, causal to the last key": Case(1, 72, 136, 2, 1, 96, upper=64),
    "heads of 112, softcap, causal": Case(1, 136, 136, head_dim=112, upper=0, softcap=5.0),
    "heads of 176, lengths that are padded": Case(2, 101, 77, head_dim=176),
    "heads of 192, shared, causal, several CTAs": Case(1, 264, 200, 2, 1, 192, upper=0),
    "heads of 240, one query": Case(1, 1, 130, head_dim=240),
    "heads of 256, causal": Case(1, 136, 200, head_dim=256, upper=64),
    "heads of 256, shared, window, softcap, float16": Case(
        1, 72, 136, 2, 1, 256, "float16", lower=-20, upper=40, softcap=5.0, layouts=_HEADS_FIRST
    ),
}

#: Tiles of the cases above; heads of other lengths than 64 have the default's.
SMALL = BackwardConfig(64, 64, 2)

_CAUSAL = Case(4, 2048, 2048, 16, 16, upper=0)


def _capped(head_dim: int) -> Case:
    return Case(2, 1000, 1000, 16, 4, head_dim, lower=-255, upper=0, softcap=50.0)


def _windowed(head_dim: int, **beside: Any) -> Case:
    return Case(2, 776, 1032, 16, 4, head_dim, lower=-100, upper=100, **beside)


def _capped_and_dropped(head_dim: int) -> Case:
    return dataclasses.replace(
        _CAUSAL, keep="bhst", drawn=True, head_dim=head_dim, kv_heads=4, lower=-255, softcap=50.0
    )


def _filled(head_dim: int, **beside: Any) -> Case:
    return dataclasses.replace(_CAUSAL, head_dim=head_dim, fill=_LOWEST, **beside)


#: Compiled for a described GPU with default configurations.
COMPILED: Mapping[str, Case] = {
    "causal, D 64": _CAUSAL,
    "causal, D 128": dataclasses.replace(_CAUSAL, head_dim=128),
    "full, D 64": dataclasses.replace(_CAUSAL, upper=None),
    "full, D 128": dataclasses.replace(_CAUSAL, upper=None, head_dim=128),
    "heads first, float16": dataclasses.replace(_CAUSAL, layouts=_HEADS_FIRST, dtype="float16"),
    "shared heads, window, D 64": dataclasses.replace(_CAUSAL, kv_heads=4, lower=-255),
    "shared heads, window, D 128": dataclasses.replace(_CAUSAL, kv_heads=4, lower=-255, head_dim=128),
    "shared heads, window, softcap, ragged, D 64": _capped(64),
    "full, ragged, D 64": Case(2, 1000, 1000, 16, 16),
    "to the last key, D 128": Case(1, 512, 4096, 16, 16, 128, upper=3584),
    "shared heads, window, softcap, ragged, D 128": _capped(128),
    "causal, D 32": dataclasses.replace(_CAUSAL, head_dim=32),
    "full, D 80": dataclasses.replace(_CAUSAL, upper=None, head_dim=80),
    "shared heads, window, D 96": dataclasses.replace(_CAUSAL, kv_heads=4, lower=-255, head_dim=96),
    "causal, D 112": dataclasses.replace(_CAUSAL, head_dim=112),
    "shared heads, window, softcap, ragged, D 160": _capped(160),
    "causal, D 192": dataclasses.replace(_CAUSAL, head_dim=192),
    "full, D 256": dataclasses.replace(_CAUSAL, upper=None, head_dim=256),
    "causal, D 256": dataclasses.replace(_CAUSAL, head_dim=256),
    "shared heads, window, D 256": dataclasses.replace(_CAUSAL, kv_heads=4, lower=-255, head_dim=256),
    "causal, padding, low fill, D 64": _filled(64, padding=True),
    "causal, padding, low fill, D 128": _filled(128, padding=True),
    "causal, segments, low fill, D 96": _filled(96, segments=True),
    "causal, segments, low fill, D 128": _filled(128, segments=True),
    "mask, low fill, D 64": _filled(64, mask="b1st", upper=None),
    "mask, low fill, D 128": _filled(128, mask="b1st", upper=None),
    "bias, D 64": dataclasses.replace(_CAUSAL, bias="1hst", upper=None),
    "bias, D 128": dataclasses.replace(_CAUSAL, bias="1hst", upper=None, head_dim=128),
    "bias, padding, low fill, causal, D 64": _filled(64, bias="1hst", padding=True),
    "narrow bias and mask, D 64": dataclasses.replace(
        _CAUSAL, bias="1hst", bias_dtype="bfloat16", mask="b1st", upper=None
    ),
    "dropout drawn, causal, D 64": dataclasses.replace(_CAUSAL, keep="bhst", drawn=True),
    "dropout drawn, causal, D 128": dataclasses.replace(_CAUSAL, keep="bhst", drawn=True, head_dim=128),
    "dropout drawn, full, D 128": dataclasses.replace(_CAUSAL, keep="bhst", drawn=True, upper=None, head_dim=128),
    "dropout from an array, D 64": dataclasses.replace(_CAUSAL, keep="11st"),
    "dropout from an array, mask, D 128": dataclasses.replace(
        _CAUSAL, keep="bhst", mask="b1st", upper=None, head_dim=128
    ),
    "bias of keys, D 128": dataclasses.replace(_CAUSAL, key_bias=True, upper=None, head_dim=128),
    "bias, padding, low fill, causal, D 128": _filled(128, bias="1hst", padding=True),
    "bias, mask, low fill, causal, D 128": _filled(128, bias="1hst", mask="b1st"),
    "bias, softcap, causal, D 128": dataclasses.replace(_CAUSAL, bias="1hst", head_dim=128, softcap=50.0),
    "dropout drawn, softcap, causal, D 128": dataclasses.replace(
        _CAUSAL, keep="bhst", drawn=True, head_dim=128, softcap=50.0
    ),
    "dropout drawn, window, ragged, shared heads, D 128": _windowed(128, keep="bhst", drawn=True),
    "dropout drawn, mask, D 128": _filled(128, mask="bhst", keep="bhst", drawn=True, upper=None),
    "dropout drawn, window, softcap, shared heads, D 96": _capped_and_dropped(96),
    "dropout drawn, window, softcap, shared heads, D 128": _capped_and_dropped(128),
}

#: Likewise, with much beside the scores, which XLA arranges first in some launches more.
CROWDED: Mapping[str, Case] = {
    "bias of keys, segments, window, ragged, D 128": _windowed(128, key_bias=True, segments=True, fill=_LOWEST),
    "softcap, mask, bias, window, ragged, D 128": _windowed(128, mask="1hst", bias="bhst", fill=_LOWEST, softcap=50.0),
    "all at once, D 64": _windowed(64, mask="bhst", bias="b1st", fill=_LOWEST, softcap=50.0, keep="bhst", drawn=True),
    "all at once, D 128": _windowed(128, mask="bhst", bias="b1st", fill=_LOWEST, softcap=50.0, keep="bhst", drawn=True),
}

#: Likewise, with the bytes that the assembler spills at most: two sums of 256 numbers, tiles and a slope are too much
#: for jax 0.10's.
SPILLING: Mapping[str, tuple[Case, int]] = {
    "shared heads, window, softcap, ragged, D 256": (_capped(256), 48),
}
