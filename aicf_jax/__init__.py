"""Semantic fusion for JAX: `fuse` rewrites a model by what its operations mean; `explain` says what and why."""
