"""From a configuration to a lane that is ready to run: files, memory, weights, KV cache."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from ambidex.memory.expert_cache import CACHED_EXPERTS
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
    HOST_PART,
    LOGIT_ROWS,
    OF_KV,
    StepSizes,
    activation_bytes,
    check_room_for_weights,
    comfortable_kv_bytes,
    graph_bytes,
    graph_rows,
    layer_bytes,
    plan_beside_cache,
    reserve_host_part,
    room_for_kv,
)
from ambidex.models.registry import build_model, model_config
from ambidex.runner.compressing import Compressing
from ambidex.runner.foretelling import Predict, foretell, host_profile, predictor
from ambidex.runner.graphs import GraphReplayer
from ambidex.runner.hands import Hands, open_hands
from ambidex.runner.lane_memory import LaneMemory, bytes_of_modules, memory_refused
from ambidex.runner.low_bit import low_bit_source
from ambidex.runner.model_runner import ModelRunner
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
from ambidex.weights.load import fixed_bytes, load_weights, planned_bytes

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
        """Module -> memory -> bytes of its weights, and of copies of the host's experts."""
        ledger = self.device.ledger
        found = bytes_of_modules(self.runner.model.named_parameters(), ledger.name)
        for held in ledger.reservations("weights"):
            if held.name == CACHED_EXPERTS:
                found[CACHED_EXPERTS] = {ledger.name: held.num_bytes}
        return found

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
    profile = None
    if not config.device.names_accelerator:
        if config.warm_up_fully:
            # What is no model fails now, and not after the seconds that measuring takes.
            _check_model(config)
        profile = host_profile(config)
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


def _check_model(config: EngineConfig) -> None:
    """Raises what opening the model's files raises; reads headers alone."""
    path = Path(resolve_model(config.model.model, revision=config.model.revision).path)
    checkpoint = open_checkpoint(path, dict(config.model.hf_overrides))
    check_config(model_config(checkpoint.config), checkpoint)


def _load_on(
    hands: Hands,
    config: EngineConfig,
    profile: HardwareProfile | None,
    progress: Callable[[int, int], None] | None,
) -> LoadedLane:
    loading = _Loading(hands, config, profile)
    loading.open()
    loading.plan()
    loading.load(progress)
    loading.start()
    return loading.lane()


def _clear_frames(error: BaseException) -> None:
    """Drop the variables of the calls that an error, and what it came of, went through."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__context__


@dataclass(frozen=True, slots=True)
class _LaneSizes:
    """What steps and the KV cache of a lane take of its device."""

    config: EngineConfig
    steps: StepSizes
    groups: Sequence[KVGroup]
    max_model_len: int
    #: Whether tokens are chosen in the lane's memory.
    chooses: bool
    #: The device's memory in words, and the share of it for a cache that nobody sized.
    memory: str
    share: float
    #: Of the device, beside activations, KV cache and weights.
    beside_bytes: int = 0

    @property
    def groups_bytes(self) -> list[GroupSize]:
        return [GroupSize(group.bytes_per_token, group.window) for group in self.groups]

    @property
    def is_length_given(self) -> bool:
        return self.config.model.max_model_len is not None

    def step_bytes(self, length: int) -> int:
        """Of a step whose contexts are up to ``length`` tokens."""
        return activation_bytes(self.steps, self.config.scheduler, length, chooses=self.chooses)

    @property
    def host_step_bytes(self) -> int:
        """Of a step beside an accelerator, where attention is."""
        return activation_bytes(replace(self.steps, gathers_kv=False), self.config.scheduler, 1)

    def kv_bytes(self, num_blocks: tuple[int, ...]) -> int:
        return kv_cache_bytes(list(self.groups), num_blocks, self.config.cache.block_size)

    def kv_room(self, comfortable_bytes: int = 0) -> int:
        """What weights on an accelerator leave for the cache."""
        return room_for_kv(
            self.groups_bytes,
            self.config.cache,
            self.config.scheduler,
            self.max_model_len,
            self.is_length_given,
            comfortable_bytes,
        )

    def fit(self, free_bytes: int) -> KVSize:
        return size_kv_cache(
            self.groups_bytes,
            free_bytes - self.beside_bytes,
            self.step_bytes,
            self.config.cache,
            self.config.scheduler,
            self.max_model_len,
            self.is_length_given,
            self.memory,
            self.share,
        )


class _Loading:
    """The stages of loading one lane, in order: each uses what those before it left."""

    def __init__(self, hands: Hands, config: EngineConfig, profile: HardwareProfile | None) -> None:
        self._hands = hands
        self._config = config
        self._profile = profile
        self._device = hands.device
        self._accelerator = hands.accelerator
        near_node = None if hands.accelerator is None else hands.accelerator.node
        self._host_nodes = HostNodes(hands.host.ledger, hands.threads, near_node)

    # --- what the files hold, and the model without weights ------------------------------------

    def open(self) -> None:
        config, hands = self._config, self._hands
        self._resolved = resolve_model(config.model.model, revision=config.model.revision)
        self._checkpoint = open_checkpoint(
            Path(self._resolved.path), dict(config.model.hf_overrides)
        )
        self._tokenizer_path = self._checkpoint.path
        if config.model.tokenizer is not None:
            self._tokenizer_path = Path(resolve_model(config.model.tokenizer).path)
        self._values = model_config(self._checkpoint.config)
        check_config(self._values, self._checkpoint)
        with config_errors(self._values):
            self._max_model_len = resolve_max_model_len(
                config.model.max_model_len, self._values, config.model.max_model_len_cap
            )
        self._vocab_size = int(self._values.require("vocab_size"))
        self._dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
        self._low_bit = low_bit_source(config, self._checkpoint, hands.host.kernels)
        self._kv_dtype = _kv_dtype(
            config.cache.kv_cache_dtype, self._dtype, self._low_bit is not None, hands.host
        )
        self._build(self._max_model_len)
        self._table = NameTable(self._model.names)
        self._planned = planned_bytes(
            self._model.named_parameters(),
            self._table,
            self._checkpoint,
            self._low_bit.num_bytes if self._low_bit else None,
        )
        steps = StepSizes.of_config(
            self._values,
            [(len(g.layers), g.num_kv_heads, g.head_dim) for g in self._groups],
            hands.kernels.gathers_kv,
        )
        of_memory = (True, "host memory", DEFAULT_KV_SHARE)
        if self._accelerator is not None:
            of_memory = (False, self._device.name, ASKED_KV_SHARE)
        self._sizes = _LaneSizes(config, steps, self._groups, self._max_model_len, *of_memory)
        fixed: dict[str, int] = {}
        if self._low_bit is not None:
            fixed = fixed_bytes(self._table, self._checkpoint, self._low_bit.fixed_bytes)
        self._shape = built_shape(self._model, self._groups, steps, self._planned, fixed)

    def _build(self, length: int) -> None:
        """The model for contexts of ``length``; it takes no memory yet."""
        context = BuildContext(
            self._device, DTYPES[self._dtype], length, placed_kernels=self._hands.placed_kernels
        )
        self._model = build_model(context, self._values)
        self._groups = context.kv_groups(KV_DTYPES[self._kv_dtype])

    # --- where everything goes -----------------------------------------------------------------

    def plan(self) -> None:
        """Reserve in every account what the model will take. Raises OutOfMemory, OptionError."""
        config, hands, model = self._config, self._hands, self._model
        hands.host.measure()
        self._captured_rows: list[int] = []
        if self._accelerator is not None and not config.enforce_eager and config.offload.is_async:
            # Without copies ahead the host waits within a step, and what waits is not captured.
            self._captured_rows = graph_rows(config.scheduler.max_num_seqs)
        self._captured_bytes = graph_bytes(self._sizes.steps, self._captured_rows)
        self._compressing = Compressing(hands, model, config.offload)
        if self._accelerator is not None:
            beside = self._captured_bytes + self._compressing.staging_bytes + rope_bytes(model)
            self._sizes = replace(self._sizes, beside_bytes=beside)
        needed, least, comfortable = self._room_beside_weights()
        names = self._table.paths(self._checkpoint.tensor_names())
        # Not a function of this one's variables, which would stay with a kept exception.
        place = partial(
            plan_places,
            config,
            hands,
            model,
            names,
            self._planned,
            needed,
            self._sizes.host_step_bytes,
            self._shape,
        )
        self._places = plan_beside_cache(place, comfortable, least)
        self._reserve_weights()
        sizes = self._sizes
        self._memory = LaneMemory(self._device, sizes.fit, sizes.step_bytes, sizes.kv_bytes)
        if self._memory.size.max_model_len != self._max_model_len:
            # Some rope scalings depend on the longest context.
            self._build(self._memory.size.max_model_len)
        self._host_part: Reservation | None = None
        if self._accelerator is not None:
            num_bytes = self._sizes.host_step_bytes
            self._host_part = reserve_host_part(hands.host.ledger, num_bytes)
            assert hands.host_memory is not None
            ahead = layer_bytes(self._sizes.steps, config.scheduler)
            hands.host_memory.limit_bytes = ahead
            hands.host_memory.hold(ahead + self._captured_bytes)

    def _room_beside_weights(self) -> tuple[int, int, int]:
        """Bytes for what is neither weights nor KV cache, for the least cache, and for a
        comfortable one."""
        sizes = self._sizes
        steps = sizes.step_bytes(sizes.max_model_len if sizes.is_length_given else 1)
        room = sizes.kv_room()
        if self._accelerator is None:
            return steps, room, room
        needs = {
            "the largest step": steps,
            "captured steps (none with --enforce-eager)": self._captured_bytes,
            "tables of positions": rope_bytes(self._model),
            "decompressing a weight": self._compressing.staging_bytes,
            OF_KV: room,
        }
        ledger = self._accelerator.ledger
        check_room_for_weights(ledger, needs, sizes.steps, self._config.scheduler)
        comfortable = comfortable_kv_bytes(
            self._config.offload,
            sum(self._planned.values()),
            ledger.free_bytes - sum(needs.values()),
            ledger.capacity_bytes,
            self._hands.host.ledger.free_bytes - sizes.host_step_bytes,
        )
        return steps + sizes.beside_bytes, room, sizes.kv_room(comfortable)

    def _reserve_weights(self) -> None:
        places = self._places
        self._weights = [
            (
                ledger,
                _reserve_weights(
                    self._config, ledger, places.num_bytes[ledger.name], self._sizes.step_bytes(1)
                ),
            )
            for ledger in self._hands.ledgers
        ]
        ledger = self._device.ledger
        if places.staging_bytes:
            staging = ledger.reserve("staging", "streamed weights", places.staging_bytes)
            self._weights.append((ledger, staging))
        self._held_back: Reservation | None = None
        if places.cache_bytes:
            self._held_back = ledger.reserve("weights", CACHED_EXPERTS, places.cache_bytes)

    # --- weights -------------------------------------------------------------------------------

    def load(self, progress: Callable[[int, int], None] | None) -> None:
        """Every weight to its place; what is held then stands in the ledgers, to the byte."""
        config, hands, model = self._config, self._hands, self._model
        places = self._compressing.places(model, self._places.by_path, config.scheduler)
        place_parameters(model, places)
        if self._host_nodes.is_filled:
            on_host = self._places.num_bytes[hands.host.ledger.name]
            hands.host.fill_nodes(self._host_nodes.plan(on_host))
        with memory_refused(self._device):
            self._unused = load_weights(
                model.named_parameters(),
                self._table,
                self._checkpoint,
                self._device,
                progress,
                self._low_bit.load if self._low_bit else None,
            )
            for ledger, reservation in self._weights:
                ledger.release(reservation)
            held = sum(parameter.held_bytes for _, parameter in model.named_parameters())
            self._on_host = held
            if self._accelerator is not None:
                self._on_host = sum(host_weight_bytes(each) for _, each in model.named_parameters())
                self._device.ledger.reserve("weights", "weights", held - self._on_host)
            self._host_nodes.reserve("weights", "weights", self._on_host)
            if self._accelerator is not None:
                limits = config.scheduler
                start_streaming(hands, model, config.offload, limits.max_num_batched_tokens)
                self._compressing.start(model)
        # What loading freed counts as free.
        give_freed_memory_back()

    # --- cache, steps, warm-up -----------------------------------------------------------------

    def start(self) -> None:
        """Make the KV cache and what replays steps, and compute the first ones."""
        config = self._config
        self._kv_cache = self._memory.make_cache(
            lambda size: KVCache(
                self._device,
                self._groups,
                size.num_blocks,
                config.cache.block_size,
                KV_DTYPES[self._kv_dtype],
            )
        )
        self._size = self._memory.size
        replayer = self._replayer()
        if self._accelerator is not None:
            if self._held_back is not None:
                self._device.ledger.release(self._held_back)
            # And what nothing else has asked for, but for a little that is reserved at first use.
            cache_bytes = self._device.ledger.free_bytes * 7 // 8
            start_expert_cache(
                self._hands, self._model, config.offload.moe_expert_cache, cache_bytes
            )
        self._runner = ModelRunner(
            self._device, self._model, self._kv_cache, replayer, self._hands.kernels
        )
        limits = config.scheduler
        largest = Largest(
            limits.max_num_batched_tokens, limits.max_num_seqs, self._size.max_model_len
        )
        warm_up(self._runner, largest if config.warm_up_fully else None)
        give_freed_memory_back()
        self._settle()

    def _replayer(self) -> Replayer | GraphReplayer | None:
        config, device = self._config, self._device
        if self._accelerator is not None:
            rotations = rope_bytes(self._model)
            device.ledger.reserve("activations", "tables of positions", rotations)
            if not self._captured_rows:
                return None
            device.ledger.reserve("graphs", "captured steps", self._captured_bytes)
            assert self._hands.placed is not None
            assert self._hands.host_memory is not None
            return GraphReplayer(
                self._accelerator,
                self._hands.placed,
                self._hands.host_memory,
                self._model,
                self._kv_cache,
                self._captured_rows,
            )
        if not device.kernels.can_record or config.enforce_eager:
            return None
        return Replayer(
            cast("NativeKernels", device.kernels),
            self._model,
            self._kv_cache,
            config.scheduler.max_num_batched_tokens,
            config.scheduler.max_num_seqs,
        )

    def _settle(self) -> None:
        """What steps take, as far as it is known by now, in the place of estimates."""
        config, vocab_size = self._config, self._vocab_size
        if self._host_part is not None and config.warm_up_fully:
            # All kinds of steps have been computed, the largest too.
            host = self._hands.host.ledger
            host.release(self._host_part)
            for name, num_bytes in _host_part_bytes(config, self._hands, vocab_size).items():
                host.reserve("activations", name, num_bytes)
            graphs = self._runner.replayer
            if isinstance(graphs, GraphReplayer):
                # They are there already, whether there was room for them or not.
                launches = min(graphs.launch_bytes, host.free_bytes)
                host.reserve("graphs", "captured launches", launches)
        ropes = [module for module in submodules(self._model) if isinstance(module, Rope)]
        rotations = [part for rope in ropes for part in rope.tables]
        arena: list[torch.Tensor] = []
        recorded = self._runner.replayer
        if isinstance(recorded, Replayer):
            arena = recorded.arena_tensors()
            self._memory.settle_steps(
                _recorded_bytes(config, self._runner, recorded, rotations, vocab_size)
            )
        if config.cache.prefault:
            self._memory.take_pages([*self._kv_cache.tensors(), *rotations, *arena])

    # --- the outcome ---------------------------------------------------------------------------

    def lane(self) -> LoadedLane:
        config, checkpoint, size = self._config, self._checkpoint, self._size
        predict = self._places.predict
        if self._profile is not None:
            predict = predictor(self._profile, self._shape)
        is_real_time = self._accelerator is None or self._accelerator.is_real_time
        return LoadedLane(
            hands=self._hands,
            device=self._device,
            ledgers=self._hands.ledgers,
            runner=self._runner,
            checkpoint=checkpoint,
            description=f"{self._resolved.description} ({checkpoint.format}, "
            f"{checkpoint.dtype_name})",
            tokenizer_path=self._tokenizer_path,
            groups=self._groups,
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            vocab_size=self._vocab_size,
            dtype_description=self._low_bit.description
            if self._low_bit
            else _describe_dtype(config.model.dtype, self._dtype, checkpoint.dtype_name),
            kv_dtype=self._kv_dtype,
            notes=self._notes(),
            load_s=0.0,
            memory_nodes=self._host_nodes.describe(),
            expected=foretell(predict, config, size.max_model_len) if predict else {},
            predict=predict if is_real_time else None,
        )

    def _notes(self) -> list[str]:
        notes = [*self._hands.notes, *self._places.notes, *self._compressing.notes]
        notes += [*self._host_nodes.notes(self._on_host), *self._memory.notes]
        if self._size.note:
            notes.append(self._size.note)
        unknown = [name for name in self._unused if not name.endswith("lm_head.weight")]
        if unknown:
            notes.append(
                f"{len(unknown)} tensors of the checkpoint are not used, for example {unknown[0]}."
            )
        return notes


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
        HOST_PART: hands.host_memory.needed_bytes,
        "kernel threads": cast("NativeKernels", hands.host.kernels).memory_bytes,
        "logits": 2 * 4 * LOGIT_ROWS * vocab_size,
        # The same as they came from the accelerator.
        "fetched logits": 2 * 4 * LOGIT_ROWS * vocab_size,
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
