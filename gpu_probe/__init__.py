"""GPU Probing Lab: measures a machine into a hardware property map.

`probes` holds one file a probe, `runner` executes them, `property_map` is what comes out and what `mcir` and
`aicf_jax` read. `python -m gpu_probe` is the command line. `files`, `environment` and `progress` stand here because the
other packages may import this one and not the other way round.
"""

from gpu_probe.property_map import MapError, Property, PropertyMap, shipped

__all__ = ["MapError", "Property", "PropertyMap", "shipped"]
