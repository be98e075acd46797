"""Options for an accelerator beside the CPU: the device, its memory, what happens to weights that
do not fit it; and what people write for lanes and machines that are not built yet.

Most of them need an accelerator (``needs_accelerator``): without one the answer is the same, so
they have no effect. A lane or a machine that is asked for by name and absent is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ambidex.config import DeviceConfig, OffloadConfig
from ambidex.errors import OptionError
from ambidex.option_types import NO_EFFECT, REFUSED, WORKS, Option
from ambidex.options_file import FileEntry

ACCELERATOR = "Accelerator and weight offload"

_NO_ACCELERATOR = "the CPU is the only lane, there is no accelerator"
_NO_OFFLOAD = "without an accelerator every weight is in host memory already"
_HOST_KV = (
    "without an accelerator the KV cache is in host memory; --kv-cache-memory-bytes or "
    "VLLM_CPU_KVCACHE_SPACE gives its size"
)
_DEVICE_KV = "KV is not moved between memories yet, a preempted request is recomputed"
_ABSENT = (
    "no such lane is built yet, and a lane that is absent is never replaced in silence. Leave the "
    "option out, or give cpu, or sim (a simulated accelerator)."
)
_NUMA = "--cpu-bind says where threads run, nodes too"


def _works(name: str, type: str, reason: str, help: str, **more: Any) -> Option:
    """An option that works beside an accelerator, and has no effect without, for ``reason``."""
    return Option(
        name,
        WORKS,
        type,
        reason=reason,
        group=ACCELERATOR,
        help=help,
        needs_accelerator=True,
        **more,
    )


ACCELERATOR_OPTIONS = (
    Option(
        "--device",
        WORKS,
        "device",
        dest="device",
        default="auto",
        group=ACCELERATOR,
        refused_values={"cuda*": _ABSENT, "gpu*": _ABSENT},
        help="auto, cpu, or sim:memory=2GiB,link=4GB/s,speed=0.25 (a simulated accelerator).",
    ),
    _works(
        "--gpu-memory-utilization",
        "float",
        _NO_ACCELERATOR,
        "Share of the accelerator's memory that this process may take.",
        dest="gpu_memory_utilization",
        default=0.92,
        low=0,
        high=1,
        unit="a fraction of the device's memory",
        aliases=("--device-memory-utilization",),
    ),
    _works(
        "--gpu-memory-limit",
        "gib",
        _NO_ACCELERATOR,
        "The same as a size: 8GiB. The smaller of the two counts.",
        dest="gpu_memory_limit_bytes",
        default_help="none",
        low=0,
    ),
    _works(
        "--num-gpu-blocks",
        "count",
        _NO_ACCELERATOR,
        "The same as --num-gpu-blocks-override.",
        dest="num_blocks",
        default_help="from the free memory",
        low=0,
        unit="blocks",
    ),
    _works(
        "--cpu-offload-gb",
        "gib",
        _NO_OFFLOAD,
        "Weights to keep in host memory: 4, 40GB; 0 forbids it. Also: --cpu-offload-size.",
        dest="cpu_offload_bytes",
        default_help="what does not fit",
        low=0,
        unit="GiB",
    ),
    _works(
        "--cpu-offload-size",
        "gib",
        _NO_OFFLOAD,
        "The same as --cpu-offload-gb.",
        dest="cpu_offload_bytes",
        low=0,
        unit="GiB",
    ),
    _works(
        "--cpu-offload",
        "flag",
        _NO_OFFLOAD,
        "Keep in host memory what does not fit, as without it; --no-cpu-offload forbids it.",
        dest="cpu_offload",
        default=True,
    ),
    _works(
        "--offload-layers",
        "list",
        _NO_OFFLOAD,
        "Which weights may go: '*.mlp', layers.40:, layers.10:20, 10-20.",
        dest="offload_patterns",
        default_help="any",
    ),
    _works(
        "--offload-mode",
        "str",
        _NO_OFFLOAD,
        "stream (copied to the accelerator), compute (by the CPU), split (both), auto.",
        dest="offload_mode",
        default="auto",
        choices=("auto", "stream", "compute", "split"),
    ),
    _works(
        "--async-cpu-offload",
        "flag",
        _NO_OFFLOAD,
        "Copy streamed weights ahead of use.",
        dest="is_async_offload",
        default=True,
    ),
    _works(
        "--offload-prefetch-step",
        "count",
        _NO_OFFLOAD,
        "How many layers are copied ahead; each takes a buffer on the accelerator.",
        dest="offload_prefetch_step",
        default_help="1",
        low=0,
        high=1024,
        unit="layers",
    ),
    _works(
        "--offload-compress",
        "flag",
        _NO_OFFLOAD,
        "Compress what is streamed, without loss, where that is faster.",
        dest="offload_compress",
        default=False,
    ),
    Option(
        "--offload-quantized",
        NO_EFFECT,
        "flag",
        # True is how it is.
        quiet=True,
        reason="weights in low bits are offloaded in low bits, as they are",
        refused_values={
            "false": "weights in low bits are offloaded in low bits, as they are: widening them "
            "on the host would only make more bytes to read. Leave it out; --quantization or "
            "another file says how weights are held, and --cpu-offload-gb 0 forbids the offload."
        },
    ),
    _works(
        "--pcie-bandwidth-limit",
        "bandwidth",
        _NO_OFFLOAD,
        "Most that copies to the accelerator may take of the link: 8 (GB/s), 8GB/s; 0: all.",
        dest="link_limit_bytes_per_s",
        default_help="none",
        low=0,
        unit="0: no limit",
        env=("VLLM_PCIE_BW_LIMIT",),
    ),
    _works(
        "--moe-expert-cache",
        "str",
        _NO_OFFLOAD,
        "Experts kept on the accelerator too: auto (by use), static (chosen once), off.",
        dest="moe_expert_cache",
        default="auto",
        choices=("auto", "static", "off"),
        normal={"none": "off", "false": "off", "dynamic": "auto", "true": "auto"},
    ),
)


def _lane(name: str, help: str) -> Option:
    """An option that names a lane: the only one there is, and auto, are what happens anyway."""
    return Option(
        name,
        REFUSED,
        reason="only the CPU lane is there, and an absent lane is never replaced in silence",
        replacement="Leave the option out, or give cpu.",
        harmless=("cpu", "auto"),
        harmless_reason="the CPU is the only lane",
        help=help,
        with_accelerator={
            "reason": "a CPU lane beside the accelerator's is not built yet",
            "replacement": "Leave the option out, or give gpu (the accelerator, whatever it is).",
            "harmless": ("gpu", "auto"),
            "harmless_reason": "the accelerator's lane is the only one",
        },
    )


HARDWARE_OPTIONS = (
    Option(
        "--swap-space",
        NO_EFFECT,
        "gib",
        low=0,
        unit="GiB",
        reason=_HOST_KV,
        with_accelerator={"reason": _DEVICE_KV},
    ),
    Option(
        "--kv-offloading-size",
        NO_EFFECT,
        "gib",
        low=0,
        unit="GiB",
        reason=_HOST_KV,
        with_accelerator={"reason": _DEVICE_KV},
    ),
    Option(
        "--kv-offloading-backend",
        NO_EFFECT,
        reason=_HOST_KV,
        with_accelerator={"reason": _DEVICE_KV},
    ),
    Option(
        "--max-prefill-len",
        NO_EFFECT,
        "count",
        low=0,
        reason="the CPU prefills every prompt",
        with_accelerator={"reason": "the accelerator prefills every prompt"},
    ),
    _lane("--prefill-device", "Lane of the prefill."),
    _lane("--decode-device", "Lane of the decode."),
    Option(
        "--decode-url",
        REFUSED,
        reason="handing a request to another machine is not built yet",
        replacement="Leave it out: this machine then decodes too.",
    ),
    Option("--numa-bind", REFUSED, "flag", reason=_NUMA, replacement="Use --cpu-bind numa:0."),
    Option(
        "--numa-bind-nodes",
        REFUSED,
        "list",
        reason=_NUMA,
        replacement="Use --cpu-bind numa:0.",
    ),
    Option(
        "--numa-bind-cpus",
        REFUSED,
        "list",
        reason=_NUMA,
        replacement="Use --cpu-bind 0-15.",
    ),
)


def device_config(values: Mapping[str, Any]) -> DeviceConfig:
    """Raises :class:`OptionError` where an accelerator would be left without any memory."""
    config = DeviceConfig(
        device=values["device"],
        gpu_memory_utilization=values["gpu_memory_utilization"],
        gpu_memory_limit_bytes=values["gpu_memory_limit_bytes"],
    )
    if config.names_accelerator:
        check_room(
            values,
            f"--device {config.device}",
            ", leave it out, or compute on the CPU alone with --device cpu",
        )
    return config


def check_room(values: Mapping[str, Any], lane: str, remedy: str = ", or leave it out") -> None:
    """Raises :class:`OptionError` where the accelerator that ``lane`` names has no memory."""
    for name, dest in (
        ("--gpu-memory-utilization", "gpu_memory_utilization"),
        ("--gpu-memory-limit", "gpu_memory_limit_bytes"),
        ("--num-gpu-blocks", "num_blocks"),
    ):
        if values[dest] == 0:
            raise OptionError(
                f"{name} 0 leaves {lane} nothing to work with. Give more than 0{remedy}."
            )


def check_file(read: Mapping[str, tuple[FileEntry, Any]]) -> None:
    """Raises :class:`OptionError` where one line of a file asks for an offload and another forbids
    it, whatever goes before the file. ``read``: by the key of its option, a line and its value."""
    lines = [
        read[key] for key in ("cpu_offload_bytes", "offload_patterns", "cpu_offload") if key in read
    ]
    asks = [entry for entry, value in lines if value]
    # True and False are 1 and 0; null and an empty list say nothing.
    forbids = [entry for entry, value in lines if value == 0]
    if asks and forbids:
        raise OptionError(
            f"{asks[0].key} ({asks[0].where}) asks for an offload, which {forbids[0].key} "
            f"({forbids[0].where}) forbids. Leave one of them out."
        )


def offload_config(values: Mapping[str, Any], sources: Mapping[str, str]) -> OffloadConfig:
    """Raises :class:`OptionError` where one option asks for an offload and another of the same
    strength forbids it; else the stronger one counts.

    ``sources`` is that of :class:`options.Resolved`.
    """
    size, patterns = values["cpu_offload_bytes"], tuple(values["offload_patterns"] or ())
    asks: list[tuple[str, str]] = []
    forbids: list[tuple[str, str]] = []
    if size is not None:
        row = ("cpu_offload_bytes", "--cpu-offload-gb" if size else "--cpu-offload-gb 0")
        (asks if size else forbids).append(row)
    if patterns:
        asks.append(("offload_patterns", "--offload-layers"))
    if not values["cpu_offload"]:
        forbids.append(("cpu_offload", "--no-cpu-offload"))
    elif sources["cpu_offload"] != "default":
        asks.append(("cpu_offload", "--cpu-offload"))
    if asks and forbids:
        asking = max(asks, key=lambda one: _strength(sources[one[0]]))
        forbidding = max(forbids, key=lambda one: _strength(sources[one[0]]))
        strengths = [_strength(sources[dest]) for dest, _ in (asking, forbidding)]
        if strengths[0] == strengths[1]:
            raise OptionError(
                f"{_said_by(asking, sources)} asks for what {_said_by(forbidding, sources)} "
                "forbids. Leave one of them out."
            )
        if strengths[0] > strengths[1]:
            size, forbids = size or None, []
    if forbids:
        size, patterns = 0, ()
    return OffloadConfig(
        cpu_offload_bytes=size,
        patterns=patterns,
        mode=values["offload_mode"],
        is_async=values["is_async_offload"],
        prefetch_step=values["offload_prefetch_step"],
        link_limit_bytes_per_s=values["link_limit_bytes_per_s"] or None,
        compress=values["offload_compress"],
        moe_expert_cache=values["moe_expert_cache"],
    )


def _strength(source: str) -> int:
    """The command line goes before the environment, that before a file."""
    kinds = ("default", "file", "environment")
    return next((rank for rank, kind in enumerate(kinds) if source.startswith(kind)), len(kinds))


def _said_by(one: tuple[str, str], sources: Mapping[str, str]) -> str:
    dest, name = one
    _, inside, place = sources[dest].partition(" (")
    return f"{name} ({place}" if inside else name
