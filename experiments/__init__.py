"""Studies that use the whole stack: learning-rate sweep, benchmarks."""
