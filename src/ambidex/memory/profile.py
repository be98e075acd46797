"""What hardware does in a second, as far as the speed of a model depends on it: plain numbers.

A profile comes from the table of common hardware (``hardware_table.py``) or was measured on this
machine (``device/probe.py``); nobody else may know which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ambidex.memory.rates import LinkRate

#: Forms of weights that a processor may have rates of its own for, the widest first. ``intN`` are
#: those of N bits with scales, whatever file they came from; the host multiplies them with
#: activations in 8 bits.
WEIGHT_FORMS = ("float32", "bfloat16", "float16", "int8", "int6", "int5", "int4")


@dataclass(frozen=True, slots=True)
class ProductRate:
    """Arithmetic operations a second (two a multiplication and addition) that a product reaches
    where memory does not hold it up, by the number of its rows (tokens): pairs, ascending. Few rows
    often reach less than many."""

    points: tuple[tuple[int, float], ...]
    #: Reading of what it multiplies with, out of memory; 0: as fast as any other.
    bytes_per_s: float = 0.0
    #: How well reading and arithmetic hide behind each other: both take
    #: ``(reading^overlap + arithmetic^overlap) ^ (1 / overlap)``; at infinity the longer one.
    overlap: float = math.inf
    #: Seconds that each number of the inputs takes beside that, however many outputs it has: low
    #: bits are multiplied with rounded inputs.
    input_s: float = 0.0

    def flops(self, rows: float) -> float:
        """Between two points the seconds of a row change evenly."""
        assert self.points
        low = self.points[0]
        for high in self.points:
            if rows <= high[0]:
                if high[0] == low[0]:
                    return high[1]
                share = (rows - low[0]) / (high[0] - low[0])
                before, after = low[0] / low[1], high[0] / high[1]
                return rows / (before + share * (after - before)) if rows else high[1]
            low = high
        return low[1]

    def scaled(self, factor: float) -> ProductRate:
        """Of a processor ``factor`` times as fast."""
        points = tuple((rows, flops * factor) for rows, flops in self.points)
        return ProductRate(points, self.bytes_per_s * factor, self.overlap, self.input_s / factor)

    def together(self, read_s: float, compute_s: float) -> float:
        """Seconds of reading and arithmetic that go on beside each other."""
        shorter, longer = sorted((read_s, compute_s))
        if not shorter or math.isinf(self.overlap):
            return longer
        return float(longer * (1 + (shorter / longer) ** self.overlap) ** (1 / self.overlap))


@dataclass(frozen=True, slots=True)
class Processor:
    """Something that multiplies, and its memory. At most eight of the numbers are constants that
    no data sheet and no probe gives."""

    name: str
    #: Of its memory.
    memory_bytes: int
    #: Reading of its memory, as reached, not as on the data sheet.
    bytes_per_s: float
    #: By form of weights; a form that is missing is as fast as the next wider one.
    products: Mapping[str, ProductRate]
    #: Attention of many tokens at once, in operations a second; 0: as a float32 product.
    attention_flops: float = 0.0
    #: Attention of single tokens reads keys and values at this rate; 0: as other memory.
    kv_bytes_per_s: float = 0.0
    #: A fixed cost of each operation, of each step outside its operations, and of each token that
    #: a step puts out, in seconds.
    launch_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    #: Cores or threads that compute; 0: a device on its own.
    num_threads: int = 0
    #: Attention by the form of keys and values ("float32", "float16"), where it was measured; its
    #: rows are the queries that share a key: tokens times heads of a KV head.
    attention: Mapping[str, ProductRate] = field(default_factory=dict)
    #: Norms, rotations and other operations that touch every number once; 0: as other memory.
    small_bytes_per_s: float = 0.0
    #: The same by the rows of a step (few are one thread's work): pairs, ascending.
    small_by_rows: tuple[tuple[int, float], ...] = ()
    #: What attention takes for each sequence and KV head of a layer beside its tokens, in seconds.
    attention_task_s: float = 0.0
    #: The share of a step's bytes that caches keep until the next step, by those bytes: pairs,
    #: ascending; empty: none.
    kept: tuple[tuple[float, float], ...] = ()
    #: Reading of memory by the number of threads: pairs, ascending.
    reads_by_threads: tuple[tuple[int, float], ...] = ()
    #: A fixed cost of each token of a prompt, in seconds.
    prompt_token_s: float = 0.0
    #: What its memory gives to everyone together, copies over the link included; 0: no more than
    #: the processor alone reads.
    shared_bytes_per_s: float = 0.0
    #: Whether its attention copies keys and values before it reads them, which takes memory.
    gathers_kv: bool = False

    @property
    def total_bytes_per_s(self) -> float:
        """Of its memory, for everyone together."""
        return max(self.shared_bytes_per_s, self.bytes_per_s)

    def product(self, form: str) -> ProductRate:
        """The rate for weights of ``form``."""
        index = WEIGHT_FORMS.index(form)
        for name in (*reversed(WEIGHT_FORMS[: index + 1]), *WEIGHT_FORMS):
            if name in self.products:
                return self.products[name]
        raise AssertionError(f"{self.name} has no rate at all")

    def attention_rate(self, form: str) -> ProductRate | None:
        """The rate for keys and values of ``form``; None where it was not measured. Types of two
        bytes are alike."""
        for name in (form, "float16" if form != "float32" else "float32", *self.attention):
            if name in self.attention:
                return self.attention[name]
        return None

    def small_rate(self, rows: float) -> float:
        """Bytes a second of operations that touch every number of ``rows`` rows once."""
        if self.small_by_rows:
            return ProductRate(self.small_by_rows).flops(rows)
        return self.small_bytes_per_s or self.bytes_per_s

    def kept_share(self, num_bytes: float) -> float:
        """The share of a step's ``num_bytes`` that caches still hold from the step before."""
        low = (0.0, 1.0)
        for high in self.kept:
            if num_bytes <= high[0]:
                share = (num_bytes - low[0]) / (high[0] - low[0])
                return low[1] + share * (high[1] - low[1])
            low = high
        return 0.0


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The host, and the accelerator beside it if there is one."""

    name: str
    host: Processor
    device: Processor | None = None
    #: To the device, and from it.
    link: LinkRate | None = None
    link_back: LinkRate | None = None
    #: One crossing within a step: what is left of the latency when host and device hand over.
    sync_s: float = 0.0
    #: table | measured
    origin: str = "table"
    #: Where the numbers are from: a line each.
    sources: tuple[str, ...] = field(default=())
    #: Of a number of activations where it crosses the link.
    activation_bytes: int = 4
