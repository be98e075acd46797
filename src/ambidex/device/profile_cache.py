"""This machine's profile: measured once, kept in the user's cache folder.

It is kept by what it depends on: the processor, its memory, the kernels, where the process may run,
and the threads. A file that is old, broken or of another machine is measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ambidex
from ambidex.cgroups import read_text
from ambidex.config import DeviceConfig
from ambidex.kernels.cpu.levels import choose_level, kernel_table_name, recorded_levels
from ambidex.kernels.cpu.library import load
from ambidex.kernels.cpu.topology import ThreadPlan, plan_threads, read_topology
from ambidex.memory.profile import WEIGHT_FORMS, HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.memory.strain import Strain, other_cpus, read_strain

if TYPE_CHECKING:
    from ambidex.config import EngineConfig

logger = logging.getLogger(__name__)

#: Of what is measured, and of how it is written.
FORMAT = 4

#: A profile is far smaller; no more of a file is read.
_MAX_BYTES = 1 << 20
#: How long another process may measure before this one does too; it takes seconds.
LOCK_WAIT_S = 60.0
_LOCK_POLL_S = 0.1

#: measure(config, threads, name, memory bytes, the host's profile if it is known) -> profile
Measure = Callable[["EngineConfig", ThreadPlan, str, int, HardwareProfile | None], HardwareProfile]


def this_machine(
    config: EngineConfig,
    folder: Path,
    measure: Measure | None = None,
    root: Path = Path("/"),
    *,
    anew: bool = False,
) -> HardwareProfile:
    """The profile of the machine that this process runs on, with the threads and the device that
    ``config`` asks for: from ``folder`` unless ``anew``, or measured, which takes seconds, imports
    PyTorch, and writes it there. The host is measured once for all devices beside it. One process
    measures at a time. ``measure`` and ``root`` are for tests.

    Raises OptionError for threads or a device that are not there.
    """
    plan, key, path = _where(config, folder, root)
    found = None if anew else _read(path, key)
    if found is not None:
        return found
    host, what = None, "this machine"
    if config.device.names_accelerator:
        alone = dataclasses.replace(config, device=DeviceConfig())
        host, what = this_machine(alone, folder, measure, root, anew=anew), config.device.device
    with _lock(path.with_suffix(".lock")):
        # Another process may have measured meanwhile.
        found = None if anew else _read(path, key)
        if found is not None:
            return found
        logger.info("measuring %s once; the result is kept in %s", what, path)
        before = read_strain(root)
        profile = (measure or _measure)(config, plan, key["cpu"], key["memory_bytes"], host)
        if host is None:
            profile = with_strain(profile, before, read_strain(root))
        _write(path, key, profile)
    return profile


def with_strain(profile: HardwareProfile, before: Strain, after: Strain) -> HardwareProfile:
    """``profile``, whose first source says so where other programs computed meanwhile."""
    # The system counts in hundredths of a second.
    others = other_cpus(before, after) if after.at_s - before.at_s >= 0.5 else 0.0
    if not others:
        return profile
    first, *rest = profile.sources or ("measured here",)
    first += f", while other programs used {others:.1f} CPUs: --measure measures again"
    return dataclasses.replace(profile, sources=(first, *rest))


def known_machine(
    config: EngineConfig, folder: Path, root: Path = Path("/")
) -> HardwareProfile | None:
    """The profile in ``folder``; None where this machine has not been measured."""
    _, key, path = _where(config, folder, root)
    return _read(path, key)


def _where(
    config: EngineConfig, folder: Path, root: Path
) -> tuple[ThreadPlan, dict[str, Any], Path]:
    plan = plan_threads(config.cpu_threads, config.cpu_bind, os.environ)
    key = machine_key(config, plan, root)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return plan, key, folder / f"machine-{digest[:16]}.json"


def machine_key(config: EngineConfig, plan: ThreadPlan, root: Path = Path("/")) -> dict[str, Any]:
    """What a profile depends on."""
    topology = read_topology(root)
    return {
        "format": FORMAT,
        "version": ambidex.__version__,
        "cpu": cpu_name(root),
        "memory_bytes": memory_bytes(root),
        "kernels": _kernels(),
        "affinity": list(topology.cpus),
        "quota": topology.quota,
        "threads": plan.num_threads,
        "pinned": list(plan.cpus),
        "device": config.device.device if config.device.names_accelerator else "cpu",
    }


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name, as its maker gives it."""
    text = read_text(root / "proc/cpuinfo") or ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    name = found["model name"].strip()
    return f"{name} (family {found.get('cpu family')}, model {found.get('model')})"


def memory_bytes(root: Path = Path("/")) -> int:
    """Of the whole machine; what a process may have of it is the ledger's affair."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo") or "", re.M)
    if found:
        return int(found[1]) * 1024
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _kernels() -> str:
    name = kernel_table_name(os.environ)
    if name != "native":
        return name
    forced = os.environ.get("AMBIDEX_CPU_LEVEL")
    return choose_level(load().supported_levels(), recorded_levels(), forced)[0]


def _measure(
    config: EngineConfig,
    plan: ThreadPlan,
    name: str,
    num_bytes: int,
    host: HardwareProfile | None,
) -> HardwareProfile:
    from ambidex.device.probe import measure_machine

    # What runs native kernels is pinned: not this thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure_machine, config, plan, name, num_bytes, host).result()


# ------------------------------------------------------------------------------------ the file


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; without it where there is no such file, or where it takes too
    long: two that measure slow each other down, and do no harm else."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)
            _wait_for(handle)
        except OSError as error:
            logger.info("measuring without %s: %s", path, error)
        yield


def _wait_for(handle: int) -> None:
    """Raises OSError where the lock cannot be had in time."""
    end, is_told = time.monotonic() + LOCK_WAIT_S, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_told:
                logger.info("waiting for another process, which measures this machine")
                is_told = True
            if time.monotonic() > end:
                raise
        time.sleep(_LOCK_POLL_S)


def _read(path: Path, key: Mapping[str, Any]) -> HardwareProfile | None:
    """None where there is no file, or one that is not right."""
    try:
        values = json.loads(_regular_text(path))
        if values["key"] != json.loads(json.dumps(key)):
            raise ValueError("it is of another machine")
        return _profile(values["profile"])
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.info("%s is measured again: %s", path, error)
        return None


def _regular_text(path: Path) -> str:
    """Raises OSError or ValueError."""
    # Opening a FIFO that nobody writes to would block.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no regular file")
    with open(handle, encoding="utf-8") as file:
        return file.read(_MAX_BYTES)


def _write(path: Path, key: Mapping[str, Any], profile: HardwareProfile) -> None:
    """At once or not at all: others may be reading or writing it. Where it cannot be written the
    next process measures again."""
    text = json.dumps({"key": key, "profile": _plain(dataclasses.asdict(profile))}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("this machine's profile cannot be kept in %s: %s", path.parent, error)


def _plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _profile(values: Mapping[str, Any]) -> HardwareProfile:
    """Raises ValueError, LookupError or TypeError where it is none."""
    device, link, back = values["device"], values["link"], values["link_back"]
    return HardwareProfile(
        name=str(values["name"]),
        host=_processor(values["host"]),
        device=None if device is None else _processor(device),
        link=None if link is None else _link(link),
        link_back=None if back is None else _link(back),
        sync_s=_number(values["sync_s"]),
        origin=str(values["origin"]),
        sources=tuple(str(source) for source in values["sources"]),
    )


def _processor(values: Mapping[str, Any]) -> Processor:
    rates = ("products", "attention")
    pairs = ("kept", "reads_by_threads", "small_by_rows")
    fields = {field.name for field in dataclasses.fields(Processor)}
    if set(values) != fields:
        raise ValueError(f"it lacks or has too much: {sorted(set(values) ^ fields)}")
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name in rates:
            made[name] = {form: _rate(rate) for form, rate in value.items()}
        elif name in pairs:
            made[name] = _pairs(value)
        elif name == "gathers_kv":
            if not isinstance(value, bool):
                raise TypeError(f"{value!r} is neither true nor false")
            made[name] = value
        else:
            made[name] = str(value) if name == "name" else _number(value)
    processor = Processor(**made)
    if not processor.products or not set(processor.products) <= set(WEIGHT_FORMS):
        raise ValueError("its products are of no known form")
    if not processor.bytes_per_s:
        raise ValueError("its memory is not read at all")
    return processor


def _rate(values: Mapping[str, Any]) -> ProductRate:
    overlap = math.inf if values["overlap"] is None else _number(values["overlap"])
    points = tuple((int(rows), flops) for rows, flops in _pairs(values["points"]))
    if not points or min(flops for _, flops in points) <= 0 or overlap < 1:
        raise ValueError("a rate of nothing")
    return ProductRate(points, _number(values["bytes_per_s"]), overlap, _number(values["input_s"]))


def _link(values: Mapping[str, Any]) -> LinkRate:
    return LinkRate(_number(values["bytes_per_s"]), _number(values["latency_s"]))


def _pairs(values: Any) -> tuple[tuple[float, float], ...]:
    """Ascending."""
    pairs = tuple((_number(first), _number(second)) for first, second in values)
    if list(pairs) != sorted(pairs):
        raise ValueError("its points are not in order")
    return pairs


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is no quantity")
    return value
