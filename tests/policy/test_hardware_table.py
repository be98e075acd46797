"""Hardware by name, and by numbers."""

from __future__ import annotations

import pytest

from ambidex.errors import OptionError
from ambidex.memory.hardware_table import (
    CPUS,
    DEFAULT_CPUS,
    GPUS,
    LEVELS,
    REACHED_ARITHMETIC,
    REACHED_LINK,
    REACHED_MEMORY,
    find_gpu,
    find_host,
    parse_gpu,
    parse_host,
    table_profile,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx-3090", "RTX 3090"),
        ("RTX3090", "RTX 3090"),
        ("3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx_4060_ti", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("a100", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla T4", "T4"),
        ("a10g", "A10G"),
        ("L40s", "L40S"),
    ],
)
def test_names_of_gpus_as_people_and_drivers_write_them(text: str, name: str) -> None:
    assert find_gpu(text).processor.name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("epyc-9354", "EPYC 9354"),
        ("EPYC9654", "EPYC 9654"),
        ("AMD EPYC 7763 64-Core Processor", "EPYC 7763"),
        ("Intel(R) Xeon(R) CPU E5-2678 v3 @ 2.50GHz", "Xeon E5-2678 v3"),
        ("Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", "Xeon Gold 6248"),
        ("Xeon Platinum 8480+", "Xeon Platinum 8480+"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "Core i9-13900K"),
        ("i9-13900k", "Core i9-13900K"),
        ("AMD Ryzen 7 5800X 8-Core Processor", "Ryzen 7 5800X"),
        ("ryzen 7950x", "Ryzen 9 7950X"),
    ],
)
def test_names_of_cpus_as_people_and_systems_write_them(text: str, name: str) -> None:
    assert find_host(text).name == name


def test_every_row_is_found_by_its_names_and_has_a_source() -> None:
    for gpu in GPUS:
        for name in (gpu.name, *gpu.aliases):
            assert find_gpu(name).processor.name == gpu.name
        assert gpu.source
        # 8 bits are not slower than 16, nor 16 than 32; a memory is read in well under a second.
        assert gpu.fp32 <= gpu.fp16 <= gpu.int8
        assert 0.004 < gpu.memory_gb / gpu.bandwidth_gb < 0.1
        assert (gpu.is_server, gpu.generation) in DEFAULT_CPUS
    for cpu in CPUS:
        for name in (cpu.name, *cpu.aliases):
            assert find_host(name).name == cpu.name
        assert cpu.source and cpu.level in LEVELS
    assert {name.name for name in CPUS} >= set(DEFAULT_CPUS.values())


def test_a_share_of_the_peak_is_reached() -> None:
    found = find_gpu("A100-80")
    assert found.processor.memory_bytes == 80e9
    assert found.processor.bytes_per_s == pytest.approx(2039e9 * REACHED_MEMORY)
    assert found.processor.product("bfloat16").flops(1) == 312e12 * REACHED_ARITHMETIC
    assert found.processor.product("int4").flops(1) == 624e12 * REACHED_ARITHMETIC
    assert found.link.bytes_per_s == pytest.approx(16 * 1.969e9 * REACHED_LINK)
    assert 25e9 < found.link.bytes_per_s < 26e9
    # No tensor core of a T4 multiplies bf16.
    assert find_gpu("T4").processor.product("bfloat16").flops(1) == 8.1e12 * REACHED_ARITHMETIC
    assert find_gpu("T4").half == "float16" and find_gpu("L4").half == "bfloat16"
    # Four channels of DDR4-2133; twelve cores of two 256-bit multiply-adds a cycle.
    host = find_host("e5-2678v3")
    assert host.bytes_per_s == pytest.approx(4 * 2133e6 * 8 * REACHED_MEMORY)
    assert host.product("float32").flops(1) == pytest.approx(12 * 2.5e9 * 32 * REACHED_ARITHMETIC)
    # Small cores are half of one.
    assert find_host("13900k").product("float32").flops(1) == pytest.approx(
        16 * 4.9e9 * 32 * REACHED_ARITHMETIC
    )


def test_the_slower_end_of_a_link_decides() -> None:
    fast = table_profile("H100", "epyc-9354")
    slow = table_profile("H100", "Xeon Gold 6248")
    assert fast.link is not None and slow.link is not None
    assert fast.link.bytes_per_s == pytest.approx(4 * slow.link.bytes_per_s, rel=1e-3)
    assert "The link is PCIe 3.0 x16: the CPU has no faster one." in slow.sources
    coherent = table_profile("GH200", None)
    assert coherent.link is not None and coherent.link.bytes_per_s == 450e9 * REACHED_LINK
    assert coherent.host.name == "Grace"


def test_what_is_not_named_is_said() -> None:
    profile = table_profile("A10", None)
    assert profile.name == "A10 with EPYC 7543"
    assert profile.sources[0] == "No CPU is named: EPYC 7543 is taken; --cpu names another."
    assert "256 GiB is taken" in profile.sources[1]
    given = table_profile("A10", "epyc 7543", 64 << 30)
    assert given.host.memory_bytes == 64 << 30
    assert not any("is taken" in line for line in given.sources)
    alone = table_profile(None, "13900k", 32 << 30)
    assert alone.device is None and alone.link is None
    assert any("80% of memory and links, 65% of arithmetic" in line for line in alone.sources)


@pytest.mark.parametrize(
    ("text", "near"),
    [("rtx 3095", "RTX 3090"), ("A11", "A10"), ("4090ti", "RTX 4090"), ("h10", "H100")],
)
def test_an_unknown_gpu_names_the_nearest_and_how_to_give_numbers(text: str, near: str) -> None:
    with pytest.raises(OptionError) as caught:
        find_gpu(text)
    message = str(caught.value)
    assert f"--gpu '{text}' is no GPU that is known here. The nearest are " in message
    assert near in message
    example = message.rpartition("--gpu ")[2].removesuffix(".")
    assert find_gpu(example).processor.memory_bytes == 24e9


def test_nothing_near_names_all() -> None:
    with pytest.raises(OptionError) as caught:
        find_host("zzzzzz")
    assert all(row.name in str(caught.value) for row in CPUS)
    assert "Known are " in str(caught.value) and "nearest" not in str(caught.value)


def test_a_part_of_names_names_those() -> None:
    with pytest.raises(OptionError, match="nearest are EPYC 7543, EPYC 7763") as caught:
        find_host("epyc")
    assert "Xeon" not in str(caught.value)


def test_numbers_of_a_gpu() -> None:
    found = parse_gpu("memory=24GB,bandwidth=936GB/s,flops=71TFLOP/s,link=25GB/s")
    assert found.processor.memory_bytes == 24e9
    assert found.processor.bytes_per_s == 936e9 * REACHED_MEMORY
    assert found.processor.product("float16").flops(1) == 71e12 * REACHED_ARITHMETIC
    # What copies reach is what people measure.
    assert found.link.bytes_per_s == 25e9
    reached = parse_gpu("memory=80GB, bandwidth=2TB/s, flops=312T, reached=1")
    assert reached.processor.bytes_per_s == 2e12
    assert reached.processor.product("bfloat16").flops(1) == 312e12
    pcie = parse_gpu("memory=8GB,bandwidth=272GB/s,flops=30.2TFLOPS,int8=121TOPS,pcie=4x8")
    assert pcie.link.bytes_per_s == pytest.approx(8 * 1.969e9 * REACHED_LINK)
    assert pcie.processor.product("int8").flops(1) == 121e12 * REACHED_ARITHMETIC


def test_numbers_of_a_host() -> None:
    found = parse_host("bandwidth=300GB/s,flops=3TFLOP/s,cores=64,memory=512GB")
    assert found.bytes_per_s == 300e9 * REACHED_MEMORY and found.memory_bytes == 512e9
    assert found.product("bfloat16").flops(1) == 3e12 * REACHED_ARITHMETIC
    assert found.num_threads == 64
    profile = table_profile("A10", "bandwidth=300GB/s,flops=3TFLOP/s,reached=1", 64 << 30)
    assert profile.host.bytes_per_s == 300e9 and profile.host.memory_bytes == 64 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memori=24GB", "'memori' is no number of hardware. Did you mean memory?"),
        ("memory=24GB", "bandwidth and flops are missing"),
        ("memory=24GB,bandwidth=1TB/s", "flops is missing"),
        ("memory=24GB,memory=24GB", "'memory' is given twice"),
        ("memory=24GB,bandwidth=fast,flops=1T", "'fast' is no value of 'bandwidth'"),
        ("memory=24GB,bandwidth=,flops=1T", "'' is no value of 'bandwidth'"),
        ("memory=24GB,bandwidth=1TB/s,flops=0", "'flops' must be more than 0"),
        ("memory=24GB,bandwidth=1TB/s,flops=1T,pcie=4x3", "'4x3' is no value of 'pcie'"),
        ("memory=24GB,bandwidth=1TB/s,flops=nan", "'nan' is no value of 'flops'"),
        ("memory=24GB,bandwidth=936Gb/s,flops=1T", "would be bits, and is taken in bytes"),
        ("memory=24GB,bandwidth=1TB/s,flops=1T,link=25Gbps", "or write link=25GBps if bytes"),
        ("memory=24GB,bandwidth=7Gbit/s,flops=1T", "'7Gbit/s' is no value of 'bandwidth'"),
        ("bandwidth=936,flops=71T,memory=24GB", "lacks a unit: write bandwidth=936GB/s, or what"),
        ("bandwidth=1TB/s,flops=71,memory=24GB", "lacks a unit: write flops=71TFLOP/s"),
        ("bandwidth=1TB/s,flops=71T,memory=24", "lacks a unit: write memory=24GB"),
        ("memory=24GB,bandwidth=1TB/s,flops=1T,link=4GB/s,pcie=4x16", "'link' and 'pcie' both"),
        ("memory=1e400,bandwidth=1TB/s,flops=1T", "memory"),
    ],
)
def test_wrong_numbers(text: str, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        find_gpu(text)
    assert expected in str(caught.value)


def test_no_hardware_at_all() -> None:
    with pytest.raises(OptionError, match="Give --gpu NAME, --cpu NAME or --this-machine"):
        table_profile(None, None)
