"""What users get wrong, and what their machines lack: one line that says what to do next.

The HTTP side is in tests/server/test_bad_input.py, single options in tests/policy/test_options.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

Command = Callable[..., Any]


def assert_refused(done: Any, *named: str, code: int = 1) -> None:
    """One line of error, nothing on stdout, no traceback; before it at most lines of progress."""
    *progress, error = done.err.splitlines() or [""]
    assert error.startswith("ambidex: error: "), done.err
    assert all(re.match(r"ambidex: (?!error)|\d\d:\d\d:\d\d INFO ", line) for line in progress)
    for text in named:
        assert text in error
    assert (done.code, done.out) == (code, "")


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Path:
    path: Path = tiny_model("llama", tokenizer=True)
    return path


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Callable[..., str]:
    """``broken(field=value)``: a copy of the model with changes to its config.json; None removes
    a field."""

    def make(**changes: Any) -> str:
        folder = tmp_path / "model"
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        config = {k: v for k, v in (config | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture
def host_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``host_bytes(n)``: a machine with so much free memory."""

    def limit(num_bytes: int) -> None:
        monkeypatch.setattr("ambidex.device.cpu.host_capacity_bytes", lambda: num_bytes)

    return limit


# --- MODEL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("{tmp}/nope.gguf", "no such file or folder"),
        ("{tmp}/no/folder", "no such file or folder"),
        ("./nope", "no such file or folder"),
        ("smollm2-135m-instrukt", "Did you mean 'smollm2-135m-instruct'?"),
        ("{tmp}", "holds no weights"),
        ("{tmp}/notes.txt", "no model file"),
    ],
)
def test_a_model_that_is_not_there(
    call_command: Command, tmp_path: Path, name: str, named: str
) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    name = name.format(tmp=tmp_path)
    assert_refused(call_command("run", name, "-p", "x"), name.rpartition("/")[2], named)


def test_a_hub_id_without_a_network(
    call_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = call_command("run", "some/model", "-p", "x")
    assert_refused(done, "some/model", str(tmp_path), "HF_HUB_OFFLINE")


@pytest.mark.parametrize("kind", ["folder", "package"])
def test_a_cache_that_cannot_be_written(
    call_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("AMBIDEX_CACHE", str(tmp_path / "file" / "cache"))
    command = ("run", "-p", "x") if kind == "folder" else ("pull", "smollm2-135m-instruct")
    assert_refused(call_command(*command), str(tmp_path), "Set AMBIDEX_CACHE")


@pytest.mark.parametrize(
    ("size", "named"), [(0, "empty"), (100, "header"), (0.5, "bytes"), (-1, "bytes")]
)
def test_truncated_safetensors(
    call_command: Command, broken: Callable[..., str], size: float, named: str
) -> None:
    folder = broken()
    path = Path(folder, "model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: size if isinstance(size, int) else int(len(data) * size)])
    assert_refused(call_command("run", folder, "-p", "x"), str(path))


@pytest.mark.parametrize("size", [0, 3, 1000, 4_000_000])
def test_truncated_gguf(call_command: Command, smollm2: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.gguf"
    with smollm2.open("rb") as file:
        path.write_bytes(file.read(size))
    assert_refused(call_command("run", str(path), "-p", "x"), str(path))


def test_unsupported_architecture_names_the_supported(
    call_command: Command, broken: Callable[..., str]
) -> None:
    folder = broken(model_type="gpt_bigcode", architectures=["GPTBigCodeForCausalLM"])
    done = call_command("run", folder, "-p", "x")
    assert_refused(done, "GPTBigCodeForCausalLM", "config.json", "llama, mistral", "qwen3_moe")


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
     "intermediate_size", "max_position_embeddings"],
)  # fmt: skip
def test_a_config_that_lacks_a_field(
    call_command: Command, broken: Callable[..., str], field: str
) -> None:
    folder = broken(**{field: None})
    done = call_command("run", folder, "-p", "x")
    assert_refused(done, f"{folder}/config.json", f"'{field}'", "--hf-overrides")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 2.5),
        ("vocab_size", True),
        ("max_position_embeddings", "long"),
        ("max_position_embeddings", -1),
    ],
)
def test_a_config_with_a_senseless_field(
    call_command: Command, broken: Callable[..., str], field: str, value: Any
) -> None:
    folder = broken(**{field: value})
    done = call_command("run", folder, "-p", "x")
    assert_refused(done, f"{folder}/config.json", f"'{field}'", repr(value))


@pytest.mark.parametrize("text", ["{", "", "[1]", '{"a": NaN', "\udcff"])
def test_a_config_that_is_no_json(
    call_command: Command, broken: Callable[..., str], text: str
) -> None:
    folder = broken()
    path = Path(folder, "config.json")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_refused(call_command("run", folder, "-p", "x"), str(path))


def test_weights_of_another_configuration(
    call_command: Command, broken: Callable[..., str]
) -> None:
    done = call_command("run", broken(intermediate_size=128), "-p", "x")
    assert_refused(done, "mlp.down_proj", "[64, 96]", "do not belong together")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", [1, 128])
def test_weights_of_another_configuration_in_low_bits(
    call_command: Command, broken: Callable[..., str], kind: str, size: int
) -> None:
    """Sizes are planned before a tensor is read; what is planned must not be negative."""
    folder = broken(intermediate_size=size)
    done = call_command("run", folder, "-p", "x", "--quantization", kind)
    assert_refused(done, "mlp.down_proj", "[64, 96]", f"[64, {size}]", "do not belong together")


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.weight", "norm.weight"])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_weight_under_two_names(
    call_command: Command, broken: Callable[..., str], name: str, kind: str | None
) -> None:
    folder = broken()
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    tensors[name] = tensors[f"model.{name}"].clone()
    save_file(tensors, file)
    words = ("--quantization", kind) if kind else ()
    done = call_command("run", folder, "-p", "x", *words)
    assert_refused(done, name, "twice", "'model.'")


def test_a_missing_layer(call_command: Command, broken: Callable[..., str]) -> None:
    assert_refused(call_command("run", broken(num_hidden_layers=3), "-p", "x"), "layers.2", "lacks")


def test_a_folder_without_a_tokenizer(call_command: Command, broken: Callable[..., str]) -> None:
    folder = broken()
    Path(folder, "tokenizer.json").unlink()
    assert_refused(call_command("run", folder, "-p", "x"), "tokenizer.json", "--tokenizer")
    Path(folder, "tokenizer.json").write_text("{")
    assert_refused(call_command("run", folder, "-p", "x"), "tokenizer.json")


@pytest.mark.parametrize("name", ["x.gguf", "x.safetensors", "x.bin"])
def test_a_model_that_is_a_pipe(call_command: Command, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / name).symlink_to("pipe")
    for words in (("-p", "x"), ("-p", "x", "--hf-overrides.a", "1")):
        done = call_command("run", str(tmp_path / name), *words)
        assert_refused(done, f"{tmp_path}/{name} is a pipe, not a regular file")


def test_a_folder_whose_files_are_pipes(call_command: Command, broken: Callable[..., str]) -> None:
    folder = broken()
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        Path(folder, name).unlink()
        os.mkfifo(Path(folder, name))
        assert_refused(call_command("run", folder, "-p", "x"), folder)


def test_a_chat_template_that_is_a_pipe(call_command: Command, broken: Callable[..., str]) -> None:
    templates = Path(broken(), "additional_chat_templates")
    templates.mkdir()
    os.mkfifo(templates / "default.jinja")
    done = call_command("run", str(templates.parent), "-p", "x")
    assert_refused(done, "default.jinja is a pipe, not a regular file")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_hidden_layers", 1_000_000_000, "lacks layers.999999999: its layers end"),
        ("num_hidden_layers", 10**30, "at most"),
        ("vocab_size", 1_000_000_000, "512 rows"),
        ("hidden_size", 1_000_000_000, "64 columns"),
        ("num_experts", 1_000_000_000, "4096"),
        ("head_dim", 1_000_000_000, "65536"),
        ("head_dim", 15, "must be an even number"),
        ("partial_rotary_factor", 0.2, "of which 3 are to be rotated"),
        ("num_key_value_heads", 3, "must divide"),
        ("rms_norm_eps", "x", "a number"),
        ("rms_norm_eps", float("inf"), "a number"),
        ("rope_parameters", "x", "an object"),
        ("rope_theta", "a", "a number"),
        ("rope_theta", 0, "above 0"),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}, "rope_scaling.factor"),
        ("rope_scaling", {"rope_type": ["x"]}, "a string"),
        ("tie_word_embeddings", "no", "true or false"),
        ("hidden_act", 3, "a string"),
        ("eos_token_id", -5, "a whole number of at least 0"),
        ("eos_token_id", "</s>", "a whole number of at least 0"),
        ("eos_token_id", [1, None], "a whole number of at least 0"),
        ("quantization_config", "gptq", "an object"),
    ],
)
def test_a_config_that_would_break_the_model(
    call_command: Command, broken: Callable[..., str], field: str, value: Any, named: str
) -> None:
    folder = broken(**{field: value})
    done = call_command("run", folder, "-p", "x")
    assert_refused(done, f"{folder}/config.json", field, named)


def test_a_wrong_override_is_refused_like_the_file(call_command: Command, model: Path) -> None:
    words = ("run", str(model), "-p", "x", "--hf-overrides")
    done = call_command(*words, '{"rms_norm_eps": "x"}')
    assert_refused(done, "'rms_norm_eps' is 'x'", "config.json")
    done = call_command(*words, '{"architectures": 3, "model_type": [1]}')
    assert_refused(done, "config.json", "is not supported")


def test_yarn_needs_a_factor(call_command: Command, broken: Callable[..., str]) -> None:
    folder = broken(rope_scaling={"rope_type": "yarn"})
    assert_refused(call_command("run", folder, "-p", "x"), "config.json", "'yarn'", "'factor'")


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantised_weights(call_command: Command, broken: Callable[..., str], method: str) -> None:
    folder = broken(quantization_config={"quant_method": method, "bits": 4})
    done = call_command("run", folder, "-p", "x")
    assert_refused(done, f"'{method}'", "unquantised checkpoint", "GGUF")


@pytest.mark.parametrize("asked", ["awq", "gguf", "bitsandbytes"])
def test_quantization_that_the_files_lack(call_command: Command, model: Path, asked: str) -> None:
    done = call_command("run", str(model), "-p", "x", "--quantization", asked)
    assert_refused(done, f"--quantization {asked} does not fit", "not quantised", code=2)


def test_experts_that_the_files_lack(
    call_command: Command, tiny_model: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("qwen3_moe", tokenizer=True), tmp_path / "model")
    words = ("run", str(folder), "-p", "x", "--hf-overrides.num_experts")
    assert_refused(call_command(*words, "1000000000"), "'num_experts'", "8 in a layer")


def test_a_value_that_no_check_knows(
    call_command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("unexpected")

    monkeypatch.setattr("ambidex.models.llama.Llama.__init__", fail)
    done = call_command("run", str(model), "-p", "x")
    assert_refused(done, f"{model}/config.json", "TypeError: unexpected")


def test_an_index_with_an_endless_name(call_command: Command, broken: Callable[..., str]) -> None:
    folder = broken()
    index = Path(folder, "model.safetensors.index.json")
    for name in ("x" * 5000, "a\0b"):
        index.write_text(json.dumps({"weight_map": {"t": name}}))
        done = call_command("run", folder, "-p", "x")
        assert_refused(done, str(index), "no file name")
        assert len(done.err) < 1000


def test_print_config_shows_what_has_no_effect(call_command: Command) -> None:
    done = call_command("serve", "m", "--print-config", "--gpu-memory-utilization", "0.9")
    assert done.code == 0 and "max-num-seqs" in done.out
    assert "--gpu-memory-utilization" in done.err


# --- the prompt and how to answer it --------------------------------------------------------------


def test_prompts(call_command: Command, model: Path) -> None:
    done = call_command("run", str(model), "-p", "word " * 600)
    assert_refused(done, "512 tokens", "Shorten the prompt")
    assert_refused(call_command("run", str(model), "-p", "\udcff"), "not valid Unicode")
    assert call_command("run", str(model), "-p", " \n\t", "--max-tokens", "2").code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--temperature", "nan"), "--temperature"),
        (("--temperature", "inf"), "--temperature"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--block-size", "7"), "--block-size"),
        (("--max-model-len", "0"), "--max-model-len"),
        (("--dtype", "int4"), "--dtype"),
        (("--hf-overrides", "{"), "--hf-overrides"),
        (("--config", "nope.yaml"), "nope.yaml"),
    ],
)
def test_option_values(call_command: Command, model: Path, words: Any, named: str) -> None:
    assert_refused(call_command("run", str(model), "-p", "x", *words), named, code=2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--max-tokens", "-1"), "--max-tokens"),
        (("--chat-template", "{% for %}"), "chat template"),
    ],
)
def test_parameters_out_of_range(
    call_command: Command, model: Path, words: Any, named: str
) -> None:
    done = call_command("run", str(model), "-p", "x", *words)
    assert_refused(done, named, code=done.code or 1)


# --- memory ---------------------------------------------------------------------------------------


def test_a_context_beyond_the_model(call_command: Command, model: Path) -> None:
    done = call_command("run", str(model), "-p", "x", "--max-model-len", "513")
    assert_refused(done, "513", "512", "config.json", code=2)
    assert call_command("run", str(model), "-p", "x", "--max-model-len", "512", "-n", "1").code == 0


def suggested(error: str, pattern: str) -> str:
    match = re.search(pattern, error)
    assert match, error
    return match[1]


def test_what_is_suggested_works(
    call_command: Command, model: Path, host_bytes: Callable[[int], None]
) -> None:
    """A machine where a long context does not fit: each way out that the error names does."""
    host_bytes(250 << 20)
    command = ("run", str(model), "-p", "x", "-n", "1", "--max-num-batched-tokens", "64")
    long = "--hf-overrides.max_position_embeddings=1000000"
    asked = call_command(*command, long, "--max-model-len", "1m")
    assert_refused(asked, "--max-model-len 1000000")
    length = suggested(asked.err, r"Lower it to (\d+)")
    assert call_command(*command, long, "--max-model-len", length).code == 0
    # Not asked for, it shrinks and says to what.
    free = call_command(*command, long)
    assert free.code == 0 and "instead of 1,000,000" in free.err
    # Too small a KV cache for a context that the memory could hold.
    small = call_command(*command, "--max-model-len", "512", "--kv-cache-memory-bytes", "64KiB")
    size = suggested(small.err, r"--kv-cache-memory-bytes (\d+)")
    given = ("--max-model-len", "512", "--kv-cache-memory-bytes", size)
    assert call_command(*command, *given).code == 0


def test_a_kv_cache_beyond_the_memory(
    call_command: Command, model: Path, host_bytes: Callable[[int], None]
) -> None:
    host_bytes(1 << 30)
    command = ("run", str(model), "-p", "x", "-n", "1")
    done = call_command(*command, "--kv-cache-memory-bytes", "2GiB")
    assert_refused(done, "2.00 GiB", "--kv-cache-memory-bytes")
    size = suggested(done.err, r"--kv-cache-memory-bytes (\d+)")
    assert call_command(*command, "--kv-cache-memory-bytes", size).code == 0
    assert_refused(
        call_command(*command, "--kv-cache-memory-bytes", "64"), "one block of 16 tokens"
    )


def test_weights_beyond_the_memory(
    call_command: Command,
    model: Path,
    host_bytes: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host_bytes(100_000)
    done = call_command("run", str(model), "-p", "x")
    assert_refused(done, str(model), "KiB", "host memory", "smaller model")
    # Nearly enough: what halves the weights is named.
    host_bytes(1 << 20)
    assert_refused(call_command("run", str(model), "-p", "x"), "--max-num-batched-tokens")
    monkeypatch.setattr("ambidex.runner.loader.activation_bytes", lambda *_, **__: 1000)
    monkeypatch.setattr("ambidex.runner.loader._recorded_bytes", lambda *_: {"steps": 1000})
    host_bytes(340_000)
    assert_refused(call_command("run", str(model), "-p", "x"), "--dtype bfloat16")
    done = call_command("run", str(model), "-p", "x", "-n", "1", "--dtype", "bfloat16")
    assert done.code == 0 and "tokens instead of 512" in done.err


@pytest.mark.parametrize("where", ["loading", "running"])
@pytest.mark.parametrize(
    "refusal",
    [
        MemoryError,
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
    ids=["python", "pytorch"],
)
def test_memory_that_the_system_refuses(
    call_command: Command,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    refusal: Callable[[], Exception],
) -> None:
    def refuse(*_: Any) -> None:
        # Made anew: its traceback holds the engine.
        raise refusal()

    place = "device.cpu.CPUDevice.zeros" if where == "loading" else "engine.engine.Engine.step"
    monkeypatch.setattr(f"ambidex.{place}", refuse)
    assert_refused(call_command("run", str(model), "-p", "x"), "ulimit -v")


def test_our_own_mistakes_are_not_hidden(
    call_command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("ambidex.engine.engine.Engine.step", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        call_command("run", str(model), "-p", "x")


# --- the installation -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which PyTorch is as a half-finished installation leaves it."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "raise ImportError('libtorch_cpu.so: cannot open shared object file\\nmore lines')\n"
    )
    return folder


@pytest.mark.parametrize(
    "words",
    [("--help",), ("--version",), ("pull", "--help"), ("run", "--help"),
     ("serve", "m", "--print-config")],
)  # fmt: skip
def test_a_broken_torch_breaks_no_command_that_needs_none(
    run_command: Command, broken_torch: Path, words: Any
) -> None:
    done = run_command(*words, path=broken_torch)
    assert (done.code, done.err) == (0, "") and done.out


def test_a_broken_torch_is_one_line(run_command: Command, broken_torch: Path) -> None:
    # The model is not looked for: nothing is fetched for an engine that cannot run.
    done = run_command("run", "some/model", "-p", "x", path=broken_torch)
    assert_refused(done, "PyTorch", "libtorch_cpu.so", "pip install --force-reinstall")


def test_serve_says_why_it_cannot_start(
    run_command: Command, broken_torch: Path, broken: Callable[..., str]
) -> None:
    """The engine's own sentence, from the engine's process."""
    done = run_command("serve", "m", "--port", "0", path=broken_torch)
    assert_refused(done, "PyTorch", "pip install --force-reinstall")
    done = run_command("serve", broken(hidden_size=None), "--port", "0")
    assert_refused(done, "'hidden_size'", "config.json")
