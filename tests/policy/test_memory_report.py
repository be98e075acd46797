"""Where the weights are, and what start-up and ``/ledger`` say of it."""

from __future__ import annotations

from ambidex.engine.messages import EngineInfo
from ambidex.engine.summary import describe, memory_report
from ambidex.memory.expert_cache import CACHED_EXPERTS
from ambidex.memory.ledger import Ledger, MemorySnapshot

GIB = 1 << 30


def host(**accounts: int) -> MemorySnapshot:
    return snapshot("host", 16 * GIB, **accounts)


def snapshot(name: str, capacity: int, **accounts: int) -> MemorySnapshot:
    ledger = Ledger(name, capacity)
    for account, num_bytes in accounts.items():
        ledger.reserve(account, account, num_bytes)
    return ledger.snapshot()


def test_a_machine_without_an_accelerator_gets_no_warning() -> None:
    report = memory_report([host(weights=3 * GIB)], {"head": {"host": 3 * GIB}})
    assert (report["cpu_weights"], report["gpu_weights"]) == (3 * GIB, 0)
    assert report["cpu_weight_share"] == 1.0
    assert report["warnings"] == []


def test_no_weights_at_all() -> None:
    report = memory_report([host()], {})
    assert (report["cpu_weights"], report["gpu_weights"], report["cpu_weight_share"]) == (0, 0, 0.0)


def test_weights_on_both_sides() -> None:
    """A module that is split counts on either side; a node's memory is the machine's."""
    memories = [host(weights=2), snapshot("host:node1", 10, weights=1), snapshot("sim:0", 100)]
    modules = {
        "embedding": {"host": 100},
        "layers.0.mlp.gate_up": {"host": 30, "sim:0": 70},
        "layers.0.mlp.down": {"host:node1": 20},
        "head": {"sim:0": 80},
    }
    report = memory_report(memories, modules)
    assert (report["cpu_weights"], report["gpu_weights"]) == (150, 150)
    assert report["cpu_weight_share"] == 0.5
    assert report["modules"] == modules
    assert [each["name"] for each in report["memories"]] == ["host", "host:node1", "sim:0"]
    assert report["memories"][1]["free_bytes"] == 9
    assert report["warnings"] == []


def test_most_weights_beside_an_accelerator_are_worth_a_warning() -> None:
    memories = [host(weights=3 * GIB), snapshot("sim:0", 2 * GIB, weights=GIB)]
    modules = {"a": {"host": 3 * GIB}, "b": {"sim:0": GIB}}
    (warning,) = memory_report(memories, modules)["warnings"]
    assert "75% of the weights (3.00 GiB of 4.00 GiB)" in warning
    assert "1.00 GiB on sim:0" in warning
    # 60% is no warning yet.
    modules = {"a": {"host": 60}, "b": {"sim:0": 40}}
    assert memory_report(memories, modules)["warnings"] == []
    modules = {"a": {"host": 61}, "b": {"sim:0": 39}}
    assert len(memory_report(memories, modules)["warnings"]) == 1


def test_copies_of_experts_are_weights_and_no_part_of_the_share() -> None:
    memories = [host(weights=60), snapshot("sim:0", 100, weights=60)]
    modules = {"a": {"host": 60}, "b": {"sim:0": 40}, CACHED_EXPERTS: {"sim:0": 20}}
    report = memory_report(memories, modules)
    assert (report["cpu_weights"], report["gpu_weights"]) == (60, 60)
    assert report["cpu_weight_share"] == 0.6


def test_the_start_up_table_shows_each_memory() -> None:
    info = EngineInfo(
        model="m",
        tokenizer_path="",
        max_model_len=1024,
        vocab_size=10,
        num_blocks=64,
        block_size=16,
        dtype="float32",
        memory=[
            snapshot("host", 8 * GIB, weights=2 * GIB, kv_cache=GIB),
            snapshot("sim:0", 2 * GIB, weights=2 * GIB),
        ],
    )
    table = {line.partition("  ")[0]: line for line in describe(info)}
    rows = [
        ("host memory", "8.00 GiB"),
        ("host: weights", "2.00 GiB"),
        ("host: kv_cache", "1.00 GiB"),
        ("host: free", "5.00 GiB"),
        ("sim:0 memory", "2.00 GiB"),
        ("sim:0: weights", "2.00 GiB"),
        ("sim:0: free", "0 bytes"),
    ]
    for name, value in rows:
        assert table[name].endswith(f"  {value}"), name
    assert [name for name in table if name.startswith(("host", "sim"))] == [n for n, _ in rows]
