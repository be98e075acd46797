"""Options: the table, the resolver, the file of options. Without torch."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.cli.config_file import load_config, resolve_command
from ambidex.config import EngineConfig, ModelConfig, ServerConfig
from ambidex.errors import OptionError
from ambidex.kv.block import BLOCK_SIZES
from ambidex.option_types import EXPECTED, TYPES, parse_json, refusal
from ambidex.options import (
    NO_EFFECT,
    OPTIONS,
    REFUSED,
    WORKS,
    FileOptions,
    Option,
    Resolved,
    config_path,
    format_help,
    resolve,
    resolve_keywords,
)

DATA = Path(__file__).parents[1] / "data"
COMMANDS = DATA / "commands"
NAMES = [n for n in (DATA / "vllm_names.txt").read_text().splitlines() if not n.startswith("#")]


def serve(line: str, env: dict[str, str] | None = None, file: Any = None) -> Resolved:
    return resolve(shlex.split(line), env or {}, file)


def engine(line: str, env: dict[str, str] | None = None, file: Any = None) -> EngineConfig:
    return serve(f"m {line}", env, file).engine_config()


def failure(line: str, env: dict[str, str] | None = None, file: Any = None) -> str:
    with pytest.raises(OptionError) as caught:
        serve(line, env, file).engine_config()
    return str(caught.value)


def error_of(call: Callable[[], object]) -> str:
    """The error's text; empty where there is none."""
    try:
        call()
    except OptionError as error:
        return str(error)
    return ""


# --- the table ---------------------------------------------------------------------------------


def test_every_name_stands_once_and_every_row_is_whole() -> None:
    seen: set[str] = set()
    for option in OPTIONS:
        for name in (option.name, *option.aliases, *option.env):
            assert name not in seen, name
            assert "_" not in name or not name.startswith("-"), name
            seen.add(name)
        assert option.type in TYPES, option
        assert option.kind in (WORKS, NO_EFFECT, REFUSED)
        if option.kind == WORKS:
            assert option.quiet or option.help, option.name
        else:
            assert option.reason and not option.reason.endswith("."), option.name
            assert not option.dest, option.name
        if option.kind == REFUSED:
            assert option.replacement.endswith("."), option.name
        for reason in option.refused_values.values():
            assert reason.endswith("."), option.name
    assert TYPES.keys() == EXPECTED.keys()


def test_the_table_knows_every_name_of_vllm() -> None:
    options = [name for name in NAMES if name.startswith("-")]
    variables = [name for name in NAMES if not name.startswith("-")]
    assert len(options) > 400 and len(variables) > 400
    for name in options:
        # A value may be wrong for the option, the name never is.
        for line in ([name, "1"], [name.replace("-", "_").replace("__", "--", 1), "1"]):
            assert "Unknown option" not in error_of(partial(resolve, line, {}, None))
    for name in variables:
        try:
            notes = resolve([], {name: "1"}, None).notes
        except OptionError:
            continue
        assert not any("not known" in note for note in notes), notes


def test_block_sizes_are_those_of_the_cache() -> None:
    (option,) = [o for o in OPTIONS if o.name == "--block-size"]
    assert option.choices == BLOCK_SIZES


def test_defaults_are_those_of_the_configuration() -> None:
    resolved = serve("m")
    assert resolved.engine_config() == EngineConfig(model=ModelConfig(model="m"))
    assert resolved.server_config() == ServerConfig()
    assert resolved.notes == ()
    assert set(resolved.sources.values()) == {"command line", "default"}


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--tokenizer t", "model.tokenizer", "t"),
        ("--dtype half", "model.dtype", "float16"),
        ("--dtype float", "model.dtype", "float32"),
        ("--dtype bfloat16", "model.dtype", "bfloat16"),
        ("--max-model-len 8192", "model.max_model_len", 8192),
        ("--max_model_len=8k", "model.max_model_len", 8000),
        ("--max-model-len 1M", "model.max_model_len", 1024**2),
        ("--max-model-len -1", "model.max_model_len", None),
        ("--max-model-len auto:131072", "model.max_model_len_cap", 131072),
        ('--hf-overrides \'{"a": {"b": 1}}\'', "model.hf_overrides", {"a": {"b": 1}}),
        (
            "--hf-overrides.a.b 1 --hf-overrides.a.c=x",
            "model.hf_overrides",
            {"a": {"b": 1, "c": "x"}},
        ),
        (
            "--hf_overrides.rope_scaling.rope_type yarn",
            "model.hf_overrides",
            {"rope_scaling": {"rope_type": "yarn"}},
        ),
        ("--hf-overrides.ids+ 1,2", "model.hf_overrides", {"ids": ["1", "2"]}),
        ("--rope-theta 1e6 --hf-overrides.x 1", "model.hf_overrides", {"rope_theta": 1e6, "x": 1}),
        ("--revision main", "model.revision", "main"),
        ("--served-model-name a b --port 1", "model.served_model_names", ("a", "b")),
        ("--chat-template t.jinja", "model.chat_template", "t.jinja"),
        ("--seed 0", "model.seed", 0),
        ("--generation-config vllm", "model.generation_config", "vllm"),
        ("--max-logprobs 5", "model.max_logprobs", 5),
        ("--max-logprobs -1", "model.max_logprobs", 1_000_000),
        ("--block-size 32", "cache.block_size", 32),
        ("--no-enable-prefix-caching", "cache.enable_prefix_caching", False),
        ("--enable_prefix_caching=false", "cache.enable_prefix_caching", False),
        ("--kv-cache-dtype bfloat16", "cache.kv_cache_dtype", "bfloat16"),
        ("--kv-cache-dtype int8", "cache.kv_cache_dtype", "int8"),
        ("--quantization int8", "model.quantization", "int8"),
        ("--kv-cache-memory-bytes 2GiB", "cache.kv_cache_bytes", 2**31),
        ("--kv-cache-memory-bytes 40GB", "cache.kv_cache_bytes", 40 * 10**9),
        ("--kv-cache-memory-bytes 1.5g", "cache.kv_cache_bytes", 1_500_000_000),
        ("--num-gpu-blocks-override 77", "cache.num_blocks", 77),
        ("--max-num-seqs 4", "scheduler.max_num_seqs", 4),
        ("--max-num-batched-tokens 2K", "scheduler.max_num_batched_tokens", 2048),
        ("--enable-chunked-prefill False", "scheduler.enable_chunked_prefill", False),
        ("--scheduling-policy priority", "scheduler.policy", "priority"),
        ("--enable-log-requests", "log.enable_log_requests", True),
        ("--enable-log-requests --disable-log-requests", "log.enable_log_requests", False),
        ("--no-disable-log-requests", "log.enable_log_requests", True),
        ("--disable-log-stats", "log.disable_log_stats", True),
        ("--log-level warn", "log.level", "WARNING"),
        ("--log-format json", "log.format", "json"),
        ("--cpu-threads 3", "cpu_threads", 3),
        ("--cpu-bind 0-15", "cpu_bind", "0-15"),
        ("--cpu-bind 0,2,4", "cpu_bind", "0,2,4"),
        ("--cpu-bind NUMA:0", "cpu_bind", "numa:0"),
        ("--enforce-eager", "enforce_eager", True),
        ("--enforce-eager=False", "enforce_eager", False),
    ],
)
def test_engine_options(line: str, field: str, value: Any) -> None:
    found: Any = engine(line)
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--host 0.0.0.0", "host", "0.0.0.0"),
        ("--port 0", "port", 0),
        ("--api-key a b --api-key c", "api_keys", ("a", "b", "c")),
        ("--admin-api-key a", "admin_api_keys", ("a",)),
        ("--allowed-origins '[\"*\"]'", "allowed_origins", ("*",)),
        ("--ssl-certfile c --ssl-keyfile k", "ssl_keyfile", "k"),
        ("--ssl-certfile c", "ssl_certfile", "c"),
        ("--root-path /api", "root_path", "/api"),
        ("--uvicorn-log-level info", "uvicorn_log_level", "info"),
        ("--shutdown-timeout 2.5", "shutdown_timeout_s", 2.5),
        ("--max-body-size 1MiB", "max_body_bytes", 2**20),
        ("--response-role helper", "response_role", "helper"),
    ],
)
def test_server_options(line: str, field: str, value: Any) -> None:
    assert getattr(serve(f"m {line}").server_config(), field) == value


def test_every_field_of_the_configuration_has_an_option() -> None:
    # The tests above set each field; this one fails when a field is added without one.
    renamed = {"policy": "scheduling_policy", "level": "log_level", "format": "log_format"}
    dests = {option.dest for option in OPTIONS} | {"max_model_len_cap"}
    dests |= {"prefault"}  # the command decides
    parts = [type(part) for part in (engine("").model, engine("").cache, engine("").scheduler)]
    for part in (*parts, type(engine("").log), ServerConfig):
        for field in dataclasses.fields(part):
            assert renamed.get(field.name, field.name) in dests, field.name


# --- spelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("--max-modle-len 1", "--max-model-len"),
        ("--max-model 1", "--max-model-len"),  # no prefix matching
        ("--prot 1", "--port"),
        ("--kv-cache-memory-byte 1", "--kv-cache-memory-bytes"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
        ("--api-kye=secret", "--api-key"),
        ("--tensor-paralel-size 2", "--tensor-parallel-size"),
    ],
)
def test_unknown_options_name_the_nearest(line: str, nearest: str) -> None:
    message = failure(f"m {line}")
    assert message.startswith("Unknown option --") and f"{nearest}." in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--port", "--port needs a value"),
        ("--port --host x", "the next word is --host"),
        ("--served-model-name --port 1", "--served-model-name needs a value"),
        ("--port 70000", "--port must be between 0 and 65535 (0 picks a free port), not 70000."),
        ("--port x", "--port must be a whole number"),
        ("--port=1.5", "--port must be a whole number"),
        ("--gpu-memory-utilization 1.5", "between 0 and 1 (a fraction of the device's memory)"),
        ("--gpu-memory-utilization nan", "not finite"),
        ("--gpu-memory-utilization -0.5", "between 0 and 1"),
        ("--block-size 17", "must be one of 8, 16, 32, 64, 128, not 17."),
        ("--max-num-seqs 0", "at least 1 (requests), not 0."),
        ("--max-model-len 0", "at least 1 (tokens)"),
        ("--max-model-len 8q", "8192, 8k or 1M, or auto"),
        ("--max-model-len auto:0", "the cap is at least 1"),
        ("--max-num-seqs 1.5", "it is no whole number"),
        ("--kv-cache-memory-bytes 4GX", "the units are"),
        ("--shutdown-timeout inf", "not finite"),
        ("--dtype float64", "must be one of auto, float32"),
        ("--cpu-threads 0", "between 1 and 1024 (threads)"),
        ("--cpu-bind everywhere", "auto, none, numa:0, or CPUs such as 0-15"),
        ("--cpu-bind 0-", "auto, none, numa:0, or CPUs such as 0-15"),
        ("--hf-overrides '{a: 1}'", "character 2"),
        ("--hf-overrides '[1]'", "must be a JSON object"),
        ("--hf-overrides '{\"a\": NaN}'", "NaN is no JSON"),
        ("--speculative-config {bad", "must be a JSON object"),
        ("--enable-prefix-caching=maybe", "must be true or false"),
        ("m2", "'m2' is one argument too many"),
        ("--model other", "Two models are named, m and --model other."),
        ("'--port 8000'", "came as one word"),
        ("' ' --port 1", "a backslash with a space behind it"),
        ("--device warp", "must be one of auto, cpu"),
        ("--no-port 1", "Unknown option --no-port"),
        ("--ssl-keyfile k", "--ssl-certfile"),
        ("--no-enable-chunked-prefill --max-model-len 4096", "Give --max-num-batched-tokens 4096"),
        ("--hf-config-path nowhere", "there is no nowhere"),
    ],
)
def test_wrong_values_are_sentences(line: str, part: str) -> None:
    message = error_of(lambda: serve(f"m {line}").engine_config())
    message = message or error_of(serve(f"m {line}").server_config)
    assert part in message
    assert "\n" not in message and message.endswith(".")


def test_no_model_is_an_error_with_the_next_step() -> None:
    assert "No model is given. Write `ambidex serve MODEL`" in failure("--port 1")
    assert serve("").engine_config("default").model.model == "default"


def test_words_that_look_like_options() -> None:
    prompt = Option("--prompt", WORKS, dest="prompt", help="Text.", aliases=("-p",))
    for line, text in (
        (["-p", "- a list"], "- a list"),
        (["-p", "-1"], "-1"),
        (["-p=-x"], "-x"),
        (["--prompt=--x=y"], "--x=y"),
        (["-p", ""], ""),
    ):
        resolved = resolve(line, {}, None, command="run", extra=[prompt])
        assert resolved.values["prompt"] == text
    assert resolve(["--", "--m"], {}, None).values["model"] == "--m"
    assert resolve(["a", "b"], {}, None, command="pull").positionals == ("a", "b")


def test_a_command_owns_its_extra_options() -> None:
    extra = [
        Option("--max-tokens", WORKS, "count", dest="max_tokens", default=512, help="Longest."),
        Option("--raw", WORKS, "flag", dest="raw", default=False, help="No template."),
    ]
    resolved = resolve(["m", "--max-tokens", "4", "--raw"], {}, None, command="run", extra=extra)
    assert (resolved.values["max_tokens"], resolved.values["raw"]) == (4, True)
    assert "it belongs to a request" in failure("m --max-tokens 4")
    text = format_help("run", extra)
    assert text.startswith("Options of run:") and "[512]" in text and "--port" not in text


def test_options_of_a_server_have_no_effect_elsewhere() -> None:
    resolved = resolve(["m", "--port", "1"], {"VLLM_API_KEY": "k"}, None, command="run")
    assert resolved.notes == ("--port 1: no effect here: `run` starts no server.",)


def test_an_option_given_twice_says_so() -> None:
    resolved = serve("m --port 1 --port 2 --dtype half --dtype half")
    assert resolved.values["port"] == 2
    assert resolved.notes == ("--port is given after --port: the last one counts.",)


# --- no effect, refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "--tensor-parallel-size 1",
        "-tp 1",
        "-tp=1",
        "--tensor_parallel_size 1",
        "--pipeline-parallel-size 1 --data-parallel-size 1",
        "--disable-custom-all-reduce",
        "--use-v2-block-manager",
        "--num-scheduler-steps 10",
        "--multi-step-stream-outputs",
        "--multi-step-stream-outputs=False",
        "--trust-remote-code",
        "--no-trust-remote-code",
        "--gpu-memory-utilization 0.9",
        "--cpu-offload-gb 0",
        "--cpu-offload-gb 24",
        "--cpu-offload",
        "--cpu-offload-size 40GB",
        "--async-cpu-offload",
        "--no-async-cpu-offload",
        "--offload-layers '*.mlp' 'decoder.layers.40:'",
        "--offload-mode split",
        "--swap-space 20GB",
        "--num-gpu-blocks 0",
        "--prefill-device cpu",
        "--decode-device auto",
        "-O3",
        "-O 3",
        "-O.level=3",
        "-cc.cudagraph_mode NONE",
        "--compilation-config '{\"level\": 3}'",
        "--cudagraph-capture-sizes 1 2 4",
        "--task generate",
        "--calculate-kv-scales",
        "--kv-cache-dtype-skip-layers 0 1",
        "--speculative-config null",
        "--num-speculative-tokens 0",
        "--no-enable-lora",
        "--load-format safetensors",
        "--hf-token",
        "--allowed-methods '[\"*\"]'",
        "--distributed-executor-backend mp",
        "--limit-mm-per-prompt image=2",
        "--limit-mm-per-prompt.image 2",
    ],
)
def test_no_effect_is_one_line(line: str) -> None:
    resolved = serve(f"m {line}")
    assert len(resolved.notes) >= 1
    for note in resolved.notes:
        assert ": no effect here: " in note and note.endswith(".") and "\n" not in note
    assert resolved.engine_config() == engine("")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--tensor-parallel-size 4", "Use 1"),
        ("-tp 4", "-tp 4 cannot be used"),
        ("--device cuda", "no such lane is built yet"),
        ("--device GPU:0", "no such lane is built yet"),
        ("--prefill-device gpu", "only the CPU lane is there"),
        ("--decode-device cuda:0", "only the CPU lane is there"),
        ("--decode-url http://x", "another machine is not built yet"),
        ("--numa-bind", "Use --cpu-bind numa:0"),
        ("--numa-bind-nodes 0 1", "Use --cpu-bind numa:0"),
        ("--numa-bind-cpus 0-3 4-7", "Use --cpu-bind 0-15"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype bfloat16"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype bfloat16"),
        ("--quantization fp8", "unquantised"),
        ("--quantization-config '{\"a\": 1}'", "--quantization int8"),
        ('--speculative-config \'{"model": "d"}\'', "speculative decoding is not built"),
        ("--speculative-config.model d", "speculative decoding is not built"),
        ("--enable-lora", "Merge the adapter"),
        ("--lora-modules a=b c=d", "Merge the adapter"),
        ("--task embed", "only text generation"),
        ("--load-format dummy", "Give a real model"),
        ("--enable-auto-tool-choice", "not built yet"),
        ("--ctx-size 4096", "Use --max-model-len"),
        ("--uds /x", "Use --host and --port"),
        ("--generation-config ./folder", "with each request"),
    ],
)
def test_refused_options_say_what_to_use(line: str, part: str) -> None:
    message = failure(f"m {line}")
    assert "cannot be used: " in message and part in message
    assert message.endswith(".") and "\n" not in message


def test_all_refusals_come_at_once_and_a_reason_once() -> None:
    message = failure("m --quantization fp8 -tp 2 -pp 2 --speculative-model d --spec-tokens 5")
    lines = message.splitlines()
    assert len(lines) == 3
    assert any(line.startswith("-tp 2, -pp 2 cannot be used") for line in lines)


def test_a_refused_secret_is_not_printed() -> None:
    assert "hunter2" not in failure("m --hf-token hunter2")


def test_refusal_is_by_value() -> None:
    option = Option("--x", REFUSED, "int", reason="why", replacement="Use 1.", harmless=(1,))
    assert refusal(option, 1) is None
    assert refusal(option, 2) == "why. Use 1."


# --- environment, file, precedence -------------------------------------------------------------


def test_command_line_environment_file_default() -> None:
    file = {"log-level": "error", "cpu_threads": 3, "max-num-seqs": 5, "port": 9}
    env = {"AMBIDEX_LOG_LEVEL": "debug", "VLLM_LOGGING_LEVEL": "info", "OMP_NUM_THREADS": "2,1"}
    resolved = serve("m --cpu-threads 1", env, file)
    values = {name: (value, source) for name, value, source in resolved.explain()}
    assert values["--cpu-threads"] == ("1", "command line")
    assert values["--log-level"] == ("DEBUG", "environment (AMBIDEX_LOG_LEVEL)")
    assert values["--max-num-seqs"] == ("5", "file (the configuration)")
    assert values["--block-size"] == ("16", "default")
    assert serve("m", env, file).engine_config().cpu_threads == 2
    assert serve("m", {}, file).engine_config().log.level == "ERROR"


def test_what_a_stronger_source_says_hides_a_refusal() -> None:
    file = {"tensor-parallel-size": 4}
    assert "tensor-parallel-size 4 cannot be used" in failure("m", {}, file)
    assert "no effect" in serve("m -tp 1", {}, file).notes[0]


def test_kv_space_is_gib() -> None:
    assert engine("", {"VLLM_CPU_KVCACHE_SPACE": "200"}).cache.kv_cache_bytes == 200 * 2**30
    assert engine("", {"VLLM_CPU_KVCACHE_SPACE": "0.5"}).cache.kv_cache_bytes == 2**29
    assert engine("", {"VLLM_CPU_KVCACHE_SPACE": "0"}).cache.kv_cache_bytes is None
    both = engine("--kv-cache-memory-bytes 1GiB", {"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert both.cache.kv_cache_bytes == 2**30
    assert "VLLM_CPU_KVCACHE_SPACE must be a size" in failure("m", {"VLLM_CPU_KVCACHE_SPACE": "x"})


def test_variables_of_vllm_and_its_neighbours() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_DISABLE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_NEW_IN_2031": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_PORT_8000_TCP_ADDR": "10.0.0.1",
        "AMBIDEX_CACHE": "/c",
        "HF_HOME": "/h",
        "PATH": "/bin",
        "VLLM_API_KEY": "",
    }
    notes = serve("m", env).notes
    text = "\n".join(notes)
    assert "VLLM_NEW_IN_2031 is not known here and has no effect." in notes
    for name in ("NCCL_DEBUG INFO", "VLLM_TARGET_DEVICE cpu", "VLLM_WORKER_MULTIPROC_METHOD fork"):
        assert name in text
    for name in ("USAGE", "SERVICE", "TCP", "CACHE", "HF_HOME", "PATH", "API_KEY"):
        assert name not in text
    for text in ("auto", "nobind", "0-29", "0-31|32-63"):
        resolved = serve("m", {"VLLM_CPU_OMP_THREADS_BIND": text})
        assert resolved.engine_config().cpu_bind == text
        assert not resolved.notes


def test_keys_are_never_shown() -> None:
    resolved = serve("m --api-key s3cret", {"AMBIDEX_ADMIN_API_KEY": "s3cret"})
    assert "s3cret" not in repr(resolved.explain()) + repr(resolved.notes)
    assert ("--api-key", "*** (1)", "command line") in resolved.explain()
    assert resolved.server_config().admin_api_keys == ("s3cret",)
    assert serve("m", {"VLLM_API_KEY": "k", "AMBIDEX_API_KEY": "a"}).values["api_keys"] == ["a"]


def test_keyword_arguments() -> None:
    resolved = resolve_keywords(
        {
            "model": "m",
            "max_model_len": 128,
            "tensor_parallel_size": 1,
            "dtype": None,
            "enable_prefix_caching": False,
            "hf_overrides": {"a": 1},
            "swap_space": 4,
        },
        {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    config = resolved.engine_config()
    assert (config.model.max_model_len, config.log.level) == (128, "ERROR")
    assert config.model.hf_overrides == {"a": 1} and not config.cache.enable_prefix_caching
    assert [note.split(":")[0] for note in resolved.notes] == [
        "tensor_parallel_size 1",
        "swap_space 4GiB",
    ]
    with pytest.raises(OptionError, match=r"Unknown argument max_modle_len\. .* max_model_len\."):
        resolve_keywords({"max_modle_len": 1}, {})
    with pytest.raises(OptionError, match="max_num_seqs must be a whole number"):
        resolve_keywords({"max_num_seqs": [1]}, {})


def write(folder: Path, text: str) -> str:
    path = folder / "c.yaml"
    path.write_text(text)
    return str(path)


def test_a_yaml_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "# a comment\nmodel: m\nmax_model_len: 8k\nserved-model-name: [a, b]\n"
        "enable-prefix-caching: false\nport: 0x10\napi-key: 1234\nhf-overrides:\n"
        "  rope_scaling: {rope_type: yarn}\nno-enable-chunked-prefill: true\nseed:\n"
        "max-num-batched-tokens: 8000\ntensor-parallel-size: 1\n",
    )
    resolved = resolve_command(["--config", path, "--port", "7"], {})
    config = resolved.engine_config()
    assert (config.model.model, config.model.max_model_len) == ("m", 8000)
    assert config.model.served_model_names == ("a", "b") and config.model.seed is None
    assert config.model.hf_overrides == {"rope_scaling": {"rope_type": "yarn"}}
    assert type(config.model.hf_overrides["rope_scaling"]) is dict
    assert not config.cache.enable_prefix_caching and not config.scheduler.enable_chunked_prefill
    assert resolved.server_config().port == 7
    assert resolved.server_config().api_keys == ("1234",)
    assert resolved.sources["max_model_len"] == f"file ({path}, line 3)"
    assert resolved.notes[0].startswith(f"{path}, line 13: tensor-parallel-size 1: no effect")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot: 1\n", "line 1: unknown option 'prot'. The nearest option is --port."),
        ("--port: 1\n", "unknown option '--port'. In a file options are written without dashes"),
        ("cpu-offload-gb: .inf\n", "40GB or a number of GiB, not inf."),
        (
            "model: m\nport: 1\nport: 2\n",
            "line 3: port says 2, and port on line 2 says 1:",
        ),
        (
            "port: 1\n\nmax-num-seqs: 1\nmax_num_seqs: 2\n",
            "line 4: max_num_seqs says 2, and max-num-seqs on line 3 says 1:",
        ),
        ("model: m\nport: high\n", "line 2: port must be a whole number"),
        ("port: [1, 2]\n", "line 1: port must be a whole number"),
        ("port: true\n", "line 1: port must be a whole number"),
        ("port: 70000\n", "line 1: port must be between 0 and 65535"),
        ("enable-prefix-caching: 3\n", "must be true or false"),
        ("served-model-name: {a: b}\n", "must be one or more values"),
        ("hf-overrides: 3\n", "must be a JSON object"),
        ("model: 2020-01-01\n", "line 1: model has a value of a kind"),
        ("a:\n\tb: 1\n", "line 2: a tab"),
        ("port: 'x\n", "line 2: "),
        ("- port\n", "it holds a list"),
        ("port\n", "it holds a single value"),
        ("1: 2\n", "line 1: the name of an option belongs before the colon, not 1"),
        ("config: x\n", "config belongs on the command line"),
        ("--port: 1\n", "unknown option '--port'"),
        ("tensor-parallel-size: 8\n", "line 1: tensor-parallel-size 8 cannot be used"),
        ("model: !!python/object:os.system x\n", "line 1: model"),
    ],
)
def test_a_wrong_yaml_file(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        resolve_command(["--config", path], {})
    message = str(caught.value)
    assert part in message and path in message
    assert "\n" not in message and message.endswith(".")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no file"):
        load_config(str(tmp_path / "none.yaml"))
    with pytest.raises(OptionError, match=r"without a config\.json"):
        load_config(str(tmp_path))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="not UTF-8"):
        load_config(str(tmp_path / "b.yaml"))
    assert load_config(write(tmp_path, "")).items == ()


def test_config_must_be_a_file_of_a_sane_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(OptionError, match="no regular file"):
            load_config(name)
    with pytest.raises(OptionError, match="more than 1048576 bytes"):
        load_config(write(tmp_path, "# comment\n" * 110_000))
    with pytest.raises(OptionError, match=r"line 1: more than 10000 values"):
        load_config(write(tmp_path, f"stop: [{'1, ' * 20_000}]\n"))
    with pytest.raises(OptionError, match=r"--hf-config-path: .* no regular file"):
        resolve(["m", "--hf-config-path", str(tmp_path / "pipe")], {}).engine_config()


def test_config_may_be_a_pipe_of_the_shell() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"port: 7\n")
    os.close(writer)
    try:
        assert [(i.key, i.value) for i in load_config(f"/dev/fd/{reader}").items] == [("port", 7)]
    finally:
        os.close(reader)


def test_config_takes_no_aliases(tmp_path: Path) -> None:
    bomb = ["a0: &a0 [x, x]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 13)]
    for text, part in (
        ("\n".join(bomb), "line 1: &a0: anchors and aliases are not supported"),
        ("port: 1\nmodel: *x\n", r"line 2: \*x: anchors and aliases are not supported"),
    ):
        with pytest.raises(OptionError, match=part):
            load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    "words",
    [
        ("--cpu-threads", "999999999"),
        ("--cpu-threads", "\u0664"),
        ("--max-num-seqs", "\u0664"),
        ("--kv-cache-memory-bytes", "99999999999999999999999GiB"),
        ("--kv-cache-memory-bytes", "9" * 400 + ".5"),
        ("--max-model-len", "9" * 4000),
        ("--port", "\uff18\uff10"),
        ("--shutdown-timeout", "\u0661\u0660"),
    ],
)
def test_numbers_beyond_reason(words: tuple[str, str]) -> None:
    with pytest.raises(OptionError, match=words[0]):
        resolve(["m", *words], {})


def test_config_may_name_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_theta": 7}')
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        resolved = resolve_command(["m", "--config", name, "--hf-overrides.x", "1"], {})
        assert resolved.notes == (
            f"--config {name} is a model's configuration, not a file of options: used as such.",
        )
        model = resolved.engine_config().model
        assert model.model == "m"
        assert model.hf_overrides == {"model_type": "llama", "rope_theta": 7, "x": 1}
    with pytest.raises(OptionError, match="No model is given"):
        resolve_command(["--config", str(tmp_path)], {}).engine_config()
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolved = resolve_command(["--config", str(tmp_path)], {})
    assert resolved.engine_config().model.model == str(tmp_path)
    assert resolved.sources["model"] == f"file ({tmp_path})"


def test_the_path_of_the_file_is_found_first() -> None:
    assert config_path(["m", "--config=a", "--port", "1"]) == "a"
    assert config_path(["m"]) is None


# --- commands as people paste them -------------------------------------------------------------


def options_of(text: str) -> tuple[list[str], dict[str, str]]:
    """The words behind the launcher (python -m ..., vllm serve, docker run ...), and the
    variables before it, as a shell would pass them."""
    # A comment ends with its line, and a command at a line's end without a backslash before.
    text = text.replace("\\\n", " ")
    lexer = shlex.shlex(text.splitlines()[0], posix=True, punctuation_chars="")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words = []
    for word in lexer:
        if word.startswith("#"):
            break
        words.append(word)
    env = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    launchers = {"serve", "vllm.entrypoints.openai.api_server", "vllm/vllm-openai:latest"}
    start = next(i for i, word in enumerate(words) if word in launchers)
    return words[start + 1 :], env


def pasted(number: str) -> Resolved:
    words, env = options_of((COMMANDS / f"{number}.txt").read_text())
    return resolve(words, env, None)


def test_no_pasted_command_has_an_unknown_option() -> None:
    files = sorted(COMMANDS.glob("*.txt"))
    assert len(files) == 10
    for path in files:
        message = error_of(partial(pasted, path.stem))
        assert "nknown option" not in message, path


def test_pasted_commands_that_start() -> None:
    assert pasted("02").engine_config().scheduler.max_num_seqs == 512
    names = " ".join(pasted("03").notes)
    for name in (
        "--prefill-device",
        "--num-gpu-blocks",
        "--disable-custom-all-reduce",
        "--swap-space",
    ):
        assert name in names
    sixth = pasted("06")
    assert sixth.engine_config().cache.kv_cache_bytes == 200 * 2**30
    assert sixth.engine_config().cpu_threads == 64
    assert "code in a model folder is never run" in " ".join(sixth.notes)
    seventh = pasted("07")
    assert seventh.engine_config().cpu_threads == 4
    assert "--cpu-offload, --cpu-offload-size 37.25GiB" in " ".join(seventh.notes)
    assert pasted("08").notes and pasted("10").notes


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        ("01", ["backslash"]),
        ("04", ["--tensor-parallel-size 4"]),
        ("05", ["--quantization fp8", "--kv-cache-dtype fp8", "--tensor-parallel-size 2"]),
        ("09", ["--speculative-model /cpu/draft, --num-speculative-tokens 5"]),
    ],
)
def test_pasted_commands_that_are_refused(number: str, parts: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        pasted(number)
    for part in parts:
        assert part in str(caught.value)


# --- help, speed, robustness -------------------------------------------------------------------


def test_help_lists_what_works() -> None:
    text = format_help("serve")
    for option in OPTIONS:
        if option.kind == WORKS and option.group in ("Model", "Compute", "Logs", "Server"):
            assert option.name in text
    assert "--tensor-parallel-size" not in text
    assert "--tensor-parallel-size" in format_help("serve", everything=True)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, ambidex.options, ambidex.cli.config_file;"
        "print([m for m in sys.modules if m.split('.')[0] in ("
        "'torch', 'numpy', 'ruamel', 'rich', 'fastapi', 'difflib', 'argparse', 'asyncio')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


_WORDS = st.one_of(
    st.sampled_from([name for option in OPTIONS for name in (option.name, *option.aliases)]),
    st.sampled_from(
        ["1", "0", "-1", "auto", "true", "{}", '{"a": 1}', "x", "8k", "4GiB", "=", "."]
    ),
    st.text(max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_WORDS, max_size=6), st.booleans())
def test_any_words_resolve_or_are_one_error(words: list[str], joined: bool) -> None:
    argv = ["=".join(words)] if joined else words
    message = error_of(lambda: resolve(argv, {}, None).explain())
    assert not message or message.endswith(".")


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([o.name.strip("-") for o in OPTIONS if not o.is_variable]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=4),
            st.lists(st.integers(), max_size=2),
            st.dictionaries(st.text(max_size=2), st.none()),
        ),
        max_size=3,
    )
)
def test_any_values_in_a_file_resolve_or_are_one_error(values: dict[str, Any]) -> None:
    message = error_of(lambda: resolve([], {}, FileOptions.of("c.yaml", values)))
    assert not message or message.startswith("c.yaml")


def test_json_is_strict() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
