"""Nothing is sent to anybody: no telemetry, and with HF_HUB_OFFLINE=1 not even a request for files.

Python's own audit events say so: a command in whose process a name is looked up, or a socket
connected to anything but this machine's own files, ends at once with a code of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

#: Exit code of a command that tried to reach a network.
CAUGHT = 97

GUARD = f"""
import os, socket, sys

def watch(event, args):
    looks_up = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
    sends = event in ("socket.connect", "socket.sendto", "socket.sendmsg")
    if looks_up or (sends and args[0].family != socket.AF_UNIX):
        os.write(2, f"{{event}} {{args[1:]}}\\n".encode())
        os._exit({CAUGHT})

sys.addaudithook(watch)
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    (folder / "sitecustomize.py").write_text(GUARD)
    return folder


@pytest.mark.parametrize(
    "code",
    [
        "socket.create_connection(('127.0.0.1', 9))",
        "socket.getaddrinfo('example.org', 443)",
        "socket.gethostbyname('example.org')",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
    ],
)
def test_the_guard_sees_a_network(guard: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import socket; {code}"],
        env={"PYTHONPATH": str(guard)},
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == CAUGHT


@pytest.mark.model
def test_offline_opens_no_socket(run_command: Command, guard: Path, smollm2: Path) -> None:
    """The whole command on the cached model."""
    done = run_command(
        *("run", "smollm2-135m-instruct", "-p", "Hello", "-n", "4", "--temperature", "0"),
        env={"HF_HUB_OFFLINE": "1"},
        path=guard,
    )
    assert done.code == 0, done.err
    assert done.out.strip() and str(smollm2) in done.err


def test_a_local_model_needs_no_network(run_command: Command, guard: Path, tiny_model: Any) -> None:
    """Nor is anybody told that it runs: HF_HUB_OFFLINE is not set."""
    folder = str(tiny_model("llama", tokenizer=True))
    done = run_command("run", folder, "-p", "x", "-n", "4", env={"HF_HUB_OFFLINE": ""}, path=guard)
    assert done.code == 0, done.err


def test_offline_a_model_that_is_not_here_is_not_asked_for(
    run_command: Command, guard: Path, tmp_path: Path
) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "AMBIDEX_CACHE": str(tmp_path)}
    for name in ("some/model", "smollm2-135m-instruct"):
        done = run_command("pull", name, env=env, path=guard)
        assert (done.code, done.out) == (1, "") and "HF_HUB_OFFLINE" in done.err
