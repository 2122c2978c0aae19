"""Memory-Centric IR: tiles, streams, online reductions, rematerialization, buffer lifetimes.

`derive` turns a computation graph (what is computed) into a memory flow `Program` (how memory moves); `lower_jax` runs
it as lax loops, `interpret` slowly and obviously; `traffic`, `lifetimes` and `peak_bytes` count it; `schedule` chooses
its tile sizes.
"""

from mcir.derive import derive
from mcir.errors import DeriveError, MCIRError, ParseError, VerifyError
from mcir.graph import ComputationGraph
from mcir.ir import (
    Axis,
    Buffer,
    Compute,
    Load,
    OnlineReduction,
    Program,
    Rematerialization,
    Store,
    Stream,
    Tile,
    Type,
    Update,
)
from mcir.read import trace
from mcir.text import parse

__all__ = [
    "Axis",
    "Buffer",
    "ComputationGraph",
    "Compute",
    "DeriveError",
    "Load",
    "MCIRError",
    "OnlineReduction",
    "ParseError",
    "Program",
    "Rematerialization",
    "Store",
    "Stream",
    "Tile",
    "Type",
    "Update",
    "VerifyError",
    "derive",
    "parse",
    "trace",
]
