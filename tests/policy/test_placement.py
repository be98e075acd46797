"""Where each weight goes: numbers in, places out."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ambidex.config import OffloadConfig
from ambidex.errors import OptionError, OutOfMemory
from ambidex.memory.judge import Mix
from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.placement import (
    ROW_UNIT,
    ModuleSize,
    Placement,
    PlacementPlan,
    WeightKind,
    WeightPlace,
    describe,
    plan_placement,
)
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.option_types import to_gib

MIB = 1 << 20


def machine(
    link: float, host: float = 20e9, host_flops: float = 1e11, dram: float = 0.0
) -> HardwareProfile:
    """A device that reads 1 TB/s and computes 10 TFLOP/s."""
    return HardwareProfile(
        "made up",
        host=Processor(
            "host",
            1 << 50,
            host,
            {"float32": ProductRate(((1, host_flops),))},
            shared_bytes_per_s=dram,
        ),
        device=Processor("device", 1 << 50, 1e12, {"float32": ProductRate(((1, 1e13),))}),
        link=LinkRate(link),
        sync_s=1e-6,
    )


def shape_of(modules: Sequence[ModuleSize]) -> ModelShape:
    """A model of such weights, in 16 bits."""
    weights = tuple(
        WeightShape(
            m.path,
            m.rows,
            max(m.num_bytes // m.rows // 2, 1),
            m.kind,
            "bfloat16",
            m.num_bytes,
            names=m.names,
            fixed_bytes=m.fixed_bytes,
        )
        for m in modules
    )
    layers = len({path.split(".")[1] for m in modules if (path := m.path).startswith("layers.")})
    return ModelShape("made up", "llama", layers, 1024, 4096, 4096, 8, 128, weights, (), None)


#: A CPU that reads its memory faster than the link carries, and the other way round.
FAST_HOST = machine(4e9)
FAST_LINK = machine(50e9)
NEVER_FULL = 1 << 50
#: For tests that make many plans and ask for no speed.
SHORT = Mix(1, 1)


def model(num_layers: int = 4, *, tied: bool = False, experts: int = 0) -> list[ModuleSize]:
    """Layers of 30 MiB in matrices (qkv 6, output 4, gate_up 12, down 8) or experts (80 MiB
    beside attention), an embedding and a head of 16 MiB, and vectors of 1 KiB."""
    found = [
        ModuleSize(
            "embedding.weight",
            16 * MIB,
            4096,
            WeightKind.TIED if tied else WeightKind.TABLE,
            ("model.embed_tokens.weight",),
        )
    ]
    for i in range(num_layers):
        at, name = f"layers.{i}", f"model.layers.{i}"
        found += [
            ModuleSize(f"{at}.attention_norm.weight", 1024, 256, WeightKind.VECTOR),
            ModuleSize(f"{at}.attention.qkv.weight", 6 * MIB, 1536),
            ModuleSize(f"{at}.attention.output.weight", 4 * MIB, 1024),
        ]
        if experts:
            rows = 512 * experts
            found += [
                ModuleSize(f"{at}.mlp.router.weight", 16 << 10, experts),
                ModuleSize(f"{at}.mlp.gate_up", 50 * MIB, 2 * rows, WeightKind.EXPERTS),
                ModuleSize(f"{at}.mlp.down", 30 * MIB, rows, WeightKind.EXPERTS),
            ]
        else:
            gate_up = tuple(f"{name}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            found += [
                ModuleSize(f"{at}.mlp.gate_up.weight", 12 * MIB, 3072, names=gate_up),
                ModuleSize(
                    f"{at}.mlp.down.weight", 8 * MIB, 1024, names=(f"{name}.mlp.down_proj.weight",)
                ),
            ]
    if not tied:
        found.append(ModuleSize("head.weight", 16 * MIB, 4096, names=("lm_head.weight",)))
    return found


def total(modules: Sequence[ModuleSize]) -> int:
    return sum(module.num_bytes for module in modules)


def plan(
    modules: Sequence[ModuleSize],
    device: int = NEVER_FULL,
    host: int = NEVER_FULL,
    profile: HardwareProfile = FAST_LINK,
    mix: Mix | None = None,
    **offload: Any,
) -> PlacementPlan:
    return plan_placement(shape_of(modules), device, host, OffloadConfig(**offload), profile, mix)


def moved(result: PlacementPlan) -> dict[str, Placement]:
    """Weights that left the device, by path without what all share."""
    return {
        path.removesuffix(".weight"): place.placement
        for path, place in result.places.items()
        if place.placement is not Placement.RESIDENT
    }


# --- decided by what fits ----------------------------------------------------------------------


def test_what_fits_stays() -> None:
    modules = model()
    result = plan(modules, total(modules))
    assert moved(result) == {} and result.mode == "resident"
    assert result.device_bytes == total(modules) and result.host_bytes == 0
    assert result.staging_bytes == 0 and result.spare_bytes == 0 and result.cpu_share == 0
    assert result.notes == () and result.warnings == ()
    assert describe(result) == [
        "weights: 152.00 MiB on the accelerator, 0 bytes on the host (0%)",
        "offload: none, all weights fit the accelerator",
    ]


def test_one_byte_too_many_moves_the_least() -> None:
    modules = model()
    # The table first, since a step reads few of its rows; it is never streamed.
    result = plan(modules, total(modules) - 1, mode="stream")
    assert moved(result) == {"embedding": Placement.HOST}
    assert result.host_bytes == result.computed_bytes == 16 * MIB
    assert result.streamed_bytes == result.staging_bytes == 0


def test_layers_leave_from_the_last_upward() -> None:
    modules = model()
    result = plan(modules, total(modules) - 30 * MIB, mode="compute")
    assert result.mode == "compute"
    assert moved(result) == dict.fromkeys(
        ["embedding", "layers.3.mlp.down", "layers.3.mlp.gate_up"], Placement.HOST
    )
    assert result.notes == (
        "The weights take 152.00 MiB, the accelerator has 122.00 MiB for them: 36.00 MiB stay on "
        "the host.",
    )


def test_auto_says_what_it_expects() -> None:
    modules = model()
    result = plan(modules, total(modules) - 30 * MIB, profile=FAST_HOST)
    assert result.mode == "split"
    assert result.notes[1].startswith(
        "The CPU multiplies with some rows of what is on the host, and others are streamed: the "
        "CPU reads 20.0 GB/s there, and the link carries 4.0 GB/s. A token of 1 request, of 16, "
        "and 2,048 tokens of a prompt are expected to take "
    )
    # The other modes beside it, each with three times.
    assert re.findall(r"in mode (\w+) [\d.]+ m?s, [\d.]+ m?s and [\d.]+ m?s", result.notes[1]) == [
        "compute",
        "stream",
    ]


def test_staging_counts() -> None:
    modules = model()
    result = plan(modules, total(modules) - 30 * MIB, mode="stream")
    # 16 of the table, and 80 of the layers, for a ring of two layers of 30: 36 become free.
    assert result.mode == "stream"
    assert result.ring_layers == 2 and result.ring_layer_bytes == 30 * MIB
    assert result.staging_bytes == 60 * MIB
    assert moved(result) == {
        "embedding": Placement.HOST,
        "layers.1.mlp.gate_up": Placement.STREAM,
        "layers.1.mlp.down": Placement.STREAM,
        **{
            f"layers.{i}.{name}": Placement.STREAM
            for i in (2, 3)
            for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
        },
    }
    assert result.streamed_bytes == 80 * MIB and result.computed_bytes == 16 * MIB
    assert result.spare_bytes == 6 * MIB
    assert describe(result)[1:] == [
        "offload: asked for what does not fit, placed 96.00 MiB, mode stream (weights: 11 "
        "resident, 10 stream, 1 host)",
        "staging: a ring of 2 layers of 30.00 MiB on the accelerator",
    ]


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, 2),
        ({"prefetch_step": 0}, 1),
        ({"prefetch_step": 3}, 4),
        ({"is_async": False}, 1),
        ({"is_async": False, "prefetch_step": 3}, 1),
    ],
)
def test_the_ring_is_as_many_layers_as_are_in_use_and_ahead(
    settings: dict[str, Any], layers: int
) -> None:
    modules = model()
    result = plan(modules, mode="stream", patterns=("*.mlp",), **settings)
    assert result.ring_layers == layers
    assert result.staging_bytes == layers * 20 * MIB
    name = "1 layer" if layers == 1 else f"{layers} layers"
    assert describe(result)[2] == f"staging: a ring of {name} of 20.00 MiB on the accelerator"
    assert plan(modules, mode="compute", patterns=("*.mlp",), **settings).staging_bytes == 0


def test_a_layer_of_the_ring_is_the_largest_with_each_weight_aligned() -> None:
    modules = [
        ModuleSize("layers.0.a.weight", 65, 10),
        ModuleSize("layers.0.b.weight", 64, 10),
        ModuleSize("layers.1.a.weight", 150, 10),
    ]
    assert plan(modules, mode="stream", patterns=("*",)).ring_layer_bytes == 128 + 64
    # A weight that is in no layer counts by itself.
    head = [*modules, ModuleSize("head.weight", 257, 10)]
    assert plan(head, mode="stream", patterns=("*",)).ring_layer_bytes == 320


def test_the_head_goes_last() -> None:
    modules = model()
    small = sum(m.num_bytes for m in modules if not m.is_matrix) + 16 * MIB
    result = plan(modules, small, profile=FAST_HOST)
    assert set(result.places) - {f"{path}.weight" for path in moved(result)} == {
        m.path for m in modules if not m.is_matrix
    } | {"head.weight"}
    assert "89% of the weights (136.00 MiB of 152.00 MiB)" in result.warnings[0]


@pytest.mark.parametrize("mode", ["compute", "split"])
def test_where_the_head_has_to_leave_layers_stay(mode: str) -> None:
    """All layers would be 120 MiB on the host, and do not free what the tied embedding takes."""
    tied = ModuleSize("embedding.weight", 100 * MIB, 4096, WeightKind.TIED)
    modules = [tied, *model(tied=True)[1:]]
    result = plan(modules, 100 * MIB - 1, mode=mode, prefetch_step=0, profile=FAST_HOST)
    assert moved(result)["embedding"] is Placement.HOST
    assert result.device_bytes + result.staging_bytes < 100 * MIB
    # The embedding, and what is more than 100 MiB of the layers' 120; all whole, or evenly.
    assert 120 * MIB < result.host_bytes <= 130 * MIB
    assert ("layers.0.mlp.down" in moved(result)) == (mode == "split")


def test_the_slower_way_is_not_taken_by_itself() -> None:
    modules = model()
    device = total(modules) - 30 * MIB
    # A link that is far slower than the CPU, and one that is far faster: one side alone.
    slow_link, slow_host = machine(1e8, 20e9, 1e13), machine(20e9, 1e8, 1e9, 50e9)
    assert plan(modules, device, profile=slow_link).computed_bytes == 24 * MIB + 12 * MIB
    streams = plan(modules, device, profile=slow_host)
    assert streams.split_table is None or streams.split_table.share(1) > 0.95
    # A limit on the link makes it the slower way.
    limited = plan(modules, device, profile=machine(50e9, 20e9, 1e13), link_limit_bytes_per_s=1e8)
    assert limited.mode == "compute"


def test_without_room_for_staging_the_cpu_computes() -> None:
    modules = model(1)
    result = plan(modules, 3 * MIB)
    assert result.mode == "compute" and result.staging_bytes == 0
    assert "no room for the ring" in result.notes[2]


def test_where_streaming_takes_more_than_the_host_has_the_cpu_computes() -> None:
    modules = model()
    # Splitting moves more than computing alone, since it needs room for a ring.
    free = plan(modules, total(modules) - 22 * MIB)
    assert free.mode == "split" and free.host_bytes > 24 * MIB
    result = plan(modules, total(modules) - 22 * MIB, free.host_bytes - 1)
    assert result.mode == "compute" and result.host_bytes == 24 * MIB


# --- asked for ---------------------------------------------------------------------------------


def test_a_size_is_met_in_whole_weights() -> None:
    modules = model()
    result = plan(modules, total(modules) - 1, cpu_offload_bytes=17 * MIB, mode="compute")
    assert moved(result) == dict.fromkeys(["embedding", "layers.3.mlp.down"], Placement.HOST)
    assert result.offloaded_bytes == 24 * MIB and result.asked_bytes == 17 * MIB
    assert result.warnings == ()
    assert "asked for 17.00 MiB, placed 24.00 MiB, mode compute" in describe(result)[1]


def test_an_offload_that_is_not_needed_is_done_and_warned_of() -> None:
    modules = model()
    spare = 5 * MIB
    result = plan(modules, total(modules) + spare, cpu_offload_bytes=MIB, mode="compute")
    assert result.host_bytes == 16 * MIB
    (warning,) = result.warnings
    assert "(1.00 MiB) asks for an offload that is not needed" in warning
    assert "152.00 MiB and fit the accelerator with 5.00 MiB to spare" in warning
    exact = plan(modules, total(modules), cpu_offload_bytes=MIB, mode="compute")
    assert "with 0 bytes to spare" in exact.warnings[0]
    by_pattern = plan(modules, total(modules) + spare, patterns=("*.down",), mode="compute")
    assert by_pattern.host_bytes == 32 * MIB
    (warning,) = by_pattern.warnings
    assert "--offload-layers *.down asks for an offload that is not" in warning
    assert "It is done all the same, and makes steps slower; leave it out." in warning


def test_an_offload_that_is_not_needed_may_be_faster() -> None:
    rate = {"float32": ProductRate(((1, 1e10),))}
    slow = replace(machine(4e9), device=Processor("device", 1 << 50, 1e9, rate))
    result = plan(model(), total(model()), cpu_offload_bytes=100 * MIB, profile=slow)
    assert result.warnings[0].endswith("with 0 bytes to spare. It is done all the same.")


def test_a_mode_that_changes_nothing_says_so() -> None:
    modules = model()
    (note,) = plan(modules, total(modules), mode="stream").notes
    assert note == "--offload-mode stream has no effect: all weights fit the accelerator."
    mixture = model(experts=8)
    result = plan(mixture, total(mixture) - 1, mode="stream")
    assert result.staging_bytes == 0 and result.host_bytes > 0
    assert "--offload-mode stream streams nothing here. What is on the host" in result.notes[-1]


def test_more_than_there_is() -> None:
    modules = model()
    result = plan(modules, total(modules) - 1, cpu_offload_bytes=1 << 40, profile=FAST_HOST)
    assert result.host_bytes == 152 * MIB and result.device_bytes == 4096
    assert (
        "asks for 1.00 TiB; all that may leave the accelerator are 152.00" in (result.warnings[0])
    )
    assert "100% of the weights" in result.warnings[1]
    assert (
        "16.00 MiB are enough without --cpu-offload-gb (1.00 TiB): leave it out. Fewer bits "
        "(--quantization int8 or int4) leave less there."
    ) in result.warnings[1]


def test_what_is_quantised_already_is_not_told_to_be() -> None:
    shape = shape_of(model())
    low = replace(shape, weights=tuple(replace(w, columns=4 * w.columns) for w in shape.weights))
    for each, device, host in ((shape, 20 * MIB, 1 << 50), (shape, 20 * MIB, 1), (shape, 1, 1)):
        said = []
        for made in (each, low):
            try:
                result = plan_placement(made, device, host, OffloadConfig(), FAST_HOST)
                said.append(" ".join(result.warnings))
            except OutOfMemory as error:
                said.append(str(error))
        plain, few = said
        assert "--quantization int8 or int4" in plain, plain
        assert few and "--quantization" not in few, few


@pytest.mark.parametrize(("device", "streams"), [(5e9, False), (2e10, True)])
def test_rows_that_are_never_streamed_are_not_said_to_be(device: float, streams: bool) -> None:
    """An accelerator that is no faster than the host has its hands full with its own rows."""
    rate = {"float32": ProductRate(((1, 5e10),))}
    slow = replace(machine(4e9, 5e9), device=Processor("device", 1 << 50, device, rate))
    result = plan(model(), total(model()) - 30 * MIB, profile=slow)
    assert result.mode == "split" and result.split_table is not None
    assert result.split_table.streams == streams
    assert (result.staging_bytes > 0) == streams
    (note,) = (note for note in result.notes if "multiplies" in note)
    assert ("and others are streamed" in note) == streams


def test_patterns_take_all_that_they_name() -> None:
    modules = model()
    result = plan(modules, total(modules) - 1, patterns=("*.mlp",), mode="compute")
    names = [f"layers.{i}.mlp.{name}" for i in range(4) for name in ("gate_up", "down")]
    assert moved(result) == dict.fromkeys(names, Placement.HOST)
    by_checkpoint = plan(
        modules, total(modules) + MIB, patterns=("model.layers.2:.mlp.down_proj",), mode="stream"
    )
    assert moved(by_checkpoint) == dict.fromkeys(
        ["layers.2.mlp.down", "layers.3.mlp.down"], Placement.STREAM
    )


def test_a_size_within_patterns() -> None:
    modules = model()
    result = plan(
        modules, total(modules) - 1, patterns=(":2",), cpu_offload_bytes=9 * MIB, mode="compute"
    )
    assert moved(result) == dict.fromkeys(
        ["layers.1.mlp.down", "layers.1.mlp.gate_up"], Placement.HOST
    )
    assert "asked for 9.00 MiB of :2, placed 20.00 MiB" in describe(result)[1]


def test_vectors_stay() -> None:
    modules = model()
    result = plan(modules, patterns=("*",), mode="compute")
    vectors = {m.path for m in modules if not m.is_matrix}
    assert {p for p, at in result.places.items() if at.placement is Placement.RESIDENT} == vectors
    with pytest.raises(OptionError, match=r"names only vectors \(4, such as layers\.0\.att"):
        plan(modules, patterns=("*.mlp", "*norm"))


def test_zero_and_patterns_contradict() -> None:
    with pytest.raises(OptionError, match="Leave one of them out"):
        plan(model(), cpu_offload_bytes=0, patterns=("*",))


def test_zero_placed_is_an_error_with_the_reason() -> None:
    vectors = [m for m in model() if not m.is_matrix]
    with pytest.raises(OptionError, match=r"\(1.00 MiB\) asks .* all are vectors. Leave it out"):
        plan(vectors, cpu_offload_bytes=MIB)


# --- split -------------------------------------------------------------------------------------


def test_split_shares_evenly_and_exactly() -> None:
    modules = model(tied=True)
    asked = 30 * MIB
    result = plan(modules, total(modules) - 1, cpu_offload_bytes=asked, mode="split")
    places = {p: at for p, at in result.places.items() if at.placement is Placement.SPLIT}
    assert len(places) == 16
    # 64 rows are 512 KiB at most; a quarter of each matrix leaves.
    assert asked <= result.host_bytes <= asked + MIB // 2
    for module in modules:
        if module.path in places:
            share = 1 - places[module.path].resident_rows / module.rows
            assert share == pytest.approx(0.25, abs=2 * ROW_UNIT / module.rows)
    assert result.streamed_bytes == result.computed_bytes == 0
    # A quarter of a layer, to a unit of each of its four matrices.
    assert abs(result.ring_layer_bytes - 30 * MIB // 4) <= 2 * MIB


def test_split_of_a_few_rows() -> None:
    modules = model(tied=True)
    result = plan(modules, cpu_offload_bytes=1, mode="split")
    assert result.places["layers.3.mlp.down.weight"] == WeightPlace(Placement.SPLIT, 1024 - 64)
    assert len(moved(result)) == 1 and result.host_bytes == 8 * MIB // 16


def test_what_every_part_has_is_in_both_memories() -> None:
    plain = ModuleSize("layers.0.a.weight", 1024, 256)
    ordered = replace(plain, num_bytes=1024 + 300, fixed_bytes=300)
    for asked, host in ((1, 256), (300, 512), (1 << 20, 1024)):
        without = plan([plain], cpu_offload_bytes=asked, mode="split")
        assert (without.host_bytes, without.device_bytes) == (host, 1024 - host)
    for asked, host in ((1, 556), (557, 812), (1 << 20, 1324)):
        result = plan([ordered], cpu_offload_bytes=asked, mode="split")
        there = 1324 - host + (300 if host < 1324 else 0)
        assert (result.host_bytes, result.device_bytes) == (host, there)
        assert result.ring_layer_bytes == -(-host // 64) * 64


def test_split_of_everything() -> None:
    modules = model(tied=True)
    result = plan(modules, patterns=("*.mlp",), mode="split")
    assert set(moved(result).values()) == {Placement.SPLIT}
    assert {result.places[f"{path}.weight"].resident_rows for path in moved(result)} == {0}
    # What is looked up has one place, whole.
    assert moved(plan(modules, patterns=("*",), mode="split"))["embedding"] is Placement.STREAM
    untied = plan(model(), patterns=("*",), mode="split")
    assert moved(untied)["embedding"] is Placement.HOST
    assert moved(untied)["head"] is Placement.SPLIT


def test_split_only_takes_more_when_more_is_asked_for() -> None:
    rows = (1024, 448, 704, 320, 1600)
    modules = [ModuleSize(f"layers.{i}.a.weight", 2 * n, n) for i, n in enumerate(rows)]
    before = plan(modules, cpu_offload_bytes=1, mode="split")
    for asked in range(65, total(modules), 64):
        after = plan(modules, cpu_offload_bytes=asked, mode="split")
        for path, place in after.places.items():
            assert place.resident_rows <= before.places[path].resident_rows
        before = after


def test_rows_that_are_no_multiple() -> None:
    modules = [ModuleSize("layers.0.a.weight", 1000, 100), ModuleSize("layers.0.b.weight", 50, 50)]
    result = plan(modules, cpu_offload_bytes=1, mode="split")
    assert result.places["layers.0.b.weight"] == WeightPlace(Placement.SPLIT, 0)
    some = plan(modules, cpu_offload_bytes=51, mode="split")
    assert some.places["layers.0.a.weight"] == WeightPlace(Placement.SPLIT, 64)
    assert some.host_bytes in (360, 410) and some.device_bytes == 1050 - some.host_bytes


# --- experts, tied embeddings ------------------------------------------------------------------


@pytest.mark.parametrize("profile", [FAST_HOST, FAST_LINK])
def test_experts_go_first_and_are_computed(profile: HardwareProfile) -> None:
    modules = model(experts=8)
    result = plan(modules, total(modules) - 90 * MIB, profile=profile)
    assert moved(result) == dict.fromkeys(
        [f"layers.{i}.mlp.{name}" for i in (2, 3) for name in ("gate_up", "down")], Placement.HOST
    )
    assert "computed there, not streamed: of experts" in result.notes[1]
    # What is left over is for a cache of hot experts.
    assert result.spare_bytes == 70 * MIB


def test_experts_of_a_layer_go_together() -> None:
    modules = model(experts=8)
    result = plan(modules, patterns=("layers.1.mlp.down",), profile=FAST_HOST)
    assert moved(result) == dict.fromkeys(
        ["layers.1.mlp.gate_up", "layers.1.mlp.down"], Placement.HOST
    )


@pytest.mark.parametrize("mode", ["stream", "compute", "split"])
def test_experts_are_never_streamed(mode: str) -> None:
    modules = model(experts=8)
    result = plan(modules, total(modules) - 1, patterns=("layers.*.mlp.gate_up",), mode=mode)
    names = [f"layers.{i}.mlp.{name}" for i in range(4) for name in ("gate_up", "down")]
    assert moved(result) == dict.fromkeys(names, Placement.HOST)
    assert result.staging_bytes == 0 and result.computed_bytes == 320 * MIB
    # The ring is for what else of the layer is streamed.
    router = plan(modules, patterns=("layers.*.mlp",), mode="stream")
    assert router.ring_layer_bytes == 16 << 10 and router.streamed_bytes == 64 << 10


def test_a_tied_embedding_is_one_weight() -> None:
    modules = model(tied=True)
    result = plan(modules, patterns=("model.embed_tokens",), mode="stream")
    assert moved(result) == {"embedding": Placement.STREAM}
    assert result.ring_layer_bytes == result.streamed_bytes == 16 * MIB
    # It is read whole by the head, so it leaves after the layers.
    least = plan(modules, total(modules) - MIB, mode="compute")
    assert moved(least) == {"layers.3.mlp.down": Placement.HOST}


# --- bad input ---------------------------------------------------------------------------------


def refusal(modules: Sequence[ModuleSize], *budgets: int, **settings: Any) -> str:
    with pytest.raises(OutOfMemory) as caught:
        plan(modules, *budgets, **settings)
    return str(caught.value)


def test_forbidden_and_needed() -> None:
    modules = model()
    message = refusal(modules, total(modules) - 20 * MIB, cpu_offload_bytes=0, profile=FAST_HOST)
    assert message == (
        "The weights take 152.00 MiB, the accelerator has 132.00 MiB for them, and "
        "--no-cpu-offload (or --cpu-offload-gb 0) forbids keeping any on the host. Leave it out, "
        "or give --cpu-offload-size 24MiB instead."
    )
    message = refusal(modules, total(modules) - 20 * MIB, 20 * MIB, cpu_offload_bytes=0)
    assert "24.00 MiB would have to go there, where 20.00 MiB are free beside what" in message


def test_too_small_a_size() -> None:
    modules = model()
    message = refusal(modules, 100 * MIB, cpu_offload_bytes=20 * MIB, profile=FAST_HOST)
    assert message == (
        "With --cpu-offload-gb (20.00 MiB) 128.00 MiB of the weights' 152.00 MiB stay on the "
        "accelerator, which has 100.00 MiB for them. Give --cpu-offload-size 54MiB, or leave the "
        "size out."
    )
    within = refusal(
        modules, 100 * MIB, cpu_offload_bytes=20 * MIB, patterns=("*.down",), mode="compute"
    )
    assert within.endswith("Leave --cpu-offload-gb out and leave --offload-layers out.")


def test_patterns_that_leave_too_much() -> None:
    modules = model()
    message = refusal(modules, 100 * MIB, patterns=("*.down",), mode="compute")
    assert "120.00 MiB of the weights' 152.00 MiB stay on the accelerator" in message
    assert message.endswith("Leave --offload-layers out.")


def test_more_than_the_host_has() -> None:
    modules = model()
    message = refusal(modules, 140 * MIB, 50 * MIB, cpu_offload_bytes=100 * MIB, profile=FAST_HOST)
    assert message == (
        "100.00 MiB of weights would stay in host memory, of which 50.00 MiB are free beside what "
        "steps take. Lower --cpu-offload-gb (100.00 MiB) to --cpu-offload-size 46MiB, or free "
        "memory."
    )
    by_pattern = refusal(modules, 140 * MIB, 50 * MIB, patterns=("*.mlp",), profile=FAST_HOST)
    assert "80.00 MiB of weights would stay in host memory, of which 50.00" in by_pattern
    assert "16.00 MiB there are enough" in by_pattern and "Leave it out" in by_pattern
    for_nothing = refusal(modules, 160 * MIB, 50 * MIB, patterns=("*.mlp",), profile=FAST_HOST)
    assert "All of them fit the accelerator, which is what happens without" in for_nothing
    neither = refusal(modules, 50 * MIB, 50 * MIB, profile=FAST_HOST)
    assert "106.00 MiB of weights would stay in host memory" in neither
    assert "the accelerator has 50.00 MiB for them. Free memory" in neither


def test_a_device_smaller_than_one_layer() -> None:
    modules = model()
    message = refusal(modules, 20 * MIB, mode="stream")
    assert message == (
        "The accelerator has 20.00 MiB for weights. Mode stream needs 60.00 MiB at least: 4.00 "
        "KiB of weights and a ring of 2 layers of 30.00 MiB. Give --offload-mode compute."
    )
    assert refusal(modules, 40 * MIB, mode="stream").endswith("Give --offload-prefetch-step 0.")
    nothing = refusal(modules, 1000, profile=FAST_HOST)
    assert "Mode compute needs 4.00 KiB at least: 4.00 KiB of weights. Give the accelerator" in (
        nothing
    )
    synchronous = refusal(modules, 20 * MIB, mode="stream", is_async=False)
    assert "and a ring of 1 layer of 30.00 MiB. Give --offload-mode compute." in synchronous
    ahead = refusal(modules, 70 * MIB, mode="stream", prefetch_step=4)
    assert ahead.endswith("Give --offload-prefetch-step 1.")


def test_an_offload_that_makes_it_not_fit() -> None:
    # One streamed weight takes a ring of twice its size.
    modules = model(1)
    message = refusal(modules, total(modules), patterns=("head",), mode="stream")
    assert "Without it all of them fit: leave it out." in message


def test_a_size_and_patterns_that_make_it_not_fit() -> None:
    """Without the size alone the patterns would ask for the same."""
    modules = model(1)
    asked = {"cpu_offload_bytes": 100 * MIB, "patterns": ("head",), "mode": "stream"}
    message = refusal(modules, total(modules), **asked)
    assert "Without it and --offload-layers all of them fit: leave both out." in message
    message = refusal(modules, 2 * total(modules), 0, **asked)
    assert (
        "happens without --cpu-offload-gb (100.00 MiB) and --offload-layers. Leave both" in message
    )


def test_only_what_works_is_suggested() -> None:
    # Computing 8 MiB of these weights would do, but patterns take all 20, and the host has 10.
    message = refusal(model(1), 55 * MIB, 10 * MIB, patterns=("*.mlp",), mode="stream")
    assert message.startswith("With --offload-layers *.mlp 42.00 MiB of the weights' 62.00 MiB")
    assert "stay on the accelerator beside a ring of 2 layers of 20.00 MiB, which has" in message
    assert "Give the accelerator more memory" in message and "--offload-mode" not in message


# --- properties --------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[ModuleSize]:
    found = []
    num_layers = draw(st.integers(0, 4))
    sizes, rows = st.integers(1, 2000), st.integers(1, 400)
    if draw(st.booleans()):
        kind = draw(st.sampled_from([WeightKind.TABLE, WeightKind.TIED]))
        found.append(ModuleSize("embedding.weight", draw(sizes), draw(rows), kind))
    for i in range(num_layers):
        found.append(ModuleSize(f"layers.{i}.norm.weight", draw(sizes), 8, WeightKind.VECTOR))
        for name in ("qkv", "output"):
            found.append(ModuleSize(f"layers.{i}.attention.{name}.weight", draw(sizes), draw(rows)))
        kind = draw(st.sampled_from([WeightKind.MATRIX, WeightKind.EXPERTS]))
        for name in ("gate_up", "down"):
            found.append(ModuleSize(f"layers.{i}.mlp.{name}", draw(sizes), draw(rows), kind))
    found.append(ModuleSize("norm.weight", draw(sizes), 8, WeightKind.VECTOR))
    if draw(st.booleans()):
        found.append(ModuleSize("head.weight", draw(sizes), draw(rows)))
    return found


def offloads(most: int) -> st.SearchStrategy[OffloadConfig]:
    return st.builds(
        OffloadConfig,
        cpu_offload_bytes=st.none() | st.just(0) | st.integers(1, most),
        patterns=st.sampled_from([(), ("*.mlp",), (":1",), ("*.attention", "*.down"), ("*",)]),
        mode=st.sampled_from(["auto", "stream", "compute", "split"]),
        is_async=st.booleans(),
        prefetch_step=st.none() | st.integers(0, 4),
        link_limit_bytes_per_s=st.sampled_from([None, 1e9]),
    )


def check(
    result: PlacementPlan,
    modules: Sequence[ModuleSize],
    device: int,
    host: int,
    offload: OffloadConfig,
) -> None:
    """Every weight has one place, bytes add up, budgets hold."""
    assert list(result.places) == [module.path for module in modules]
    on_host = {}
    for module in modules:
        place = result.places[module.path]
        if place.placement is Placement.RESIDENT:
            assert place.resident_rows == module.rows
        elif place.placement is Placement.SPLIT:
            assert place.resident_rows % ROW_UNIT == 0 and 0 <= place.resident_rows < module.rows
            assert module.kind is WeightKind.MATRIX
        else:
            assert place.resident_rows == 0
        assert module.is_matrix or place.placement is Placement.RESIDENT
        if place.placement is not Placement.RESIDENT:
            resident = module.num_bytes * place.resident_rows // module.rows
            on_host[module.path] = module.num_bytes - resident
    by_kind = {
        kind: [p for p in on_host if result.places[p].placement is kind] for kind in Placement
    }
    assert result.host_bytes == result.offloaded_bytes == sum(on_host.values()) <= host
    assert result.device_bytes + result.host_bytes == result.total_bytes == total(modules)
    assert result.streamed_bytes == sum(on_host[p] for p in by_kind[Placement.STREAM])
    assert result.computed_bytes == sum(on_host[p] for p in by_kind[Placement.HOST])
    assert result.device_bytes + result.staging_bytes + result.spare_bytes == device
    assert result.spare_bytes >= 0
    linked = by_kind[Placement.STREAM] + by_kind[Placement.SPLIT]
    layers: dict[str, int] = {}
    for path in linked:
        layer = ".".join(path.split(".")[:2]) if path.startswith("layers.") else path
        layers[layer] = layers.get(layer, 0) + math.ceil(on_host[path] / 64) * 64
    assert result.ring_layer_bytes == max(layers.values(), default=0)
    ahead = 1 if offload.prefetch_step is None else offload.prefetch_step
    assert result.ring_layers == ((1 + ahead if offload.is_async else 1) if linked else 0)
    assert not any(m.is_expert for m in modules if m.path in linked)
    if offload.mode == "compute":
        assert not linked
    if offload.mode == "stream":
        assert not by_kind[Placement.SPLIT]
        never = {m.path for m in modules if m.kind is WeightKind.TABLE or m.is_expert}
        assert set(by_kind[Placement.HOST]) <= never
    if offload.cpu_offload_bytes == 0:
        assert not on_host
    if offload.cpu_offload_bytes is None and not offload.patterns:
        assert not on_host or total(modules) > device
    for i in range(4):
        experts = {
            result.places[m.path].placement
            for m in modules
            if m.is_expert and m.path.startswith(f"layers.{i}.")
        }
        assert len(experts) <= 1
    assert all(line for line in describe(result))


def variants(message: str, offload: OffloadConfig) -> list[OffloadConfig]:
    """What the message suggests, as configurations: each must work."""
    found = []
    if size := re.search(r"(?:[Gg]ive|to) --cpu-offload-size (\w+)", message):
        found.append(replace(offload, cpu_offload_bytes=to_gib(size[1])))
    if "leave the size out" in message or "Leave it out, or give" in message:
        found.append(replace(offload, cpu_offload_bytes=None))
    if "eave it out" in message and not size:
        found.append(replace(offload, cpu_offload_bytes=None, patterns=()))
    remedy = offload
    changes: list[tuple[str, dict[str, Any]]] = [
        ("eave --cpu-offload-gb", {"cpu_offload_bytes": None}),
        ("eave --offload-layers out", {"patterns": ()}),
        ("ive --offload-prefetch-step 1", {"prefetch_step": 1}),
        ("ive --offload-prefetch-step 0", {"prefetch_step": 0}),
        ("ive --offload-mode compute", {"mode": "compute"}),
    ]
    for text, change in changes:
        if text in message:
            remedy = replace(remedy, **change)
    if remedy != offload:
        found.append(remedy)
    return found


@settings(max_examples=400, deadline=None)
@given(st.data(), models(), st.sampled_from([FAST_HOST, FAST_LINK]))
def test_a_plan_holds_or_says_what_works(
    data: st.DataObject, modules: list[ModuleSize], profile: HardwareProfile
) -> None:
    size = total(modules)
    device = data.draw(st.integers(0, size + 100), "device")
    host = data.draw(st.just(NEVER_FULL) | st.integers(0, size), "host")
    offload = data.draw(offloads(2 * size), "offload")
    try:
        result = plan_placement(shape_of(modules), device, host, offload, profile)
    except OptionError:
        assert offload.patterns or not any(m.is_matrix for m in modules)
        return
    except OutOfMemory as error:
        message = str(error)
        assert message.endswith(".") and "\n" not in message
        for variant in variants(message, offload):
            changed = plan_placement(shape_of(modules), device, host, variant, profile)
            check(changed, modules, device, host, variant)
        return
    check(result, modules, device, host, offload)
    asked = offload.cpu_offload_bytes
    if asked or offload.patterns:
        most = replace(offload, cpu_offload_bytes=NEVER_FULL)
        everything = plan_placement(
            shape_of(modules), NEVER_FULL, NEVER_FULL, most, profile
        ).host_bytes
        assert result.host_bytes >= min(everything if asked is None else asked, everything) > 0
        is_unneeded = any("not needed" in warning for warning in result.warnings)
        assert is_unneeded == (size <= device)
    assert (result.cpu_share > 0.6) == any("% of the weights" in w for w in result.warnings)


@settings(max_examples=60, deadline=None)
@given(st.data(), models(), st.sampled_from(["stream", "compute", "split"]))
def test_what_is_moved_by_itself_is_the_least(
    data: st.DataObject, modules: list[ModuleSize], mode: str
) -> None:
    assume(any(module.is_matrix for module in modules))
    device = data.draw(st.integers(0, total(modules) - 1), "device")
    try:
        automatic = plan(modules, device, mode=mode, mix=SHORT)
    except OutOfMemory:
        automatic = None
    sizes = []
    asked = 1
    while asked <= total(modules):
        # The next size that changes something is one byte above the last.
        asked = plan(modules, mix=SHORT, cpu_offload_bytes=asked, mode=mode).host_bytes + 1
        with contextlib.suppress(OutOfMemory):
            one = plan(modules, device, mix=SHORT, mode=mode, cpu_offload_bytes=asked - 1)
            sizes.append(one.host_bytes)
        if asked > sum(m.num_bytes for m in modules if m.is_matrix):
            break
    assert bool(sizes) == (automatic is not None)
    if automatic is not None:
        # The same order, unless the head leaves, which may leave before what else would have.
        gone = [path for path in moved(automatic) if path in ("head", "embedding")]
        assert automatic.host_bytes <= sizes[0]
        assert gone or automatic.host_bytes == sizes[0]


@settings(max_examples=60, deadline=None)
@given(st.data(), models())
def test_split_is_exact_to_one_unit(data: st.DataObject, modules: list[ModuleSize]) -> None:
    matrices = [m for m in modules if m.kind is WeightKind.MATRIX]
    assume(matrices)
    modules = [m for m in modules if m.kind in (WeightKind.MATRIX, WeightKind.VECTOR)]
    asked = data.draw(st.integers(1, total(matrices)), "asked")
    result = plan(modules, cpu_offload_bytes=asked, mode="split")
    unit = max(min(ROW_UNIT, m.rows) * m.num_bytes / m.rows for m in matrices) + 1
    assert asked <= result.host_bytes <= asked + unit
