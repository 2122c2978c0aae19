"""Programs that broke other fusers, and the models people build: one file a kind of fault, plain JAX as the oracle."""
