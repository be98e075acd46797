"""From a configuration to a lane that is ready to run: files, memory, weights, KV cache."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ambidex.errors import InstallationError

try:
    import torch
except Exception as error:  # A broken installation fails in many ways.
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise InstallationError(
        f"PyTorch cannot be imported: {reason}. Install it again: python -m pip install "
        "--force-reinstall 'torch>=2.11' (the README has the line for a CPU build)."
    ) from error

from ambidex.checkpoint_names import NameTable
from ambidex.config import EngineConfig, config_errors
from ambidex.device.cpu import CPUDevice
from ambidex.device.host_nodes import HostNodes
from ambidex.errors import OptionError, OutOfMemory
from ambidex.kv.block import BLOCK_SIZES, KVGroup
from ambidex.kv.cache import KVCache, kv_cache_bytes
from ambidex.layers.module import BuildContext, submodules
from ambidex.layers.rope import Rope, rope_bytes
from ambidex.layers.sampler import sampler_bytes
from ambidex.memory.host import give_freed_memory_back
from ambidex.memory.ledger import format_bytes
from ambidex.memory.sizing import (
    ASKED_KV_SHARE,
    DEFAULT_KV_SHARE,
    GroupSize,
    KVSize,
    resolve_max_model_len,
    size_kv_cache,
)
from ambidex.memory.step_memory import (
    StepSizes,
    activation_bytes,
    check_room_for_weights,
    comfortable_kv_bytes,
    graph_bytes,
    graph_rows,
    layer_bytes,
    room_for_kv,
)
from ambidex.models.registry import CausalLM, build_model, model_config
from ambidex.runner.compressing import Compressing
from ambidex.runner.foretelling import Predict, foretell, host_profile, predictor
from ambidex.runner.graphs import GraphReplayer
from ambidex.runner.hands import Hands, open_hands
from ambidex.runner.lane_memory import LaneMemory, bytes_of_modules, memory_refused
from ambidex.runner.low_bit import low_bit_source
from ambidex.runner.model_runner import LOGIT_ROWS, ModelRunner
from ambidex.runner.placing import (
    built_shape,
    host_weight_bytes,
    place_parameters,
    plan_places,
    start_expert_cache,
    start_streaming,
)
from ambidex.runner.replay import Replayer
from ambidex.runner.warm_up import Largest, warm_up
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.config_check import check_config
from ambidex.weights.hub import resolve_model
from ambidex.weights.load import load_weights, planned_bytes

if TYPE_CHECKING:
    from ambidex.device.base import Device
    from ambidex.kernels.native import NativeKernels
    from ambidex.memory.ledger import Ledger, Reservation
    from ambidex.memory.profile import HardwareProfile
    from ambidex.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
HOST_PART = "the host's part of steps"
KV_DTYPES = {**DTYPES, "int8": torch.int8}


@dataclass(slots=True)
class LoadedLane:
    """A model on a device, ready to run, and what was decided on the way."""

    hands: Hands
    #: The lane's own: the accelerator where there is one.
    device: Device
    #: One a memory: the host's, then each accelerator's.
    ledgers: list[Ledger]
    runner: ModelRunner
    checkpoint: Checkpoint
    #: How MODEL was resolved, in words.
    description: str
    #: The folder or GGUF file that the tokenizer is read from.
    tokenizer_path: Path
    groups: list[KVGroup]
    num_blocks: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    dtype_description: str
    kv_dtype: str
    #: Sentences that the user should read once.
    notes: list[str]
    load_s: float
    #: A line for each of the host's memories, where they are several.
    memory_nodes: list[str]
    #: Seconds by what they are of; empty where nothing is known of this machine's speed.
    expected: dict[str, float]
    #: Seconds that a step should take by the clock on the wall; None where nothing is known of it.
    predict: Predict | None

    def module_bytes(self) -> dict[str, dict[str, int]]:
        """Module -> memory -> bytes of its weights."""
        return bytes_of_modules(self.runner.model.named_parameters(), self.device.ledger.name)

    def close(self) -> None:
        """Drop weights, KV cache and kernels: their memory, reservations and threads."""
        self.runner.close()
        self.hands.close()
        give_freed_memory_back()


def load_lane(
    config: EngineConfig, progress: Callable[[int, int], None] | None = None
) -> LoadedLane:
    """Resolve, open, size, load and warm up, in the thread that will run the lane.
    ``progress(loaded, total)`` counts tensors."""
    began = time.perf_counter()
    cache = config.cache
    if cache.block_size not in BLOCK_SIZES:
        raise OptionError(
            f"--block-size {cache.block_size} is not supported; choose one of "
            f"{', '.join(map(str, BLOCK_SIZES))}."
        )
    profile = None if config.device.names_accelerator else host_profile(config)
    hands = open_hands(config)
    for note in hands.threads.notes:
        logger.warning("%s", note)
    try:
        lane = _load_on(hands, config, profile, progress)
    except BaseException as error:
        # Whoever keeps the exception does not keep weights and threads with it.
        _clear_frames(error)
        hands.close()
        raise
    lane.load_s = time.perf_counter() - began
    return lane


def _clear_frames(error: BaseException) -> None:
    """Drop the variables of the calls that an error, and what it came of, went through."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__context__


def _load_on(
    hands: Hands,
    config: EngineConfig,
    profile: HardwareProfile | None,
    progress: Callable[[int, int], None] | None,
) -> LoadedLane:
    cache = config.cache
    resolved = resolve_model(config.model.model, revision=config.model.revision)
    checkpoint = open_checkpoint(Path(resolved.path), dict(config.model.hf_overrides))
    tokenizer_path = checkpoint.path
    if config.model.tokenizer is not None:
        tokenizer_path = Path(resolve_model(config.model.tokenizer).path)
    model_values = model_config(checkpoint.config)
    check_config(model_values, checkpoint)
    with config_errors(model_values):
        max_model_len = resolve_max_model_len(
            config.model.max_model_len, model_values, config.model.max_model_len_cap
        )
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    device = hands.device
    near_node = None if hands.accelerator is None else hands.accelerator.node
    host_nodes = HostNodes(hands.host.ledger, hands.threads, near_node)

    def build(length: int) -> tuple[CausalLM, list[KVGroup]]:
        context = BuildContext(device, DTYPES[dtype], length, placed_kernels=hands.placed_kernels)
        return build_model(context, model_values), context.kv_groups(KV_DTYPES[kv_dtype])

    low_bit = low_bit_source(config, checkpoint, hands.host.kernels)
    kv_dtype = _kv_dtype(cache.kv_cache_dtype, dtype, low_bit is not None, hands.host)
    model, groups = build(max_model_len)
    step_sizes = StepSizes.of_config(
        model_values, [(len(g.layers), g.num_kv_heads, g.head_dim) for g in groups]
    )

    def step_bytes(length: int) -> int:
        return activation_bytes(step_sizes, config.scheduler, length)

    table = NameTable(model.names)
    planned = planned_bytes(
        model.named_parameters(), table, checkpoint, low_bit.num_bytes if low_bit else None
    )
    hands.host.measure()
    group_sizes = [GroupSize(group.bytes_per_token, group.window) for group in groups]
    is_length_given = config.model.max_model_len is not None
    accelerator = hands.accelerator
    captured_rows: list[int] = []
    if accelerator is not None and not config.enforce_eager and config.offload.is_async:
        # Without copies ahead the host waits within a step, and what waits cannot be captured.
        captured_rows = graph_rows(config.scheduler.max_num_seqs)
    captured_bytes = graph_bytes(step_sizes, captured_rows)
    beside = 0 if accelerator is None else captured_bytes + rope_bytes(model)
    kv_room = room_for_kv(group_sizes, cache, config.scheduler, max_model_len, is_length_given)
    least_steps = step_bytes(max_model_len if is_length_given else 1)
    streaming = Compressing(hands, model, config.offload)
    beside += streaming.staging_bytes
    if accelerator is not None:
        needs = {
            "the largest step": least_steps,
            "captured steps (none with --enforce-eager)": captured_bytes,
            "tables of positions": rope_bytes(model),
            "decompressing a weight": streaming.staging_bytes,
            "the KV cache": kv_room,
        }
        ledger = accelerator.ledger
        check_room_for_weights(ledger, needs)
        left = ledger.free_bytes - sum(needs.values())
        comfortable = comfortable_kv_bytes(
            config.offload,
            sum(planned.values()),
            left,
            ledger.capacity_bytes,
            hands.host.ledger.free_bytes - step_bytes(1),
        )
        kv_room = room_for_kv(
            group_sizes, cache, config.scheduler, max_model_len, is_length_given, comfortable
        )
    shape = built_shape(model, groups, step_sizes, planned)
    places = plan_places(
        config,
        hands,
        model,
        table.paths(checkpoint.tensor_names()),
        planned,
        least_steps + beside + kv_room,
        step_bytes(1),
        shape,
        kv_room,
    )
    weights = [
        (ledger, _reserve_weights(config, ledger, places.num_bytes[ledger.name], step_bytes(1)))
        for ledger in hands.ledgers
    ]
    if places.staging_bytes:
        staging = device.ledger.reserve("staging", "streamed weights", places.staging_bytes)
        weights.append((device.ledger, staging))
    held_back = (
        device.ledger.reserve("weights", "cached experts", places.cache_bytes)
        if places.cache_bytes
        else None
    )
    of_memory = ("host memory", DEFAULT_KV_SHARE)
    if accelerator is not None:
        of_memory = (device.name, ASKED_KV_SHARE)

    def fit(free_bytes: int) -> KVSize:
        return size_kv_cache(
            group_sizes,
            free_bytes - beside,
            step_bytes,
            cache,
            config.scheduler,
            max_model_len,
            is_length_given,
            *of_memory,
        )

    def kv_bytes(num_blocks: tuple[int, ...]) -> int:
        return kv_cache_bytes(groups, num_blocks, cache.block_size)

    def make_cache(size: KVSize) -> KVCache:
        return KVCache(device, groups, size.num_blocks, cache.block_size, KV_DTYPES[kv_dtype])

    memory = LaneMemory(device, fit, step_bytes, kv_bytes)
    if memory.size.max_model_len != max_model_len:
        # Some rope scalings depend on the longest context. So far the model takes no memory.
        model, groups = build(memory.size.max_model_len)
    of_steps: Reservation | None = None
    place_parameters(model, streaming.places(model, places.by_path, config.scheduler))
    if accelerator is not None:
        num_bytes = step_bytes(memory.size.max_model_len)
        of_steps = hands.host.ledger.reserve("activations", HOST_PART, num_bytes)
        assert hands.host_memory is not None
        hands.host_memory.limit_bytes = layer_bytes(step_sizes, config.scheduler)
    if host_nodes.is_filled:
        hands.host.fill_nodes(host_nodes.plan(places.num_bytes[hands.host.ledger.name]))
    with memory_refused(device):
        unused = load_weights(
            model.named_parameters(),
            table,
            checkpoint,
            device,
            progress,
            low_bit.load if low_bit else None,
        )
        # What is held, to the byte, takes the place of what was foreseen.
        for ledger, reservation in weights:
            ledger.release(reservation)
        held = sum(parameter.held_bytes for _, parameter in model.named_parameters())
        on_host = held
        if accelerator is not None:
            on_host = sum(host_weight_bytes(each) for _, each in model.named_parameters())
            device.ledger.reserve("weights", "weights", held - on_host)
        host_nodes.reserve("weights", "weights", on_host)
        if accelerator is not None:
            limits = config.scheduler
            start_streaming(hands, model, config.offload, limits.max_num_batched_tokens)
            streaming.start(model)
    # What loading freed counts as free.
    give_freed_memory_back()
    kv_cache = memory.make_cache(make_cache)
    size = memory.size
    replayer: Replayer | GraphReplayer | None = None
    if accelerator is not None:
        device.ledger.reserve("activations", "tables of positions", rope_bytes(model))
        if captured_rows:
            device.ledger.reserve("graphs", "captured steps", captured_bytes)
            assert hands.placed is not None
            replayer = GraphReplayer(accelerator, hands.placed, model, kv_cache, captured_rows)
    elif device.kernels.can_record and not config.enforce_eager:
        replayer = Replayer(
            cast("NativeKernels", device.kernels),
            model,
            kv_cache,
            config.scheduler.max_num_batched_tokens,
            config.scheduler.max_num_seqs,
        )
    if accelerator is not None:
        if held_back is not None:
            device.ledger.release(held_back)
        # And what nothing else has asked for, but for a little that is reserved at first use.
        cache_bytes = device.ledger.free_bytes * 7 // 8
        start_expert_cache(hands, model, config.offload.moe_expert_cache, cache_bytes)
    runner = ModelRunner(device, model, kv_cache, replayer, hands.kernels)
    scheduler = config.scheduler
    largest = Largest(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, size.max_model_len)
    warm_up(runner, largest if config.warm_up_fully else None)
    give_freed_memory_back()
    vocab_size = int(model_values.require("vocab_size"))
    if of_steps is not None and config.warm_up_fully:
        # All kinds of steps have been computed, the largest too.
        hands.host.ledger.release(of_steps)
        for name, size_bytes in _host_part_bytes(config, hands, vocab_size).items():
            hands.host.ledger.reserve("activations", name, size_bytes)
    ropes = [module for module in submodules(model) if isinstance(module, Rope)]
    rotations = [part for rope in ropes for part in rope.tables]
    recorded = runner.replayer if isinstance(runner.replayer, Replayer) else None
    if recorded is not None:
        memory.settle_steps(_recorded_bytes(config, runner, recorded, rotations, vocab_size))
    if cache.prefault:
        arena = recorded.arena_tensors() if recorded is not None else []
        memory.take_pages([*kv_cache.tensors(), *rotations, *arena])
    notes = [*hands.notes, *places.notes, *streaming.notes]
    notes += [*host_nodes.notes(on_host), *memory.notes]
    if size.note:
        notes.append(size.note)
    unknown = [name for name in unused if not name.endswith("lm_head.weight")]
    if unknown:
        notes.append(
            f"{len(unknown)} tensors of the checkpoint are not used, for example {unknown[0]}."
        )
    predict = places.predict if profile is None else predictor(profile, shape)
    return LoadedLane(
        hands=hands,
        device=device,
        ledgers=hands.ledgers,
        runner=runner,
        checkpoint=checkpoint,
        description=f"{resolved.description} ({checkpoint.format}, {checkpoint.dtype_name})",
        tokenizer_path=tokenizer_path,
        groups=groups,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        vocab_size=vocab_size,
        dtype_description=low_bit.description
        if low_bit
        else _describe_dtype(config.model.dtype, dtype, checkpoint.dtype_name),
        kv_dtype=kv_dtype,
        notes=notes,
        load_s=0.0,
        memory_nodes=host_nodes.describe(),
        expected=foretell(predict, config, size.max_model_len) if predict else {},
        predict=predict if accelerator is None or accelerator.is_real_time else None,
    )


def _kv_dtype(asked: str, dtype: str, is_low_bit: bool, device: CPUDevice) -> str:
    """The type of the KV cache. Beside weights in low bits it is float16, which attention reads
    twice as fast: what that rounds is far below what 8-bit activations do."""
    is_native = device.kernels.name == "native"
    if asked == "int8" and not is_native:
        raise OptionError(
            "--kv-cache-dtype int8 needs the native kernels, and others were asked for. Give "
            "--kv-cache-dtype bfloat16, or leave AMBIDEX_CPU_KERNELS out."
        )
    if asked != "auto":
        return asked
    return "float16" if is_low_bit and is_native else dtype


def _reserve_weights(
    config: EngineConfig, ledger: Ledger, needed: int, step_bytes: int
) -> Reservation:
    """Raises OutOfMemory with what helps: that a step fits beside the weights is part of it."""
    free = ledger.free_bytes
    if needed > free:
        remedy = "Free memory, or choose a smaller model."
        smaller = [
            (option, needed // divisor)
            for option, divisor in (("--dtype bfloat16", 2), ("--quantization int8", 3))
            if config.model.dtype in ("auto", "float32") and config.model.quantization is None
        ]
        fitting = [(option, size) for option, size in smaller if size + step_bytes < free]
        if fitting:
            option, size = fitting[0]
            remedy = f"Give {option}, which takes about {format_bytes(size)}."
        raise OutOfMemory(
            f"The weights of {config.model.model} take {format_bytes(needed)}; "
            f"{format_bytes(free)} of {ledger.name} memory are free. {remedy}"
        )
    return ledger.reserve("weights", "weights", needed)


def _describe_dtype(asked: str, dtype: str, stored: str) -> str:
    if asked == "auto":
        return f"{dtype} (auto: what this CPU's kernels compute in; stored as {stored})"
    return dtype if dtype == "float32" else f"{dtype} weights, float32 arithmetic"


def _host_part_bytes(config: EngineConfig, hands: Hands, vocab_size: int) -> dict[str, int]:
    """What steps take of the host's memory beside an accelerator."""
    assert hands.host_memory is not None
    return {
        HOST_PART: hands.host_memory.peak_bytes,
        "kernel threads": cast("NativeKernels", hands.host.kernels).memory_bytes,
        "logits": 2 * 4 * LOGIT_ROWS * vocab_size,
        "sampler": sampler_bytes(max(config.scheduler.max_num_seqs, LOGIT_ROWS), vocab_size),
    }


def _recorded_bytes(
    config: EngineConfig,
    runner: ModelRunner,
    replayer: Replayer,
    rotations: list[torch.Tensor],
    vocab_size: int,
) -> dict[str, int]:
    """What steps take where they are replayed: what is held, and what choosing tokens takes."""
    return {
        "recorded step": replayer.arena_bytes,
        "kernel threads": cast("NativeKernels", runner.device.kernels).memory_bytes,
        "rotations": sum(part.nbytes for part in rotations),
        # Of prompt tokens, twice, since the C library keeps what was freed, in pieces. Those of new
        # tokens are in the recorded step.
        "logits": 2 * 4 * LOGIT_ROWS * vocab_size,
        "sampler": sampler_bytes(max(config.scheduler.max_num_seqs, LOGIT_ROWS), vocab_size),
    }
