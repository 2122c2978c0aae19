"""`Kernel`: one implementation of a fused operation, and what it is capable of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import jax

from aicf_jax.policy import GENERIC, NUMERICS, TARGETS, target_named


class _Any:
    """Contains everything."""

    def __contains__(self, item: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "ANY"

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Any)


#: A capability without limits.
ANY: Any = _Any()


@dataclasses.dataclass(frozen=True, eq=False)
class Where:
    """A capability: contains the values for which `holds` is true; prints as `text`."""

    text: str
    holds: Callable[[Any], bool]

    def __contains__(self, item: object) -> bool:
        return bool(self.holds(item))

    def __repr__(self) -> str:
        return self.text


#: Name of the candidate that is always there: the operation's own equations, compiled by XLA.
XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One implementation.

    Attributes:
      name: unique; `Fusion.kernel`.
      op: name of the operation it implements.
      platforms: lowering platforms it runs on, e.g. ``("cpu",)`` or ``("cuda",)``.
      capabilities: requirement name -> accepted values. An operation's requirement is met when its value is in the
        collection; a requirement that is not named here is not met.
      run: ``run(op, *inputs) -> results`` as a tuple, one array for each of ``op.results``. Traced by jax, once per
        operation and platform.
      save: ``save(op, *inputs) -> (results, saved)``, with what the backward of the operation wants kept
        (`ops.Composite.save`). None: it is recomputed from the inputs.
      targets: names of the machines it is made for (`Policy.target`), e.g. ``("h100", "h200")``; elsewhere it is no
        candidate. Where the policy names no machine, the GPU at hand counts. None: any machine of its platforms.
      opaque: XLA cannot see into it, and so not split it over devices: where it would have to, under ``jit`` on
        several devices, it is split as `partition` says, or the equations run in its place and partition as unfused.
        Inside `jax.shard_map` it runs on the parts that are there.
      with_devices: what it calls can only be lowered where jax says which devices the program is for, as what uses
        jax's custom partitioning inside.
      partition: ``partition(op, saving) -> Partition``, for an opaque kernel that is right for parts of its arrays;
        with `saving` what `save` returns counts as results. It may return a function of the inputs instead, which
        gives all of these and splits what XLA cannot see into itself (`partition.split`), or None, for no partition.
      available: ``() -> None``, or what it needs of its surroundings and what there is instead, as two texts. Asked
        last, and only of a kernel that is made for the machine.
      needs: ``needs(op)``, what it needs of the machine (`hardware.Need`, a sequence), held against the policy's
        property map where there is one for the platform.
      program: ``program(op) -> text``: the memory flow program it runs, for `explain`.
      numerics: class of its results against the operation's equations, see `Policy`.
      deterministic: the same inputs give the same bits on every run.
      cost_bytes: `FusedOp` -> bytes it moves between memory and chip, by which it is ranked; other costs may be in it
        as bytes that take as long. None means "inputs and results once".
      moved_bytes: `FusedOp` -> bytes that a call of `run` moves, for `explain`, where `cost_bytes` has others too; None
        means `cost_bytes`.
      launches: how many kernels `run` launches, or `FusedOp` -> that: a property map of a GPU ranks by them too.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    name: str
    op: str
    platforms: tuple[str, ...]
    capabilities: Mapping[str, Container[Hashable]]
    run: Callable[..., tuple[Any, ...]]
    numerics: str = "reassociated"
    deterministic: bool = True
    cost_bytes: Callable[[Any], int] | None = None
    save: Callable[..., tuple[Any, Any]] | None = None
    program: Callable[[Any], str] | None = None
    targets: tuple[str, ...] | None = None
    opaque: bool = False
    with_devices: bool = False
    partition: Callable[[Any, bool], Any] | None = None
    available: Callable[[], tuple[str, str] | None] | None = None
    needs: Callable[[Any], Sequence[Any]] | None = None
    moved_bytes: Callable[[Any], int] | None = None
    launches: Callable[[Any], int] | int = 1

    def __post_init__(self) -> None:
        if self.name == XLA or not self.name:
            raise ValueError(f"Kernel(name=...): expected a name other than {XLA!r}, found {self.name!r}")
        unknown = [p for p in self.platforms if p not in TARGETS]
        if not self.platforms or unknown:
            known = ", ".join(sorted(set(TARGETS.values())))
            raise ValueError(f"Kernel({self.name!r}, platforms=...): expected some of {known}, found {self.platforms}")
        foreign = [t for t in self.targets or () if TARGETS.get(t) not in {TARGETS[p] for p in self.platforms}]
        if foreign:
            raise ValueError(f"Kernel({self.name!r}, targets=...): expected machines of its platforms, found {foreign}")
        object.__setattr__(self, "platforms", tuple(dict.fromkeys(TARGETS[p] for p in self.platforms)))
        if self.numerics not in NUMERICS:
            raise ValueError(
                f"Kernel({self.name!r}, numerics=...): expected one of {NUMERICS}, found {self.numerics!r}"
            )
        if not callable(self.run):
            raise TypeError(f"Kernel({self.name!r}, run=...): expected a function, found {self.run!r}")

    def __hash__(self) -> int:
        return hash((self.name, self.op, self.platforms))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A kernel of the package is pickled by its name: what it runs need not be a function that pickle finds."""
        from aicf_jax.kernels import KERNELS, named

        return (named, (self.name,)) if any(k is self for k in KERNELS) else super().__reduce_ex__(protocol)

    def is_for(self, target: str | None) -> bool:
        """Whether it is made for the machine that a policy names, or for the one at hand where none is named."""
        if self.targets is None or target in self.targets:
            return True
        return target in (None, *GENERIC) and _gpu_at_hand() in self.targets

    def launches_of(self, op: Any) -> int:
        """How many kernels it launches for an operation."""
        return self.launches if isinstance(self.launches, int) else self.launches(op)

    def unmet(self, requirements: Mapping[str, Hashable]) -> dict[str, Hashable]:
        """The requirements this kernel does not meet: requirements are a subset of capabilities when it is empty."""
        return {k: v for k, v in requirements.items() if k not in self.capabilities or v not in self.capabilities[k]}


@functools.cache
def _gpu_at_hand() -> str:
    """The target that the first GPU of this process is, empty where there is none or one that has no name here."""
    if jax.default_backend() != "gpu":
        return ""
    return target_named(jax.devices()[0].device_kind)
