"""What the caller allows: `Policy`, and the machines a program may be compiled for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from gpu_probe.property_map import MapError, PropertyMap

#: Numerics classes from strict to loose. A rewrite is legal when its class is not looser than the policy's.
NUMERICS = ("bitwise", "reassociated", "approximate")

#: Names accepted by ``Policy.target`` -> the lowering platform whose kernels are considered.
TARGETS: Mapping[str, str] = {
    "cpu": "cpu",
    "gpu": "cuda",
    "cuda": "cuda",
    "a100": "cuda",
    "l4": "cuda",
    "h100": "cuda",
    "h200": "cuda",
    "b200": "cuda",
}

#: Targets that name no machine.
GENERIC = ("cpu", "gpu", "cuda")


def target_named(device: str) -> str:
    """The target that a device is by its name, empty where there is none: an L4, but not an L40."""
    kind = device.lower()
    return next((t for t in TARGETS if t not in GENERIC and re.search(rf"{t}(?!\d)", kind)), "")


_CHOICES = {
    "numerics": NUMERICS,
    "on_failure": ("fallback", "raise"),
    "ad": ("complete",),
    "target": (None, *TARGETS),
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Limits on what `fuse` may do. Hashable; part of the key of every cache.

    Attributes:
      numerics: the loosest class a rewrite may have. ``"bitwise"``: identical results, also outside ``jit``, where the
        program then runs equation by equation as the unfused call does. ``"reassociated"``: the same real-number
        function, sums in another order, accumulation never in a lower precision. ``"approximate"``: documented bounds.
      deterministic: only kernels that give the same bits on every run.
      target: the machine kernels are chosen for, one of `TARGETS`; None means every platform a program may be lowered
        to gets its own choice. Kernels for some machines only are considered where the target names a machine, or is
        None and the GPU at hand is one of them; ``"gpu"`` and ``"cuda"`` name none, which is reported as a refusal.
      verify: run fused and unfused side by side and raise `VerificationError` where they disagree, naming the
        operation, its largest error, the bound and the source line. Inside ``jit``, ``grad``, ... the check runs with
        the compiled program, and jax reports it as a runtime error that ends with the same message. The reference is
        the unfused program under `jax.jit`.
      on_failure: ``"fallback"`` runs the unfused program when the framework itself fails (recorded in the report,
        logged once); ``"raise"`` raises `FuseError` instead. A function that cannot be traced at all, because its
        Python needs the values of arrays, raises jax's own error then.
      ad: ``"complete"``: forward mode, reverse mode and any mixture of them, of any order.
      fuel: only the first so many rewrites of a program are made, in the order `Fusion.rewrite` counts; the others are
        refused with code ``fuel``. A rewrite brings its derived backward with it. None: all. `aicf_jax.bisect` searches
        over it.
      tuning: path of a table of measured times (`aicf_jax.tune`), which kernels are then ranked by where it has them;
        None: by the bytes they move. It is read when a program is first rewritten.
      hardware: a `gpu_probe.PropertyMap` of the machine, its path, or the name of one that comes with the package
        (``"h200"``), read here. Tiles, the requirements of kernels on the machine, and the ranking of kernels then
        follow it, for programs of its kind of device; `explain` says what it lacks. None: the system's description of
        this machine's caches, and bytes.

    Raises:
      ValueError: naming the attribute, what was expected and what was found.
    """

    numerics: str = "reassociated"
    deterministic: bool = False
    target: str | None = None
    verify: bool = False
    on_failure: str = "fallback"
    ad: str = "complete"
    fuel: int | None = None
    tuning: str | None = None
    hardware: PropertyMap | str | Path | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            found = getattr(self, name)
            if found not in choices:
                raise ValueError(f"Policy({name}=...): expected one of {list(choices)}, found {found!r}")
        for name in ("deterministic", "verify"):
            found = getattr(self, name)
            if not isinstance(found, bool):
                raise ValueError(f"Policy({name}=...): expected True or False, found {found!r}")
        if self.fuel is not None and (type(self.fuel) is not int or self.fuel < 0):
            raise ValueError(f"Policy(fuel=...): expected None or a number of rewrites, found {self.fuel!r}")

        if self.tuning is not None and not isinstance(self.tuning, str):
            raise ValueError(f"Policy(tuning=...): expected None or a path as text, found {self.tuning!r}")
        if isinstance(self.hardware, str | Path):
            try:
                object.__setattr__(self, "hardware", PropertyMap.load(self.hardware))
            except MapError as error:
                raise ValueError(f"Policy(hardware=...): {error}") from error
        elif self.hardware is not None and not isinstance(self.hardware, PropertyMap):
            raise ValueError(f"Policy(hardware=...): expected a PropertyMap or its path, found {self.hardware!r}")

    def properties(self, platform: str) -> PropertyMap | None:
        """The property map where it is of a platform's kind of device, else None."""
        found = self.hardware if isinstance(self.hardware, PropertyMap) else None
        return found if found is not None and TARGETS.get(found.kind) == platform else None

    def map_note(self, platform: str) -> str:
        """What is to be known of the property map on a platform, empty where there is nothing.

        That it is of another kind of device, and so not used; or that it is used and of another machine than `target`.
        """
        found = self.hardware
        if not isinstance(found, PropertyMap):
            return ""
        if self.properties(platform) is None:
            kinds = f"another kind of device ({found.kind}) than the program's ({platform})"
            return f"the property map of {found.name} is of {kinds} and was not used"
        is_named = self.target is not None and self.target not in GENERIC
        if is_named and target_named(found.name) != self.target:
            return f"the property map is of {found.name}, the target is {self.target}: ranking and needs follow the map"
        return ""

    def allows(self, numerics: str) -> bool:
        """Whether a rewrite of class `numerics` is within this policy."""
        return NUMERICS.index(numerics) <= NUMERICS.index(self.numerics)

    def platforms(self) -> tuple[str, ...]:
        """The lowering platforms kernels are chosen for."""
        return tuple(sorted(set(TARGETS.values()))) if self.target is None else (TARGETS[self.target],)
