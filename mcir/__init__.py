"""Memory-Centric IR: tiles, streams, online reductions, rematerialization, buffer lifetimes.

`derive` turns a computation graph (what is computed) into a memory flow `Program` (how memory moves); `lower_jax` runs
it as lax loops, `interpret` slowly and obviously; `traffic`, `lifetimes` and `peak_bytes` count it; `schedule` chooses
its tile sizes.
"""
