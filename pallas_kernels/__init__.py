"""GPU kernels for the fused operations, forward and backward, in Pallas with its Mosaic GPU backend.

One package an operation: ``config`` (tile sizes, checked), ``forward``, ``backward``, ``reference`` (the same equations
in plain jax) and ``cases`` (shapes the tests run). Kernels are functions of arrays; `aicf_jax.kernels` makes candidates
of them. Importing this package imports no Mosaic: that happens when a kernel is traced. The modules ``portable`` have
the same functions through Triton, for GPUs before Hopper (their kernels: ``triton_kernels``).
"""
