"""Entry point of `python -m experiments.text_lm`."""

import sys

from experiments.text_lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
