"""GPU Probing Lab: measures a machine into a hardware property map.

The probes come with a later milestone (see docs/design). So far it holds `files`, with which every package writes: it
stands here because the others may import this package and not the other way round.
"""
