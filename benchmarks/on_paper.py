"""What placements of a large model reach on paper: ``auto`` against pure streaming, pure
computing, and the bound that no placement can be faster than.

    python benchmarks/on_paper.py [--record]

The rates are given, and taken as reached. Steps of 1 to 4,096 tokens are decodes of as many
sequences, whose keys and values fill the KV cache together; the last line of each table is a
4,096-token prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ambidex.config import EngineConfig, ModelConfig, OffloadConfig
from ambidex.memory.cost_model import CostModel, StepTime, bound
from ambidex.memory.judge import Mix
from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape
from ambidex.memory.operations import StepLoad
from ambidex.memory.placement import PlacementPlan, plan_placement
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.memory.weight_places import Placement, WeightKind
from ambidex.weights.shape import model_shape

HERE = Path(__file__).parent
TOKENS = tuple(1 << n for n in range(13))
PROMPT = 4096


def llama_like(
    name: str,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    head_dim: int = 128,
    bytes_per_weight: int = 2,
    form: str = "bfloat16",
) -> ModelShape:
    """A model of layers like Llama's, each weight of ``bytes_per_weight``, KV cache in 16 bits."""
    weights: list[WeightShape] = []

    def add(path: str, rows: int, kind: WeightKind = WeightKind.MATRIX, columns: int = 0) -> None:
        columns = columns or (1 if kind is WeightKind.VECTOR else hidden)
        size = rows * columns * bytes_per_weight
        is_paired = path.endswith("gate_up.weight")
        weights.append(WeightShape(path, rows, columns, kind, form, size, 1, 1, (), is_paired))

    add("embedding.weight", vocab, WeightKind.TABLE)
    for i in range(layers):
        at = f"layers.{i}"
        add(f"{at}.attention_norm.weight", hidden, WeightKind.VECTOR)
        add(f"{at}.attention.qkv.weight", (heads + 2 * kv_heads) * head_dim)
        add(f"{at}.attention.output.weight", hidden, columns=heads * head_dim)
        add(f"{at}.mlp_norm.weight", hidden, WeightKind.VECTOR)
        add(f"{at}.mlp.gate_up.weight", 2 * intermediate)
        add(f"{at}.mlp.down.weight", hidden, columns=intermediate)
    add("norm.weight", hidden, WeightKind.VECTOR)
    add("head.weight", vocab)
    kv_bytes = layers * 2 * kv_heads * head_dim * 2
    return ModelShape(
        name=name,
        model_type="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        num_heads=heads,
        head_dim=head_dim,
        weights=tuple(weights),
        kv=(KVShape(layers, kv_heads, head_dim, kv_bytes, None),),
        max_positions=32768,
        description="bfloat16",
    )


def public(name: str) -> ModelShape:
    """A model of the built-in list, weights and KV cache in bfloat16."""
    return model_shape(name, EngineConfig(ModelConfig(name, dtype="bfloat16")))


def machine(
    name: str,
    *,
    memory: float,
    hbm: float,
    flops: float,
    link: float,
    dram: float,
    host_flops: float,
) -> HardwareProfile:
    """Rates as reached; handing over between host and device takes 5 us each way, and activations
    cross in 16 bits."""
    return HardwareProfile(
        name=name,
        host=Processor("host", 1 << 40, dram, {"float32": ProductRate(((1, host_flops),))}),
        device=Processor("device", int(memory), hbm, {"float32": ProductRate(((1, flops),))}),
        link=LinkRate(link),
        link_back=LinkRate(link),
        sync_s=5e-6,
        activation_bytes=2,
    )


@dataclass(frozen=True, slots=True)
class Case:
    shape: ModelShape
    profile: HardwareProfile
    kv_bytes: float

    @property
    def title(self) -> str:
        return (
            f"{self.shape.name}, bf16, {self.shape.weight_bytes / 1e9:.0f} GB; {self.profile.name}"
        )


def cases() -> list[Case]:
    first = machine(
        "80 GB at 2 TB/s, 312 TFLOP/s, link 25 GB/s, DRAM 300 GB/s, CPU 3 TFLOP/s, 5 GB of KV",
        memory=80e9,
        hbm=2e12,
        flops=312e12,
        link=25e9,
        dram=300e9,
        host_flops=3e12,
    )
    second = machine(
        "24 GB at 1 TB/s, 165 TFLOP/s, link 25 GB/s, DRAM 80 GB/s, CPU 1 TFLOP/s, 2 GB of KV",
        memory=24e9,
        hbm=1e12,
        flops=165e12,
        link=25e9,
        dram=80e9,
        host_flops=1e12,
    )
    return [Case(public("llama-3-70b"), first, 5e9), Case(public("qwen2.5-32b"), second, 2e9)]


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one step."""

    load: StepLoad
    auto: StepTime
    stream_s: float
    compute_s: float
    bound_s: float
    #: Of the host's rows, those that ``auto`` streams.
    share: float
    #: What handing over between host and device takes of the auto step.
    sync_s: float

    @property
    def pure_s(self) -> float:
        return min(self.stream_s, self.compute_s)


def product_bytes_on_device(shape: ModelShape, plan: PlacementPlan) -> float:
    """Of the weights that products use."""
    total = 0.0
    for weight in shape.weights:
        if weight.kind in (WeightKind.VECTOR, WeightKind.TABLE):
            continue
        place = plan.places[weight.path]
        if place.placement in (Placement.RESIDENT, Placement.SPLIT):
            total += weight.num_bytes * place.resident_rows / weight.module.rows
    return total


def plan(case: Case, mode: str = "auto", mix: Mix | None = None) -> PlacementPlan:
    assert case.profile.device is not None
    budget = case.profile.device.memory_bytes - int(case.kv_bytes)
    offload = OffloadConfig(mode=mode)
    return plan_placement(case.shape, budget, 1 << 40, offload, case.profile, mix or mix_of(case))


def mix_of(case: Case) -> Mix:
    tokens = int(case.kv_bytes / case.shape.kv_bytes_per_token)
    return Mix(num_seqs=max(min(128, tokens // 512), 1), chunk_tokens=PROMPT)


def model_of(case: Case, plan: PlacementPlan) -> CostModel:
    return CostModel(case.profile, case.shape, plan.places, ring_bytes=plan.staging_bytes)


def loads(case: Case) -> list[StepLoad]:
    held = case.kv_bytes / case.shape.kv_bytes_per_token
    decodes = [StepLoad(n, 1, max(int(held / n), 1)) for n in TOKENS]
    return [*decodes, StepLoad(1, PROMPT, PROMPT)]


def rows(case: Case) -> Iterator[Row]:
    auto, stream, compute = (plan(case, mode) for mode in ("auto", "stream", "compute"))
    auto_model = model_of(case, auto)
    table = auto.split_table
    assert table is not None
    resident = product_bytes_on_device(case.shape, auto)
    for load in loads(case):
        step = auto_model.step(load, table)
        yield Row(
            load,
            step,
            model_of(case, stream).seconds(load),
            model_of(case, compute).seconds(load),
            bound(case.profile, case.shape, resident, load),
            table.share(load.num_tokens),
            step.parts.get("synchronisation", 0.0),
        )


def report(case: Case) -> Iterator[str]:
    placed = plan(case)
    yield f"### {case.title}"
    yield ""
    yield (
        f"`auto` is mode {placed.mode}: {placed.device_bytes / 1e9:.1f} GB on the device beside a "
        f"ring of {placed.staging_bytes / 1e9:.1f} GB, {placed.host_bytes / 1e9:.1f} GB on the "
        "host."
    )
    yield ""
    yield (
        "| tokens | stream s | compute s | bound s | auto s | of it sync | streamed | limit | "
        "auto / bound | gain over the better pure | that the bound allows |"
    )
    yield f"|{' --- |' * 11}"
    for row in rows(case):
        name = f"{row.load.num_tokens}"
        name += " (prompt)" if row.load.num_new > 1 else ""
        yield (
            f"| {name} | {row.stream_s:.3f} | {row.compute_s:.3f} | {row.bound_s:.3f} | "
            f"{row.auto.seconds:.3f} | {row.sync_s:.3f} | {row.share:.0%} | {row.auto.limit} | "
            f"{row.auto.seconds / row.bound_s:.3f} | {row.pure_s / row.auto.seconds:.2f} | "
            f"{row.pure_s / row.bound_s:.2f} |"
        )
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    args = parser.parse_args()
    text = "\n".join(line for case in cases() for line in report(case))
    print(text)
    if args.record:
        with (HERE / "RESULTS.md").open("a") as file:
            file.write(f"\n{text}\n")


if __name__ == "__main__":
    main()
