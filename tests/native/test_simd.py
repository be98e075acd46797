"""Vectors and tiles that kernels are written on, against plain loops, at every level of this
host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ambidex.kernels.cpu import _native

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake, "cmake is part of the test extra"
    env = os.environ | {"PATH": path}
    for step in (["-S", str(ROOT), "-B", str(folder), "-DAMBIDEX_TESTS=ON"], ["--build", folder]):
        done = subprocess.run([cmake, *step], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


# amx has v4_vnni's vectors.
LEVELS = [level for level in _native.supported_levels() if level != "amx"]


@pytest.mark.parametrize("level", LEVELS)
def test_vectors_compute_what_plain_loops_do(build: Path, level: str) -> None:
    done = subprocess.run(
        [build / f"simd_test_{level}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 100_000, done.stdout


@pytest.mark.parametrize("unit", ["emulated", "amx"])
def test_tiles_compute_what_plain_loops_do(build: Path, unit: str) -> None:
    """What is emulated is what processors do, where there is one to compare with."""
    program = build / f"tile_test_{unit}"
    if unit == "amx" and not program.exists():
        pytest.skip("the compiler knows no tile registers")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if unit == "amx" and done.returncode == 77:
        pytest.skip("this process has no tile registers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 1000, done.stdout
