"""The profile of this machine: measured once, and again when it is not to be trusted."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex.config import DeviceConfig, EngineConfig, ModelConfig
from ambidex.device import profile_cache
from ambidex.device.profile_cache import cpu_name, memory_bytes, this_machine, with_strain
from ambidex.kernels.cpu.topology import ThreadPlan
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.memory.strain import Strain

CONFIG = EngineConfig(ModelConfig("any"), cpu_threads=1)
RATE = ProductRate(((1, 1e9), (8, 2e9)), 3e9, math.inf)
HOST = Processor(
    "a processor",
    1 << 30,
    4e9,
    {"float32": RATE, "int8": ProductRate(((1, 1.5e9),), 0.0, 2.0)},
    launch_s=1e-6,
    attention={"float16": RATE},
    kept=((1e6, 0.5), (2e6, 0.0)),
    reads_by_threads=((1, 2e9), (2, 4e9)),
)
PROFILE = HardwareProfile(
    "here", HOST, replace(HOST, name="device"), LinkRate(1e9, 1e-5), None, 1e-5, "measured", ("x",)
)

ONE = {"points": [[1, 1]], "bytes_per_s": 1, "overlap": 1, "input_s": 0}


class Probe:
    """Counts how often something is measured."""

    def __init__(self) -> None:
        self.calls: list[tuple[ThreadPlan, str, int]] = []
        #: Devices that were measured beside a host that was known.
        self.devices: list[str] = []

    def __call__(
        self,
        config: EngineConfig,
        plan: ThreadPlan,
        name: str,
        num_bytes: int,
        host: HardwareProfile | None,
    ) -> HardwareProfile:
        if host is None:
            self.calls.append((plan, name, num_bytes))
        else:
            assert host == PROFILE
            self.devices.append(config.device.device)
        return PROFILE


def make_root(folder: Path, *, cpu: str = "Some CPU", kilobytes: int = 1000) -> Path:
    (folder / "proc").mkdir(parents=True)
    (folder / "proc/cpuinfo").write_text(
        f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {cpu}\n"
    )
    (folder / "proc/meminfo").write_text(f"MemTotal:       {kilobytes} kB\nMemFree: 1 kB\n")
    return folder


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_it_is_measured_once(tmp_path: Path) -> None:
    probe, folder = Probe(), tmp_path / "not" / "there"
    for _ in range(3):
        assert this_machine(CONFIG, folder, probe) == PROFILE
    assert len(probe.calls) == 1
    assert probe.calls[0][0].num_threads == 1
    assert the_file(folder).suffix == ".json"


def test_reading_it_needs_no_torch(tmp_path: Path) -> None:
    this_machine(CONFIG, tmp_path, Probe())
    code = f"""
import sys
from pathlib import Path
from ambidex.config import EngineConfig, ModelConfig
from ambidex.device.profile_cache import this_machine
found = this_machine(EngineConfig(ModelConfig("any"), cpu_threads=1), Path({str(tmp_path)!r}))
assert found.name == "here", found
assert "torch" not in sys.modules
"""
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": {}}', '{"key": {}, "profile": {}}', "\0\1"],
)
def test_a_broken_file_is_measured_again(tmp_path: Path, text: str) -> None:
    probe = Probe()
    this_machine(CONFIG, tmp_path, probe)
    the_file(tmp_path).write_text(text)
    assert this_machine(CONFIG, tmp_path, probe) == PROFILE
    assert len(probe.calls) == 2
    assert this_machine(CONFIG, tmp_path, probe) == PROFILE
    assert len(probe.calls) == 2


def test_bytes_that_are_no_text_are_measured_again(tmp_path: Path) -> None:
    probe = Probe()
    this_machine(CONFIG, tmp_path, probe)
    the_file(tmp_path).write_bytes(b"\xff\xfe\x80")
    this_machine(CONFIG, tmp_path, probe)
    assert len(probe.calls) == 2


def _set(values: Any, path: str, value: Any) -> None:
    *front, last = path.split(".")
    for name in front:
        values = values[name]
    if value is None:
        del values[last]
    else:
        values[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("key.format", 0),
        ("key.version", "0.0.1"),
        ("profile.host.bytes_per_s", 0),
        ("profile.host.bytes_per_s", -1),
        ("profile.host.bytes_per_s", "fast"),
        ("profile.host.bytes_per_s", True),
        ("profile.host.launch_s", None),
        ("profile.host.more", 1),
        ("profile.host.gathers_kv", 1),
        ("profile.host.products", {}),
        (
            "profile.host.products",
            {"int3": {"points": [[1, 1]], "bytes_per_s": 1, "overlap": 1, "input_s": 0}},
        ),
        ("profile.host.products.float32.points", []),
        ("profile.host.products.float32.points", [[8, 1e9], [1, 1e9]]),
        ("profile.host.products.float32.points", [[1, 0]]),
        ("profile.host.products.float32.overlap", 0.5),
        ("profile.host.products.float32.input_s", None),
        ("profile.host.kept", [[1], [2]]),
        ("profile.link", {"bytes_per_s": 1}),
        ("profile.sync_s", None),
    ],
)
def test_what_is_not_right_is_measured_again(tmp_path: Path, path: str, value: Any) -> None:
    probe = Probe()
    this_machine(CONFIG, tmp_path, probe)
    values = json.loads(the_file(tmp_path).read_text())
    _set(values, path, value)
    the_file(tmp_path).write_text(json.dumps(values))
    assert this_machine(CONFIG, tmp_path, probe) == PROFILE
    assert len(probe.calls) == 2


def test_each_machine_and_each_choice_has_its_own(tmp_path: Path) -> None:
    probe, folder = Probe(), tmp_path / "cache"
    roots = [
        make_root(tmp_path / "a"),
        make_root(tmp_path / "b", cpu="Other CPU"),
        make_root(tmp_path / "c", kilobytes=2000),
    ]
    for root in roots * 2:
        this_machine(CONFIG, folder, probe, root)
    assert len(probe.calls) == 3
    assert probe.calls[1][1:] == ("Other CPU (family 25, model 17)", 1024000)
    for config in (
        replace(CONFIG, cpu_threads=2),
        replace(CONFIG, cpu_bind="none"),
    ):
        for _ in range(2):
            this_machine(config, folder, probe, roots[0])
    # Not pinning is a choice of its own only where threads would be pinned.
    assert len(probe.calls) in (4, 5)
    # `auto` and `cpu` are the same.
    this_machine(replace(CONFIG, device=DeviceConfig("cpu")), folder, probe, roots[0])
    assert len(probe.calls) in (4, 5)


def test_the_host_is_measured_once_for_all_devices(tmp_path: Path) -> None:
    probe, devices = Probe(), ["sim:memory=1GiB", "sim:memory=2GiB"]
    for device in devices * 2:
        this_machine(replace(CONFIG, device=DeviceConfig(device)), tmp_path, probe)
    this_machine(CONFIG, tmp_path, probe)
    assert (len(probe.calls), probe.devices) == (1, devices)
    this_machine(replace(CONFIG, device=DeviceConfig(devices[0])), tmp_path, probe, anew=True)
    assert (len(probe.calls), probe.devices) == (2, [*devices, devices[0]])


def test_a_quota_is_part_of_it(tmp_path: Path) -> None:
    probe, root = Probe(), make_root(tmp_path / "root")
    this_machine(CONFIG, tmp_path / "cache", probe, root)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (root / "sys/fs/cgroup/box").mkdir(parents=True)
    (root / "sys/fs/cgroup/box/cpu.max").write_text("150000 100000\n")
    this_machine(CONFIG, tmp_path / "cache", probe, root)
    assert len(probe.calls) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe, folder = Probe(), tmp_path / "file"
    folder.write_text("no folder")
    for _ in range(2):
        assert this_machine(CONFIG, folder, probe) == PROFILE
    assert len(probe.calls) == 2
    assert "cannot be kept" in caplog.text


def test_writers_do_not_meet(tmp_path: Path) -> None:
    def one(_: int) -> HardwareProfile:
        return this_machine(CONFIG, tmp_path, Probe())

    with ThreadPoolExecutor(8) as pool:
        assert all(found == PROFILE for found in pool.map(one, range(32)))
    # Nothing temporary is left behind.
    json.loads(the_file(tmp_path).read_text())
    assert not list(tmp_path.glob("*.tmp"))


def test_it_is_measured_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    probe = Probe()
    this_machine(CONFIG, tmp_path, probe)
    this_machine(CONFIG, tmp_path, probe, anew=True)
    assert len(probe.calls) == 2
    this_machine(CONFIG, tmp_path, probe)
    assert len(probe.calls) == 2


def test_one_measures_and_the_others_wait_for_it(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()
    calls = []

    def slow(*_: object) -> HardwareProfile:
        calls.append(1)
        begun.set()
        assert go.wait(30)
        return PROFILE

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(this_machine, CONFIG, tmp_path, slow)
        assert begun.wait(30)
        second = pool.submit(this_machine, CONFIG, tmp_path, slow)
        threading.Event().wait(0.3)  # The other is at the lock, or it would have measured.
        go.set()
        assert first.result() == second.result() == PROFILE
    assert len(calls) == 1


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(profile_cache, "LOCK_WAIT_S", 0.0)
    probe = Probe()
    this_machine(CONFIG, tmp_path, probe)
    with open(the_file(tmp_path).with_suffix(".lock"), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert this_machine(CONFIG, tmp_path, probe, anew=True) == PROFILE
    assert len(probe.calls) == 2
    assert "waiting for another process" in caplog.text and "measuring without" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop"])
@pytest.mark.parametrize("suffix", [".json", ".lock"])
def test_what_is_no_regular_file_does_not_block(tmp_path: Path, kind: str, suffix: str) -> None:
    probe = Probe()
    this_machine(CONFIG, tmp_path, probe)
    path = the_file(tmp_path).with_suffix(suffix)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    assert this_machine(CONFIG, tmp_path, probe, anew=suffix == ".lock") == PROFILE
    assert len(probe.calls) == 2


def test_a_measurement_beside_other_programs_says_so() -> None:
    before = Strain(10.0, 100.0, 50.0, 0.0, 0.0, 0)
    quiet = Strain(14.0, 104.0, 54.0, 0.0, 0.0, 0)
    assert with_strain(PROFILE, before, quiet) == PROFILE
    busy = with_strain(PROFILE, before, replace(quiet, busy_s=105.6))
    assert busy.sources == ("x, while other programs used 0.4 CPUs: --measure measures again",)
    # Too short to be told from what the system's counters are rounded to.
    assert with_strain(PROFILE, before, replace(before, at_s=10.01, busy_s=100.01)) == PROFILE


def test_a_machine_that_says_nothing_still_has_a_name(tmp_path: Path) -> None:
    assert cpu_name(tmp_path)
    assert memory_bytes(tmp_path) >= 0
