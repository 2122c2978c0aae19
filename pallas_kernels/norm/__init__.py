"""Layer norm and RMS norm with the residual addition before them, forward and backward, for Hopper."""
