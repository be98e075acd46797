#!/bin/sh
# Sets up ./.venv with the test tools, then checks style and types and runs the tests.
# Usage: scripts/test.sh [PYTEST ARGUMENTS]
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh test
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/python" -m pytest "$@"
