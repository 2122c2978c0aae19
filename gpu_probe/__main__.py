"""`python -m gpu_probe`."""

import sys

from gpu_probe.cli import main

if __name__ == "__main__":
    sys.exit(main())
