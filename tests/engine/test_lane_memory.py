"""The size of the KV cache while other programs take and free memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from ambidex.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ambidex.device.cpu import CPUDevice
from ambidex.engine.engine import Engine
from ambidex.errors import OutOfMemory
from ambidex.kernels.cpu.numa import PagePlacer
from ambidex.memory.host import host_capacity_bytes
from ambidex.memory.ledger import Ledger
from ambidex.memory.sizing import KVSize
from ambidex.request import EngineRequest, SamplingParams
from ambidex.runner.lane_memory import MAX_TRIES, LaneMemory
from ambidex.runner.loader import activation_bytes

if TYPE_CHECKING:
    from ambidex.kernels.native import NativeKernels

MIB = 1 << 20


class FakeDevice:
    """A device whose memory others use too: ``free`` is what each measurement finds, the last
    entry for good."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)
        self.ledger = Ledger("host", 0)
        self.measure()

    def measure(self) -> None:
        self.ledger.set_free(self.free.pop(0) if len(self.free) > 1 else self.free[0])


def plan(device: FakeDevice, weights: int = 0) -> LaneMemory:
    """A cache of half of what is free, a block a byte; steps take 10 bytes."""

    def fit(free_bytes: int) -> KVSize:
        if free_bytes < 20:
            raise OutOfMemory("nothing fits")
        return KVSize((free_bytes // 2,), free_bytes // 2)

    device.ledger.reserve("weights", "weights", weights)
    return LaneMemory(device, fit, lambda length: 10, lambda blocks: blocks[0])  # type: ignore[arg-type]


def accounts(device: FakeDevice) -> dict[str, int]:
    return {name: n for name, n in device.ledger.snapshot().accounts.items() if n}


def test_what_was_planned_is_made_where_it_is_still_free() -> None:
    device = FakeDevice(1000, 900)
    memory = plan(device, weights=100)
    assert accounts(device) == {"weights": 100, "activations": 10, "kv_cache": 450}
    assert memory.make_cache(lambda size: size.num_blocks) == (450,)
    assert accounts(device) == {"weights": 100, "activations": 10, "kv_cache": 450}
    assert device.ledger.capacity_bytes == 1000
    assert memory.notes == []


def test_memory_that_others_free_is_no_reason_to_change() -> None:
    device = FakeDevice(1000, 5000)
    memory = plan(device)
    assert memory.make_cache(lambda size: size.num_blocks) == (500,)
    assert device.ledger.free_bytes == 5000 - 510


def test_memory_that_others_took_makes_the_cache_smaller() -> None:
    device = FakeDevice(1000, 400)
    memory = plan(device, weights=100)
    assert memory.make_cache(lambda size: size.num_blocks) == (200,)
    assert accounts(device) == {"weights": 100, "activations": 10, "kv_cache": 200}
    (note,) = memory.notes
    assert "200 blocks instead of 450" in note and "400 bytes" in note


def test_too_little_is_an_error_as_at_first() -> None:
    memory = plan(FakeDevice(1000, 19))
    with pytest.raises(OutOfMemory, match="nothing fits"):
        memory.make_cache(lambda size: size)


@pytest.mark.parametrize("refusal", [MemoryError(), RuntimeError("can't allocate memory")])
def test_a_refused_allocation_is_tried_again_with_what_is_there(refusal: Exception) -> None:
    """Memory goes between the measurement and the allocation."""
    device = FakeDevice(1000, 1000, 600)
    memory = plan(device)
    tried = []

    def make(size: KVSize) -> KVSize:
        tried.append(size.num_blocks[0])
        # The measurement that follows finds what is left.
        if size.num_blocks[0] > 300:
            raise refusal
        return size

    # 510 are still free: the size stays, and so does the refusal.
    with pytest.raises(OutOfMemory, match="ulimit -v"):
        memory.make_cache(make)
    device.free = [500]
    assert memory.make_cache(make).num_blocks == (250,)
    assert tried == [500, 250]


def test_a_refusal_that_leads_to_a_smaller_size() -> None:
    device = FakeDevice(1000, 1000, 400)
    memory = plan(device)
    tried = []

    def make(size: KVSize) -> KVSize:
        tried.append(size.num_blocks[0])
        if len(tried) == 1:
            raise MemoryError
        return size

    assert memory.make_cache(make).num_blocks == (200,)
    assert tried == [500, 200]
    assert accounts(device) == {"activations": 10, "kv_cache": 200}


def test_tries_are_bounded() -> None:
    """Somebody else is always faster."""
    device = FakeDevice(*(2000 // (2 ** (i + 1)) for i in range(20)))
    memory = plan(device)
    tried = []

    def make(size: KVSize) -> None:
        tried.append(size.num_blocks[0])
        raise MemoryError

    with pytest.raises(OutOfMemory, match="ulimit -v"):
        memory.make_cache(make)
    assert len(tried) == MAX_TRIES and tried == sorted(set(tried), reverse=True)


def test_our_own_mistakes_are_not_tried_again() -> None:
    memory = plan(FakeDevice(1000))

    def make(size: KVSize) -> None:
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        memory.make_cache(make)


def test_what_steps_really_take() -> None:
    device = FakeDevice(1000)
    memory = plan(device)
    memory.settle_steps({"arena": 3, "threads": 4})
    assert accounts(device) == {"activations": 7, "kv_cache": 500}
    names = {held.name: held.num_bytes for held in device.ledger.reservations("activations")}
    assert names == {"arena": 3, "threads": 4}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 16), (32, 512), (256, 2048)])
def test_steps_take_no_more_than_was_estimated(
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    seqs: int,
    tokens: int,
) -> None:
    """Or an engine could not start with what sizing has left."""
    estimates = []

    def estimate(*arguments: Any, **options: Any) -> int:
        estimates.append(activation_bytes(*arguments, **options))
        return estimates[-1]

    monkeypatch.setattr("ambidex.runner.loader.activation_bytes", estimate)
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    config = replace(engine_config(tiny_model(kind), kv_cache_bytes=16 * MIB), scheduler=scheduler)
    engine = Engine(config)
    try:
        ledger = engine.lane.ledgers[0]
        parts = {held.name: held.num_bytes for held in ledger.reservations("activations")}
        assert "recorded step" in parts
        assert sum(parts.values()) <= min(estimates)
        kernels = cast("NativeKernels", engine.lane.device.kernels)
        assert parts["kernel threads"] == kernels.memory_bytes > 0
        answer(engine)
        # What grows with what is computed has hardly grown.
        assert kernels.memory_bytes < parts["kernel threads"] + MIB
    finally:
        engine.close()


# --- the whole engine on a made-up machine --------------------------------------------------------


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """``meminfo(*bytes)``: a machine whose MemAvailable is another one each time it is read, the
    last one for good. Returns what was read so far."""

    def make(*available: int) -> list[int]:
        root = tmp_path / "root"
        (root / "proc").mkdir(parents=True)
        waiting, read = list(available), []

        def capacity() -> int:
            num_bytes = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            text = f"MemTotal: {1 << 30} kB\nMemAvailable: {num_bytes >> 10} kB\n"
            (root / "proc/meminfo").write_text(text)
            read.append(num_bytes)
            return host_capacity_bytes(root)

        monkeypatch.setattr("ambidex.device.cpu.host_capacity_bytes", capacity)
        return read

    return make


def engine_config(folder: Path, length: int | None = None, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(folder), max_model_len=length),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
        cpu_threads=1,
    )


def answer(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add_request(EngineRequest("one", [5, 6, 7], params, 0.0))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.new_token_ids
    return tokens


#: A step of the tiny model is estimated to take 9 MiB.
PLENTY, SCARCE = 200 * MIB, 11 * MIB


def test_an_engine_starts_though_memory_went_while_it_loaded(
    tiny_model: Callable[[str], Path], meminfo: Callable[..., list[int]]
) -> None:
    # Made, before sizing, after the weights.
    read = meminfo(PLENTY, PLENTY, SCARCE)
    engine = Engine(engine_config(tiny_model("llama")))
    try:
        assert len(read) == 3
        num_blocks = engine.lane.num_blocks[0]
        assert engine.lane.runner.kv_cache.num_blocks == (num_blocks,)
        assert [pool.num_blocks for pool in engine.block_manager.pools] == [num_blocks]
        assert 32 <= num_blocks < 512
        info = engine.info()
        (note,) = [note for note in info.notes if "took memory" in note]
        assert f"has {num_blocks} blocks instead of 512" in note
        (host,) = info.memory
        assert host.accounts["kv_cache"] < SCARCE and host.free_bytes > 0
        tokens = answer(engine)
    finally:
        engine.close()
    plain = Engine(engine_config(tiny_model("llama"), num_blocks=64))
    try:
        assert answer(plain) == tokens
    finally:
        plain.close()


def test_a_size_that_was_asked_for_and_has_gone_is_refused(
    tiny_model: Callable[[str], Path], meminfo: Callable[..., list[int]]
) -> None:
    meminfo(PLENTY, PLENTY, SCARCE)
    with pytest.raises(OutOfMemory, match=r"2\.00 MiB was asked for; .* are left"):
        Engine(engine_config(tiny_model("llama"), kv_cache_bytes=2 * MIB))


def test_memory_that_is_freed_while_it_loads(
    tiny_model: Callable[[str], Path], meminfo: Callable[..., list[int]]
) -> None:
    meminfo(SCARCE, PLENTY)
    engine = Engine(engine_config(tiny_model("llama")))
    try:
        assert not any("took memory" in note for note in engine.info().notes)
        assert engine.info().memory[0].free_bytes > PLENTY // 2
    finally:
        engine.close()


def test_pages_that_are_not_there_are_told_and_not_taken(
    tiny_model: Callable[[str], Path],
    meminfo: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(address: int, num_bytes: int) -> None:
        raise AssertionError("these pages are not free")

    monkeypatch.setattr("ambidex.device.cpu.prefault", never)
    meminfo(PLENTY, PLENTY, PLENTY, MIB)
    engine = Engine(engine_config(tiny_model("llama"), prefault=True))
    try:
        (note,) = [note for note in engine.info().notes if "in advance" in note]
        assert "1.00 MiB are free" in note and "--kv-cache-memory-bytes" in note
        assert len(answer(engine)) == 6
    finally:
        engine.close()


def test_pages_are_shared_out_to_the_nodes() -> None:
    """One thread takes them all; on several nodes each has its share all the same."""
    bound = []

    def bind(address: int, num_bytes: int, node: int) -> int:
        bound.append((address, num_bytes, node))
        return 0

    device = CPUDevice(1, kernels="reference")
    device._placer = PagePlacer([0, 0, 1, 1], bind)
    cache = device.zeros((4, 8 * mmap.PAGESIZE), torch.uint8)
    device.prefault([cache])
    half = 16 * mmap.PAGESIZE
    first = cache.data_ptr()
    assert bound == [(first, half, 0), (first + half, half, 1)]
