"""The ledger against the operating system, beside an accelerator.

    python benchmarks/ledger.py MODEL [--device sim:memory=1GiB] [--mode stream compute split]
        [--offload-gb 0.05] [--record]

Each mode runs in a process of its own: an engine computes the largest steps and 32 requests; then
what the host's ledger has reserved is compared with the most that the process held (VmHWM). Memory
of the simulated accelerator is this process's too: its pages are counted and taken off, and stand
beside the accelerator's ledger, whose tensors lie with gaps of up to an eighth. The host's
ledger should be within 5%. --record appends the table to benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from record_levels import cpu_model

from ambidex.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
)
from ambidex.device.sim import SimDevice
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.levels import machine_name
from ambidex.request import EngineRequest, SamplingParams

HERE = Path(__file__).parent
REQUESTS = 32


def peak_bytes() -> int:
    """VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def pages_of(device: SimDevice) -> int:
    """Bytes of this process's memory that the accelerator's takes."""
    region = device._region
    # Of neighbouring areas the system's list says only what they have together.
    size = region._end - region._base
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.c_void_p(region._base)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def measure(args: argparse.Namespace, mode: str) -> str:
    """A row of the table."""
    engine = Engine(
        EngineConfig(
            model=ModelConfig(str(args.model), max_model_len=2048),
            cache=CacheConfig(kv_cache_bytes=args.kv_mib << 20, prefault=True),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
            device=DeviceConfig(args.device),
            offload=OffloadConfig(cpu_offload_bytes=int(args.offload_gb * 1e9), mode=mode),
            cpu_threads=1,
            warm_up_fully=True,
        )
    )
    for number in range(REQUESTS):
        params = SamplingParams(
            max_tokens=3,
            ignore_eos=True,
            temperature=float(number % 2),
            seed=1,
            prompt_logprobs=None if number else 2,
        )
        prompt = [3 + (number + i) % 500 for i in range(16 if number else 256)]
        engine.add_request(EngineRequest(str(number), prompt, params, 0.0))
    while engine.has_work:
        engine.step()
    host, there = engine.memory()
    device = engine.lane.hands.accelerator
    assert isinstance(device, SimDevice), "this script asks the simulated accelerator's memory"
    pages, peak = pages_of(device), peak_bytes()
    accounts = ", ".join(f"{k} {v / 1e6:.0f}" for k, v in host.accounts.items() if v)
    engine.close()
    held = peak - pages
    return (
        f"| {args.model.name} | {mode} | {peak / 1e6:.0f} | {pages / 1e6:.0f} of "
        f"{there.reserved_bytes / 1e6:.0f} | {held / 1e6:.0f} | {host.reserved_bytes / 1e6:.0f} "
        f"({accounts}) | {host.reserved_bytes / held:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    rates = "core_bandwidth=10GB/s,core_flops=50G,link=10GB/s"
    parser.add_argument("--device", default=f"sim:memory=1GiB,{rates}")
    parser.add_argument("--mode", nargs="+", default=["stream", "compute", "split"])
    parser.add_argument("--offload-gb", type=float, default=0.05, help="GB of weights on the host")
    parser.add_argument("--kv-mib", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args, args.mode[0]))
        return
    lines = [
        f"## {time.strftime('%Y-%m-%d', time.gmtime())}: {cpu_model()}, {machine_name()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}",
        "",
        "### The ledger against the operating system, beside a simulated accelerator (MB)",
        "",
        "| model | mode | VmHWM | accelerator's pages of its ledger | the host's | its ledger | "
        "ledger / held |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode in args.mode:
        command = [sys.executable, __file__, str(args.model), "--one", "--mode", mode]
        command += ["--device", args.device, "--kv-mib", str(args.kv_mib)]
        command += ["--offload-gb", str(args.offload_gb)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines.append(done.stdout.splitlines()[-1])
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if args.record:
        with (HERE / "RESULTS.md").open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
