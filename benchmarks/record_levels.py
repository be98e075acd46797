"""Tests the native kernels at every instruction-set level of this host, and records what passed.

    python benchmarks/record_levels.py [--levels v3 v4] [--output benchmarks/levels.json]

Runs the tests of the kernels once a level, with AMBIDEX_CPU_LEVEL naming it, so that tests of other
levels are left out. Writes, for this kind of machine, level -> {passed, cpu, date, tests, version};
a level that fails loses its record. A level without a record is not picked by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ambidex
from ambidex.kernels.cpu import _native
from ambidex.kernels.cpu.levels import machine_name

ROOT = Path(__file__).parent.parent


def cpu_model() -> str:
    """The processor's name, as its maker gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        text = ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    name = found["model name"].strip()
    return f"{name} (family {found.get('cpu family')}, model {found.get('model')})"


def run_tests(level: str, files: list[str]) -> tuple[bool, int]:
    """(whether all passed, how many tests passed) at one level."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files],
        cwd=ROOT,
        env=os.environ | {"AMBIDEX_CPU_LEVEL": level},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = re.search(r"(\d+) passed", done.stdout)
    num_passed = int(found[1]) if found else 0
    if done.returncode != 0:
        print(done.stdout)
    return done.returncode == 0 and num_passed > 0, num_passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=_native.supported_levels())
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "levels.json")
    args = parser.parse_args()
    if _native.EMULATED_TILES:
        sys.exit("These kernels emulate tile registers, which says nothing about processors.")
    files = [
        str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/kernels/test_native_*.py"))
    ]
    if not files:
        sys.exit("There are no tests of native kernels.")
    files.append("tests/native")
    records: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    mine = records.setdefault(machine_name(), {})
    failed = []
    for level in args.levels or _native.supported_levels():
        began = time.perf_counter()
        passed, num_tests = run_tests(level, files)
        print(
            f"{level}: {'passed' if passed else 'FAILED'}, {num_tests} tests, "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
        mine.pop(level, None)
        if not passed:
            failed.append(level)
            continue
        mine[level] = {
            "passed": True,
            "cpu": cpu_model(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "tests": num_tests,
            "version": ambidex.__version__,
        }
    args.output.write_text(json.dumps(records, indent=1) + "\n")
    if failed:
        sys.exit(f"not recorded: {', '.join(failed)}")


if __name__ == "__main__":
    main()
