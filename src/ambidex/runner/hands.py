"""The devices of a lane: the host alone, or an accelerator and the host together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ambidex.device.cpu import CPUDevice
from ambidex.device.host_memory import HostMemory
from ambidex.device.probe import core_rate
from ambidex.device.queued import QueuedKernels
from ambidex.device.registry import make_accelerator
from ambidex.kernels.cpu.topology import ThreadPlan, plan_threads
from ambidex.weights.placed import HostTable, PlacedKernels

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.device.base import Accelerator, Device
    from ambidex.kernels.table import Kernels
    from ambidex.memory.cost_model import ComputeRate
    from ambidex.memory.ledger import Ledger


@dataclass(slots=True)
class Hands:
    """``device`` is the lane's: the accelerator where there is one, else the host."""

    host: CPUDevice
    #: Of the host.
    threads: ThreadPlan
    accelerator: Accelerator | None = None
    placed: PlacedKernels | None = None
    #: For the host's results beside an accelerator.
    host_memory: HostMemory | None = None

    @property
    def device(self) -> Device:
        return self.accelerator or cast("Device", self.host)

    @property
    def kernels(self) -> Kernels:
        return cast("Kernels", self.placed) if self.placed else self.host.kernels

    @property
    def placed_kernels(self) -> Kernels | None:
        return cast("Kernels", self.placed) if self.placed else None

    @property
    def notes(self) -> list[str]:
        """Sentences that the user should read once."""
        notes = list(self.host.notes)
        if self.accelerator is not None:
            notes += self.accelerator.notes
        return notes

    @property
    def ledgers(self) -> list[Ledger]:
        ledgers = [self.host.ledger]
        if self.accelerator is not None:
            ledgers.append(self.accelerator.ledger)
        return ledgers

    def close(self) -> None:
        """Drop kernels and threads, and give every reservation back."""
        placed, self.placed = self.placed, None
        if placed is not None:
            placed.close()
        if self.accelerator is not None:
            self.accelerator.close()
        self.host.close()
        for ledger in self.ledgers:
            ledger.release_all()


def available_cpus() -> set[int]:
    """CPUs that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def open_hands(config: EngineConfig) -> Hands:
    """Make the devices that ``config`` asks for. Raises OptionError."""
    plan = plan_threads(config.cpu_threads, config.cpu_bind, os.environ)
    asked = config.device.device
    if asked in ("auto", "cpu"):
        return Hands(_make_host(plan), plan)

    def measure() -> ComputeRate:
        single = CPUDevice(1, cpus=plan.cpus[:1])
        try:
            return core_rate(single.kernels)
        finally:
            single.close()

    # A simulated device computes on this machine, too: apart from the host's threads.
    spare = sorted(available_cpus() - set(plan.cpus)) if plan.cpus else []
    accelerator = make_accelerator(asked, measure, spare)
    ledger = accelerator.ledger
    share = int(ledger.capacity_bytes * config.device.gpu_memory_utilization)
    ledger.capacity_bytes = min(share, config.device.gpu_memory_limit_bytes or share)
    if config.offload.link_limit_bytes_per_s is not None:
        accelerator.limit_link(config.offload.link_limit_bytes_per_s)
    if accelerator.node is not None:
        plan = plan_threads(
            config.cpu_threads, config.cpu_bind, os.environ, near_node=accelerator.node
        )
    host = _make_host(plan)
    memory = HostMemory(accelerator)
    queue = QueuedKernels(
        host.kernels,
        accelerator.new_stream("host", host.prepare_thread),
        memory,
        accelerator.host_rate(plan.num_threads),
        "the host's",
    )
    placed = PlacedKernels(accelerator, queue, cast("HostTable", host.kernels))
    return Hands(host, plan, accelerator, placed, memory)


def _make_host(plan: ThreadPlan) -> CPUDevice:
    return CPUDevice(plan.num_threads, cpus=plan.cpus, nodes=plan.nodes, within=plan.within)
