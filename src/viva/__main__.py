"""``python -m viva``: the command ``viva``."""

import sys

from viva.cli import main

if __name__ == "__main__":
    sys.exit(main())
