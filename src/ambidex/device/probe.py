"""What this machine really reaches, measured with the kernels that will run on it.

A probe takes a few seconds. Products are measured as a step runs them: recorded, replayed, one
after the other over weights that differ, so that those of a large set come out of memory as a
model's do. What counts is the mean of some rounds without the slowest, as for a step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ambidex.device.cpu import CPUDevice
from ambidex.device.registry import make_accelerator
from ambidex.kernels.cpu.weight_memory import WeightMemory
from ambidex.kernels.metadata import AttentionMetadata
from ambidex.kernels.quantized import Quantized
from ambidex.kernels.table import Kernels, Weight
from ambidex.memory.cost_model import ComputeRate, LinkRate
from ambidex.memory.operations import (
    ATTENTION_LAUNCHES,
    BLOCK_QUERIES,
    HALF_TILE,
    attention_flops,
    fit_reading,
)
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.device.base import Accelerator
    from ambidex.kernels.cpu.topology import ThreadPlan

# --------------------------------------------------------------------- constants of the host
# Three of at most eight; the others are in ``memory/operations.py``. In the time of ``_work()``,
# a piece of Python that stands for this machine's speed at it.
#: A step outside native code: what is scheduled, handed to the lane's thread, and accounted for.
STEP_WORK = 16.0
#: Each token that a step puts out.
TOKEN_WORK = 0.4
#: Each token of a prompt: it is listed, and copied.
PROMPT_TOKEN_WORK = 0.01


#: So many have work enough with a matrix.
_THREADS_A_MATRIX = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    #: Rows and columns of a matrix.
    matrix: tuple[int, int] = (1152, 896)
    #: What no cache holds, at least and for each thread, and what the nearest shared one does.
    large_bytes: int = 192 << 20
    large_bytes_a_thread: int = 16 << 20
    small_bytes: int = 4 << 20
    #: Sets that are read over and over, to see how much of them caches keep: shares of the large.
    sets: tuple[float, ...] = (1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
    rows: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 256)
    rows_from_memory: tuple[int, ...] = (1, 2, 4, 8, 16)
    #: Of a prompt's step, whose inputs and outputs no cache holds.
    rows_of_prompts: int = 2048
    rows_for_inputs: int = 64
    #: Of attention: tokens that single ones look back at, and those of a prompt.
    context: int = 1024
    prompt: int = 256
    rounds: int = 3

    def on(self, num_threads: int) -> Sizes:
        """The same where so many threads share the work and have caches."""
        rows, columns = self.matrix
        return replace(
            self,
            matrix=(rows * -(-num_threads // _THREADS_A_MATRIX), columns),
            large_bytes=max(self.large_bytes, num_threads * self.large_bytes_a_thread),
        )


FULL = Sizes()
#: Everything once, for tests.
SHORT = Sizes(
    matrix=(256, 128),
    large_bytes=4 << 20,
    large_bytes_a_thread=0,
    small_bytes=1 << 20,
    sets=(0.25, 0.5),
    rows=(1, 4, 16),
    rows_from_memory=(1, 4),
    rows_of_prompts=128,
    rows_for_inputs=16,
    context=128,
    prompt=64,
    rounds=1,
)

#: Heads of a KV head in attention of single tokens, and the queries of a block of a prompt.
_SHARED = (1, 3, 7)
_HEAD_DIM = 64
_KV_HEADS = 2
_BLOCK_SIZE = 16
#: Calls are timed that often, in each of the rounds.
_LEAST_TIMES = 8
#: Of all calls, those whose times are left out.
_DISTURBED = 0.05

_ROUNDS = 3
# Larger than caches, small enough to be read in a few milliseconds.
_READ_BYTES = 64 << 20
_MATRIX = 768
_MATRIX_ROWS = 128


def core_rate(kernels: Kernels) -> ComputeRate:
    """What ``kernels``, with one thread, read out of memory and multiply in float32: the best of a
    few short rounds, some tens of milliseconds."""
    columns = 1024
    table = kernels.pack(torch.ones(_READ_BYTES // 4 // columns, columns))
    row = torch.ones(1, columns)
    read_s = _best_s(lambda: kernels.linear(row, table), _ROUNDS)
    matrix = kernels.pack(torch.ones(_MATRIX, _MATRIX))
    rows = torch.ones(_MATRIX_ROWS, _MATRIX)
    product_s = _best_s(lambda: kernels.linear(rows, matrix), _ROUNDS)
    return ComputeRate(_READ_BYTES / read_s, 2.0 * _MATRIX_ROWS * _MATRIX**2 / product_s)


def measure_host(
    device: CPUDevice,
    name: str,
    memory_bytes: int,
    sizes: Sizes = FULL,
) -> Processor:
    """The host as ``device``'s kernels and threads see it. Called in a thread that may be pinned:
    ``device.prepare_thread`` is called. Takes seconds, and ``sizes.large_bytes`` of memory."""
    device.prepare_thread()
    if device.kernels.name != "native":
        # For looking into what goes wrong: a plain roofline has to do.
        rate = core_rate(device.kernels)
        products = {"float32": ProductRate(((1, rate.flops),))}
        return Processor(
            name,
            memory_bytes,
            rate.bytes_per_s,
            products,
            num_threads=device.num_threads,
            gathers_kv=device.kernels.gathers_kv,
        )
    with torch.inference_mode():
        return _HostProbe(device, sizes.on(device.num_threads)).measure(name, memory_bytes)


def measure_machine(
    config: EngineConfig,
    plan: ThreadPlan,
    name: str,
    memory_bytes: int,
    known: HardwareProfile | None = None,
    sizes: Sizes = FULL,
) -> HardwareProfile:
    """The host, with the threads of ``plan``, unless it is ``known``; and the accelerator that
    ``config`` asks for."""
    if known is None:
        host = CPUDevice(plan.num_threads, cpus=plan.cpus, nodes=plan.nodes, within=plan.within)
        try:
            processor = measure_host(host, name, memory_bytes, sizes)
        finally:
            host.close()
        sources = (f"measured here, {plan.num_threads} threads",)
        known = HardwareProfile(name, processor, origin="measured", sources=sources)
    if not config.device.names_accelerator:
        return known
    processor = known.host
    core = ComputeRate(
        processor.reads_by_threads[0][1],
        processor.product("float32").flops(_MATRIX_ROWS) / plan.num_threads,
    )
    accelerator = make_accelerator(config.device.device, lambda: core, ())
    try:
        device = measure_device(accelerator)
        link, back = measure_link(accelerator)
    finally:
        accelerator.close()
    return HardwareProfile(
        f"{name} + {device.name}",
        processor,
        device,
        link,
        back,
        link.latency_s,
        origin="measured",
        sources=known.sources,
    )


def measure_device(device: Accelerator) -> Processor:
    """An accelerator, as far as it knows itself."""
    rate = device.rate
    return Processor(
        name=device.name,
        memory_bytes=device.ledger.capacity_bytes,
        bytes_per_s=rate.bytes_per_s,
        products={"float32": ProductRate(((1, rate.flops),))},
        launch_s=rate.launch_s,
        gathers_kv=device.kernels.gathers_kv,
    )


def measure_link(device: Accelerator, num_bytes: int = 64 << 20) -> tuple[LinkRate, LinkRate]:
    """The link to ``device`` and back, on its own clock: what large copies reach, and what a small
    one takes longer than that. It must have some memory free."""
    small = 4096
    num_bytes = max(min(num_bytes, device.ledger.free_bytes // 2), 16 * small)
    held = device.ledger.reserve("staging", "probe", num_bytes)
    try:
        return _measure_link(device, small, num_bytes)
    finally:
        device.ledger.release(held)


def _measure_link(device: Accelerator, small: int, num_bytes: int) -> tuple[LinkRate, LinkRate]:
    on_device = device.empty((num_bytes,), torch.uint8, "staging")
    on_host = torch.zeros(num_bytes, dtype=torch.uint8)

    def copy_s(inward: bool, size: int) -> float:
        there, here = on_device[:size], on_host[:size]
        pair = (there, here) if inward else (here, there)
        stream = device.copy_in if inward else device.copy_out
        times = []
        for _ in range(_ROUNDS):
            began = stream.record().reached()
            copied = device.copy(*pair, "probe")
            copied.wait()
            times.append(copied.reached() - began)
        return min(times)

    found = []
    for inward in (True, False):
        short_s, long_s = copy_s(inward, small), copy_s(inward, num_bytes)
        rate = (num_bytes - small) / max(long_s - short_s, 1e-9)
        found.append(LinkRate(rate, max(short_s - small / rate, 0.0)))
    device.synchronize()
    return found[0], found[1]


class _HostProbe:
    def __init__(self, device: CPUDevice, sizes: Sizes) -> None:
        self._device = device
        self._kernels: Any = device.kernels
        self._sizes = sizes
        self._max_rows = max(*sizes.rows, sizes.prompt, sizes.rows_of_prompts)
        self._ids = torch.zeros(self._max_rows, dtype=torch.int64)
        self._input = torch.full((self._max_rows, sizes.matrix[1]), 0.5)
        self._residual = torch.full((self._max_rows, sizes.matrix[0]), 0.5)
        # The content of weights does not matter: every form has the same memory, as weights have.
        self._memory = WeightMemory().take(sizes.large_bytes).zero_()
        #: The most bytes a second that came out of memory, arithmetic included.
        self._read = 0.0

    def measure(self, name: str, memory_bytes: int) -> Processor:
        self._warm_up()
        launch_s = self._launch_s()
        small = self._small_by_rows(launch_s)
        products = {}
        for form, weight in self._weights().items():
            products[form] = self._product_rate(weight, launch_s)
        widest = self._weights()["float32"]
        kept = self._kept(widest, products["float32"], launch_s)
        attention = {
            form: self._attention_rate(dtype, launch_s)
            for form, dtype in (("float32", torch.float32), ("float16", torch.float16))
        }
        work_s = _best_s(_work, 20 * self._sizes.rounds)
        return Processor(
            name=name,
            memory_bytes=memory_bytes,
            bytes_per_s=self._read,
            products=products,
            launch_s=launch_s,
            step_s=STEP_WORK * work_s,
            token_s=TOKEN_WORK * work_s,
            prompt_token_s=PROMPT_TOKEN_WORK * work_s,
            num_threads=self._device.num_threads,
            attention=attention,
            small_bytes_per_s=small[-1][1],
            small_by_rows=small,
            attention_task_s=self._attention_task_s(launch_s),
            kept=kept,
            reads_by_threads=self._reads_by_threads(widest, self._read),
        )

    # ------------------------------------------------------------------------------ products

    def _weights(self) -> dict[str, Weight]:
        """One matrix of each form, as files have them."""
        rows, columns = self._sizes.matrix
        matrix = torch.full((rows, columns), 0.01)
        kernels = self._kernels
        weights = {
            name: kernels.pack(matrix.to(dtype))
            for name, dtype in (
                ("float32", torch.float32),
                ("bfloat16", torch.bfloat16),
                ("float16", torch.float16),
            )
        }
        for bits in (8, 6, 5, 4):
            weights[f"int{bits}"] = kernels.pack(_low_bit(rows, columns, bits))
        return weights

    def _product_rate(self, weight: Weight, launch_s: float) -> ProductRate:
        """Of one form: by rows where caches hold the weights, and how reading out of memory adds
        to that where there are few rows."""
        sizes = self._sizes
        num_rows, columns = weight.shape
        flops = 2.0 * num_rows * columns
        # Low bits are quickest: enough of them for a clock.
        near = self._products(self._copies(weight, sizes.small_bytes) * 2)
        seconds = {rows: self._each_s(near, rows, launch_s) for rows in sizes.rows}
        few = self._products(self._copies(weight, 0) * 4)
        long = sizes.rows_of_prompts
        seconds[long] = max(few.seconds(self._ids, long, 1) - launch_s, 1e-9)
        # A matrix with a quarter of the outputs has the same inputs.
        cut = num_rows // 4 // 16 * 16
        short = self._products([part.rows(0, cut) for part in self._copies(weight, 0)] * 8)
        many = sizes.rows_for_inputs
        whole_s, cut_s = seconds[many], self._each_s(short, many, launch_s)
        shared_s = (cut_s - whole_s * cut / num_rows) / (1 - cut / num_rows)
        input_s = min(max(shared_s, 0.0), whole_s / 4) / (many * columns)
        points = tuple(
            (rows, flops * rows / max(seconds[rows] - input_s * columns * rows, seconds[rows] / 2))
            for rows in (*sizes.rows, long)
        )
        far = self._products(self._copies(weight, sizes.large_bytes))
        times = [
            (seconds[rows], self._each_s(far, rows, launch_s)) for rows in sizes.rows_from_memory
        ]
        read_s, overlap = fit_reading(times)
        self._read = max(self._read, weight.num_bytes / times[0][1])
        return ProductRate(points, weight.num_bytes / read_s, overlap, input_s)

    def _kept(
        self, weight: Weight, rate: ProductRate, launch_s: float
    ) -> tuple[tuple[float, float], ...]:
        """What caches keep of sets of bytes."""
        in_cache_s = 2.0 * weight.shape[0] * weight.shape[1] / rate.flops(1)
        in_cache_s += rate.input_s * weight.shape[1]
        from_memory_s = weight.num_bytes / rate.bytes_per_s
        kept, share = [], 1.0
        for part in self._sizes.sets:
            num_bytes = int(part * self._sizes.large_bytes)
            run = self._products(self._copies(weight, num_bytes))
            measured = self._each_s(run, 1, launch_s)
            # The part of the reading that hides behind arithmetic is not seen.
            low, high = 0.0, 1.0
            for _ in range(20):
                middle = (low + high) / 2
                if rate.together((1 - middle) * from_memory_s, in_cache_s) > measured:
                    low = middle
                else:
                    high = middle
            # Noise apart, more bytes are not kept better.
            share = min(share, low)
            kept.append((float(num_bytes), share))
        # What is kept of the large one is taken for none.
        return (*kept, (float(self._sizes.large_bytes), 0.0))

    def _reads_by_threads(
        self, weight: Weight, all_threads: float
    ) -> tuple[tuple[int, float], ...]:
        """Bytes a second that fewer threads read: by powers of two."""
        device = self._device
        found = []
        for count in (2**power for power in range(device.num_threads.bit_length())):
            if count < device.num_threads:
                kernels: Any = type(self._kernels)(count, device.cpus[:count], self._kernels.level)
                copies = self._copies(weight, self._sizes.large_bytes)
                run = _Run(kernels, self._max_rows, self._calls(kernels, copies))
                found.append((count, weight.num_bytes / self._each_s(run, 1, 0.0)))
        return (*found, (device.num_threads, all_threads))

    def _calls(self, kernels: Any, weights: Sequence[Weight]) -> list[Callable[[], Tensor]]:
        """As a model has them: half of a layer's arithmetic is gate and up, which end in an
        activation, and the products after those add a residual."""
        made: list[Callable[[], Tensor]] = []
        for number, weight in enumerate(weights):
            if number % 2:
                residual = self._residual[:, : weight.shape[0]]
                made.append(partial(kernels.linear, self._input, weight, None, residual))
            else:
                made.append(partial(kernels.gated_linear, self._input, weight, "silu"))
        return made

    def _copies(self, weight: Weight, num_bytes: int) -> list[Weight]:
        """So many of ``weight`` that they have about ``num_bytes``, side by side."""
        at = 0

        def move(piece: Tensor) -> Tensor:
            nonlocal at
            size = piece.numel() * piece.element_size()
            area = self._memory[at : at + size]
            at += -(-size // 64) * 64
            flat = piece.flatten()
            moved = area.view(flat.dtype)
            moved.copy_(flat)
            return moved.view(piece.shape)

        return [weight.moved(move) for _ in range(max(1, num_bytes // (weight.num_bytes + 64)))]

    def _products(self, weights: Sequence[Weight]) -> _Run:
        return _Run(self._kernels, self._max_rows, self._calls(self._kernels, weights))

    def _each_s(self, run: _Run, rows: int, launch_s: float) -> float:
        """Seconds of each call of ``run``, its launch apart."""
        return max(run.seconds(self._ids, rows, self._sizes.rounds) - launch_s, 1e-9)

    # ------------------------------------------------------------------------------ the others

    def _launch_s(self) -> float:
        """Of an operation that has next to nothing to do."""
        x, weight = torch.ones(self._max_rows, 16), torch.ones(16)
        calls = [partial(self._kernels.rms_norm, x, weight, 1e-6)] * 200
        run = _Run(self._kernels, self._max_rows, calls)
        # Short enough for many rounds, of which some are undisturbed.
        return run.seconds(self._ids, 1, 10 * self._sizes.rounds)

    def _warm_up(self) -> None:
        """Compute for a moment: processors that were idle are slower at first."""
        run = self._products(self._copies(self._weights()["float32"], 0))
        until = time.perf_counter() + 0.1 * self._sizes.rounds
        while time.perf_counter() < until:
            run.seconds(self._ids, self._max_rows, 1)

    def _small_by_rows(self, launch_s: float) -> tuple[tuple[int, float], ...]:
        """Norms: what is read and written a second, by the rows of a step."""
        width = self._sizes.matrix[1]
        most = self._sizes.rows_of_prompts
        # Out of memory where a step is large: what another core has just written is no nearer.
        num = max(2, self._sizes.large_bytes // (4 * most * width))
        parts = self._memory[: num * 4 * most * width].view(torch.float32).view(num, most, width)
        weight = torch.ones(width)
        calls = [partial(self._kernels.rms_norm, x, weight, 1e-6) for x in parts]
        run = _Run(self._kernels, most, calls)
        return tuple(
            (rows, 8.0 * rows * width / self._each_s(run, rows, launch_s))
            for rows in (1, 4, 16, 64, most)
        )

    def _attention_task_s(self, launch_s: float) -> float:
        """What one sequence and KV head takes beside its tokens, with all threads at work."""
        short, long = self._sizes.context // 8, self._sizes.context
        times = [
            self._attention_s(torch.float16, 3, 1, context, self._sizes.small_bytes)
            for context in (short, long)
        ]
        # Tokens that are computed come in whole tiles.
        at_none = times[0] - (times[1] - times[0]) * short / (long - short)
        threads = min(self._device.num_threads, _KV_HEADS)
        own_s = max(at_none - ATTENTION_LAUNCHES * launch_s, 0.0)
        return own_s * threads / _KV_HEADS / self._device.num_threads

    def _attention_rate(self, dtype: torch.dtype, launch_s: float) -> ProductRate:
        sizes = self._sizes
        points, times = [], []
        for shared in _SHARED:
            near_s = self._attention_s(dtype, shared, 1, sizes.context, sizes.small_bytes)
            flops = attention_flops(sizes.context + HALF_TILE, _KV_HEADS * shared, _HEAD_DIM)
            # Where others hold the cores a launch takes longer than it did.
            own_s = max(near_s - ATTENTION_LAUNCHES * launch_s, near_s / 2)
            points.append((shared, flops / own_s))
            times.append(
                (near_s, self._attention_s(dtype, shared, 1, sizes.context, sizes.large_bytes // 2))
            )
        num_bytes = 2 * _KV_HEADS * _HEAD_DIM * sizes.context * dtype.itemsize
        read_s, overlap = fit_reading(times)
        shared = 4
        seconds = self._attention_s(dtype, shared, sizes.prompt, sizes.prompt, 0)
        pairs = sizes.prompt * ((sizes.prompt + 1) / 2 + HALF_TILE)
        flops = attention_flops(pairs, _KV_HEADS * shared, _HEAD_DIM)
        points.append((BLOCK_QUERIES, flops / seconds))
        return ProductRate(tuple(points), num_bytes / read_s, overlap)

    def _attention_s(
        self, dtype: torch.dtype, shared: int, num_new: int, context: int, num_bytes: int
    ) -> float:
        """Seconds of one layer's attention of ``num_new`` tokens in ``context``, ``shared`` heads
        to a KV head; so many layers that they have ``num_bytes``."""
        kernels = self._kernels
        num_blocks = -(-context // _BLOCK_SIZE)
        layout = kernels.kv_layout(_KV_HEADS, (num_blocks + 1) * _BLOCK_SIZE, _HEAD_DIM, dtype)
        layer_bytes = sum(math.prod(shape) * kind.itemsize for shape, kind in layout)
        caches = []
        for _ in range(max(2, num_bytes // layer_bytes)):
            # In memory as the real ones; pages that were never written are one page of zeros.
            parts = tuple(self._device.zeros(shape, kind, "kv_cache") for shape, kind in layout)
            for part in parts:
                part.fill_(0.01)
            caches.append(parts)
        query = torch.ones(self._max_rows, _KV_HEADS * shared, _HEAD_DIM)
        metadata = AttentionMetadata(
            _BLOCK_SIZE, num_blocks, None, [0, num_new], [context], [list(range(num_blocks))]
        )

        calls = [
            partial(kernels.attention, query, cache, metadata, _HEAD_DIM**-0.5) for cache in caches
        ]
        run = _Run(kernels, self._max_rows, calls, metadata)
        return run.seconds(self._ids, num_new, self._sizes.rounds)


class _Run:
    """Calls that are alike, recorded one after the other, as a step runs them.

    Each is timed by itself, and what counts is the mean, as it is for a step, which is many of
    them; but for the slowest, on which falls what other programs do in between. Few calls get more
    rounds.
    """

    def __init__(
        self,
        kernels: Any,
        max_rows: int,
        calls: Sequence[Callable[[], Tensor]],
        metadata: AttentionMetadata | None = None,
    ) -> None:
        self._kernels, self._calls, self._metadata = kernels, calls, metadata
        self._recording = kernels.record(max_rows, max_rows + 1, self._record)

    def _record(self, _: int) -> tuple[Tensor, Tensor]:
        for call in self._calls:
            out = call()
        return out, self._kernels.take_logit_rows(out, [])

    def seconds(self, ids: Tensor, rows: int, rounds: int) -> float:
        """Of one call, with that many rows."""
        kernels = self._kernels
        kernels.set_step(ids, ids, rows)
        kernels.set_logit_rows([])
        if self._metadata is not None:
            kernels.set_metadata(self._metadata)
        # The first round takes the memory that results need.
        num_calls = len(self._calls)
        rounds = max(rounds + 1, rounds * _LEAST_TIMES // num_calls)
        _, *replays = (self._recording.replay_timed()[:num_calls] for _ in range(rounds))
        times = sorted(seconds for replay in replays for seconds in replay)
        return statistics.fmean(times[: max(1, int(len(times) * (1 - _DISTURBED)))])


def _low_bit(rows: int, columns: int, bits: int) -> Quantized:
    """As common files have it: groups of 32, scales of two bytes, and minima below 6 bits."""
    groups = -(-columns // 32)
    codes = torch.full((rows, columns), 2 ** (bits - 1), dtype=torch.uint8)
    scale = torch.full((rows, groups), 0.01, dtype=torch.float16)
    if bits > 5:
        return Quantized("probe", bits, 32, codes, scale=scale, zero=2 ** (bits - 1))
    return Quantized("probe", bits, 32, codes, scale=scale, minimum=-scale)


def _work() -> int:
    """A piece of Python such as schedulers are made of, about a tenth of a millisecond."""
    table: dict[int, list[int]] = {}
    for number in range(400):
        table.setdefault(number % 37, []).append(number)
    return sum(len(values) for values in table.values() if values)


def _best_s(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
