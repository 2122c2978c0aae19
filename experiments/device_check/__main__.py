"""Entry point of `python -m experiments.device_check`."""

import sys

from experiments.device_check.cli import main

if __name__ == "__main__":
    sys.exit(main())
