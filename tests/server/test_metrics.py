from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ambidex.engine.messages import EngineStats
from ambidex.memory.ledger import MemorySnapshot
from ambidex.metrics import (
    REQUEST_BUCKETS_S,
    TOKEN_BUCKETS_S,
    TTFT_BUCKETS_S,
    FinishedSequence,
    Metrics,
    token_buckets,
)


def samples(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    page, content_type = metrics.render("")
    assert content_type.startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(metrics: Metrics, name: str) -> float:
    return sum(v for _, v in samples(metrics)[name])


#: Name, type: as vLLM exposes them.
NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
}


def test_names_types_and_labels() -> None:
    page = Metrics("m", 4096).render("")[0].decode()
    for name, kind in NAMES.items():
        assert f"# TYPE {name} {kind}\n" in page, name
    for family in text_string_to_metric_families(page):
        if family.name.startswith("vllm:"):
            for sample in family.samples:
                assert sample.labels["model_name"] == "m"
                assert sample.labels["engine"] == "0"


@pytest.mark.parametrize(
    ("name", "buckets"),
    [
        ("vllm:time_to_first_token_seconds", TTFT_BUCKETS_S),
        ("vllm:inter_token_latency_seconds", TOKEN_BUCKETS_S),
        ("vllm:time_per_output_token_seconds", TOKEN_BUCKETS_S),
        ("vllm:request_time_per_output_token_seconds", TOKEN_BUCKETS_S),
        ("vllm:e2e_request_latency_seconds", REQUEST_BUCKETS_S),
        ("vllm:request_prompt_tokens", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)),
    ],
)
def test_buckets(name: str, buckets: tuple[float, ...]) -> None:
    found = samples(Metrics("m", 4096))[f"{name}_bucket"]
    assert [float(labels["le"]) for labels, _ in found] == [*buckets, float("inf")]


def test_token_buckets() -> None:
    assert token_buckets(1) == [1]
    assert token_buckets(0) == [1]
    assert token_buckets(60) == [1, 2, 5, 10, 20, 50]


def test_every_finish_reason_is_there_from_the_start() -> None:
    found = samples(Metrics("m", 10))["vllm:request_success_total"]
    assert {labels["finished_reason"] for labels, _ in found} == {
        "stop",
        "length",
        "abort",
        "error",
    }


def test_counters_grow_over_engine_processes() -> None:
    metrics = Metrics("m", 10)
    metrics.engine_stats(EngineStats(prefix_cache_queries=10, prefix_cache_hits=4))
    metrics.engine_stats(EngineStats(prefix_cache_queries=15, prefix_cache_hits=4, num_running=2))
    assert value(metrics, "vllm:num_requests_running") == 2
    metrics.engine_died()
    assert value(metrics, "vllm:num_requests_running") == 0
    metrics.engine_restarted()
    metrics.engine_stats(EngineStats(prefix_cache_queries=3, prefix_cache_hits=1))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 18
    assert value(metrics, "vllm:prefix_cache_hits_total") == 5
    assert value(metrics, "vllm:gpu_prefix_cache_hits_total") == 5
    assert value(metrics, "ambidex:engine_restarts_total") == 1


def test_a_finished_sequence() -> None:
    metrics = Metrics("m", 100)
    metrics.finished(FinishedSequence("length", 7, 5, e2e_s=2.0, decode_s=1.0))
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 0.25
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 7
    metrics.finished(FinishedSequence("stop", 7, 1, e2e_s=2.0, decode_s=0.0))
    # One token has no time to the next.
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 2


def test_openmetrics_is_served_where_asked_for() -> None:
    _, content_type = Metrics("m", 10).render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")


def test_memory_gauges_follow_the_engine() -> None:
    def reserved() -> dict[tuple[str, str], float]:
        found = samples(metrics).get("ambidex:memory_reserved_bytes", [])
        return {(labels["memory"], labels["account"]): value for labels, value in found}

    metrics = Metrics("m", 10)
    assert reserved() == {}
    host = MemorySnapshot("host", 100, {"weights": 30, "kv_cache": 20})
    metrics.engine_stats(EngineStats(memory=[host, MemorySnapshot("sim:0", 50, {"weights": 5})]))
    assert reserved() == {
        ("host", "weights"): 30,
        ("host", "kv_cache"): 20,
        ("sim:0", "weights"): 5,
    }
    assert value(metrics, "ambidex:memory_capacity_bytes") == 150
    labels, _ = samples(metrics)["ambidex:memory_capacity_bytes"][0]
    assert labels == {"model_name": "m", "engine": "0", "memory": "host"}
    metrics.engine_stats(EngineStats(memory=[MemorySnapshot("host", 100, {"weights": 31})]))
    assert reserved()["host", "weights"] == 31
    # Nothing is reserved where nothing runs.
    metrics.engine_died()
    assert reserved() == {}
    assert "ambidex:memory_capacity_bytes" not in samples(metrics)
