"""The smallest sweep, stand-ins for a fuser, and the command run in this process.

`fuse` is injected, so these tests are about the sweep and not about the fuser: the identity stands for a right one.
"""

from __future__ import annotations

import io

import jax
from rich.console import Console

from experiments.lr_sweep import cli
from experiments.lr_sweep.config import SweepConfig

# Two cells, two rates: the smallest sweep that has something to resume.
SMALL = SweepConfig(
    learning_rates=(1e-3, 1e-2),
    optimizers=("sgd",),
    dtypes=("float32",),
    inputs=("standardized", "unscaled"),
    steps=20,
    batch_size=32,
    hidden=(16,),
    gradient_steps=2,
)
SMALL_FLAGS = (
    *("--learning-rates", "1e-3", "1e-2", "--optimizers", "sgd", "--dtypes", "float32"),
    *("--inputs", "standardized", "unscaled", "--steps", "20", "--batch-size", "32", "--hidden", "16"),
    *("--gradient-steps", "2"),
)


def identity(module):
    return module


class ReassociatedModel:
    """A rightly fused model that sums in another order: every product split in two halves of the reduction axis."""

    def __init__(self, module):
        self._module = module

    def apply(self, variables, x):
        layers = list(variables["params"].values())
        for number, layer in enumerate(layers):
            half = layer["kernel"].shape[0] // 2
            x = x[:, half:] @ layer["kernel"][half:] + x[:, :half] @ layer["kernel"][:half] + layer["bias"][None]
            x = x if number == len(layers) - 1 else jax.nn.relu(x)
        return x


def command(folder, *flags, fuse=identity, **options):
    """Run the command in this process; (exit code, what it printed)."""
    out = io.StringIO()
    console = Console(file=out, width=200, soft_wrap=True)
    code = cli.main([*flags, "--output", str(folder)], fuse=fuse, console=console, **options)
    return code, out.getvalue()
