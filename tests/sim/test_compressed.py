"""Weights that cross the link compressed: the CPU lane's tokens bit for bit, fewer bytes over the
link, as many as planned, and only where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lane_harness import (
    SIM,
    Ran,
    assert_same,
    assert_streamed,
    make_config,
    num_rows,
    place_by,
    prompts,
    run,
)
from safetensors.torch import load_file, save_file

from ambidex.config import OffloadConfig
from ambidex.device.cpu import CPUDevice
from ambidex.engine.engine import Engine
from ambidex.errors import KernelError
from ambidex.layers.module import Parameter, Place, Table
from ambidex.quant import lossless
from ambidex.weights.compressed import CompressedWeight, Compression
from ambidex.weights.streamer import Streamer

KINDS = ["llama", "qwen2", "gemma3_text", "qwen3_moe"]
LAYERS = ("layers.*",)
DTYPE = {"dtype": "bfloat16"}

#: What is asked for beside streaming all layers compressed.
WAYS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "2 ahead": {"prefetch_step": 2},
    "3 ahead, eager": {"prefetch_step": 3, "enforce_eager": True},
    "on demand": {"is_async": False},
    "limited": {"link_limit_bytes_per_s": 1e8},
}


@pytest.fixture(scope="module")
def expected(sim_model: Callable[..., Path]) -> Callable[[str], Ran]:
    """What the CPU lane says of a model."""
    made: dict[str, Ran] = {}

    def make(kind: str) -> Ran:
        if kind not in made:
            made[kind] = run(make_config(sim_model(kind), **DTYPE))
        return made[kind]

    return make


def stream(folder: Path, device: str = SIM, **options: Any) -> tuple[Ran, list[str]]:
    """What an engine says that streams all layers, and its notes."""
    changes = {name: options.pop(name) for name in ("enforce_eager",) if name in options}
    offload = OffloadConfig(**{"patterns": LAYERS, "mode": "stream", "compress": True, **options})
    notes: list[str] = []
    held: list[int] = []

    def look(engine: Engine) -> None:
        lane = engine.lane
        notes.extend(note for note in lane.notes if "compress" in note)
        # The ledgers have what is held, to the byte.
        assert lane.hands.accelerator is not None
        staging = lane.hands.accelerator.ledger.reserved_bytes("staging")
        assert staging == lane.hands.accelerator.taken_bytes("staging")  # type: ignore[attr-defined]
        held.append(lane.hands.host.ledger.reserved_bytes("weights"))

    ran = run(make_config(folder, device, offload, **DTYPE, **changes), prepare=look)
    assert held == [ran.host_bytes]
    return ran, notes


@pytest.mark.parametrize(
    ("kind", "way"),
    [*(("llama", way) for way in WAYS), *((kind, "captured") for kind in KINDS[1:])],
)
def test_the_same_tokens(
    sim_model: Callable[..., Path], expected: Callable[[str], Ran], kind: str, way: str
) -> None:
    ran, notes = stream(sim_model(kind), **WAYS[way])
    assert_same(ran, expected(kind))
    assert_streamed(ran)
    # More came out than crossed the link; what is ahead has not come out yet.
    crossed = ran.counts["streamed_bytes"] - ran.ahead_bytes
    assert 1.3 < ran.counts["decompressed_bytes"] / crossed < 1.6
    assert len(notes) == 1 and "Streamed weights are compressed by a factor of 1." in notes[0]
    assert (ran.num_replays > 0) == (way not in ("eager", "3 ahead, eager", "on demand"))


def test_beside_rows_that_are_shared(
    sim_model: Callable[..., Path],
    expected: Callable[[str], Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One ring for what crosses compressed and what does not, at any number of tokens."""

    def choose(path: str, parameter: Parameter) -> Place | None:
        rows = num_rows(parameter)
        if isinstance(parameter, Table):
            return Place(0, lambda _: rows)
        if path.startswith("layers.0"):
            return Place(0, lambda _: rows)
        if path.startswith("layers.1"):
            return Place(0, lambda count: rows if count > 2 else 0)
        return Place(64, lambda _: rows - 64)

    place_by(monkeypatch, choose)
    ran, notes = stream(sim_model("llama"), patterns=())
    assert_same(ran, expected("llama"))
    assert_streamed(ran, is_constant=False)
    assert "compressed by a factor" in notes[0]
    first = 2 * 128 * (256 + 128 + 640 + 320)
    for step in ran.steady():
        assert step.counts["decompressed_bytes"] == first < step.streamed_bytes


def test_a_slow_link_is_faster_by_what_is_saved(sim_model: Callable[..., Path]) -> None:
    """On the virtual clock, where a step takes as long as its copies."""
    folder = sim_model("llama", hidden_size=256, intermediate_size=768, num_hidden_layers=8)
    device = SIM.replace("link=4GB/s,latency=20us", "link=1GB/s,latency=1us")
    seconds = []
    for compress in (False, True):
        ran, _ = stream(folder, device, compress=compress)
        steps = [step for step in ran.steady() if step.rows == (4, 4)][2:]
        assert len(steps) >= 3
        copied_s = ran.busy(steps)["copy_in"]
        seconds.append(sum(step.seconds for step in steps) / len(steps))
        assert seconds[-1] <= 1.1 * copied_s
    assert 1.3 < seconds[0] / seconds[1] < 1.5


def test_switched_off_more_crosses(
    sim_model: Callable[..., Path], expected: Callable[[str], Ran]
) -> None:
    folder = sim_model("llama")
    ran, _ = stream(folder)
    plain, notes = stream(folder, compress=False)
    assert_same(plain, expected("llama"))
    assert notes == [] and plain.counts["decompressed_bytes"] == 0
    assert 1.3 < plain.steady()[0].streamed_bytes / ran.steady()[0].streamed_bytes < 1.6
    assert 1.3 < plain.host_bytes / ran.host_bytes < 1.6


def test_the_untied_head_comes_in_pieces(
    sim_model: Callable[..., Path], expected: Callable[[str], Ran]
) -> None:
    ran, _ = stream(sim_model("qwen2"), patterns=("layers.*", "head*"))
    assert_same(ran, expected("qwen2"))
    assert_streamed(ran)
    assert ran.counts["rows_streamed"] > 512 and ran.counts["decompressed_bytes"] > 0


def test_the_largest_is_no_whole_number_of_panels(sim_model: Callable[..., Path]) -> None:
    """600 rows come out as 608."""
    folder = sim_model("llama", intermediate_size=300)
    ran, _ = stream(folder)
    assert_same(ran, run(make_config(folder, **DTYPE)))
    assert_streamed(ran)
    assert ran.counts["decompressed_bytes"] > 0


@pytest.mark.parametrize(
    ("device", "numbers"),
    [
        ("core_bandwidth=10GB/s,core_flops=50G,speed=0.25,link=4GB/s", ["1.5 GB/s", "4.0 GB/s"]),
        ("core_bandwidth=10GB/s,core_flops=50G,speed=4,link=100GB/s", ["23.4 GB/s", "100.0 GB/s"]),
    ],
)
def test_off_where_the_raw_link_is_faster(
    sim_model: Callable[..., Path], expected: Callable[[str], Ran], device: str, numbers: list[str]
) -> None:
    ran, notes = stream(sim_model("llama"), f"sim:memory=256MiB,{device}")
    assert_same(ran, expected("llama"))
    assert_streamed(ran)
    assert ran.counts["decompressed_bytes"] == 0
    (note,) = notes
    assert note.startswith("Streamed weights are not compressed (--offload-compress)")
    assert all(number in note for number in numbers)


def test_what_does_not_compress_stays_as_it_is(
    sim_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The numbers of one matrix are spread over many powers of two."""
    source, folder = sim_model("llama"), tmp_path / "spread"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    shape = tensors[name].shape
    exponents = torch.randint(-60, 0, shape, generator=torch.Generator().manual_seed(1))
    tensors[name] = (torch.rand(shape) + 1) * 2.0**exponents
    save_file(tensors, folder / "model.safetensors")
    wanted = run(make_config(folder, **DTYPE))
    ran, notes = stream(folder)
    assert_same(ran, wanted)
    assert_streamed(ran)
    assert ran.counts["decompressed_bytes"] > 0
    assert "1 of 12 stay as they are." in notes[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "compute"}, "no matrix is streamed as a whole"),
        ({"mode": "split"}, "no matrix is streamed as a whole"),
        ({"mode": "stream", "patterns": ("embedding*",)}, "no matrix is streamed as a whole"),
    ],
    ids=str,
)
def test_what_else_crosses_says_so(
    sim_model: Callable[..., Path],
    expected: Callable[[str], Ran],
    options: dict[str, Any],
    reason: str,
) -> None:
    ran, notes = stream(sim_model("llama"), **options)
    assert_same(ran, expected("llama"))
    assert ran.counts.get("decompressed_bytes", 0) == 0
    assert len(notes) == 1 and reason in notes[0]


def test_only_bfloat16(sim_model: Callable[..., Path]) -> None:
    config = make_config(
        sim_model("llama"), SIM, OffloadConfig(patterns=LAYERS, mode="stream", compress=True)
    )
    engine = Engine(config)
    (note,) = (note for note in engine.lane.notes if "compress" in note)
    engine.close()
    assert "Only bfloat16 weights compress." in note


def test_without_decompression_it_fails(
    sim_model: Callable[..., Path],
    expected: Callable[[str], Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens come out of what was decompressed: left out, they are others."""
    monkeypatch.setattr(CompressedWeight, "decompressed", forgetful)
    ran, _ = stream(sim_model("llama"))
    assert ran.traces != expected("llama").traces


def forgetful(self: CompressedWeight, kernels: Any, memory: torch.Tensor) -> Any:
    out = memory[: self.raw_bytes]
    return self.form.gather([(0, self.shape[0])], lambda _: out)


def test_damage_in_host_memory_fails_the_request(
    sim_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(engine: Engine) -> None:
        weight: Any = engine.lane.runner.model.named_parameters()
        data = next(p.data for path, p in weight if path == "layers.1.mlp.down.weight")
        data.host._compressed.payload[0] ^= 1

    offload = OffloadConfig(patterns=LAYERS, mode="stream", compress=True)
    ran = run(make_config(sim_model("llama"), SIM, offload, **DTYPE), prepare=damage)
    assert all(error is not None and "damaged" in error for error in ran.errors)


# ------------------------------------------------------------------------------------- the weight


@pytest.fixture(scope="module")
def host() -> Iterator[CPUDevice]:
    made = CPUDevice(1, kernels="native")
    yield made
    made.close()


@pytest.mark.parametrize("shape", [(192, 128), (200, 96)])
@pytest.mark.parametrize("ranges", [((0, 64),), ((64, None),), ((0, 64), (128, None))])
def test_rows_of_a_compressed_weight(
    host: CPUDevice, shape: tuple[int, int], ranges: tuple[tuple[int, int | None], ...]
) -> None:
    """Gathered rows are those of the matrix as it was."""
    kernels: Any = host.kernels
    rows = [(start, shape[0] if end is None else end) for start, end in ranges]
    plain = kernels.pack(torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16())
    compression = Compression(1e9, 1e12)
    made = compression.compress(plain, kernels, torch.cat)
    assert made is not None and made.shape == shape
    assert made.raw_bytes == plain.num_bytes > 1.2 * made.num_bytes
    part = made.gather(rows, torch.cat)
    memory = torch.empty(made.raw_bytes, dtype=torch.uint8)
    got: Any = part.decompressed(kernels, memory)
    expected = plain.gather(rows, torch.cat)
    assert got.shape == expected.shape
    assert torch.equal(got.panels.view(torch.int16), expected.panels.view(torch.int16))


def test_the_reference_reads_it_too(host: CPUDevice) -> None:
    kernels: Any = host.kernels
    plain = kernels.pack(torch.randn(128, 64).bfloat16())
    made = Compression(1e9, 1e12).compress(plain, kernels, torch.cat)
    assert made is not None
    words = lossless.decompress(made._compressed)
    assert torch.equal(words, plain.panels.view(torch.int16).flatten())
    made._compressed.payload[0] ^= 1
    with pytest.raises(KernelError, match="damaged"):
        made.decompressed(kernels, torch.empty(made.raw_bytes, dtype=torch.uint8))


def test_counts_are_the_streamers(
    sim_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decompressed is what products ask for, not what is copied."""
    monkeypatch.setattr(Streamer, "_fetch_ahead", lambda self, place: None)
    ran, _ = stream(sim_model("llama"), enforce_eager=True)
    assert ran.errors == [None] * len(prompts())
    assert ran.counts["prefetched"] == 0 and ran.counts["decompressed_bytes"] > 0
