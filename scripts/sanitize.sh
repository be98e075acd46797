#!/bin/sh
# Runs the native kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, and the
# thread group's stress test under ThreadSanitizer. Usage: scripts/sanitize.sh [PYTEST ARGUMENTS]
#
# PYTHON names the interpreter, which has the test tools; CXX the compiler (g++). LEVELS are the
# instruction sets ("v3;v4_vnni;amx"; a test uses those that the machine has, and amx with tiles that
# are emulated wherever there is v4_vnni); TEST_EXAMPLES (4) is how many examples a test of random
# shapes gets.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
cxx=${CXX:-g++}
levels=${LEVELS:-v3;v4_vnni;amx}

say() { printf '%s\n' "sanitize: $*" >&2; }

# cmake and ninja are the system's, or Python packages beside the interpreter.
PATH=$(dirname "$python"):$PATH
generator=
if command -v ninja >/dev/null 2>&1; then generator='-G Ninja'; fi

build() { # FOLDER TARGET CMAKE-ARGUMENTS...
    folder=$1 target=$2
    shift 2
    mkdir -p "$folder"
    log=$folder/build.log
    # shellcheck disable=SC2086
    if ! { cmake $generator -S . -B "$folder" -DPython_EXECUTABLE="$python" \
        -DCMAKE_CXX_COMPILER="$cxx" "$@" &&
        cmake --build "$folder" --parallel --target "$target"; } >"$log" 2>&1; then
        cat "$log" >&2
        exit 1
    fi
}

say "building the thread group's test with ThreadSanitizer"
build build/tsan pool_test -DAMBIDEX_SANITIZE=thread -DAMBIDEX_TESTS=ON -DAMBIDEX_LEVELS=
# A request for more memory than there is must fail here as it does elsewhere.
TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1 build/tsan/pool_test

say "building the kernels with AddressSanitizer and UndefinedBehaviorSanitizer ($levels)"
build build/asan _native -DAMBIDEX_SANITIZE=address,undefined "-DAMBIDEX_LEVELS=$levels" \
    -DAMBIDEX_EMULATED_TILES=ON

# Python is not built with the sanitizer, so its library has to be loaded first; and what Python
# and PyTorch hold until the end are no leaks of ours.
runtime=
for library in libasan.so libubsan.so libstdc++.so.6; do
    path=$("$cxx" -print-file-name=$library)
    [ -e "$path" ] || { say "$cxx has no $library; install it, or name g++ with CXX"; exit 1; }
    runtime="$runtime $path"
done
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:halt_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export AMBIDEX_NATIVE_DIR="$PWD/build/asan"
export AMBIDEX_TEST_EXAMPLES="${TEST_EXAMPLES:-4}"
# Two threads of PyTorch beside ours would only fight for the cores.
export OMP_NUM_THREADS=1
if [ $# -eq 0 ]; then set -- tests/kernels/test_native_*.py; fi
LD_PRELOAD=$runtime PYTHONPATH="$PWD/src" "$python" -c 'from ambidex.kernels.cpu.library import load; load()'
say "running $*"
LD_PRELOAD=$runtime PYTHONPATH="$PWD/src" exec "$python" -m pytest -q "$@"
