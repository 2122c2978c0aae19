"""Memory-Centric IR: tiles, streams, online reductions, rematerialization, buffer lifetimes.

`derive` turns a computation graph (what is computed) into a memory flow `Program` (how memory moves); `lower_jax` runs
it as lax loops, `interpret` slowly and obviously; `traffic`, `lifetimes` and `peak_bytes` count it; `schedule` chooses
its tile sizes.
"""

from mcir.attention import attention, attention_backward, logsumexp, moments
from mcir.derive import Derived, derive, derive_bound
from mcir.errors import DeriveError, MCIRError, ParseError, VerifyError
from mcir.graph import ComputationGraph
from mcir.interpret import interpret
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
from mcir.lifetime import BufferLifetime, lifetimes, peak_bytes
from mcir.lower_jax import lower, lower_program
from mcir.read import trace
from mcir.schedule import Hardware, ScheduleError, schedule
from mcir.text import parse
from mcir.traffic import Traffic, traffic

__all__ = [
    "Axis",
    "Buffer",
    "BufferLifetime",
    "ComputationGraph",
    "Compute",
    "DeriveError",
    "Derived",
    "Hardware",
    "Load",
    "MCIRError",
    "OnlineReduction",
    "ParseError",
    "Program",
    "Rematerialization",
    "ScheduleError",
    "Store",
    "Stream",
    "Tile",
    "Traffic",
    "Type",
    "Update",
    "VerifyError",
    "attention",
    "attention_backward",
    "derive",
    "derive_bound",
    "interpret",
    "lifetimes",
    "logsumexp",
    "lower",
    "lower_program",
    "moments",
    "parse",
    "peak_bytes",
    "schedule",
    "trace",
    "traffic",
]
