"""``python -m ambidex.entrypoints.api_server``: vLLM's older way to start the server."""

from __future__ import annotations

import sys

from ambidex.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
