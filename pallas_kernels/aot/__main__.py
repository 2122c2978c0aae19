"""``python -m pallas_kernels.aot h200 module:function --arg bf16[8192,4096]``."""

import sys

from pallas_kernels.aot.cli import main

if __name__ == "__main__":
    sys.exit(main())
