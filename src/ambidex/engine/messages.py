"""What the server's and the engine's process say to each other, as msgpack.

Every message is one ZeroMQ frame: a tagged msgspec struct. Decoding checks types, so a damaged
frame is an error and never an object of another kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ambidex.config import EngineConfig
from ambidex.engine.foretold import StepSpeed
from ambidex.memory.ledger import MemorySnapshot
from ambidex.request import EngineOutput, EngineRequest

#: The engine process says at least this often, in seconds, that it lives.
HEARTBEAT_S = 1.0

#: Length prefix, in bytes, of the start-up frame on the engine's standard input.
FRAME_HEADER_BYTES = 4


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know of a loaded model."""

    #: As the user wrote it.
    model: str
    #: Where the tokenizer is read from: a folder or a GGUF file.
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    #: Blocks of the CPU's pool.
    num_blocks: int
    block_size: int
    dtype: str
    num_gpu_blocks: int = 0
    #: How MODEL was resolved, for example ``path``, ``alias`` or ``hub``, and the format.
    source: str = ""
    model_type: str = ""
    kv_cache_dtype: str = ""
    enable_prefix_caching: bool = True
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    cpu_threads: int = 0
    #: Which kernels compute: their table and level.
    kernels: str = ""
    #: The checkpoint's ``config.json`` and ``generation_config.json``: end-of-sequence ids, and
    #: defaults of the sampling parameters. Plain JSON values.
    model_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    #: Sentences that the user should read once.
    notes: list[str] = field(default_factory=list)
    #: When the engine was ready: the host's memory, then each accelerator's.
    memory: list[MemorySnapshot] = field(default_factory=list)
    #: Module -> memory -> bytes of its weights.
    modules: dict[str, dict[str, int]] = field(default_factory=dict)
    #: A line for each of the host's memories, where they are several (NUMA nodes, CXL).
    memory_nodes: list[str] = field(default_factory=list)
    #: Predicted seconds by what they are of; empty where this machine's speed is unknown.
    expected: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of the scheduler. Counters grow from zero in every engine process."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    #: 0 to 1.
    kv_cache_usage: float = 0.0
    #: Tokens looked up in the prefix cache, and tokens found.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    #: As in :class:`EngineInfo`, now.
    memory: list[MemorySnapshot] = field(default_factory=list)
    #: Predicted and measured, by kind of step; empty until there are enough.
    speed: dict[str, StepSpeed] = field(default_factory=dict)


class StartUp(msgspec.Struct, frozen=True):
    """The first and only frame on the engine's standard input, which then stays open: its end
    tells the engine that the server is gone."""

    config: EngineConfig
    #: ``module:callable`` that makes an engine of an :class:`EngineConfig`.
    factory: str
    #: ZeroMQ address (``ipc://...``) to connect to, and its private folder.
    address: str
    folder: str
    parent_pid: int
    #: Linux's parent-death signal follows the parent *thread*; only safe if that is the main one.
    parent_is_main_thread: bool


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[str]


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Answered by :class:`Alive` between two steps."""

    number: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Free everything and exit with code 0."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Connected; the socket's file can be removed."""

    pid: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True):
    """The engine could not start. ``kind`` is the name of a class in ``ambidex.errors``."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """What one step produced."""

    outputs: list[EngineOutput]
    stats: EngineStats | None = None


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """A heartbeat, or the answer to ``Ping(number)``."""

    stats: EngineStats
    number: int | None = None


ToEngine = AddRequests | AbortRequests | Ping | Shutdown
FromEngine = Hello | Ready | StartFailed | Outputs | Alive
