"""Progress of a long study: that of `gpu_probe`, which runs long as well."""

from gpu_probe.progress import Progress

__all__ = ["Progress"]
