"""Common hardware by name: what data sheets say, and which part of it is reached.

A peak stays a peak in the tables; what steps reach of it is one share for each kind of number,
stated once. ``--gpu`` and ``--cpu`` take names from here, or numbers: ``memory=24GB,...``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ambidex.errors import OptionError
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.option_types import to_size

#: What is reached of a memory's bandwidth, of a link's, and of dense arithmetic. Streaming reads
#: of well-written kernels come to 80 to 85% of HBM, GDDR and DDR alike; copies of pinned memory to
#: 25 of PCIe 4.0 x16's 31.5 GB/s; large products to 60 to 70% of a tensor core's peak.
REACHED_MEMORY = 0.8
REACHED_LINK = 0.8
REACHED_ARITHMETIC = 0.65
#: One crossing within a step; the beginning of a copy.
SYNC_S = 5e-6
COPY_S = 5e-6
#: Of an accelerator whose steps are captured: an operation, a step, a token.
GPU_FIXED_S = (2e-6, 5e-4, 1e-5)
#: Of a host: starting and ending an operation on all threads, a step, a token.
HOST_FIXED_S = (5e-6, 5e-4, 5e-5)

#: Lanes of a link, GB/s in one direction after encoding (PCI-SIG; NVIDIA for NVLink-C2C).
PCIE_LANE_GB = {3: 0.985, 4: 1.969, 5: 3.938}
NVLINK_C2C_GB = 450.0
NVLINK_C2C = 0


@dataclass(frozen=True, slots=True)
class GpuRow:
    """As on the data sheet: GB, GB/s, dense TFLOP/s (TOP/s for int8)."""

    name: str
    memory_gb: float
    bandwidth_gb: float
    fp32: float
    #: Tensor cores that add in fp32; what they multiply (T4 has no bf16: it is computed in fp32).
    fp16: float
    int8: float
    #: PCIe generation and lanes; generation NVLINK_C2C: that.
    generation: int
    lanes: int
    source: str
    #: Other names, as people write them.
    aliases: tuple[str, ...] = ()
    has_bf16: bool = True
    is_server: bool = True

    @property
    def link_gb(self) -> float:
        return _link_gb(self.generation, self.lanes)


_SHEET = "NVIDIA data sheet"
_GA102 = "NVIDIA Ampere GA102 whitepaper, and its specifications page"
_ADA = "NVIDIA Ada whitepaper, and its specifications page"
_RTX50 = "NVIDIA RTX Blackwell whitepaper, and its specifications page"


def _rtx(
    name: str,
    memory_gb: float,
    bandwidth_gb: float,
    fp32: float,
    fp16: float,
    int8: float,
    link: tuple[int, int],
    source: str,
    *aliases: str,
) -> GpuRow:
    return GpuRow(
        f"RTX {name}",
        memory_gb,
        bandwidth_gb,
        fp32,
        fp16,
        int8,
        *link,
        source,
        (name, *aliases),
        is_server=False,
    )


GPUS = (
    GpuRow("T4", 16, 320, 8.1, 65, 130, 3, 16, f"{_SHEET} of T4", has_bf16=False),
    GpuRow("L4", 24, 300, 30.3, 121, 242.5, 4, 16, f"{_SHEET} of L4 (dense)"),
    GpuRow("A10", 24, 600, 31.2, 125, 250, 4, 16, f"{_SHEET} of A10"),
    GpuRow("A10G", 24, 600, 35, 70, 140, 4, 16, "AWS data sheet of A10G"),
    GpuRow("A30", 24, 933, 10.3, 165, 330, 4, 16, f"{_SHEET} of A30"),
    GpuRow("A100-40", 40, 1555, 19.5, 312, 624, 4, 16, f"{_SHEET} of A100", ("a100 40gb",)),
    GpuRow(
        "A100-80", 80, 2039, 19.5, 312, 624, 4, 16, f"{_SHEET} of A100 (SXM)", ("a100", "a100 80gb")
    ),
    GpuRow(
        "A100-80-PCIe",
        80,
        1935,
        19.5,
        312,
        624,
        4,
        16,
        f"{_SHEET} of A100 (PCIe)",
        ("a100 80gb pcie", "a100 pcie"),
    ),
    GpuRow("L40S", 48, 864, 91.6, 362, 733, 4, 16, f"{_SHEET} of L40S (dense)"),
    GpuRow(
        "H100",
        80,
        3350,
        66.9,
        989,
        1979,
        5,
        16,
        f"{_SHEET} of H100 (SXM, dense)",
        ("h100 80", "h100 80gb", "h100 sxm", "h100 80gb hbm3"),
    ),
    GpuRow(
        "H100-PCIe",
        80,
        2000,
        51.2,
        756,
        1513,
        5,
        16,
        f"{_SHEET} of H100 (PCIe, dense)",
        ("h100 80gb pcie",),
    ),
    GpuRow(
        "H200",
        141,
        4800,
        66.9,
        989,
        1979,
        5,
        16,
        f"{_SHEET} of H200 (SXM, dense)",
        ("h200 141gb", "h200 sxm"),
    ),
    GpuRow(
        "GH200",
        96,
        4000,
        66.9,
        989,
        1979,
        NVLINK_C2C,
        1,
        f"{_SHEET} of GH200 (dense)",
        ("gh200 96gb", "grace hopper"),
    ),
    _rtx("3060", 12, 360, 12.7, 25.5, 102, (4, 16), _GA102, "3060 12gb"),
    _rtx("3070", 8, 448, 20.3, 40.6, 162.6, (4, 16), _GA102, "3070 8gb"),
    _rtx("3080", 10, 760, 29.8, 59.5, 238, (4, 16), _GA102, "3080 10gb"),
    _rtx("3090", 24, 936, 35.6, 71, 284, (4, 16), _GA102, "3090 24gb"),
    _rtx("4060", 8, 272, 15.1, 30.2, 121, (4, 8), _ADA, "4060 8gb"),
    _rtx("4060 Ti 16GB", 16, 288, 22.1, 44.1, 176.5, (4, 8), _ADA, "4060 ti"),
    _rtx("4070", 12, 504, 29.1, 58.3, 233.2, (4, 16), _ADA, "4070 12gb"),
    _rtx("4080", 16, 717, 48.7, 97.5, 389.9, (4, 16), _ADA, "4080 16gb"),
    _rtx("4090", 24, 1008, 82.6, 165.2, 660.6, (4, 16), _ADA, "4090 24gb"),
    _rtx("5070", 12, 672, 30.9, 61.7, 246.9, (5, 16), _RTX50, "5070 12gb"),
    _rtx("5080", 16, 960, 56.3, 112.6, 450.2, (5, 16), _RTX50, "5080 16gb"),
    _rtx("5090", 32, 1792, 104.8, 209.5, 838, (5, 16), _RTX50, "5090 32gb"),
)

#: Operations a cycle of one core: (float32, int8 with scales), by instruction set. Two units of
#: fused multiplication and addition; the dot products of VNNI do four times as much in 8 bits, and
#: AVX2's three instructions in their place twice. Zen 4 does AVX-512 in halves. What a processor
#: has beyond (AMX, bf16) the kernels do not use.
LEVELS = {
    "avx2": (32, 64),
    "avx2-vnni": (32, 128),
    "avx512-vnni": (64, 256),
    "avx512-halves": (32, 128),
    "neon": (32, 128),
}


@dataclass(frozen=True, slots=True)
class CpuRow:
    """As on the data sheet: one socket, all its memory channels filled."""

    name: str
    cores: int
    #: Of all cores at work; base clock of servers, all-core turbo of desktops.
    ghz: float
    channels: int
    #: Million transfers a second, of 8 bytes.
    mega_transfers: int
    level: str
    pcie: int
    source: str
    aliases: tuple[str, ...] = ()
    #: Cores that compute as much; small cores are half of one.
    full_cores: int = 0
    ram_gb: int = 256

    @property
    def bandwidth_gb(self) -> float:
        return self.channels * self.mega_transfers * 8 / 1000

    def flops(self, index: int) -> float:
        """Peak of float32 (0) or int8 (1)."""
        return (self.full_cores or self.cores) * self.ghz * 1e9 * LEVELS[self.level][index]


_ARK, _AMD = "Intel ARK", "AMD product page"

CPUS = (
    CpuRow(
        "Xeon E5-2678 v3", 12, 2.5, 4, 2133, "avx2", 3, "as sold; memory as E5-2600 v3",
        ("e5 2678 v3", "e5 2678"),
    ),
    CpuRow("Xeon Gold 6248", 20, 2.5, 6, 2933, "avx512-vnni", 3, _ARK, ("gold 6248", "6248")),
    CpuRow(
        "Xeon Platinum 8358", 32, 2.6, 8, 3200, "avx512-vnni", 4, _ARK, ("platinum 8358", "8358")
    ),
    CpuRow(
        "Xeon Platinum 8480+", 56, 2.0, 8, 4800, "avx512-vnni", 5, _ARK,
        ("platinum 8480", "8480", "8480c", "8480cl"),
    ),
    CpuRow("Xeon 6980P", 128, 2.0, 12, 6400, "avx512-vnni", 5, _ARK, ("6980p",)),
    CpuRow("EPYC 7543", 32, 2.8, 8, 3200, "avx2", 4, _AMD, ("7543",)),
    CpuRow("EPYC 7763", 64, 2.45, 8, 3200, "avx2", 4, _AMD, ("7763",)),
    CpuRow("EPYC 9354", 32, 3.25, 12, 4800, "avx512-halves", 5, _AMD, ("9354",)),
    CpuRow("EPYC 9654", 96, 2.4, 12, 4800, "avx512-halves", 5, _AMD, ("9654",)),
    CpuRow(
        "Core i9-13900K", 24, 4.9, 2, 5600, "avx2-vnni", 5, _ARK, ("i9 13900k", "13900k"), 16, 64
    ),
    CpuRow(
        "Core i7-12700K", 12, 4.5, 2, 4800, "avx2-vnni", 5, _ARK, ("i7 12700k", "12700k"), 10, 64
    ),
    CpuRow("Ryzen 7 5800X", 8, 4.5, 2, 3200, "avx2", 4, _AMD, ("ryzen 5800x", "5800x"), 0, 64),
    CpuRow(
        "Ryzen 9 7950X", 16, 5.0, 2, 5200, "avx512-halves", 5, _AMD, ("ryzen 7950x", "7950x"), 0, 64
    ),
    CpuRow(
        "Grace", 72, 3.1, 1, 48000, "neon", 5, "NVIDIA Grace tuning guide (480 GB module)",
        ("grace cpu",), 0, 480,
    ),
)  # fmt: skip

#: The host that a GPU gets where none is named, by whether it is a server's and its link.
DEFAULT_CPUS = {
    (True, 3): "Xeon Gold 6248",
    (True, 4): "EPYC 7543",
    (True, 5): "EPYC 9354",
    (True, NVLINK_C2C): "Grace",
    (False, 3): "Core i7-12700K",
    (False, 4): "Core i7-12700K",
    (False, 5): "Ryzen 9 7950X",
}

#: Words of names that say nothing here.
_NOISE = {
    *("nvidia", "geforce", "rtx", "tesla", "gpu", "amd", "intel", "cpu", "processor", "core"),
    *("xeon", "epyc", "ryzen", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e", "r", "tm"),
    *("with", "radeon", "graphics", "scalable", "gen", "12th", "13th", "14th"),
}

GPU_EXAMPLE = "memory=24GB,bandwidth=936GB/s,flops=71TFLOP/s,link=25GB/s"
CPU_EXAMPLE = "bandwidth=300GB/s,flops=3TFLOP/s,cores=32,memory=512GB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator as the cost model takes it, and the link to it as reached."""

    processor: Processor
    link: LinkRate
    #: PCIe generation and lanes; 0 lanes: the link was given as a number.
    generation: int
    lanes: int
    source: str
    is_server: bool = True
    has_bf16: bool = True

    @property
    def half(self) -> str:
        """The 16 bits that it multiplies."""
        return "bfloat16" if self.has_bf16 else "float16"


def find_gpu(text: str) -> Gpu:
    """A GPU by name (``rtx-3090``, ``NVIDIA A100 80GB``) or by numbers; OptionError otherwise."""
    if "=" in text:
        return parse_gpu(text)
    row = _find(text, {r.name: (r.name, *r.aliases) for r in GPUS}, "--gpu", "GPU", GPU_EXAMPLE)
    found = next(r for r in GPUS if r.name == row)
    rates = {"float32": found.fp32, "float16": found.fp16, "int8": found.int8}
    rates["bfloat16"] = found.fp16 if found.has_bf16 else found.fp32
    processor = _gpu_processor(
        found.name,
        int(found.memory_gb * 1e9),
        found.bandwidth_gb * 1e9 * REACHED_MEMORY,
        {form: 1e12 * rate * REACHED_ARITHMETIC for form, rate in rates.items()},
    )
    link = LinkRate(found.link_gb * 1e9 * REACHED_LINK, COPY_S)
    return Gpu(
        processor,
        link,
        found.generation,
        found.lanes,
        found.source,
        is_server=found.is_server,
        has_bf16=found.has_bf16,
    )


def find_host(text: str) -> Processor:
    """A CPU by name (``epyc-9354``) or by numbers; OptionError otherwise."""
    return _find_host(text)[0]


def _find_host(text: str) -> tuple[Processor, CpuRow | None]:
    if "=" in text:
        return parse_host(text), None
    name = _find(text, {r.name: (r.name, *r.aliases) for r in CPUS}, "--cpu", "CPU", CPU_EXAMPLE)
    row = next(r for r in CPUS if r.name == name)
    forms = ("float32", "int8")
    return _host_processor(
        row.name,
        row.ram_gb << 30,
        row.bandwidth_gb * 1e9 * REACHED_MEMORY,
        {form: row.flops(i) * REACHED_ARITHMETIC for i, form in enumerate(forms)},
        row.cores,
    ), row


def parse_gpu(text: str) -> Gpu:
    """``memory=24GB,bandwidth=936GB/s,flops=71TFLOP/s,link=25GB/s``. ``flops`` are dense, in 16
    bits; ``fp32`` and ``int8`` may be given beside them. Memory, bandwidth and arithmetic are those
    of a data sheet, of which the stated shares are reached, unless ``reached=1`` says that they are
    reached as they stand. ``link`` is what copies reach, ``pcie=4x16`` what a data sheet says.
    OptionError where a key is unknown or a number missing."""
    values = _parse("--gpu", text, _GPU_KEYS, ("memory", "bandwidth", "flops"), GPU_EXAMPLE)
    if "link" in values and "pcie" in values:
        raise OptionError(
            f"--gpu {text}: 'link' and 'pcie' both say how fast the link is. Leave one of them out."
        )
    is_reached = bool(values.get("reached", 0))
    of_memory, of_arithmetic = (1.0, 1.0) if is_reached else (REACHED_MEMORY, REACHED_ARITHMETIC)
    half = values["flops"]
    rates = {
        "float32": values.get("fp32", half / 4),
        "float16": half,
        "bfloat16": half,
        "int8": values.get("int8", half),
    }
    processor = _gpu_processor(
        "the given GPU",
        int(values["memory"]),
        values["bandwidth"] * of_memory,
        {form: rate * of_arithmetic for form, rate in rates.items()},
    )
    generation, lanes = divmod(int(values.get("pcie", 416)), 100)
    link = LinkRate(values.get("link", _link_gb(generation, lanes) * 1e9 * REACHED_LINK), COPY_S)
    return Gpu(processor, link, generation, 0 if "link" in values else lanes, "given", True)


def parse_host(text: str) -> Processor:
    """``bandwidth=300GB/s,flops=3TFLOP/s,cores=32,memory=512GB``. ``flops`` are float32;
    ``int8`` may be given beside them. Numbers are those of a data sheet unless ``reached=1``, as
    with :func:`parse_gpu`. OptionError where a key is unknown or a number missing."""
    values = _parse("--cpu", text, _HOST_KEYS, ("bandwidth", "flops"), CPU_EXAMPLE)
    is_reached = bool(values.get("reached", 0))
    of_memory, of_arithmetic = (1.0, 1.0) if is_reached else (REACHED_MEMORY, REACHED_ARITHMETIC)
    return _host_processor(
        "the given CPU",
        int(values.get("memory", 256 << 30)),
        values["bandwidth"] * of_memory,
        {
            "float32": values["flops"] * of_arithmetic,
            "int8": values.get("int8", 2 * values["flops"]) * of_arithmetic,
        },
        int(values.get("cores", 1)),
    )


def table_profile(
    gpu: str | None, cpu: str | None, ram_bytes: int | None = None
) -> HardwareProfile:
    """A machine of named (or given) parts. Without ``gpu`` it is a CPU alone; without ``cpu`` the
    GPU gets a usual one; without ``ram_bytes`` a usual size. OptionError where a name is unknown,
    or nothing is given."""
    if gpu is None and cpu is None:
        raise OptionError(
            "No hardware is named. Give --gpu NAME, --cpu NAME or --this-machine; for example "
            f"--gpu A10, or --gpu {GPU_EXAMPLE}."
        )
    device = None if gpu is None else find_gpu(gpu)
    sources = []
    if cpu is None:
        assert device is not None
        cpu = DEFAULT_CPUS[device.is_server, device.generation]
        sources.append(f"No CPU is named: {cpu} is taken; --cpu names another.")
    host, row = _find_host(cpu)
    if ram_bytes is None:
        if row is not None or "memory" not in cpu:
            size = host.memory_bytes >> 30
            sources.append(f"No size of RAM is given: {size} GiB is taken; --ram gives another.")
    else:
        host = replace(host, memory_bytes=ram_bytes)
    if row is not None:
        sources.append(f"{row.name}: {row.source}")
    shares = (
        f"reached of data sheets: {REACHED_MEMORY:.0%} of memory and links, "
        f"{REACHED_ARITHMETIC:.0%} of arithmetic"
    )
    if device is None:
        return HardwareProfile(host.name, host, sources=(*sources, shares))
    sources.append(f"{device.processor.name}: {device.source}")
    link = device.link
    # The slower end decides.
    if row is not None and device.lanes and 0 < row.pcie < device.generation:
        link = LinkRate(_link_gb(row.pcie, device.lanes) * 1e9 * REACHED_LINK, COPY_S)
        sources.append(f"The link is PCIe {row.pcie}.0 x{device.lanes}: the CPU has no faster one.")
    return HardwareProfile(
        f"{device.processor.name} with {host.name}",
        host,
        device.processor,
        link,
        link,
        SYNC_S,
        activation_bytes=2,
        sources=(*sources, shares),
    )


def _gpu_processor(
    name: str, memory_bytes: int, bytes_per_s: float, flops: Mapping[str, float]
) -> Processor:
    launch_s, step_s, token_s = GPU_FIXED_S
    return Processor(
        name,
        memory_bytes,
        bytes_per_s,
        _products(flops),
        attention_flops=flops["float16"],
        launch_s=launch_s,
        step_s=step_s,
        token_s=token_s,
    )


def _host_processor(
    name: str, memory_bytes: int, bytes_per_s: float, flops: Mapping[str, float], cores: int
) -> Processor:
    launch_s, step_s, token_s = HOST_FIXED_S
    return Processor(
        name,
        memory_bytes,
        bytes_per_s,
        _products(flops),
        launch_s=launch_s,
        step_s=step_s,
        token_s=token_s,
        num_threads=cores,
    )


def _products(flops: Mapping[str, float]) -> dict[str, ProductRate]:
    return {form: ProductRate(((1, rate),)) for form, rate in flops.items()}


def _link_gb(generation: int, lanes: int) -> float:
    return NVLINK_C2C_GB if generation == NVLINK_C2C else PCIE_LANE_GB[generation] * lanes


# --- names ------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("®", "").replace("™", ""))


def _key(text: str) -> str:
    """A name without what people write or leave out: ``AMD EPYC 7763 64-Core Processor``,
    ``Xeon(R) CPU E5-2678 v3 @ 2.50GHz``."""
    words = _words(re.sub(r"@.*|\b\d+-core\b", "", text.lower()))
    return "".join(word for word in words if word not in _NOISE) or "".join(words)


def _find(
    text: str, names: Mapping[str, Sequence[str]], option: str, kind: str, example: str
) -> str:
    """The name whose spelling ``text`` is; OptionError with the nearest ones."""
    keys = {_key(spelling): name for name, known in names.items() for spelling in known}
    key = _key(text)
    # "3090" and "rtx3090", "epyc9354" and "9354".
    for prefix in ("", "rtx", "epyc", "xeon", "ryzen", "nvidia", "geforce"):
        found = keys.get(key.removeprefix(prefix))
        if found is not None:
            return found
    near = [keys[near] for near in difflib.get_close_matches(key, keys, 6, 0.5)]
    # "epyc" is a word of several names.
    words = set(_words(text))
    near = list(dict.fromkeys(near))[:3] or [n for n in names if words & set(_words(n))]
    which = f"The nearest are {', '.join(near)}" if near else f"Known are {', '.join(names)}"
    raise OptionError(
        f"{option} {text!r} is no {kind} that is known here. {which}. Or give its numbers: "
        f"{option} {example}."
    )


# --- numbers ----------------------------------------------------------------------------------


def _bandwidth(text: str) -> float:
    return float(to_size(re.sub(r"/s(ec)?$|ps$", "", text, flags=re.IGNORECASE)))


def _flops(text: str) -> float:
    match = re.fullmatch(
        r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]?)(flops?|ops?)?(/s)?", text.strip(), re.IGNORECASE
    )
    if match is None:
        raise ValueError(text)
    power = " kmgtp".index(match[2].lower() or " ")
    return float(match[1]) * 1000.0**power


def _pcie(text: str) -> float:
    match = re.fullmatch(r"([345])(?:\.0)?\s*x\s*(1|2|4|8|16)", text.strip().lower())
    if match is None:
        raise ValueError(text)
    return int(match[1]) * 100 + int(match[2])


def _flag(text: str) -> float:
    if text not in ("0", "1"):
        raise ValueError(text)
    return float(text)


_GPU_KEYS: dict[str, Callable[[str], float]] = {
    "memory": to_size,
    "bandwidth": _bandwidth,
    "flops": _flops,
    "fp32": _flops,
    "int8": _flops,
    "link": _bandwidth,
    "pcie": _pcie,
    "reached": _flag,
}
_HOST_KEYS: dict[str, Callable[[str], float]] = {
    "bandwidth": _bandwidth,
    "flops": _flops,
    "int8": _flops,
    "cores": int,
    "memory": to_size,
    "reached": _flag,
}


#: Of what has one; a number without is far from what is meant.
_UNITS = {
    "memory": "GB",
    "bandwidth": "GB/s",
    "link": "GB/s",
    **dict.fromkeys(("flops", "fp32", "int8"), "TFLOP/s"),
}


def _parse(
    option: str,
    text: str,
    keys: Mapping[str, Callable[[str], float]],
    needed: Sequence[str],
    example: str,
) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise OptionError(
                f"{option}: '{key}' is no number of hardware.{hint} Known are {', '.join(keys)}; "
                f"for example {option} {example}."
            )
        if key in values:
            raise OptionError(f"{option}: '{key}' is given twice.")
        if keys[key] is _bandwidth and re.search(r"[KMGT]b(?!it)", value):
            raise OptionError(
                f"{option}: '{key}={value}' would be bits, and is taken in bytes: divide it by 8, "
                f"or write {key}={value.replace('b', 'B')} if bytes are meant."
            )
        try:
            if not equals or not value:
                raise ValueError(value)
            number = float(keys[key](value))
        except (ValueError, OptionError):
            raise OptionError(
                f"{option}: '{value}' is no value of '{key}'; for example {option} {example}."
            ) from None
        if key != "reached" and not 0 < number < math.inf:
            raise OptionError(f"{option}: '{key}' must be more than 0, not '{value}'.")
        if key in _UNITS and re.fullmatch(r"[0-9.]+", value):
            raise OptionError(
                f"{option}: '{key}={value}' lacks a unit: write {key}={value}{_UNITS[key]}, or "
                f"what it is; for example {option} {example}."
            )
        values[key] = number
    missing = [key for key in needed if key not in values]
    if missing:
        raise OptionError(
            f"{option} {text}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing; for example {option} {example}."
        )
    return values
