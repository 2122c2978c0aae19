"""Side-by-side benchmarks of fused programs against `jax.jit` of the unfused ones.

    python -m experiments.benchmarks             # every study
    python -m experiments.benchmarks suite       # ratios and temporaries of each program
    python -m experiments.benchmarks rewrite     # cost of rewriting a 24-layer model
    python -m experiments.benchmarks attention   # causal attention over sequence lengths, and a GPT block stack

Only ratios measured in one run are compared, and every number comes with its spread. Two folders are open for
additions, one file each: `suite/` (a program to time) and `studies/` (a question to answer, named on the command line).
"""
