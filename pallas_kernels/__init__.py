"""GPU kernels for the fused operations, forward and backward.

Reserved for the GPU milestones (see docs/design); it holds no code yet.
"""
