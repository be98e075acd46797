"""Prometheus metrics under vLLM's names, types, buckets and labels.

They live in the server's process: an engine that restarts starts its own counters at zero, and
only their growth is added here. Names, units and buckets: https://docs.vllm.ai/en/latest/usage/metrics
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)

FINISH_REASONS = ("stop", "length", "abort", "error")

#: Names on older dashboards -> today's.
ALIASES: Mapping[str, str] = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}

LABELS = ("model_name", "engine")


class MemoryCounters(Protocol):
    """What is reserved of one memory; see ``MemorySnapshot`` in ``memory/ledger.py``."""

    @property
    def name(self) -> str: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def accounts(self) -> Mapping[str, int]: ...


class EngineCounters(Protocol):
    """A snapshot of one engine process; see ``EngineStats`` in ``engine/messages.py``."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_swapped(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def prefix_cache_queries(self) -> int: ...
    @property
    def prefix_cache_hits(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def memory(self) -> Sequence[MemoryCounters]: ...


def token_buckets(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to ``limit``."""
    buckets: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > limit:
                return buckets or [1]
            buckets.append(digit * power)
        power *= 10


class _AliasCollector(Collector):
    """Shows some metrics of a registry a second time, under their older names."""

    def __init__(self, source: CollectorRegistry, aliases: Mapping[str, str]) -> None:
        self._source = source
        self._old_names: dict[str, list[str]] = {}
        for old, new in aliases.items():
            self._old_names.setdefault(new, []).append(old)

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            for old in self._old_names.get(metric.name, ()):
                alias = Metric(old, f"Older name of {metric.name}.", metric.type)
                alias.samples = [
                    Sample(old + s.name.removeprefix(metric.name), *s[1:]) for s in metric.samples
                ]
                yield alias


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """One sequence that ended; seconds from its arrival, tokens counted once a sequence."""

    reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    e2e_s: float
    #: From the first to the last token; None without a token.
    decode_s: float | None = None


class Metrics:
    """All metrics of one model behind one server.

    ``max_model_len`` bounds the buckets of the token histograms, as in vLLM.
    """

    def __init__(self, model_name: str, max_model_len: int, engine: str = "0") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        # ``exposed`` shows the registry, the aliases and the process; recording needs no lookup.
        self._exposed = CollectorRegistry(auto_describe=False)
        self._exposed.register(self._registry)
        self._exposed.register(_AliasCollector(self._registry, ALIASES))
        ProcessCollector(registry=self._exposed)
        PlatformCollector(registry=self._exposed)
        self._names = (model_name, engine)
        #: The newest counters of the engine process that runs now.
        self._last: EngineCounters | None = None

        lengths = token_buckets(max_model_len)
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self._swapped = self._gauge("num_requests_swapped", "Requests whose KV is swapped out.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV cache in use; 1 is all of it.")
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Requests preempted so far.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of begun requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens per engine step.", STEP_BUCKETS_TOKENS
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", TOKEN_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            TOKEN_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS_S
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", lengths
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Generated tokens of a finished request.", lengths
        )
        self._params_n = self._histogram("request_params_n", "The parameter n.", N_BUCKETS)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens.", lengths
        )
        success = Counter(
            "vllm:request_success",
            "Finished sequences by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._success = {reason: success.labels(*self._names, reason) for reason in FINISH_REASONS}
        self._restarts = Counter(
            "ambidex:engine_restarts",
            "How often the engine process died and was started again.",
            LABELS,
            registry=self._registry,
        ).labels(*self._names)
        self._heartbeat_age = Gauge(
            "ambidex:engine_heartbeat_age_seconds",
            "Since the engine process was last heard of.",
            LABELS,
            registry=self._registry,
        ).labels(*self._names)
        self._capacity = Gauge(
            "ambidex:memory_capacity_bytes",
            "What a memory offers to the engine process.",
            (*LABELS, "memory"),
            registry=self._registry,
        )
        self._reserved = Gauge(
            "ambidex:memory_reserved_bytes",
            "What is reserved of a memory, by what it is for.",
            (*LABELS, "memory", "account"),
            registry=self._registry,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, LABELS, registry=self._registry).labels(*self._names)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self._registry).labels(*self._names)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] | list[int]) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry
        ).labels(*self._names)

    def set_cache_info(self, values: Mapping[str, str | int | bool]) -> None:
        """Shows the cache's configuration as labels of ``vllm:cache_config_info``."""
        labels = {"engine": self._names[1], **{name: str(v) for name, v in values.items()}}
        Gauge(
            "vllm:cache_config_info", "The KV cache.", tuple(labels), registry=self._registry
        ).labels(**labels).set(1)

    def request_added(self, n: int, max_tokens: int | None) -> None:
        self._params_n.observe(n)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        """A sequence has its first token, ``seconds`` after its arrival."""
        self._ttft.observe(seconds)

    def later_tokens(self, seconds: float) -> None:
        """A sequence has a further token, ``seconds`` after the one before."""
        self._itl.observe(seconds)

    def step(self, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """One engine step: the lengths of the prompts that it completed, and new tokens."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_generation_tokens)
        self._step_tokens.observe(num_prompt_tokens + num_generation_tokens)

    def finished(self, sequence: FinishedSequence) -> None:
        self._success[sequence.reason].inc()
        self._e2e.observe(sequence.e2e_s)
        self._request_prompt.observe(sequence.num_prompt_tokens)
        self._request_generation.observe(sequence.num_generation_tokens)
        if sequence.decode_s is not None:
            self._decode.observe(sequence.decode_s)
            if sequence.num_generation_tokens > 1:
                self._tpot.observe(sequence.decode_s / (sequence.num_generation_tokens - 1))

    def engine_stats(self, stats: EngineCounters) -> None:
        """Takes a snapshot over: gauges as they are, counters by their growth."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._swapped.set(stats.num_swapped)
        self._kv_usage.set(stats.kv_cache_usage)
        last = self._last
        self._queries.inc(stats.prefix_cache_queries - (last.prefix_cache_queries if last else 0))
        self._hits.inc(stats.prefix_cache_hits - (last.prefix_cache_hits if last else 0))
        self._preemptions.inc(stats.num_preemptions - (last.num_preemptions if last else 0))
        self._last = stats
        self.memory(stats.memory)

    def memory(self, memories: Iterable[MemoryCounters]) -> None:
        """Takes the ledgers over."""
        for each in memories:
            self._capacity.labels(*self._names, each.name).set(each.capacity_bytes)
            for account, num_bytes in each.accounts.items():
                self._reserved.labels(*self._names, each.name, account).set(num_bytes)

    def engine_died(self) -> None:
        """The engine process is gone: nothing runs, and its successor counts from zero."""
        self._last = None
        self._running.set(0)
        self._waiting.set(0)
        self._swapped.set(0)
        self._kv_usage.set(0)
        self._capacity.clear()
        self._reserved.clear()

    def engine_restarted(self) -> None:
        self._restarts.inc()

    def heartbeat_age(self, seconds: float) -> None:
        self._heartbeat_age.set(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page for Prometheus, and its content type, by the Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._exposed), content_type
