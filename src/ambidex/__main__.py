"""``python -m ambidex``."""

import sys

from ambidex.cli import main

if __name__ == "__main__":
    sys.exit(main())
