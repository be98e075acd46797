#!/bin/sh
# Sets up ./.venv with a fitting PyTorch and this project. Usage: scripts/setup.sh [EXTRA]
#
# PyTorch, first match:
#   1. a usable torch that is already in the environment;
#   2. torch>=2.11 as the index offers it, on macOS or where an NVIDIA driver is present;
#   3. a CPU build.
# AMBIDEX_TORCH=cpu|default|skip chooses one of them. PYTHON names the interpreter for a new .venv.
set -eu
cd "$(dirname "$0")/.."
extra=${1:-}
venv=.venv
torch_wanted='torch>=2.11'
torch_cpu='torch==2.13.0+cpu'
torch_cpu_index='https://download.pytorch.org/whl/cpu'

say() { printf '%s\n' "setup: $*" >&2; }
die() { say "$*"; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 && is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed. On Debian or Ubuntu: sudo apt-get install python3 python3-venv. Or name one: PYTHON=/path/to/python3.12 $0"
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    say "making $venv with $("$python" -V)"
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif command -v uv >/dev/null 2>&1; then
        uv venv --quiet --python "$python" "$venv"
    else
        die "This Python cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv. Or install uv."
    fi
fi
python="$PWD/$venv/bin/python"

install() {
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --disable-pip-version-check "$@"
    elif command -v uv >/dev/null 2>&1; then
        uv pip install --quiet --python "$python" "$@"
    else
        die "Neither pip in $venv nor uv was found. Remove $venv and run this again."
    fi
}

torch_version() {
    "$python" - <<'PY'
import sys
try:
    import torch
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
except Exception as error:
    sys.exit(f"{error}")
if version < (2, 11):
    sys.exit(f"torch {torch.__version__} is too old")
print(torch.__version__)
PY
}

install_cpu_torch() {
    say "installing a CPU build of PyTorch ($torch_cpu, about 200 MB)"
    install "$torch_cpu" 2>/dev/null || install --index-url "$torch_cpu_index" "$torch_cpu" ||
        die "$torch_cpu was found neither on the package index nor on $torch_cpu_index for $("$python" -V). Install a torch>=2.11 into $venv and run this again with AMBIDEX_TORCH=skip."
    cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null) ||
        die "PyTorch was installed and cannot be imported: $("$python" -c 'import torch' 2>&1 | tail -n 1)"
    [ -z "$cuda" ] || die "A CPU build was asked for and one for CUDA $cuda was installed."
}

case ${AMBIDEX_TORCH:-auto} in
skip) say "AMBIDEX_TORCH=skip: PyTorch is left as it is" ;;
cpu)
    if ! found=$(torch_version 2>/dev/null) ||
        [ -n "$("$python" -c 'import torch; print(torch.version.cuda or "")')" ]; then
        install_cpu_torch
    fi
    ;;
default) install "$torch_wanted" ;;
auto)
    if found=$(torch_version 2>/dev/null); then
        say "using the torch $found that is in $venv"
    elif [ "$(uname -s)" = Darwin ] || [ -e /proc/driver/nvidia/version ]; then
        say "installing $torch_wanted"
        install "$torch_wanted"
    else
        install_cpu_torch
    fi
    ;;
*) die "AMBIDEX_TORCH=$AMBIDEX_TORCH is not known: use cpu, default or skip." ;;
esac

# The kernels are built on installation.
check_compiler() {
    compiler=
    for candidate in ${CXX:-} g++ clang++ c++; do
        if command -v "$candidate" >/dev/null 2>&1; then compiler=$candidate && break; fi
    done
    [ -n "$compiler" ] ||
        die "A C++ compiler is needed to build the kernels, and none was found. On Debian or Ubuntu: sudo apt-get install g++. On macOS: xcode-select --install. Or name one: CXX=/path/to/g++ $0"
    "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "The header files of $("$python" -V) are needed to build the kernels, and were not found. On Debian or Ubuntu: sudo apt-get install python3-dev."
}

# What was installed from which files; an unchanged set-up takes no time.
stamp="$venv/.ambidex-${extra:-base}"
kernels=src/ambidex/kernels/cpu
state=$(cksum pyproject.toml constraints.txt CMakeLists.txt "$kernels"/*.h "$kernels"/*.cpp)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$state" ] ||
    ! "$python" -c 'import ambidex.kernels.cpu._native' 2>/dev/null; then
    check_compiler
    say "building and installing Ambidex${extra:+ with what the ${extra}s need} (a few minutes)"
    install --constraint constraints.txt --editable ".${extra:+[$extra]}"
    printf '%s\n' "$state" >"$stamp"
fi
