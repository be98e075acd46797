#!/bin/sh
# Builds the native kernels into src/, for work on them. Usage: scripts/build.sh [CMAKE ARGUMENTS]
# For one family and level only: scripts/build.sh -DAMBIDEX_FAMILIES=small -DAMBIDEX_LEVELS=v3
# PYTHON names the interpreter; it must have nanobind.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
# Where the system has no cmake or ninja, the ones that were installed as Python packages.
PATH="$PATH:$(dirname "$python")"
generator=
if command -v ninja >/dev/null 2>&1; then generator='-G Ninja'; fi
# shellcheck disable=SC2086
cmake $generator -S . -B build/native -DPython_EXECUTABLE="$python" "$@" >build-native.log 2>&1 ||
    { cat build-native.log >&2; rm -f build-native.log; exit 1; }
rm -f build-native.log
cmake --build build/native --parallel
rm -f src/ambidex/kernels/cpu/_native*.so
cp build/native/_native*.so src/ambidex/kernels/cpu/
