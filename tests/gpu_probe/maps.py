"""Synthetic samples and maps."""

from gpu_probe import Property, PropertyMap
from gpu_probe.samples import Sample, Samples


def samples(probe, parameter, unit, values, **other):
    """Samples of one probe: `values` by `parameter`, a list for each."""
    return Samples(
        tuple(
            Sample(probe, {parameter: x, **other}, unit, repeat, float(value))
            for x, found in values.items()
            for repeat, value in enumerate(found)
        )
    )


def measured(value, unit, interval=None):
    return Property(value, unit, "measured", "test", interval, ("p",))


def cpu_map(**properties):
    """A map of a CPU; `l1_size` stands for `l1.size`."""
    return PropertyMap({"kind": "cpu", "name": "test"}, {k.replace("__", "."): v for k, v in properties.items()})
