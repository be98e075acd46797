"""What a probe gives, in short mode. How fast this machine is does not matter."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ambidex.config import DeviceConfig, EngineConfig, ModelConfig
from ambidex.device.cpu import CPUDevice
from ambidex.device.probe import (
    SHORT,
    measure_device,
    measure_host,
    measure_link,
    measure_machine,
)
from ambidex.device.profile_cache import this_machine
from ambidex.device.sim import make_sim
from ambidex.kernels.cpu.topology import ThreadPlan
from ambidex.memory.cost_model import ComputeRate
from ambidex.memory.profile import WEIGHT_FORMS, HardwareProfile, Processor, ProductRate

CORE = ComputeRate(10e9, 50e9)


def measured(kernels: str, threads: int = 2) -> Processor:
    def measure() -> Processor:
        device = CPUDevice(threads, kernels=kernels)
        try:
            return measure_host(device, "here", 123, SHORT)
        finally:
            device.close()

    # A probe may pin the thread that it runs in.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()


def check(rate: ProductRate) -> None:
    rows = [row for row, _ in rate.points]
    assert rows == sorted(set(rows))
    assert all(0 < flops < math.inf for _, flops in rate.points)
    assert 0 < rate.bytes_per_s < math.inf
    assert rate.overlap >= 1


def test_the_host_has_a_rate_of_every_form() -> None:
    host = measured("native")
    assert set(host.products) == set(WEIGHT_FORMS)
    for rate in (*host.products.values(), *host.attention.values()):
        check(rate)
    assert set(host.attention) == {"float32", "float16"}
    assert [rows for rows, _ in host.products["int4"].points] == [
        *SHORT.rows,
        SHORT.rows_of_prompts,
    ]
    assert (host.name, host.memory_bytes, host.num_threads) == ("here", 123, 2)
    for value in (host.bytes_per_s, host.small_bytes_per_s, host.launch_s, host.step_s):
        assert 0 < value < math.inf
    assert 0 < host.prompt_token_s < host.token_s < host.step_s
    assert [threads for threads, _ in host.reads_by_threads] == [1, 2]
    assert [num_bytes for num_bytes, _ in host.kept] == [1 << 20, 2 << 20, 4 << 20]
    shares = [share for _, share in host.kept]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] <= 1
    assert shares[-1] == 0


def test_the_reference_table_has_a_plain_roofline() -> None:
    host = measured("reference", 1)
    assert set(host.products) == {"float32"}
    assert 0 < host.bytes_per_s < math.inf
    assert 0 < host.product("int4").flops(1) < math.inf


def test_the_simulated_link_is_what_was_asked_for() -> None:
    device: Any = make_sim("memory=64MiB,link=4GB/s,latency=20us,speed=0.5", lambda: CORE, ())
    try:
        link, back = measure_link(device, 8 << 20)
        for found in (link, back):
            assert found.bytes_per_s == pytest.approx(4e9, rel=1e-6)
            assert found.latency_s == pytest.approx(20e-6, rel=1e-3)
        assert device.ledger.reserved_bytes("staging") == 0
        processor = measure_device(device)
        assert (processor.bytes_per_s, processor.memory_bytes) == (5e9, 64 << 20)
        assert processor.product("float32").flops(100) == 25e9
    finally:
        device.close()


def test_a_machine_with_an_accelerator_has_both(tmp_path: Path) -> None:
    def measure(
        config: EngineConfig,
        plan: ThreadPlan,
        name: str,
        num_bytes: int,
        host: HardwareProfile | None,
    ) -> HardwareProfile:
        with ThreadPoolExecutor(1) as thread:
            task = thread.submit(measure_machine, config, plan, name, num_bytes, host, SHORT)
            return task.result()

    device = DeviceConfig("sim:memory=64MiB,link=2GB/s,latency=10us")
    config = EngineConfig(ModelConfig("any"), device=device, cpu_threads=1)
    found = this_machine(config, tmp_path, measure)
    assert found.origin == "measured"
    assert found.device is not None
    assert found.link is not None
    assert found.link.bytes_per_s == pytest.approx(2e9, rel=1e-6)
    assert found.sync_s == pytest.approx(10e-6, rel=1e-3)
    # As written, so read.
    assert this_machine(config, tmp_path, measure) == found
