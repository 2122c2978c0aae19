"""A character-level language model of Python's standard library, trained fused and unfused side by side.

`python -m experiments.text_lm` trains the same GPT from the same initial values on the same batches, as it is and fused
by `aicf_jax.fuse`, and reports losses, times and temporaries. See `README.md` in this folder.
"""
