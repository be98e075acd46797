"""The command line: what goes to stdout and what to stderr, and how a command ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ambidex
from ambidex.weights.hub import ResolvedModel

#: A context so long that an answer without an end is still running when a test interferes.
ENDLESS = (
    "--max-tokens",
    "90000",
    "--ignore-eos",
    "--hf-overrides.max_position_embeddings",
    "99999",
)
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> str:
    return str(tiny_model("llama", tokenizer=True))


def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "ambidex", *words],
        env=env,
        # Shells start what they put into the background with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    """Waits until the answer has begun."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1)


# --- run ------------------------------------------------------------------------------------------


def test_run_streams_text_to_stdout_and_all_else_to_stderr(
    run_command: Command, call_command: Command, model: str
) -> None:
    done = run_command("run", model, "-p", "hello", *GREEDY)
    assert done.code == 0
    text = json.loads(call_command("run", model, "-p", "hello", *GREEDY, "--json").out)["text"]
    assert done.out == text + "\n"
    first, second, third, last = done.err.splitlines()
    assert first.startswith(f"ambidex: path {model} (safetensors, float32)")
    assert second.startswith("ambidex: float32") and "context of" in second
    assert re.fullmatch(r"ambidex: KV cache in float32; kernels: native, \w+, \d threads?", third)
    assert "8 tokens at" in last and "tokens per second (length)" in last
    # No bar and no colour without a terminal.
    assert "\x1b" not in done.out + done.err and "\r" not in done.err


def test_run_json_is_one_object(call_command: Command, model: str) -> None:
    done = call_command("run", model, "-p", "hello", *GREEDY, "--json")
    assert done.code == 0 and done.out.count("\n") == 1
    result = json.loads(done.out)
    assert set(result) == {"model", "text", "token_ids", "finish_reason", "usage", "timings"}
    assert (result["model"], result["finish_reason"]) == (model, "length")
    assert len(result["token_ids"]) == 8
    num_prompt = result["usage"]["prompt_tokens"]
    assert result["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 8,
        "total_tokens": num_prompt + 8,
    }
    assert set(result["timings"]) == {
        "time_to_first_token_s",
        "total_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
    }
    assert 0 < result["timings"]["time_to_first_token_s"] <= result["timings"]["total_s"]


def test_raw_leaves_the_template_out(call_command: Command, model: str) -> None:
    def num_prompt_tokens(*words: str) -> int:
        done = call_command("run", model, "-p", "hi", *GREEDY, "--json", *words)
        return int(json.loads(done.out)["usage"]["prompt_tokens"])

    # "<s>" and "hi"; and "user: hi\nassistant: " in pairs of letters.
    assert num_prompt_tokens("--raw") == 2
    assert num_prompt_tokens() > 8
    assert num_prompt_tokens("--system", "Be brief.") > num_prompt_tokens()


def test_prompt_from_standard_input(call_command: Command, model: str) -> None:
    expected = call_command("run", model, "-p", "hello\n", *GREEDY).out
    assert call_command("run", model, *GREEDY, stdin=b"hello\n").out == expected
    assert call_command("run", model, "-p", "-", *GREEDY, stdin=b"hello\n").out == expected
    # White space is a prompt like any other.
    assert call_command("run", model, "-p", " ", *GREEDY).code == 0
    broken = call_command("run", model, *GREEDY, stdin=b"\xff\xfe")
    assert (broken.code, broken.out) == (1, "") and "not UTF-8" in broken.err


@pytest.mark.parametrize("words", [("-p", ""), ()])
def test_no_prompt_is_a_usage_error(call_command: Command, model: str, words: Any) -> None:
    done = call_command("run", model, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ambidex: error: There is no prompt.") and done.err.count("\n") == 1


def test_sampling_options_reach_the_sampler(call_command: Command, model: str) -> None:
    def run(*words: str) -> Any:
        return json.loads(call_command("run", model, "-p", "hello", "--json", *words).out)

    whole = run(*GREEDY)["text"]
    stopped = run(*GREEDY, "--stop", whole[3:5])
    assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(whole[3:5])], "stop")
    sampled = ("--max-tokens", "8", "--ignore-eos", "--seed")
    assert run(*sampled, "3")["token_ids"] == run(*sampled, "3")["token_ids"]
    assert run(*sampled, "3")["token_ids"] != run(*sampled, "4")["token_ids"]
    assert run(*sampled, "3", "--top-k", "1")["text"] == whole


def test_a_character_that_the_terminal_lacks_is_replaced(run_command: Command, model: str) -> None:
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    words = ("--raw", "--max-tokens", "200", "--ignore-eos", "--seed", "1")
    done = run_command("run", model, "-p", "hello", *words, env=env)
    assert done.code == 0, done.err
    assert "?" in done.out and done.out.isascii()


def test_a_closed_pipe_ends_the_command_quietly(model: str) -> None:
    """As in ``ambidex run ... 2>&1 | head -c 1``."""
    process = start(
        "run", model, "-p", "x", *ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert first_byte(process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in errors and "Exception" not in errors and errors.count("\n") == 3


def test_standard_error_in_the_same_closed_pipe(model: str) -> None:
    read, write = os.pipe()
    process = start("run", model, "-p", "x", *ENDLESS, stdout=write, stderr=write)
    os.close(write)
    assert os.read(read, 1)
    os.close(read)
    assert process.wait(timeout=60) == 141


def test_ctrl_c_in_the_middle_of_an_answer(model: str) -> None:
    process = start(
        "run", model, "-p", "x", *ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert first_byte(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors and b"Exception" not in errors


def test_ctrl_c_while_loading(
    call_command: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ambidex.runner.loader.load_weights", interrupted)
    assert call_command("run", model, "-p", "x").code == 130


def test_a_terminal_sees_a_bar_and_a_pipe_the_text_alone(call_command: Command, model: str) -> None:
    expected = call_command("run", model, "-p", "hello", *GREEDY).out
    ours, theirs = pty.openpty()
    process = start("run", model, "-p", "hello", *GREEDY, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert process.stdout is not None
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # Linux's end of a terminal
            data = b""
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.stdout.read().decode() == expected
    assert process.wait(timeout=60) == 0
    assert b"Loading weights" in shown and b"\x1b[" in shown
    assert b"tokens per second" in shown


# --- chat -----------------------------------------------------------------------------------------


def test_chat_remembers_until_it_is_cleared(call_command: Command, model: str) -> None:
    lines = b"Hello\n\nAgain\n/clear\nHello\n/exit\nnever read\n"
    done = call_command("chat", model, *GREEDY, stdin=lines)
    assert done.code == 0, done.err
    expected = call_command("run", model, "-p", "Hello", *GREEDY).out
    assert done.out.startswith(expected) and done.out.endswith(expected)
    assert len(done.out) > 2 * len(expected)
    assert "cleared" in done.err and "> " not in done.err


def test_chat_goes_on_after_a_line_that_cannot_be_answered(
    call_command: Command, model: str
) -> None:
    lines = b"long " * 500 + b"\n\xff\nHello\n"
    done = call_command("chat", model, *GREEDY, stdin=lines)
    assert done.code == 0
    assert done.out == call_command("run", model, "-p", "Hello", *GREEDY).out
    assert "context length" in done.err and "not UTF-8" in done.err


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    call_command: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ambidex.engine.engine import Engine

    step = Engine.step
    calls = 0

    def interrupted(self: Engine, timeout_s: float | None = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return step(self, timeout_s)

    monkeypatch.setattr(Engine, "step", interrupted)
    done = call_command("chat", model, *GREEDY, stdin=b"Hello\nHello\n")
    assert done.code == 0 and done.out.count("\n") >= 2 and "(stopped)" in done.err


# --- pull, help, names ----------------------------------------------------------------------------


def test_pull_prints_the_path(call_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name: str, progress: Callable[[str], None]) -> ResolvedModel:
        asked.append(name)
        progress(f"{name}: from somewhere, licence Apache-2.0")
        return ResolvedModel(Path("cache") / name, "alias", "an alias")

    monkeypatch.setattr("ambidex.weights.hub.pull", fake)
    done = call_command("pull", "one", "two")
    assert (done.code, asked) == (0, ["one", "two"])
    assert done.out.splitlines() == [str(Path("cache/one")), str(Path("cache/two"))]
    assert "licence Apache-2.0" in done.err
    for words, named in (((), "Name a model"), (("--fast", "x"), "--fast")):
        done = call_command("pull", *words)
        assert (done.code, done.out) == (2, "") and named in done.err


def test_help_and_version_are_at_hand(run_command: Command, call_command: Command) -> None:
    assert run_command("--version").out == f"ambidex {ambidex.__version__}\n"
    done = call_command("--help")
    assert done.code == 0 and done.err == ""
    assert all(f"\n  {name}" in done.out for name in ("run", "chat", "serve", "plan", "pull"))
    nothing = call_command()
    assert (nothing.code, nothing.out) == (2, done.out)
    for command in ("run", "chat", "serve", "plan", "pull"):
        done = call_command(command, "--unknown", "--help")
        assert done.code == 0 and done.out.startswith(f"usage: ambidex {command}")


def test_help_loads_nothing_heavy() -> None:
    """What keeps ``ambidex --help`` under half a second."""
    code = """
import sys
from ambidex.cli import main
for words in (["--help"], ["--version"], ["run", "--help"], ["chat", "--help"], ["pull", "--help"],
              ["plan", "--help"], ["serve", "--help"], ["serve", "m", "--print-config"]):
    assert main(words) == 0
heavy = {"torch", "numpy", "rich", "fastapi", "uvicorn", "zmq", "tokenizers", "huggingface_hub",
         "gguf", "asyncio", "httpx", "ruamel"}
sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "module", ["ambidex.entrypoints.openai.api_server", "ambidex.entrypoints.api_server"]
)
def test_the_older_ways_to_start_the_server(run_command: Command, module: str) -> None:
    done = run_command("--help", module=module)
    assert done.code == 0 and done.out.startswith("usage: ambidex serve MODEL")
    done = run_command("--model", "m", "--port", "9", "--print-config", module=module)
    assert any(line.split() == ["--port", "9", "command", "line"] for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("serv",), "Did you mean 'serve'?"),
        (("frobnicate",), "Commands: run, chat, serve, plan, pull"),
        (("run", "--temprature", "0"), "--temperature"),
        (("serve", "m", "--max-modle-len", "5"), "--max-model-len"),
        (("serve", "m", "--tensor-parallel-size", "2"), "--tensor-parallel-size 2"),
        (("run", "m", "extra", "-p", "x"), "extra"),
        (("serve",), "No model is given"),
    ],
)
def test_wrong_words_are_one_line(call_command: Command, words: Any, named: str) -> None:
    done = call_command(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ambidex: error: ") and done.err.count("\n") == 1
    assert named in done.err


def test_print_config_shows_each_value_and_its_source(
    call_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 7\nport: 1\napi-key: hidden\n")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    done = call_command("serve", "m", "--port", "9", "--config", str(file), "--print-config")
    assert done.code == 0 and "hidden" not in done.out
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert rows["--port"].endswith("command line") and " 9 " in rows["--port"]
    assert f"file ({file}, line 1)" in rows["--max-num-seqs"]
    assert "environment (VLLM_CPU_KVCACHE_SPACE)" in rows["--kv-cache-memory-bytes"]
    assert rows["--block-size"].endswith("default")


def test_options_without_effect_are_said_once(call_command: Command, model: str) -> None:
    done = call_command(
        "run", model, "-p", "x", *GREEDY, "--trust-remote-code", "--swap-space", "4", "--port", "9"
    )
    assert done.code == 0
    for name in ("--trust-remote-code", "--swap-space 4", "--port 9"):
        assert sum(name in line for line in done.err.splitlines()) == 1


def test_closed_standard_streams(model: str) -> None:
    """As from ``ambidex run ... <&- >&-``."""
    code = (
        "import os, subprocess, sys; os.close(0); os.close(1); "
        "os.execv(sys.executable, [sys.executable, '-m', 'ambidex', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", model, "-p", "x", *GREEDY],
        stderr=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_a_full_disk_is_one_line(model: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is Linux's")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ambidex", "--help"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"ambidex: error: ") and done.stderr.count(b"\n") == 1
