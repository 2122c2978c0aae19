"""One command for a machine with a GPU: are the kernels right there, and how fast are they?

`python -m experiments.device_check` checks every kernel against float64, measures what the GPU reaches at best, and
then times the kernels beside XLA's and cuBLASLt's. `--dry-run` compiles all of it for a GPU that is not there.
"""
