"""``python -m shardwright``."""

import sys

from shardwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
