#!/bin/sh
# Sets up ./.venv, fetches the default model and answers a prompt. Usage: scripts/run.sh [PROMPT]
set -eu
here=$(dirname "$0")
"$here/setup.sh"
exec "$here/../.venv/bin/ambidex" run --temperature 0.2 --top-p 0.9 \
    -p "${*:-Explain in three sentences why the sky is blue.}"
