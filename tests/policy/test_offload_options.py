"""Options that need an accelerator: with one they work, without one a line says why not."""

from __future__ import annotations

import dataclasses
import shlex
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from ambidex.cli.config_file import resolve_command
from ambidex.config import DeviceConfig, EngineConfig, OffloadConfig
from ambidex.errors import OptionError
from ambidex.options import OPTIONS, Resolved, format_help, resolve, resolve_keywords

#: Line -> field of the configuration, and its value.
WITH_ACCELERATOR: list[tuple[str, str, Any]] = [
    ("--gpu-memory-utilization 0.5", "device.gpu_memory_utilization", 0.5),
    ("--device-memory-utilization 1", "device.gpu_memory_utilization", 1.0),
    ("--gpu-memory-limit 8GiB", "device.gpu_memory_limit_bytes", 8 << 30),
    ("--gpu-memory-limit 1.5", "device.gpu_memory_limit_bytes", 3 << 29),
    ("--num-gpu-blocks 1000", "cache.num_blocks", 1000),
    ("--cpu-offload-gb 4", "offload.cpu_offload_bytes", 4 << 30),
    ("--cpu-offload-gb 0.5", "offload.cpu_offload_bytes", 1 << 29),
    ("--cpu-offload-gb 0", "offload.cpu_offload_bytes", 0),
    ("--cpu-offload-size 40GB", "offload.cpu_offload_bytes", 40 * 10**9),
    ("--cpu-offload-size 100B", "offload.cpu_offload_bytes", 100),
    ("--cpu-offload --cpu-offload-size 40GB", "offload.cpu_offload_bytes", 40 * 10**9),
    ("--no-cpu-offload", "offload.cpu_offload_bytes", 0),
    (
        "--offload-layers '*.mlp' decoder.layers.40:",
        "offload.patterns",
        ("*.mlp", "decoder.layers.40:"),
    ),
    ("--offload-layers '*.mlp' --offload-layers 0:2", "offload.patterns", ("*.mlp", "0:2")),
    ("--offload-mode SPLIT", "offload.mode", "split"),
    ("--no-async-cpu-offload", "offload.is_async", False),
    ("--offload-prefetch-step 3", "offload.prefetch_step", 3),
    ("--offload-compress", "offload.compress", True),
    ("--pcie-bandwidth-limit 16", "offload.link_limit_bytes_per_s", 16e9),
    ("--pcie-bandwidth-limit 0.5", "offload.link_limit_bytes_per_s", 0.5e9),
    ("--pcie-bandwidth-limit 16GB/s", "offload.link_limit_bytes_per_s", 16e9),
    ("--pcie-bandwidth-limit 16GiB/s", "offload.link_limit_bytes_per_s", 16.0 * 2**30),
    ("--pcie-bandwidth-limit '500 MB/s'", "offload.link_limit_bytes_per_s", 500e6),
    ("--pcie-bandwidth-limit 8GB", "offload.link_limit_bytes_per_s", 8e9),
    ("--pcie-bandwidth-limit 8g", "offload.link_limit_bytes_per_s", 8e9),
    ("--moe-expert-cache static", "offload.moe_expert_cache", "static"),
    ("--moe-expert-cache none", "offload.moe_expert_cache", "off"),
]

#: What is the default anyway; without an accelerator each of them has its line too.
SAME_AS_DEFAULT = [
    "--cpu-offload",
    "--async-cpu-offload",
    "--pcie-bandwidth-limit 0",
    "--offload-mode auto",
]


def serve(line: str, env: dict[str, str] | None = None, file: Any = None) -> Resolved:
    return resolve(shlex.split(f"m {line}"), env or {}, file)


def engine(line: str, env: dict[str, str] | None = None, file: Any = None) -> EngineConfig:
    return serve(line, env, file).engine_config()


def failure(line: str, env: dict[str, str] | None = None, file: Any = None) -> str:
    with pytest.raises(OptionError) as caught:
        engine(line, env, file)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


# --- beside an accelerator ---------------------------------------------------------------------


@pytest.mark.parametrize(("line", "field", "value"), WITH_ACCELERATOR)
def test_with_an_accelerator(line: str, field: str, value: Any) -> None:
    resolved = serve(f"--device sim {line}")
    found: Any = resolved.engine_config()
    assert found != engine("--device sim")
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)
    assert resolved.notes == ()


@pytest.mark.parametrize("line", SAME_AS_DEFAULT)
def test_what_is_so_anyway(line: str) -> None:
    assert engine(f"--device sim {line}") == engine("--device sim")
    assert serve(f"--device sim {line}").notes == ()


def test_defaults() -> None:
    config = engine("")
    assert config.device == DeviceConfig() == DeviceConfig("auto", 0.92, None)
    assert config.offload == OffloadConfig()
    assert config.offload.is_async and config.offload.prefetch_step is None
    assert not config.device.names_accelerator
    assert not DeviceConfig("cpu").names_accelerator
    assert DeviceConfig("sim:memory=1GiB").names_accelerator


def test_every_field_is_set_by_some_line() -> None:
    fields = {field for _, field, _ in WITH_ACCELERATOR} | {"device.device"}
    for part, name in ((DeviceConfig, "device"), (OffloadConfig, "offload")):
        for field in dataclasses.fields(part):
            assert f"{name}.{field.name}" in fields


def test_a_device_with_settings_stays_as_it_is() -> None:
    text = "sim:memory=2GiB,link=4GB/s,latency=20us,speed=0.25,clock=virtual"
    assert engine(f"--device {text}").device.device == text
    assert engine("--device SIM").device.device == "sim"
    assert engine("--device CPU").device.device == "cpu"
    assert engine("", file={"device": "sim:speed=1"}).device.device == "sim:speed=1"


def test_keywords() -> None:
    made = resolve_keywords(
        {
            "model": "m",
            "device": "sim:memory=1GiB",
            "cpu_offload_gb": 0.5,
            "offload_layers": ["*.mlp", "layers.2:"],
            "async_cpu_offload": False,
            "gpu_memory_utilization": 0.5,
            "pcie_bandwidth_limit": 2,
        },
        {},
    )
    config = made.engine_config()
    assert made.notes == ()
    assert config.device == DeviceConfig("sim:memory=1GiB", 0.5)
    assert config.offload == OffloadConfig(
        1 << 29, ("*.mlp", "layers.2:"), is_async=False, link_limit_bytes_per_s=2e9
    )
    one = resolve_keywords({"model": "m", "device": "sim", "offload_layers": "*.mlp"}, {})
    assert one.engine_config().offload.patterns == ("*.mlp",)


def test_the_last_of_two_names_counts() -> None:
    resolved = serve("--device sim --cpu-offload-gb 1 --cpu-offload-size 2GiB")
    assert resolved.engine_config().offload.cpu_offload_bytes == 2 << 30
    assert resolved.notes == (
        "--cpu-offload-size is given after --cpu-offload-gb: the last one counts.",
    )
    blocks = engine("--device sim --num-gpu-blocks 5 --num-gpu-blocks-override 6")
    assert blocks.cache.num_blocks == 6


def test_the_device_may_come_from_anywhere(tmp_path: Path) -> None:
    # What counts is the device in the end, not where an option stands.
    assert engine("--cpu-offload-gb 1 --device sim").offload.cpu_offload_bytes == 1 << 30
    assert engine("--cpu-offload-gb 1", file={"device": "sim"}).offload.cpu_offload_bytes == 1 << 30
    file = {"device": "sim", "cpu-offload-gb": 1}
    assert engine("--device cpu", file=file).offload == OffloadConfig()
    assert "no effect here" in serve("--device cpu", file=file).notes[0]
    path = tmp_path / "c.yaml"
    path.write_text("device: sim\noffload-layers: ['*.mlp', 'layers.1:']\nmoe-expert-cache: off\n")
    offload = resolve_command(["m", "--config", str(path)], {}).engine_config().offload
    assert offload.patterns == ("*.mlp", "layers.1:") and offload.moe_expert_cache == "off"


def test_the_link_limit_from_the_environment() -> None:
    env = {"VLLM_PCIE_BW_LIMIT": "12"}
    assert engine("--device sim", env).offload.link_limit_bytes_per_s == 12e9
    both = engine("--device sim --pcie-bandwidth-limit 2", env)
    assert both.offload.link_limit_bytes_per_s == 2e9
    assert "VLLM_PCIE_BW_LIMIT 12GB/s: no effect here" in serve("", env).notes[0]
    assert "VLLM_PCIE_BW_LIMIT must be a rate" in failure("", {"VLLM_PCIE_BW_LIMIT": "fast"})


def test_reasons_fit_the_device() -> None:
    line = "--swap-space 4 -ngl 20 --max-prefill-len 5 --device-ids 0"
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    without = " ".join(serve(line, env).notes)
    beside = " ".join(serve(f"--device sim {line}", env).notes)
    for name in (
        "--swap-space",
        "-ngl",
        "--max-prefill-len",
        "--device-ids",
        "CUDA_VISIBLE_DEVICES",
    ):
        assert name in without and name in beside
    assert "there is no accelerator" in without
    assert "no accelerator" not in beside and "in host memory already" not in beside


def test_lanes_beside_an_accelerator() -> None:
    lanes = "--prefill-device gpu --decode-device auto"
    assert "the accelerator's lane is the only one" in serve(f"--device sim {lanes}").notes[0]
    assert "give gpu" in failure("--device sim --prefill-device cpu")
    assert "Use --offload-layers" in failure("--device sim --cpu-offload-params down_proj")


def test_help_shows_them() -> None:
    text = format_help("serve")
    assert "Accelerator and weight offload:" in text
    for option in OPTIONS:
        if option.needs_accelerator and option.name not in (
            "--num-gpu-blocks",
            "--cpu-offload-size",
        ):
            assert option.name in text
    rows = {
        name: value for name, value, _ in serve("--device sim --pcie-bandwidth-limit 2").explain()
    }
    assert rows["--device"] == "sim" and rows["--pcie-bandwidth-limit"] == "2GB/s"
    assert rows["--cpu-offload-gb"] == "what does not fit"


# --- without an accelerator --------------------------------------------------------------------


@pytest.mark.parametrize("device", ["", "--device auto ", "--device cpu "])
@pytest.mark.parametrize("line", [*[line for line, _, _ in WITH_ACCELERATOR], *SAME_AS_DEFAULT])
def test_without_an_accelerator_each_has_one_line(line: str, device: str) -> None:
    resolved = serve(f"{device}{line}")
    assert resolved.engine_config() == engine(device)
    (note,) = resolved.notes
    assert ": no effect here: " in note
    assert "there is no accelerator" in note or "without an accelerator" in note
    assert line.split()[0] in note


def test_an_idle_option_hides_no_working_one() -> None:
    resolved = serve("--num-gpu-blocks-override 77 --num-gpu-blocks 0")
    assert resolved.engine_config().cache.num_blocks == 77
    assert resolved.notes == (
        "--num-gpu-blocks 0: no effect here: the CPU is the only lane, there is no accelerator.",
    )


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--gpu-memory-utilization 1.5", ["between 0 and 1", "not 1.5"]),
        ("--device sim --gpu-memory-utilization 1.5", ["between 0 and 1", "not 1.5"]),
        ("--device sim --gpu-memory-utilization 0", ["--gpu-memory-utilization 0 leaves"]),
        ("--device sim --gpu-memory-limit 0", ["--gpu-memory-limit 0 leaves", "--device cpu"]),
        ("--device sim --num-gpu-blocks 0", ["--num-gpu-blocks 0 leaves"]),
        ("--device sim --gpu-memory-limit 8q", ["must be a size such as 8GiB"]),
        ("--device sim --offload-mode fast", ["auto, stream, compute, split, not 'fast'"]),
        ("--device sim --moe-expert-cache big", ["auto, static, off"]),
        ("--device sim --pcie-bandwidth-limit 16Gb/s", ["16GB/s", "the units are GB/s"]),
        ("--device sim --pcie-bandwidth-limit=-1", ["at least 0", "no limit"]),
        ("--device sim --offload-prefetch-step=-1", ["between 0 and 1024"]),
        ("--device sim --cpu-offload-gb=-1", ["at least 0"]),
        ("--device sim --cpu-offload-gb 0 --offload-layers x", ["--cpu-offload-gb 0 forbids"]),
        ("--device sim --cpu-offload --cpu-offload-gb 0", ["--cpu-offload asks", "forbids"]),
        ("--device sim --no-cpu-offload --cpu-offload-gb 1", ["--no-cpu-offload forbids"]),
        ("--device sim --no-cpu-offload --offload-layers x", ["--no-cpu-offload forbids"]),
        ("--device cuda", ["no such lane is built yet", "sim"]),
        ("--device gpu:0 --cpu-offload-gb 1", ["no such lane is built yet"]),
        ("--device rocm", ["must be one of auto, cpu, sim", "not 'rocm'", "packages here add"]),
        ("--device cpu:0", ["must be one of auto, cpu, sim"]),
        ("--device ''", ["must be one of auto, cpu, sim"]),
    ],
)
def test_wrong_values(line: str, parts: list[str]) -> None:
    message = failure(line)
    for part in parts:
        assert part in message


def test_a_device_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("warp", "package:make", "ambidex.devices")

    def entry_points(*, group: str) -> EntryPoints:
        return EntryPoints([point] if group == point.group else [])

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    config = engine("--device warp:x=1 --cpu-offload-gb 1")
    assert config.device.device == "warp:x=1" and config.offload.cpu_offload_bytes == 1 << 30
    assert "packages here add warp" in failure("--device wrap")
