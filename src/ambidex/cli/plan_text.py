"""A plan as lines for people, and as the values of ``--json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ambidex.cli.plan_rows import Row, by_layer, by_part, runs
from ambidex.memory.ledger import MemorySnapshot, format_bytes, format_seconds

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.memory.model_shape import KVShape, ModelShape
    from ambidex.memory.planner import Plan, PlanRefused, Prediction
    from ambidex.memory.profile import HardwareProfile, Processor

#: Of ``--json``: a field that is renamed or changes its meaning raises it, a new one does not.
JSON_VERSION = 1

ACCOUNT_NAMES = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "activations": "activations",
    "graphs": "graphs",
    "staging": "staging",
    "runtime": "runtime",
}
SHARE_NAMES = {
    "resident": "resident",
    "streamed": "streamed",
    "computed": "computed by the host",
    "split": "split",
}
#: Resources that take less than this share of a step are not worth a word.
_SMALL = 0.1


def describe(plan: Plan, config: EngineConfig) -> Iterator[str]:
    """Lines of ``ambidex plan``: model, machine, ledgers, KV cache, placement, speed."""
    yield f"{plan.shape.name}: {', '.join(model_parts(plan.shape))}"
    yield from _machine(plan.profile)
    yield ""
    yield from _table(_memory_rows(plan.memories))
    yield from _capacity(plan, config)
    yield ""
    yield from _kv(plan, config)
    yield ""
    yield from _placement(plan)
    yield ""
    yield from _table(_speed_rows(plan))
    texts = [*(f"warning: {text}" for text in plan.warnings), *plan.notes]
    if texts:
        yield ""
        yield from texts


def refused(error: PlanRefused) -> Iterator[str]:
    """The proposals of a plan that does not fit, with the speed of each."""
    if not error.proposals:
        return
    yield "What fits, and how fast it is:"
    rows = [("", "first token", "each further token", "held up by")]
    for proposal in error.proposals:
        first, more = (proposal.predictions.get(name) for name in ("ttft_1", "tpot_1"))
        rows.append(
            (
                f"  {proposal.flags}",
                format_seconds(first.seconds) if first else "",
                f"{format_seconds(more.seconds)} ({rate(1 / more.seconds)} a second)"
                if more
                else "",
                more.limit if more else "",
            )
        )
    yield from _table(rows, left=(0, 3))


def model_parts(shape: ModelShape) -> tuple[str, str]:
    """What a model is, and what it takes: ``llama, 70.6 billion parameters, bfloat16``."""
    what = [shape.model_type, f"{_count(shape.num_parameters)} parameters"]
    if any(weight.num_experts > 1 for weight in shape.weights):
        what.append(f"{_count(shape.num_active_parameters)} of them for a token")
    what += [shape.description] if shape.description else []
    weights, token = format_bytes(shape.weight_bytes), format_bytes(shape.kv_bytes_per_token)
    return ", ".join(what), f"{weights} of weights, {token} of KV cache a token"


def _machine(profile: HardwareProfile) -> Iterator[str]:
    if profile.device is not None:
        link = ""
        if profile.link is not None:
            link = f"; a link of {_bandwidth(profile.link.bytes_per_s)}"
            back = profile.link_back
            if back is not None and back.bytes_per_s != profile.link.bytes_per_s:
                link += f" there and {_bandwidth(back.bytes_per_s)} back"
        yield f"accelerator: {_processor(profile.device)}{link}"
    yield f"host: {_processor(profile.host)}"
    yield "rates: from the table" if profile.origin == "table" else "rates: measured"
    yield from (f"  {source}" for source in profile.sources)


def _processor(processor: Processor) -> str:
    number = processor.num_threads
    threads = f", {number} thread{'s' if number > 1 else ''}" if number else ""
    return (
        f"{processor.name}{threads}, {format_bytes(processor.memory_bytes)} of memory read at "
        f"{_bandwidth(processor.bytes_per_s)}"
    )


def _memory_rows(memories: Sequence[MemorySnapshot]) -> list[tuple[str, ...]]:
    rows = [("memory", *(each.name for each in memories))]
    for account, name in ACCOUNT_NAMES.items():
        sizes = [each.accounts.get(account, 0) for each in memories]
        if any(sizes):
            rows.append((name, *(format_bytes(size) if size else "-" for size in sizes)))
    rows.append(("free", *(format_bytes(each.free_bytes) for each in memories)))
    rows.append(("capacity", *(format_bytes(each.capacity_bytes) for each in memories)))
    return rows


def _kv(plan: Plan, config: EngineConfig) -> Iterator[str]:
    words = f"blocks of {config.cache.block_size} tokens"
    counts = [f"{number:,} {words}" for number in plan.kv.num_blocks]
    if len(counts) > 1:
        # Layers that see all of a request and layers that see a window keep their own.
        counts = [
            f"{text} for {_layers(group)}"
            for text, group in zip(counts, plan.shape.kv, strict=True)
        ]
    yield (
        f"KV cache: {' and '.join(counts)}; requests of up to {plan.kv.max_model_len:,} tokens, "
        f"{plan.max_concurrency:,.2f} such at once"
    )


def _layers(group: KVShape) -> str:
    number = f"{group.num_layers} layer{'s' if group.num_layers > 1 else ''}"
    return number if group.window is None else f"{number} with a window of {group.window:,} tokens"


def _capacity(plan: Plan, config: EngineConfig) -> Iterator[str]:
    """What of an accelerator's memory may be taken, where that is not all of it."""
    if plan.profile.device is None:
        return
    of_all, memory = plan.profile.device.memory_bytes, plan.memories[-1]
    if memory.capacity_bytes < of_all:
        share, limit = config.device.gpu_memory_utilization, config.device.gpu_memory_limit_bytes
        is_limit = limit is not None and memory.capacity_bytes == limit
        what = f"{share:g} of its" if not is_limit else "less than its"
        option = "--gpu-memory-limit" if is_limit else "--gpu-memory-utilization"
        yield f"capacity of {memory.name}: {what} {format_bytes(of_all)} ({option})"


def _placement(plan: Plan) -> Iterator[str]:
    placement = plan.placement
    if placement is None or not placement.host_bytes:
        where = "the accelerator's memory" if placement is not None else "host memory"
        yield f"placement: every weight is in {where}"
        return
    yield (
        f"placement: {placement.mode}; {format_bytes(placement.device_bytes)} of the weights on "
        f"the accelerator, {format_bytes(placement.host_bytes)} ({placement.cpu_share:.0%}) on "
        "the host"
    )
    layers, parts = runs(by_layer(plan)), by_part(plan)
    used = [name for name in SHARE_NAMES if any(row.shares.parts[name] for row in layers)]
    head = ("", *(SHARE_NAMES[name] for name in used))

    def cells(rows: Iterable[Row], after: str) -> Iterator[tuple[str, ...]]:
        for row in rows:
            sizes = (row.shares.parts[name] for name in used)
            yield (f"  {row.name}{after}", *(format_bytes(size) if size else "-" for size in sizes))

    yield from _table([head, *cells(layers, ""), *cells(parts, " of all layers")])
    if plan.split_table:
        some = [f"{share:.0%} at {count:,}" for count, share in plan.split_table]
        if not any(share for _, share in plan.split_table):
            some = ["none at any number"]
        yield f"of the host's rows, streamed by tokens a step: {', '.join(some)}"


def _speed_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("predicted", "seconds", "tokens/s", "held up by")]
    rates = {"tpot_1": plan.tokens_per_s_1, "tpot_full": plan.tokens_per_s_full}
    for name, one in plan.predictions.items():
        speed = rate(rates[name]) if name in rates else ""
        rows.append((one.name, format_seconds(one.seconds), speed, _limit(one)))
    return rows


def _limit(one: Prediction) -> str:
    """``link (beside it: DRAM 61%)``: what holds a step up, and what else takes long."""
    others = sorted(one.parts.items(), key=lambda part: -part[1])
    beside = [
        f"{name} {part / one.seconds:.0%}"
        for name, part in others
        if name != one.limit and part >= _SMALL * one.seconds
    ]
    return f"{one.limit} (beside it: {', '.join(beside)})" if beside else one.limit


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Columns as wide as they need be: text to the left, numbers to the right, the last one of
    words to the left too."""
    lefts = {*left, *([3] if rows[0][-1] == "held up by" else [])}
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column in lefts else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "   ".join(cells).rstrip()


def rate(value: float) -> str:
    """``1,234``, ``12.3``, ``0.12``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _count(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.1f} billion"
    if number >= 10**6:
        return f"{number / 1e6:.{0 if number >= 10**7 else 1}f} million"
    return f"{number:,}"


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.{0 if bytes_per_s >= 1e11 else 1}f} GB/s"


# --- JSON -----------------------------------------------------------------------------------------


def to_json(plan: Plan, config: EngineConfig, lengths: Mapping[str, int]) -> dict[str, Any]:
    """The fields of ``--json``, as docs/plan.md lists them; ``lengths``: prompt_len, output_len."""
    return {
        "version": JSON_VERSION,
        "fits": True,
        "model": _shape_json(plan.shape),
        "hardware": _profile_json(plan.profile),
        **lengths,
        "memories": [
            {
                "name": each.name,
                "capacity_bytes": each.capacity_bytes,
                "reserved_bytes": each.reserved_bytes,
                "free_bytes": each.free_bytes,
                "accounts": dict(each.accounts),
            }
            for each in plan.memories
        ],
        "kv_cache": {
            "num_blocks": list(plan.kv.num_blocks),
            "block_size": config.cache.block_size,
            "max_model_len": plan.kv.max_model_len,
            "note": plan.kv.note,
        },
        "max_concurrency": plan.max_concurrency,
        "full_concurrency": plan.full_concurrency,
        "placement": _placement_json(plan),
        "predictions": _predictions_json(plan.predictions),
        "tokens_per_s_1": plan.tokens_per_s_1,
        "tokens_per_s_full": plan.tokens_per_s_full,
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def refused_json(
    reason: str,
    error: PlanRefused,
    shape: ModelShape,
    profile: HardwareProfile,
    lengths: Mapping[str, int],
) -> dict[str, Any]:
    """The same where nothing fits: why, and what would."""
    return {
        "version": JSON_VERSION,
        "fits": False,
        "model": _shape_json(shape),
        "hardware": _profile_json(profile),
        **lengths,
        "error": reason,
        "proposals": [
            {"flags": each.flags, "predictions": _predictions_json(each.predictions)}
            for each in error.proposals
        ],
    }


def _shape_json(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "model_type": shape.model_type,
        "description": shape.description,
        "num_layers": shape.num_layers,
        "num_parameters": shape.num_parameters,
        "num_active_parameters": shape.num_active_parameters,
        "weight_bytes": shape.weight_bytes,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "max_positions": shape.max_positions,
    }


def _profile_json(profile: HardwareProfile) -> dict[str, Any]:
    def processor(one: Processor) -> dict[str, Any]:
        return {
            "name": one.name,
            "memory_bytes": one.memory_bytes,
            "bytes_per_s": one.bytes_per_s,
            "num_threads": one.num_threads,
        }

    return {
        "name": profile.name,
        "origin": profile.origin,
        "host": processor(profile.host),
        "device": processor(profile.device) if profile.device else None,
        "link_bytes_per_s": profile.link.bytes_per_s if profile.link else None,
        "link_back_bytes_per_s": profile.link_back.bytes_per_s if profile.link_back else None,
        "sources": list(profile.sources),
    }


def _placement_json(plan: Plan) -> dict[str, Any] | None:
    placement = plan.placement
    if placement is None:
        return None
    return {
        "mode": placement.mode,
        "device_bytes": placement.device_bytes,
        "host_bytes": placement.host_bytes,
        "staging_bytes": placement.staging_bytes,
        "layers": [_row_json(row) for row in by_layer(plan)],
        "parts": [_row_json(row) for row in by_part(plan)],
        "split_table": [
            {"num_tokens": count, "streamed_share": share} for count, share in plan.split_table
        ],
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {"name": row.name, **{f"{name}_bytes": n for name, n in row.shares.parts.items()}}


def _predictions_json(predictions: Mapping[str, Prediction]) -> dict[str, Any]:
    return {
        key: {
            "name": one.name,
            "seconds": one.seconds,
            "limit": one.limit,
            "parts": dict(one.parts),
        }
        for key, one in predictions.items()
    }
