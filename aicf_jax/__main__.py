"""``python -m aicf_jax explain module:function --arg f32[8,128]``."""

import sys

from aicf_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
