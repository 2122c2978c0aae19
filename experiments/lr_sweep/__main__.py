"""Entry point of `python -m experiments.lr_sweep`."""

import sys

from experiments.lr_sweep.cli import main

if __name__ == "__main__":
    sys.exit(main())
