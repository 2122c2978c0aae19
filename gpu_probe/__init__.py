"""GPU Probing Lab: measures a machine into a hardware property map.

`probes` holds one file a probe, `runner` executes them, `property_map` is what comes out and what `mcir` and
`aicf_jax` read. `python -m gpu_probe` is the command line. `files`, `environment` and `progress` stand here because the
other packages may import this one and not the other way round.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu_probe.property_map import MapError, Property, PropertyMap, shipped

__all__ = ["MapError", "Property", "PropertyMap", "load", "measure", "shipped"]

#: Reads a map: a path, or the name of a shipped one.
load = PropertyMap.load


def measure(device: str = "cpu", quick: bool = False, output: str | Path | None = None) -> PropertyMap:
    """Measures the device of a kind (``"cpu"`` or ``"cuda"``) that is here; half a minute for a CPU of two cores.

    Args:
      device: its kind.
      quick: fewer points and repetitions.
      output: folder of the raw samples (``samples.json``), from which an interrupted call continues; None: not kept.

    Points that fail are left out; the command line names them.

    Raises:
      DeviceError: there is no such device.
    """
    from gpu_probe import runner
    from gpu_probe.devices import connect
    from gpu_probe.probes import probes
    from gpu_probe.samples import Samples

    target, chosen = connect(device), probes(device)
    config = runner.configuration(target, chosen, quick, runner.QUICK_REPEATS if quick else runner.REPEATS, 0)
    with tempfile.TemporaryDirectory() as temporary:
        session = runner.Session(Path(output or temporary) / "samples.json", config)
        runner.measure(target, chosen, session, quick)
    return runner.analyze(target, chosen, Samples(tuple(session.samples)))
