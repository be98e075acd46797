"""Options that may make a model fit that does not: changes to try, the mildest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

from ambidex.config import EngineConfig
from ambidex.errors import OptionError, OutOfMemory
from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.placement import FORBIDS
from ambidex.memory.sizing import KVSize
from ambidex.memory.step_memory import SMALLER_STEPS, smaller_steps
from ambidex.memory.weight_places import WeightKind

#: ``--quantization`` -> bits a weight, scales included: groups of 32 with two bytes, or with four.
#: (``quant/forms.py``, to which policy has no access.)
QUANTISED_BITS = {"int8": 8.5, "int4": 5.0}
#: Of a shorter context that is proposed: free memory is not quite the same at the next try.
SHORTER = (1.0, 0.9)


class Planned(Protocol):
    """What is asked of a plan here."""

    @property
    def kv(self) -> KVSize: ...


Change = tuple[str, EngineConfig, ModelShape]


def changes(
    config: EngineConfig,
    shape: ModelShape,
    plan: Callable[[EngineConfig, ModelShape], Planned],
    reshape: Callable[[EngineConfig], ModelShape] | None,
    together: bool,
) -> Iterator[Change]:
    """(options, what they make of ``config``, the model's shape then): nothing of them is planned
    yet. First what costs no quality (an offload, a shorter context, fewer requests), then a
    smaller KV cache and fewer bits; or, ``together``, several of them."""

    def of(changed: EngineConfig) -> ModelShape:
        if reshape is None:
            return reckoned(shape, config, changed)
        same = (changed.model, changed.cache.kv_cache_dtype)
        return shape if same == (config.model, config.cache.kv_cache_dtype) else reshape(changed)

    tried: list[EngineConfig] = [config]

    def change(flags: str, changed: EngineConfig) -> Iterator[Change]:
        if changed not in tried:
            tried.append(changed)
            yield flags, changed, of(changed)

    kinds = [kind for kind in QUANTISED_BITS if _can_quantise(config, shape, kind)]
    if together:
        for (cache_flags, base), kind in product((("", config), *_free_cache(config)), kinds):
            flags, least = _smaller_steps(base)
            least = _with_cache(_quantised(least, kind), kv_cache_dtype="int8")
            flags = f"{cache_flags}--quantization {kind} --kv-cache-dtype int8 {flags}"
            yield from change(flags, least)
            yield from _shorter(least, of(least), plan, change, before=f"{flags} ")
        return
    offload = config.offload
    size = "--cpu-offload-gb" if offload.cpu_offload_bytes else FORBIDS
    names = [
        name
        for name, is_given in (
            (size, offload.cpu_offload_bytes is not None),
            ("--offload-layers", bool(offload.patterns)),
            ("--offload-mode", offload.mode != "auto"),
            ("--offload-prefetch-step", (offload.prefetch_step or 0) > 1),
        )
        if is_given
    ]
    free = replace(offload, cpu_offload_bytes=None, patterns=(), mode="auto", prefetch_step=None)
    if names:
        yield from change(f"leave out {' and '.join(names)}", replace(config, offload=free))
    if offload.mode in ("auto", "stream", "split"):
        computed = replace(offload, mode="compute")
        yield from change("--offload-mode compute", replace(config, offload=computed))
    yield from _shorter(config, shape, plan, change)
    for flags, freed in _free_cache(config):
        yield from change(flags.rstrip(", "), freed)
        if names:
            freed = replace(freed, offload=free)
            yield from change(f"{flags}leave out {' and '.join(names)}", freed)
    flags, smaller = _smaller_steps(config)
    yield from change(flags, smaller)
    if config.cache.kv_cache_dtype != "int8":
        yield from change("--kv-cache-dtype int8", _with_cache(config, kv_cache_dtype="int8"))
    for kind in kinds:
        yield from change(f"--quantization {kind}", _quantised(config, kind))
    yield from change(f"{flags} --enforce-eager", replace(smaller, enforce_eager=True))


def _shorter(
    config: EngineConfig,
    shape: ModelShape,
    plan: Callable[[EngineConfig, ModelShape], Planned],
    change: Callable[[str, EngineConfig], Iterator[Change]],
    before: str = "",
) -> Iterator[Change]:
    """The longest context that fits, where one was asked for."""
    if config.model.max_model_len is None:
        return
    try:
        free = plan(_with_model(config, max_model_len=None), shape)
    except (OutOfMemory, OptionError):
        return
    for part in SHORTER:
        length = int(free.kv.max_model_len * part)
        length -= length % 64
        if not 0 < length < config.model.max_model_len:
            continue
        shorter = _with_model(config, max_model_len=length)
        try:
            plan(shorter, shape)
        except (OutOfMemory, OptionError):
            continue
        yield from change(f"{before}--max-model-len {length}", shorter)
        return


def _free_cache(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Without the KV cache's size, where one was given; the flags end with a comma."""
    cache = config.cache
    given = (
        ("--kv-cache-memory-bytes", cache.kv_cache_bytes),
        ("--num-gpu-blocks-override", cache.num_blocks),
    )
    names = [name for name, size in given if size is not None]
    if names:
        freed = _with_cache(config, kv_cache_bytes=None, num_blocks=None)
        yield f"leave out {' and '.join(names)}, ", freed


def _smaller_steps(config: EngineConfig) -> tuple[str, EngineConfig]:
    smaller = smaller_steps(config.scheduler, *SMALLER_STEPS[0])
    flags = (
        f"--max-num-seqs {smaller.max_num_seqs} "
        f"--max-num-batched-tokens {smaller.max_num_batched_tokens}"
    )
    return flags, replace(config, scheduler=smaller)


def _with_model(config: EngineConfig, **values: Any) -> EngineConfig:
    return replace(config, model=replace(config.model, **values))


def _with_cache(config: EngineConfig, **values: Any) -> EngineConfig:
    return replace(config, cache=replace(config.cache, **values))


def _quantised(config: EngineConfig, kind: str) -> EngineConfig:
    return _with_model(config, quantization=kind, dtype="auto")


def _can_quantise(config: EngineConfig, shape: ModelShape, kind: str) -> bool:
    """Whether the weights are numbers, or become fewer bits than they have."""
    asked = config.model.quantization
    if asked not in (None, *QUANTISED_BITS):
        return False
    matrices = [w for w in shape.weights if w.kind is not WeightKind.VECTOR]
    bits = 8 * sum(w.num_bytes for w in matrices) / sum(w.num_parameters for w in matrices)
    # What is in low bits already is not quantised again, but for what is quantised while loading.
    return QUANTISED_BITS[kind] < bits and (bits >= 15 or asked is not None)


def reckoned(shape: ModelShape, config: EngineConfig, changed: EngineConfig) -> ModelShape:
    """The shape that ``changed`` makes of what is ``shape`` with ``config``."""
    kind = changed.model.quantization
    is_quantised = kind != config.model.quantization and kind in QUANTISED_BITS
    if is_quantised:
        assert kind is not None
        weights = tuple(_in_bits(weight, kind) for weight in shape.weights)
        shape = replace(shape, weights=weights, description=f"{kind}, quantised on load")
    asked = changed.cache.kv_cache_dtype
    if asked == "auto" and is_quantised and shape.kv_dtype == "float32":
        asked = "float16"
    if asked not in ("auto", shape.kv_dtype):
        groups = tuple(
            replace(
                group,
                bytes_per_token=2
                * group.num_layers
                * group.num_kv_heads
                # A scale beside the numbers of a head in 8 bits.
                * {
                    "int8": group.head_dim + 4,
                    "float32": 4 * group.head_dim,
                }.get(asked, 2 * group.head_dim),
            )
            for group in shape.kv
        )
        shape = replace(shape, kv=groups, kv_dtype=asked)
    return shape


def _in_bits(weight: WeightShape, kind: str) -> WeightShape:
    if weight.kind is WeightKind.VECTOR:
        return weight
    size = int(weight.num_parameters * QUANTISED_BITS[kind] / 8)
    return replace(weight, num_bytes=size, form=kind)
