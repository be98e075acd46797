"""The threads behind the native kernels: results, idleness, forks, errors; and the library."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ambidex.errors import InstallationError
from ambidex.kernels.cpu import library
from ambidex.kernels.cpu.small import SmallOps

_native = pytest.importorskip("ambidex.kernels.cpu._native")
LEVEL = _native.supported_levels()[-1]
#: Sanitizers do not follow a fork of a process with threads.
SANITIZED = "AMBIDEX_NATIVE_DIR" in os.environ


def normed(ops: SmallOps, rows: int = 37) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 48, generator=generator)
    return ops.rms_norm(x, torch.ones(48), 1e-5)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_every_number_of_threads_gives_the_same(num_threads: int) -> None:
    ops, alone = SmallOps(num_threads, (), LEVEL), SmallOps(1, (), LEVEL)
    for rows in (0, 1, 2, 3, 37):
        assert torch.equal(normed(ops, rows), normed(alone, rows))


def test_steps_with_and_without_a_rest() -> None:
    """Workers spin, yield or sleep when the next step comes."""
    ops = SmallOps(3, (), LEVEL)
    wanted = normed(ops)
    for pause_s in (0, 0, 0.0001, 0.0005, 0.002, 0, 0.001) * 4:
        time.sleep(pause_s)
        assert torch.equal(normed(ops), wanted)


def test_pinned_threads() -> None:
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    ops = SmallOps(2, cpus[:2], LEVEL)
    assert torch.equal(normed(ops), normed(SmallOps(1, (), LEVEL)))
    if cpus:
        assert sorted(os.sched_getaffinity(0)) == cpus, "the caller's thread is its owner's matter"


def test_two_lanes_at_once() -> None:
    lanes = [SmallOps(2, (), LEVEL) for _ in range(2)]
    wanted = normed(lanes[0])

    def steps(ops: SmallOps) -> bool:
        return all(torch.equal(normed(ops), wanted) for _ in range(100))

    with ThreadPoolExecutor(2) as executor:
        assert all(executor.map(steps, lanes))


def test_one_lane_in_two_threads_is_refused() -> None:
    """They would share the workers' memory. Whoever comes second is told, and no harm is done."""
    ops = SmallOps(2, (), LEVEL)
    large, weight = torch.ones(1 << 14, 1024), torch.ones(1024)
    wanted = normed(ops)
    refused, texts = threading.Event(), list[str]()

    def steps() -> None:
        end = time.monotonic() + 60
        while not refused.is_set() and time.monotonic() < end:
            try:
                ops.rms_norm(large, weight, 1e-5)
            except RuntimeError as error:
                texts.append(str(error))
                refused.set()

    with ThreadPoolExecutor(2) as executor:
        for future in [executor.submit(steps) for _ in range(2)]:
            future.result()
    assert refused.is_set()
    assert all(text.startswith("Two threads use one kernel table") for text in texts)
    assert torch.equal(normed(ops), wanted)


def test_idle_threads_use_no_cpu() -> None:
    code = f"""
import resource, time
from ambidex.kernels.cpu.library import load
context = load().Context({LEVEL!r}, 4, [])
def used_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
context.begin_recording()
program = context.end_recording()
context.replay(program)
time.sleep(0.05)
before = used_s()
time.sleep(1.0)
print(used_s() - before)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 0.02


@pytest.mark.skipif(not hasattr(os, "fork") or SANITIZED, reason="needs fork, unwatched")
def test_a_forked_child_ends_cleanly() -> None:
    """One that leaves the kernels alone, and one that is told that it cannot use them."""
    code = f"""
import os, signal, sys
from ambidex.kernels.cpu.library import load
context = load().Context({LEVEL!r}, 3, [])
context.begin_recording()
program = context.end_recording()
context.replay(program)
for uses in (False, True):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        refused = False
        try:
            if uses:
                context.replay(program)
        except RuntimeError as error:
            refused = "forked" in str(error)
        # The interpreter's way out, which frees the context.
        sys.exit(0 if refused == uses else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, (uses, status)
context.replay(program)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork") or SANITIZED, reason="needs fork, unwatched")
def test_a_forked_child_with_threads_of_its_own_ends_cleanly() -> None:
    """They get the descriptors of threads that the child does not have."""
    code = f"""
import os, signal, sys, threading
from ambidex.kernels.cpu.library import load
context = load().Context({LEVEL!r}, 2, [])
child = os.fork()
if child == 0:
    signal.alarm(20)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    del context
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_threads_take_no_signals() -> None:
    """A signal that a worker took would not end what Python's own thread waits for."""
    code = f"""
import os, signal, threading, time
from ambidex.kernels.cpu.library import load
context = load().Context({LEVEL!r}, 4, [])
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
for task in os.listdir("/proc/self/task"):
    for line in open(f"/proc/self/task/{{task}}/status"):
        if line.startswith("SigBlk:") and int(task) != os.getpid():
            assert int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1, line
"""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs Linux's /proc")
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the library -------------------------------------------------------------------------------


def load_with(folder: Path) -> str:
    """What is said when the library is to come from ``folder``."""
    code = """
from ambidex.errors import InstallationError
from ambidex.kernels.cpu.library import load
try:
    load()
except InstallationError as error:
    print(error)
"""
    env = {**os.environ, "AMBIDEX_NATIVE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env
    )
    return done.stdout


def test_a_folder_without_a_library(tmp_path: Path) -> None:
    assert "has no _native" in load_with(tmp_path)


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    assert _native.__file__ is not None
    (tmp_path / Path(_native.__file__).name).write_bytes(b"\x7fELF, cut short")
    text = load_with(tmp_path)
    assert "cannot be loaded" in text and "scripts/build.sh" in text


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(library.importlib, "import_module", no_module)
    with pytest.raises(InstallationError, match=r"not built for this Python.*scripts/build\.sh"):
        library.load()
