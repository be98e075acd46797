"""Configuration: frozen dataclasses, resolved once from options (see ``options.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ambidex.errors import InvalidModelError


class CheckpointConfig:
    """A model's ``config.json`` (or its equal, rebuilt from a GGUF header), read-only.

    ``source`` is what error messages name, for example ``/models/x/config.json``.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = dict(values)
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or ``default`` where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        """The field; raises :class:`InvalidModelError` that names the file and the field."""
        value = self.values.get(name)
        if value is None:
            raise InvalidModelError(
                f"{self.source} lacks the field '{name}'. Repair the file, or give the value with "
                f"--hf-overrides '{{\"{name}\": ...}}'."
            )
        return value

    def with_defaults(self, **defaults: Any) -> CheckpointConfig:
        """The same, with ``defaults`` for fields that are absent or null."""
        missing = {name: value for name, value in defaults.items() if self.get(name) is None}
        return CheckpointConfig(self.values | missing, self.source)

    def __repr__(self) -> str:
        return f"CheckpointConfig({self.source})"


def rope_parameters(config: CheckpointConfig) -> dict[str, Any]:
    """How to rotate, from either spelling of a config.json: ``rope_scaling`` beside ``rope_theta``
    and ``partial_rotary_factor``, or all of them in ``rope_parameters``."""
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(name) is None:
            parameters[name] = config.get(name)
    return parameters


@contextmanager
def config_errors(config: CheckpointConfig) -> Iterator[None]:
    """What goes wrong while values of ``config`` are used is an InvalidModelError that names it.

    The last resort, behind ``weights.config_check``, which knows the fields.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise InvalidModelError(
            f"{config.source}: no model can be built from its values "
            f"({type(error).__name__}: {str(error)[:200]}). Repair the file, or give the values "
            "with --hf-overrides."
        ) from error


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its files are read."""

    model: str
    tokenizer: str | None = None
    #: auto | float32 | float16 | bfloat16 (half and float are resolved before).
    dtype: str = "auto"
    #: None: the model's own limit, shrunk to what fits.
    max_model_len: int | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    #: Base seed for requests that give none; None: random.
    seed: int | None = None
    #: auto: the model's generation_config.json; vllm: ignore it.
    generation_config: str = "auto"
    max_logprobs: int = 20
    #: `auto:N`: the model's own limit, but no more than N tokens (max_model_len is None then).
    max_model_len_cap: int | None = None
    #: int8 | int4 (made while loading) | awq | bitsandbytes | gguf | gptq (must be what the files
    #: are); None: whatever the files are.
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    #: Tokens per block: 8, 16, 32, 64 or 128.
    block_size: int = 16
    enable_prefix_caching: bool = True
    #: auto (the model's dtype) | float32 | float16 | bfloat16 | int8.
    kv_cache_dtype: str = "auto"
    #: None: sized from what the machine has.
    kv_cache_bytes: int | None = None
    #: Overrides the sizing; blocks of ``block_size`` tokens.
    num_blocks: int | None = None
    #: Take its memory from the system at start, so that a server that is ready has it. Not for
    #: one answer, which would wait for it.
    prefault: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits on one step."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    #: fcfs | priority (a lower number runs first).
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True)
class LogConfig:
    #: DEBUG | INFO | WARNING | ERROR
    level: str = "INFO"
    #: text | json
    format: str = "text"
    enable_log_requests: bool = False
    disable_log_stats: bool = False


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where the model computes, and how much of the accelerator's memory may be taken."""

    #: auto | cpu | sim[:key=value,...] | the name of a device that a package adds, [:...] too.
    device: str = "auto"
    #: Of the accelerator's memory, for this process.
    gpu_memory_utilization: float = 0.92
    #: The same in bytes; the smaller of the two counts.
    gpu_memory_limit_bytes: int | None = None

    @property
    def names_accelerator(self) -> bool:
        """Whether something else than the CPU was asked for; ``auto`` is the CPU so far."""
        return self.device.partition(":")[0] not in ("auto", "cpu")


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Which weights stay in host memory beside an accelerator, and what happens with them."""

    #: None: decided by what fits; 0: forbidden.
    cpu_offload_bytes: int | None = None
    #: Which weights may go (see ``memory.weight_patterns``); empty: all.
    patterns: tuple[str, ...] = ()
    #: auto | stream (copied to the accelerator) | compute (by the CPU) | split (both).
    mode: str = "auto"
    #: Copy ahead of use, beside the computation.
    is_async: bool = True
    #: Layers copied ahead; None: 1.
    prefetch_step: int | None = None
    link_limit_bytes_per_s: float | None = None
    #: Compress what is streamed, where that is faster.
    compress: bool = False
    #: auto | static (chosen once, for reproducible runs) | off.
    moe_expert_cache: str = "auto"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine process needs."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    #: Compute threads; None: one per core that this process may use.
    cpu_threads: int | None = None
    #: Compute every step call by call instead of replaying a recorded one.
    enforce_eager: bool = False
    #: Where they run: auto (None means it) | none | numa:0 | 0-15 | 0,2,4.
    cpu_bind: str | None = None
    #: Compute the largest steps before the engine is ready, so that none of them fails later.
    warm_up_fully: bool = False
    #: Keep on disk what was quantised while loading.
    quantization_cache: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front end."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    uvicorn_log_level: str = "warning"
    shutdown_timeout_s: float = 25.0
    max_body_bytes: int = 32 * 1024 * 1024
    response_role: str = "assistant"
