"""What is loaded, and where the memory went: for front ends, for the log, and for ``/ledger``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ambidex.config import EngineConfig
from ambidex.engine.foretold import StepSpeed
from ambidex.engine.messages import EngineInfo
from ambidex.memory.expert_cache import CACHED_EXPERTS
from ambidex.memory.ledger import MemorySnapshot, format_bytes, format_seconds, is_host_memory

if TYPE_CHECKING:
    from ambidex.runner.loader import LoadedLane

#: Beside an accelerator, a larger share of the weights in host memory is worth a warning.
CPU_WEIGHT_SHARE_LIMIT = 0.6


def describe_engine(config: EngineConfig, lane: LoadedLane) -> EngineInfo:
    """What a front end must know of an engine with this lane."""
    checkpoint = lane.checkpoint
    memory = [ledger.snapshot() for ledger in lane.ledgers]
    modules = lane.module_bytes()
    return EngineInfo(
        model=config.model.model,
        tokenizer_path=str(lane.tokenizer_path),
        max_model_len=lane.max_model_len,
        vocab_size=lane.vocab_size,
        num_blocks=0 if lane.hands.accelerator else min(lane.num_blocks),
        num_gpu_blocks=min(lane.num_blocks) if lane.hands.accelerator else 0,
        block_size=config.cache.block_size,
        dtype=lane.dtype_description,
        source=lane.description,
        model_type=checkpoint.config.get("model_type", ""),
        kv_cache_dtype=lane.kv_dtype,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        cpu_threads=lane.hands.host.num_threads,
        kernels=lane.hands.kernels.description,
        model_config=checkpoint.config.values,
        generation_config=dict(checkpoint.generation_config),
        notes=lane.notes,
        memory=memory,
        modules=modules,
        memory_nodes=lane.memory_nodes,
        expected=lane.expected,
    )


def memory_report(
    memory: Sequence[MemorySnapshot],
    modules: Mapping[str, Mapping[str, int]],
    speed: Mapping[str, StepSpeed] | None = None,
) -> dict[str, Any]:
    """Each memory's ledger, where the weights are, and how fast steps were beside what was
    predicted: plain values, as ``/ledger`` shows them.

    ``modules``: module -> memory -> bytes of its weights; copies of experts are a module of their
    own, and no part of the share that is on the CPU.
    """
    cpu_weights = gpu_weights = 0
    for sizes in modules.values():
        for name, num_bytes in sizes.items():
            if is_host_memory(name):
                cpu_weights += num_bytes
            else:
                gpu_weights += num_bytes
    total = cpu_weights + gpu_weights - sum(modules.get(CACHED_EXPERTS, {}).values())
    share = cpu_weights / max(total, 1)
    accelerators = [each for each in memory if not each.is_host]
    warnings = []
    if accelerators and share > CPU_WEIGHT_SHARE_LIMIT:
        free = ", ".join(f"{format_bytes(each.free_bytes)} on {each.name}" for each in accelerators)
        warnings.append(
            f"{share:.0%} of the weights ({format_bytes(cpu_weights)} of "
            f"{format_bytes(total)}) are in host memory, and steps are as fast "
            f"as the CPU and the link allow. Free: {free}."
        )
    return {
        "memories": [
            {
                "name": each.name,
                "capacity_bytes": each.capacity_bytes,
                "reserved_bytes": each.reserved_bytes,
                "free_bytes": each.free_bytes,
                "accounts": dict(each.accounts),
            }
            for each in memory
        ],
        "modules": {name: dict(sizes) for name, sizes in modules.items()},
        "cpu_weights": cpu_weights,
        "gpu_weights": gpu_weights,
        "cpu_weight_share": share,
        "warnings": warnings,
        "speed": {
            kind: {
                "num_steps": each.num_steps,
                "predicted_ms": 1e3 * each.predicted_s / each.num_steps,
                "measured_ms": 1e3 * each.measured_s / each.num_steps,
                "measured_over_predicted": each.ratio,
            }
            for kind, each in (speed or {}).items()
        },
    }


def describe_threads(info: EngineInfo) -> str:
    """How many threads compute, in words."""
    return "1 thread" if info.cpu_threads == 1 else f"{info.cpu_threads} threads"


def describe(info: EngineInfo) -> list[str]:
    """Lines for the log at start-up; the last two are those that vLLM users look for."""
    threads = describe_threads(info)
    rows = [
        ("model", info.model),
        ("source", info.source),
        ("architecture", info.model_type),
        ("dtype", info.dtype),
        ("KV dtype", info.kv_cache_dtype),
        ("kernels", f"{info.kernels}, {threads}" if info.kernels else ""),
        ("max model length", f"{info.max_model_len} tokens"),
    ]
    for memory in info.memory:
        rows.append((f"{memory.name} memory", format_bytes(memory.capacity_bytes)))
        sizes = {name: size for name, size in memory.accounts.items() if size}
        for name, size in {**sizes, "free": memory.free_bytes}.items():
            rows.append((f"{memory.name}: {name}", format_bytes(size)))
    rows += [("node", line) for line in info.memory_nodes]
    for what, seconds in info.expected.items():
        rows.append((f"expected: {what}", format_seconds(seconds)))
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    lines = [f"{name:<{width}}  {value}" for name, value in shown]
    num_tokens = (info.num_blocks + info.num_gpu_blocks) * info.block_size
    lines.append(f"GPU blocks: {info.num_gpu_blocks}, CPU blocks: {info.num_blocks}")
    lines.append(
        f"Maximum concurrency for {info.max_model_len} tokens per request: "
        f"{num_tokens / info.max_model_len:.2f}x"
    )
    return lines
