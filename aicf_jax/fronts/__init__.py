"""The front doors: what a fused function, linen module and nnx module look like to their users."""
