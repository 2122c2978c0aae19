"""Learning-rate sweep: does a model diverge because of its fused gradient, or because of optimizer and scale?

`python -m experiments.lr_sweep` trains one MLP on scikit-learn's digits, fused by `aicf_jax.fuse` and unfused, from the
same seeds, over learning rates x optimizers x dtypes x input scalings. See `README.md` in this folder.
"""
