"""GPU Probing Lab: measures a machine into a hardware property map.

Reserved for the probing milestone (see docs/design); it holds no code yet.
"""
