"""``load_and_measure.py TINY MODEL DEVICE MODE KV_MIB``: loads a model beside an accelerator and
prints, as JSON, what that took of either memory."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from lane_harness import drive, make_config, placed_bytes, prompts

from ambidex.config import OffloadConfig
from ambidex.device.sim import SimDevice
from ambidex.engine.engine import Engine


def anonymous_bytes() -> int:
    """What this process takes of the machine's memory, mapped files apart."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


def resident_bytes(address: int) -> int:
    """How much of the mapping at ``address`` is there: what the accelerator's memory takes."""
    is_inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        start, dash, end = first.partition("-")
        if dash and len(rest) > 4 and rest[4] == " ":
            is_inside = int(start, 16) <= address < int(end, 16)
        elif is_inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


class Sampler:
    """The most that the process takes."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak_bytes


def main() -> None:
    tiny, folder, device, mode, kv_mib = sys.argv[1:]
    offload = OffloadConfig()
    if mode != "auto":
        offload = OffloadConfig(patterns=("layers.*",), mode=mode)
    # Whatever is made once is there before: libraries, threads, allocators.
    Engine(make_config(Path(tiny), device, OffloadConfig(patterns=("*",), mode="stream"))).close()
    before = anonymous_bytes()
    sampler = Sampler()
    limits = {"max_num_seqs": 4, "kv_cache_bytes": int(kv_mib) << 20}
    engine = Engine(make_config(Path(folder), device, offload, dtype="float32", **limits))
    peak = sampler.stop()
    accelerator = engine.lane.hands.accelerator
    assert isinstance(accelerator, SimDevice)
    after, there = anonymous_bytes(), resident_bytes(accelerator._region._base)
    parameters = list(engine.lane.runner.model.named_parameters())
    loaded_peak = {name: accelerator.peak_bytes(name) for name in ("weights", "staging")}
    ran = drive(engine, prompts((5, 20)), 4)
    streamer = engine.lane.hands.placed.streamer
    print(
        json.dumps(
            {
                "errors": ran.errors,
                "tokens": [[token for token, _, _ in trace] for trace in ran.traces],
                "host_weights": sum(placed_bytes(parameter) for _, parameter in parameters),
                "weights": sum(parameter.held_bytes for _, parameter in parameters),
                "device_weights": accelerator.taken_bytes("weights"),
                "device_peak": loaded_peak,
                "ring": streamer.ring_bytes if streamer is not None else 0,
                "device_capacity": accelerator.ledger.capacity_bytes,
                "device_used": accelerator.ledger.used_bytes,
                "host_ledger": engine.lane.hands.host.ledger.reserved_bytes("weights"),
                "growth": after - before - there,
                "peak_beyond_end": peak - after,
                "counts": ran.counts,
            }
        )
    )
    engine.close()


if __name__ == "__main__":
    main()
