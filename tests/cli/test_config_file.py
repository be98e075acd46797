"""Configuration files: nested sections, what stands twice, what is wrong, and what goes first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ambidex.cli.config_file import load_config, resolve_command
from ambidex.config import EngineConfig
from ambidex.errors import OptionError
from ambidex.options import OPTIONS, Resolved
from ambidex.options_file import SECTIONS

DOCS = Path(__file__).parents[2] / "docs"

SECTIONED = """\
model: m
device: sim
gpu_offload:
  enabled: true
  cpu_memory_size: 40GB
  swap_space: 4
  offload_layers: [10-20, "*.mlp"]
scheduler:
  max_num_batched_tokens: 8k
  max_num_seqs: 32
  chunked_prefill: false
quantization:
  method: int8
  offload_quantized: true
max-model-len: 4096
"""
FLAT = """\
model: m
device: sim
cpu-offload: true
cpu-offload-gb: 40GB
swap-space: 4
offload-layers: [10-20, "*.mlp"]
max-num-batched-tokens: 8k
max-num-seqs: 32
no-enable-chunked-prefill: true
quantization: int8
max-model-len: 4096
"""


def read(tmp_path: Path, text: str, *words: str, env: dict[str, str] | None = None) -> Resolved:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return resolve_command(["m", "--config", str(path), *words], env or {})


def engine(tmp_path: Path, text: str, *words: str, **more: Any) -> EngineConfig:
    return read(tmp_path, text, *words, **more).engine_config()


def failure(tmp_path: Path, text: str, *words: str) -> str:
    with pytest.raises(OptionError) as caught:
        engine(tmp_path, text, *words)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and "c.yaml" in message
    return message


def test_sections_mean_the_options_they_name(tmp_path: Path) -> None:
    nested = engine(tmp_path, SECTIONED)
    assert nested == engine(tmp_path, FLAT)
    assert nested.offload.cpu_offload_bytes == 40 * 10**9
    assert nested.offload.patterns == ("10-20", "*.mlp")
    assert nested.scheduler.max_num_batched_tokens == 8000
    assert nested.scheduler.max_num_seqs == 32
    assert not nested.scheduler.enable_chunked_prefill
    assert nested.model.quantization == "int8"
    # What has no effect yet says so, by the name that the file has.
    (note,) = read(tmp_path, SECTIONED).notes
    assert "line 6: gpu_offload.swap_space 4GiB: no effect here" in note


def test_each_key_of_a_section_is_an_option() -> None:
    names = {option.name for option in OPTIONS}
    for keys in SECTIONS.values():
        assert {f"--{name}" for name in keys.values()} <= names


def test_dashes_and_underlines_are_alike(tmp_path: Path) -> None:
    text = SECTIONED.replace("gpu_offload", "gpu-offload").replace("chunked_p", "chunked-p")
    assert engine(tmp_path, text) == engine(tmp_path, SECTIONED)


def test_print_config_names_the_line_of_a_nested_key(tmp_path: Path) -> None:
    sources = read(tmp_path, SECTIONED).sources
    assert sources["cpu_offload_bytes"].endswith("c.yaml, line 5)")
    assert sources["quantization"].endswith("c.yaml, line 13)")


def test_quantization_is_a_word_or_a_section(tmp_path: Path) -> None:
    for text in ("quantization: int8\n", "quantization: {method: int8}\n"):
        assert engine(tmp_path, text).model.quantization == "int8"
    assert engine(tmp_path, "quantization:\n").model.quantization is None
    assert engine(tmp_path, "quantization: {}\n").model.quantization is None


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("empty", ["", " {}", " null"])
def test_an_empty_section_says_nothing(tmp_path: Path, section: str, empty: str) -> None:
    assert engine(tmp_path, f"{section}:{empty}\n") == engine(tmp_path, "")


def test_a_null_within_a_section_says_nothing(tmp_path: Path) -> None:
    text = "scheduler:\n  max_num_seqs:\n  max_num_batched_tokens: null\n"
    assert engine(tmp_path, text) == engine(tmp_path, "")


# --- enabled --------------------------------------------------------------------------------------


def test_enabled_false_forbids_the_offload_and_rests_the_section(tmp_path: Path) -> None:
    text = (
        "device: sim\ngpu_offload:\n  enabled: false\n  cpu_memory_size: 40GB\n"
        "  offload_layers: '*.mlp'\n"
    )
    resolved = read(tmp_path, text)
    offload = resolved.engine_config().offload
    assert offload.cpu_offload_bytes == 0 and offload.patterns == ()
    (note,) = resolved.notes
    assert "line 4: gpu_offload.cpu_memory_size, gpu_offload.offload_layers" in note
    assert note.endswith("gpu_offload.enabled is false.")
    # What rests must be right all the same.
    assert "line 4: gpu_offload.cpu_memory_size must be a size" in failure(
        tmp_path, text.replace("40GB", "much")
    )
    assert engine(tmp_path, text.replace("false", "true")).offload.patterns == ("*.mlp",)


@pytest.mark.parametrize("word", ["false", "no", "off", "0", '"false"'])
def test_ways_to_write_false(tmp_path: Path, word: str) -> None:
    text = f"device: sim\ngpu_offload: {{enabled: {word}, cpu_memory_size: 1}}\n"
    assert engine(tmp_path, text).offload.cpu_offload_bytes == 0


def test_what_forbids_and_asks_in_one_file_is_an_error_with_both_lines(tmp_path: Path) -> None:
    text = "device: sim\ngpu_offload: {enabled: false}\ncpu-offload-gb: 4\n"
    message = failure(tmp_path, text)
    assert "line 3" in message and "line 2" in message
    assert "cpu-offload-gb" in message and "gpu_offload.enabled" in message


@pytest.mark.parametrize("words", [(), ("--cpu-offload-gb", "2"), ("--device", "cpu")])
@pytest.mark.parametrize(
    "text",
    [
        "cpu-offload-gb: 4\nno-cpu-offload: true\n",
        "gpu_offload:\n  enabled: true\n  cpu_memory_size: 0\n",
        "offload-layers: '*.mlp'\ncpu-offload-gb: 0\n",
        "offload-layers: '*.mlp'\ncpu-offload: false\n",
    ],
)
def test_a_file_that_contradicts_itself_is_wrong_whatever_goes_before_it(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    message = failure(tmp_path, text, *words)
    assert "asks for an offload, which" in message and message.count("c.yaml, line ") == 2
    assert "forbids. Leave one of them out." in message


def test_the_command_line_wins_over_a_file_that_forbids_or_asks(tmp_path: Path) -> None:
    off = "device: sim\ngpu_offload: {enabled: false}\n"
    assert engine(tmp_path, off, "--cpu-offload-gb", "4").offload.cpu_offload_bytes == 4 << 30
    asked = engine(tmp_path, off, "--offload-layers", "*.mlp").offload
    assert (asked.cpu_offload_bytes, asked.patterns) == (None, ("*.mlp",))
    assert engine(tmp_path, off, "--cpu-offload").offload.cpu_offload_bytes is None
    on = "device: sim\ngpu_offload: {enabled: true, cpu_memory_size: 4, offload_layers: x}\n"
    for words in (("--cpu-offload-gb", "0"), ("--no-cpu-offload",)):
        offload = engine(tmp_path, on, *words).offload
        assert (offload.cpu_offload_bytes, offload.patterns) == (0, ())


# --- twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("port: 1\nport: 2\n", ("line 2: port says 2", "port on line 1 says 1")),
        (
            "max-num-seqs: 1\n\nmax_num_seqs: 2\n",
            ("line 3: max_num_seqs says 2", "max-num-seqs on line 1 says 1"),
        ),
        (
            "scheduler:\n  max_num_seqs: 3\nmax-num-seqs: 4\n",
            ("line 3: max-num-seqs says 4", "scheduler.max_num_seqs on line 2 says 3"),
        ),
        (
            "scheduler: {max_num_seqs: 3}\nscheduler: {max_num_seqs: 4}\n",
            ("line 2: scheduler.max_num_seqs says 4", "on line 1 says 3"),
        ),
        (
            "scheduler:\n  max_num_seqs: 3\n  max-num-seqs: 4\n",
            ("line 3: scheduler.max-num-seqs says 4", "on line 2 says 3"),
        ),
        (
            "quantization: int8\nquantization: {method: int4}\n",
            ("line 2: quantization.method says int4", "quantization on line 1 says int8"),
        ),
        (
            "enable-prefix-caching: true\nno-enable-prefix-caching: true\n",
            ("line 2: no-enable-prefix-caching says false", "on line 1 says true"),
        ),
        ("seed: 1\nseed:\n", ("line 2: seed says null", "seed on line 1 says 1")),
        ("served-model-name: [a]\nserved_model_name: [b]\n", ("says b", "says a")),
        ("api-key: hidden\napi_key: secret\n", ("line 2: api_key", "api-key on line 1")),
    ],
)
def test_an_option_twice_with_different_values(
    tmp_path: Path, text: str, both: tuple[str, str]
) -> None:
    message = failure(tmp_path, text)
    assert all(part in message for part in both), message
    assert "Keep one of them." in message
    assert "hidden" not in message and "secret" not in message


@pytest.mark.parametrize(
    "text",
    [
        "max-num-seqs: 3\nmax-num-seqs: 3\n",
        "max-num-seqs: 3\nmax_num_seqs: 3\n",
        "max-num-seqs: 3k\nscheduler: {max_num_seqs: 3000}\n",
        "scheduler: {max_num_seqs: 3000}\nscheduler: {max-num-seqs: 3k}\n",
        "enable-chunked-prefill: true\nno-enable-chunked-prefill: false\n",
        "quantization: int8\nquantization: {method: INT8}\n",
        "seed:\nseed: null\n",
    ],
)
def test_an_option_twice_with_one_value(tmp_path: Path, text: str) -> None:
    once = "\n".join(text.splitlines()[:1])
    assert engine(tmp_path, text) == engine(tmp_path, once)


def test_a_field_of_a_json_option_twice(tmp_path: Path) -> None:
    message = failure(tmp_path, "hf-overrides:\n  a: 1\n  a: 2\n")
    assert "line 3: the same key is given twice" in message


# --- wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        # Names.
        ("max_num_sek: 1\n", "line 1: unknown option 'max_num_sek'. The nearest option is --max-n"),
        ("scheduler:\n  max_num_sek: 1\n", "line 2: unknown key 'max_num_sek' in scheduler. The n"),
        ("gpu_offload:\n\n  enabeld: true\n", "line 3: unknown key 'enabeld' in gpu_offload."),
        ("gpu_offload: {cpu_memory: 1}\n", "The nearest key is cpu_memory_size."),
        ("scheduler: {zzz: 1}\n", "Its keys are max_num_batched_tokens, max_num_seqs and chunked"),
        ("scheduler:\n  block_size: 16\n", "It is an option of its own: write it without"),
        ("gpu_offload:\nenabled: true\n", "line 2: unknown option 'enabled'. It is a key of the s"),
        ("gpu_ofload:\n  enabled: true\n", "line 1: unknown option 'gpu_ofload'. The nearest sect"),
        ("scheduler.max_num_seqs: 3\n", "Write max_num_seqs below scheduler:"),
        ("<<: {port: 1}\n", "line 1: unknown option '<<'."),
        # Kinds.
        ("gpu_offload: 40\n", "line 1: gpu_offload is a section, with the keys enabled, cpu_mem"),
        ("gpu_offload: [1]\n", "and not [1]"),
        ("scheduler: fcfs\n", "scheduler is a section"),
        ("gpu_offload: false\n", "gpu_offload is a section"),
        ("quantization: [int8]\n", "line 1: quantization must be text, not ['int8']"),
        ("quantization: {method: {a: b}}\n", "quantization.method must be text"),
        ("quantization:\n  method: fp8\n", "line 2: quantization.method fp8 cannot be used"),
        ("quantization:\n  offload_quantized: false\n", "line 2: quantization.offload_quantized"),
        ("gpu_offload: {enabled: perhaps}\n", "gpu_offload.enabled must be true or false"),
        ("gpu_offload: {swap_space: -1}\n", "gpu_offload.swap_space must be at least 0"),
        ("scheduler:\n  max_num_seqs: [1]\n", "line 2: scheduler.max_num_seqs must be a whole n"),
        ("max-num-seqs: [1, 2]\n", "line 1: max-num-seqs must be a whole number"),
        ("scheduler:\n  max_num_seqs: {a: 1}\n", "line 2: scheduler.max_num_seqs must be a whole"),
        ("scheduler: {max_num_seqs: 2020-01-01}\n", "line 1: max_num_seqs has a value of a kind"),
        # YAML.
        ("scheduler:\n\tmax_num_seqs: 3\n", "line 2: a tab; YAML is indented with spaces"),
        ("scheduler:\n  max_num_seqs: 3\n max_num_batched_tokens: 4\n", "line 3: "),
        ("port: 1\n---\nport: 2\n", "line 2: "),
        ("max-num-seqs:\t3\n", "line 1: a tab before a value; write a space there"),
        ("~: 3\n", "line 1: the name of an option belongs before the colon, not ~"),
        (": 3\n", "line 1: the name of an option belongs before the colon, not nothing"),
        ("[a]: 3\n", "the name of an option belongs before the colon, not a list or a mapping"),
        ("scheduler: {1: 3}\n", "line 1: the name of an option belongs before the colon, not 1"),
        # Numbers that Python will not turn into text, or read.
        (f"port: {'9' * 10_000}\n", "line 1: port: a number of more than 4300 digits"),
        (f"port: [{'9' * 10_000}]\n", "line 1: port: a number of more than 4300 digits"),
        (f"port: 0x{'f' * 10_000}\n", "line 1: port"),
        (f"max-num-seqs: 0x{'f' * 10_000}\n", "not a number of thousands of digits (it is too l"),
        (f"max-num-seqs: x{'f' * 10_000}\n", "not 'xffff"),
        ("scheduler: &a {max_num_seqs: 3}\n", "line 1: &a: anchors and aliases"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, part: str) -> None:
    assert part in failure(tmp_path, text)


def test_an_empty_name_of_a_file() -> None:
    with pytest.raises(OptionError, match=r"^--config is empty\. Give a YAML file"):
        resolve_command(["m", "--config", ""], {})


def test_the_reason_why_weights_stay_quantised(tmp_path: Path) -> None:
    message = failure(tmp_path, "quantization: {offload_quantized: false}\n")
    assert "offloaded in low bits" in message and "--cpu-offload-gb 0" in message


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def refuse(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        with pytest.raises(OptionError, match=r"cannot be listed: Permission denied\. .*\.$"):
            load_config(name)


def test_a_path_within_a_folder_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(OptionError, match=r"cannot be read: Permission denied\.$"):
        load_config(str(tmp_path / "c.yaml"))


# --- precedence -----------------------------------------------------------------------------------


def test_command_line_environment_file_default(tmp_path: Path) -> None:
    text = "scheduler: {max_num_seqs: 3}\ncpu-threads: 5\n"
    assert engine(tmp_path, text).scheduler.max_num_seqs == 3
    assert engine(tmp_path, text, "--max-num-seqs", "9").scheduler.max_num_seqs == 9
    assert engine(tmp_path, text, env={"OMP_NUM_THREADS": "7"}).cpu_threads == 7
    words = ("--cpu-threads", "2")
    assert engine(tmp_path, text, *words, env={"OMP_NUM_THREADS": "7"}).cpu_threads == 2
    assert engine(tmp_path, text).cpu_threads == 5


# --- the page -------------------------------------------------------------------------------------


def test_the_example_of_the_page_is_right(tmp_path: Path) -> None:
    page = (DOCS / "configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    resolved = read(tmp_path, example)
    config = resolved.engine_config()
    assert resolved.server_config().port == 8000
    assert config.offload.cpu_offload_bytes and config.offload.patterns
    for section, keys in SECTIONS.items():
        assert f"\n{section}:\n" in example
        for key, option in keys.items():
            assert f"\n  {key}:" in example
            assert f"| `{section}.{key}` | `--{option}`" in page
