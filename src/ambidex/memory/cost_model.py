"""How long a step takes, wherever its weights lie: rooflines and what overlaps, pure arithmetic.

On one processor a step is the sum of its operations, each as long as the longer of reading and
computing. With an accelerator beside the host each product runs where its weight lies:

- RESIDENT: on the device. HOST: on the host while the device waits; activations cross where a
  product of the one side follows one of the other, and around attention, which is the device's.
  SPLIT: both at once, each with its rows; then each sends its part to the other, and the longer
  path counts. That is about four synchronisations a split layer.
- What is streamed (STREAM, and some of a SPLIT's rows) is copied ahead of its use and beside the
  products, as far as the ring reaches: layers in a row that stream take the longer of their
  products and their copies, and layers before them that do not stream hide no more than fills the
  ring.
- Copies come out of the host's memory, so that what the CPU reads meanwhile comes slower, and they
  cross the device's memory twice, written and read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from ambidex.memory.compression import (
    TYPICAL_RATIO,
    decompressed_bytes_per_s,
    worth_compressing,
)
from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.operations import (
    StepLoad,
    attention_parts,
    is_head,
    is_product,
    product_parts,
    small_parts,
    step_bytes,
)
from ambidex.memory.profile import HardwareProfile, Processor
from ambidex.memory.rates import ComputeRate, LinkRate
from ambidex.memory.split import SplitTable, streamed_rows
from ambidex.memory.weight_patterns import layer_index
from ambidex.memory.weight_places import Placement, WeightKind, WeightPlace

__all__ = ["ComputeRate", "CostModel", "LinkRate", "StepLoad", "StepTime", "bound", "step_time"]

#: What can hold a step up, in words for people; also the keys of its parts.
HBM = "HBM"
DEVICE_ARITHMETIC = "device arithmetic"
DRAM = "DRAM"
HOST_ARITHMETIC = "host arithmetic"
LINK = "link"
SYNCHRONISATION = "synchronisation"
FIXED = "fixed costs"

#: Rounds until the host's reading and the copies agree on what each gets of the memory.
_ROUNDS = 6
#: Shares of streamed rows that are tried: so many over all, then around the best, twice.
_COARSE = 8
#: Steps are as good as each other within this part of their time.
_SAME = 0.005


@dataclass(frozen=True, slots=True)
class StepTime:
    """``seconds`` of a step; ``parts``: how long each resource is busy meanwhile, by name (see the
    constants above); ``limit``: the one that holds the step up most."""

    seconds: float
    limit: str
    parts: Mapping[str, float]


class _Item(NamedTuple):
    """Weights that are alike and lie alike."""

    weight: WeightShape
    placement: Placement
    #: Rows of each, and those of them that the host holds.
    num_rows: int
    host_rows: int
    is_head: bool
    number: int
    #: Of them: those whose input comes from the device, and whose result it needs even if the host
    #: alone computes it.
    num_in: int = 0
    num_out: int = 0


class _Segment(NamedTuple):
    """Layers one after the other, all of which stream, or none."""

    is_streaming: bool
    num_layers: int
    items: tuple[_Item, ...]


class _Parts(NamedTuple):
    """One of an item's products with one number of rows: seconds of reading and of arithmetic, all
    on the device or all on the host, and bytes of its input and result."""

    item: _Item
    num_tokens: int
    device: tuple[float, float]
    host: tuple[float, float]
    bytes_in: float
    bytes_out: float


class _Measured(NamedTuple):
    """A load, whatever is streamed; ``read`` and ``compute``: seconds of attention and of small
    operations, ``launches``: of starting the device's operations."""

    segments: tuple[tuple[_Segment, tuple[_Parts, ...]], ...]
    read: float
    compute: float
    launches: float


class CostModel:
    """Steps of one model on one machine, its weights in ``places`` (by path).

    On a machine without an accelerator all is on the host; without places all is on it.
    ``is_async``: copies run ahead of use; ``ring_bytes``: how far (None: as far as they like);
    ``compress``: what is streamed as a whole crosses compressed, where that is faster.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        shape: ModelShape,
        places: Mapping[str, WeightPlace] | None = None,
        *,
        link_limit: float | None = None,
        is_async: bool = True,
        ring_bytes: int | None = None,
        compress: bool = False,
    ) -> None:
        self.profile = profile
        self.shape = shape
        self.is_async = is_async
        self.ring_bytes = math.inf if ring_bytes is None else ring_bytes
        self.host = profile.host
        #: What the lane itself runs on, where its keys and values are too.
        self.lane = profile.device or profile.host
        link = profile.link or LinkRate(math.inf)
        self.link = link.limited(link_limit)
        self.link_back = profile.link_back or link
        self._dram = profile.host.total_bytes_per_s
        device_rate = self.lane.bytes_per_s
        self.decompressing = decompressed_bytes_per_s(TYPICAL_RATIO, device_rate)
        self.compresses = (
            compress
            and worth_compressing(
                TYPICAL_RATIO, self.link.bytes_per_s, self.decompressing, device_rate
            )[0]
        )
        self._segments = _segments(shape, places)
        items = [item for segment in self._segments for item in segment.items]
        self.has_split = any(item.placement is Placement.SPLIT for item in items)
        self._parts_at = lru_cache(maxsize=64)(self._measure)

    def step(self, load: StepLoad, streamed: float | SplitTable = 0.0) -> StepTime:
        """One step, of the host's rows of SPLIT weights the share ``streamed`` copied; a table has
        one by the rows of the product."""
        if self.profile.device is None:
            return self._host_step(load)
        rate = self.host.bytes_per_s
        found, copied = self._step(load, streamed, rate)
        for _ in range(_ROUNDS):
            # Copies take a part of the memory's rate while the processor reads it.
            share = copied / found.seconds if found.seconds else 0.0
            left = min(self.host.bytes_per_s, max(self._dram - share, self._dram / 4))
            if abs(left - rate) < 1e-3 * rate:
                break
            rate = left
            found, copied = self._step(load, streamed, rate)
        return found

    def seconds(self, load: StepLoad, streamed: float | SplitTable = 0.0) -> float:
        return self.step(load, streamed).seconds

    def best_share(self, load: StepLoad) -> float:
        """The share of the host's rows of SPLIT weights to copy with which a step is shortest; the
        least that is as good."""
        if not self.has_split:
            return 0.0
        tried = {n / _COARSE: self.seconds(load, n / _COARSE) for n in range(_COARSE + 1)}
        for step in (1 / (4 * _COARSE), 1 / (16 * _COARSE)):
            # Sharing has a price of its own: the best that shares may lie apart from none and all.
            between = [share for share in tried if 0.0 < share < 1.0]
            for best in {min(tried, key=tried.__getitem__), min(between, key=tried.__getitem__)}:
                for share in (best + n * step for n in (-3, -2, -1, 1, 2, 3)):
                    if 0.0 < share < 1.0:
                        tried[share] = self.seconds(load, share)
        enough = min(tried.values()) * (1 + _SAME)
        return min(share for share, seconds in tried.items() if seconds <= enough)

    def table(self, max_tokens: int, max_num_seqs: int, num_context: int) -> SplitTable:
        """The best shares by tokens per step: decodes as far as there may be so many sequences,
        then chunks of a prompt."""
        counts = [1]
        while counts[-1] * 2 < max_tokens:
            counts.append(counts[-1] * 2)
        if max_tokens > 1:
            counts.append(max_tokens)
        loads = [
            StepLoad(n, 1, num_context) if n <= max_num_seqs else StepLoad(1, n, n) for n in counts
        ]
        return SplitTable(
            tuple((n, self.best_share(load)) for n, load in zip(counts, loads, strict=True))
        )

    # --- one step ----------------------------------------------------------------------------

    def _host_step(self, load: StepLoad) -> StepTime:
        """All on the host: what ``operations.host_step_s`` adds up, by resource."""
        host, shape = self.host, self.shape
        kept = host.kept_share(step_bytes(shape, load))
        spent = dict.fromkeys((DRAM, HOST_ARITHMETIC, FIXED), 0.0)
        for item in self._segments[0].items if self._segments else ():
            rows = load.num_seqs if item.is_head else load.num_tokens
            read, compute = product_parts(host, item.weight, rows, kept=kept)
            name = DRAM if read >= compute else HOST_ARITHMETIC
            spent[name] += item.number * max(read, compute)
        for group in shape.kv:
            read, compute = attention_parts(host, shape, group, load, kept)
            spent[DRAM if read >= compute else HOST_ARITHMETIC] += max(read, compute)
        operations, small_s = small_parts(host, shape, load)
        spent[DRAM] += small_s
        spent[FIXED] = operations * host.launch_s + _fixed_s(host, load)
        limit = max(spent, key=lambda name: spent[name])
        return StepTime(sum(spent.values()), limit, {k: v for k, v in spent.items() if v})

    def _measure(self, load: StepLoad) -> _Measured:
        """What does not depend on shares: each item's parts, and what is the device's alone."""
        pairs = [attention_parts(self.lane, self.shape, kv, load) for kv in self.shape.kv]
        # Groups follow each other, and each of their operations takes the longer part.
        operations, small_s = small_parts(self.lane, self.shape, load)
        segments = []
        for segment in self._segments:
            parts = []
            for item in segment.items:
                rows = load.num_seqs if item.is_head else load.num_tokens
                if not rows:
                    continue
                weight = item.weight
                numbers = rows * self.profile.activation_bytes
                is_elsewhere = item.placement in (Placement.HOST, Placement.SPLIT)
                parts.append(
                    _Parts(
                        item,
                        rows,
                        product_parts(self.lane, weight, rows),
                        product_parts(self.host, weight, rows) if is_elsewhere else (0.0, 0.0),
                        numbers * weight.columns,
                        # Of experts the host adds up what a token chose.
                        numbers * item.num_rows / weight.num_experts,
                    )
                )
            segments.append((segment, tuple(parts)))
        return _Measured(
            tuple(segments),
            small_s + sum(a for a, b in pairs if a >= b),
            sum(b for a, b in pairs if b > a),
            operations * self.lane.launch_s,
        )

    def _shares(self, p: _Parts, streamed: float | SplitTable) -> tuple[float, float]:
        """Of one product: (rows that the host computes, rows that are copied), of all its rows."""
        item = p.item
        if item.placement is Placement.RESIDENT:
            return 0.0, 0.0
        if item.placement is Placement.HOST:
            return 1.0, 0.0
        if item.placement is Placement.STREAM:
            return 0.0, 1.0
        share = streamed.share(p.num_tokens) if isinstance(streamed, SplitTable) else streamed
        copied = streamed_rows(share, item.host_rows)
        return (item.host_rows - copied) / item.num_rows, copied / item.num_rows

    def _step(
        self, load: StepLoad, streamed: float | SplitTable, dram_rate: float
    ) -> tuple[StepTime, float]:
        """A step while the host's processor reads ``dram_rate``; also the bytes copied."""
        measured = self._parts_at(load)
        course = _Course(self, measured, self.host.bytes_per_s / dram_rate)
        for segment, parts in measured.segments:
            course.begin_segment()
            for p in parts:
                course.add_product(p, *self._shares(p, streamed))
            course.end_segment(segment)
        return course.end(_fixed_s(self.lane, load)), course.copied_bytes


class _Course:
    """One step beside an accelerator, added up product by product.

    ``slower``: how much longer the host reads because copies read beside it.
    """

    def __init__(self, model: CostModel, measured: _Measured, slower: float) -> None:
        self._model = model
        self._measured = measured
        self._slower = slower
        #: Seconds for which each resource is at work.
        self._busy = dict.fromkeys((HBM, DEVICE_ARITHMETIC, DRAM, HOST_ARITHMETIC, LINK), 0.0)
        #: Seconds of the step's course, by what they were spent on.
        self._held = dict.fromkeys((*self._busy, SYNCHRONISATION, FIXED), 0.0)
        self._total = self._synced = self._launches = self._host_bytes = 0.0
        self.copied_bytes = 0.0
        self.begin_segment()

    def begin_segment(self) -> None:
        #: What the step was spent on before.
        self._begun = dict(self._held)
        #: Of the segment: bytes over the link, copies, and seconds without waiting for them.
        self._link_bytes = self._seconds = 0.0
        self._num_copies = 0

    def add_product(self, p: _Parts, on_host: float, copied: float) -> None:
        """``on_host`` and ``copied``: shares of its rows."""
        item, number = p.item, p.item.number
        on_device = 1.0 - on_host
        read, compute = (each * on_device * number for each in p.device)
        self._busy[HBM] += read
        self._busy[DEVICE_ARITHMETIC] += compute
        limit = HBM if read >= compute else DEVICE_ARITHMETIC
        device = max(read, compute)
        if copied:
            self._num_copies += number
            device += self._copy(item, copied * item.weight.num_bytes * number)
        if not on_host:
            self._spend(limit, device)
            return
        self._share(p, on_host, limit, device)

    def _copy(self, item: _Item, num_bytes: float) -> float:
        """Send weights to the device; seconds that it takes to unpack them before the product."""
        if not (self._model.compresses and _is_compressible(item)):
            self._link_bytes += num_bytes
            return 0.0
        self._link_bytes += num_bytes / TYPICAL_RATIO
        unpack_s = num_bytes / self._model.decompressing
        self._busy[HBM] += unpack_s
        return unpack_s

    def _share(self, p: _Parts, on_host: float, device_limit: str, device: float) -> None:
        """A product with rows on the host, beside ``device`` seconds of its other rows."""
        model, item, number = self._model, p.item, p.item.number
        sync_s = model.profile.sync_s
        read, compute = (each * on_host * number for each in p.host)
        self._busy[DRAM] += read
        self._busy[HOST_ARITHMETIC] += compute
        self._host_bytes += read * model.host.bytes_per_s
        launch = model.host.launch_s * number
        self._launches += launch
        host = max(read * self._slower, compute)
        host_limit = DRAM if read * self._slower >= compute else HOST_ARITHMETIC
        # Both send their parts to each other; what the host has done alone may stay there.
        is_split = on_host < 1.0
        num_out = number if is_split else item.num_out
        out_bytes = on_host * num_out * p.bytes_out
        self._link_bytes += out_bytes
        there = item.num_in * (sync_s + p.bytes_in / model.link_back.bytes_per_s)
        crossing = there + num_out * sync_s + out_bytes / model.link.bytes_per_s
        returning = 0.0
        if is_split:
            bytes_back = (1.0 - on_host) * p.bytes_out
            returning = number * (sync_s + bytes_back / model.link_back.bytes_per_s)
        if device + returning > host + launch + crossing:
            self._spend(device_limit, device)
            crossing = returning
        else:
            self._spend(host_limit, host)
            self._spend(FIXED, launch)
        self._spend(SYNCHRONISATION, crossing)
        self._synced += crossing

    def _spend(self, name: str, seconds: float) -> None:
        self._seconds += seconds
        self._held[name] += seconds

    def end_segment(self, segment: _Segment) -> None:
        """Add the small operations of its layers, and what its copies take beyond its course."""
        model, measured, held = self._model, self._measured, self._held
        part = segment.num_layers / max(model.shape.num_layers, 1)
        self._spend(HBM, part * measured.read)
        self._spend(DEVICE_ARITHMETIC, part * measured.compute)
        self._spend(FIXED, part * measured.launches)
        link = model.link
        copy_s = self._link_bytes / link.bytes_per_s + self._num_copies * link.latency_s
        self._busy[LINK] += copy_s
        self.copied_bytes += self._link_bytes
        if not segment.is_streaming:
            self._total += self._seconds
        elif not model.is_async:
            held[LINK] += copy_s
            self._total += self._seconds + copy_s
        else:
            # What came before has filled the ring, at best.
            left = copy_s - min(self._total, model.ring_bytes / link.bytes_per_s)
            if left > self._seconds:
                self._held = {**self._begun, LINK: self._begun[LINK] + left}
            self._total += max(self._seconds, left)

    def end(self, fixed_s: float) -> StepTime:
        """``fixed_s``: what the step costs beside its operations."""
        model, busy, held = self._model, dict(self._busy), dict(self._held)
        lane, dram = model.lane, model.profile.host.total_bytes_per_s
        busy[HBM] += self._measured.read
        busy[DEVICE_ARITHMETIC] += self._measured.compute
        held[FIXED] += fixed_s
        total = self._total + fixed_s
        # Whatever the order, a memory does not give more than it can to all together.
        hbm_bytes = busy[HBM] * lane.bytes_per_s + self.copied_bytes
        shared = {HBM: hbm_bytes / lane.total_bytes_per_s}
        if self.copied_bytes:
            shared[DRAM] = (self._host_bytes + self.copied_bytes) / dram
        for name, seconds in shared.items():
            if seconds > total:
                total = held[name] = seconds
        busy[HBM] += self.copied_bytes / lane.total_bytes_per_s
        busy[DRAM] += self.copied_bytes / dram
        limit = max(held, key=lambda name: held[name])
        fixed = self._measured.launches + self._launches + fixed_s
        seconds_of = {**busy, SYNCHRONISATION: self._synced, FIXED: fixed}
        return StepTime(total, limit, {name: s for name, s in seconds_of.items() if s})


def _fixed_s(processor: Processor, load: StepLoad) -> float:
    """What a step costs beside its operations."""
    return (
        processor.step_s
        + load.num_seqs * processor.token_s
        + load.num_tokens * processor.prompt_token_s
    )


def step_time(
    profile: HardwareProfile,
    shape: ModelShape,
    places: Mapping[str, WeightPlace] | None,
    load: StepLoad,
    streamed: float | SplitTable = 0.0,
) -> StepTime:
    """One step; see :class:`CostModel`, which is for many."""
    return CostModel(profile, shape, places).step(load, streamed)


def _is_compressible(item: _Item) -> bool:
    weight = item.weight
    is_matrix = weight.kind is WeightKind.MATRIX and weight.form == "bfloat16"
    return item.placement is Placement.STREAM and is_matrix


def _segments(shape: ModelShape, places: Mapping[str, WeightPlace] | None) -> tuple[_Segment, ...]:
    """Equal weights together: 80 layers are as quick as one."""
    products = [weight for weight in shape.weights if is_product(weight)]
    # A tied head comes last, though its table comes first.
    products.sort(key=is_head)
    resident = Placement.RESIDENT
    placed = [
        places[w.path] if places is not None else WeightPlace(resident, w.module.rows)
        for w in products
    ]
    crossings = _crossings(products, placed)
    layers = [layer_index(weight.path) for weight in products]
    linked = (Placement.STREAM, Placement.SPLIT)
    streaming = {
        layer: any(p.placement in linked for _, p in group)
        for layer, group in groupby(zip(layers, placed, strict=True), lambda pair: pair[0])
    }
    found: list[_Segment] = []
    for streams, group in groupby(range(len(products)), lambda k: streaming[layers[k]]):
        items: dict[tuple[object, ...], _Item] = {}
        seen = set()
        for k in group:
            weight, place = products[k], placed[k]
            seen.add(layers[k])
            key = (
                *(weight.rows, weight.columns, weight.form, weight.num_bytes, weight.num_experts),
                *(weight.num_chosen, is_head(weight), place),
            )
            num_in, num_out = crossings[k]
            if key not in items:
                rows = weight.module.rows
                on_host = rows - place.resident_rows
                items[key] = _Item(weight, place.placement, rows, on_host, is_head(weight), 0)
            known = items[key]
            items[key] = known._replace(
                number=known.number + 1,
                num_in=known.num_in + num_in,
                num_out=known.num_out + num_out,
            )
        found.append(_Segment(streams, len(seen - {None}), tuple(items.values())))
    if len(found) > 1 and found[0].is_streaming and not found[-1].is_streaming:
        # Steps follow each other: what comes last lets the next step's first copies run ahead.
        found.insert(0, found.pop())
    return tuple(found)


def _crossings(
    products: Sequence[WeightShape], placed: Sequence[WeightPlace]
) -> list[tuple[bool, bool]]:
    """Of each product with rows on the host: whether its input is the device's alone, and whether
    the device needs its result. Attention is the device's: between the products of a module of that
    name, and so around it."""
    parents = [w.path.removesuffix(".weight").rpartition(".")[0] for w in products]
    shared = (Placement.HOST, Placement.SPLIT)
    found = []
    for k, place in enumerate(placed):
        is_attention = parents[k].endswith("attention")
        is_after = is_attention and k > 0 and parents[k - 1] == parents[k]
        before = placed[k - 1].placement if k else Placement.RESIDENT
        from_device = is_after or before not in shared
        following = placed[k + 1] if k + 1 < len(placed) else None
        to_device = (
            (is_attention and not is_after)
            or following is None
            or following.placement not in shared
            or following.resident_rows > 0
        )
        on_host = place.placement in shared
        found.append((on_host and from_device, on_host and to_device))
    return found


def bound(
    profile: HardwareProfile, shape: ModelShape, resident_bytes: float, load: StepLoad
) -> float:
    """Seconds that no step can be shorter than while ``resident_bytes`` of the weights that
    products use are on the device, whatever is streamed and computed of the others: everything at
    once, nothing waits. max((resident + 2 x streamed + KV) / HBM, GPU flops / rate, offloaded /
    DRAM, CPU flops / rate, streamed / link), the least over all shares of streamed rows.
    """
    device, host, link = profile.device, profile.host, profile.link
    assert device is not None
    assert link is not None

    def sums(processor: Processor) -> tuple[float, float]:
        read = compute = 0.0
        for weight in shape.weights:
            if not is_product(weight):
                continue
            rows = load.num_seqs if is_head(weight) else load.num_tokens
            a, b = product_parts(processor, weight, rows)
            read, compute = read + a, compute + b
        return read, compute

    device_read, device_compute = sums(device)
    _, host_compute = sums(host)
    total = device_read * device.bytes_per_s
    attention = [attention_parts(device, shape, group, load) for group in shape.kv]
    kv_s = sum(read for read, _ in attention)
    attention_s = sum(compute for _, compute in attention)
    gone = max(total - resident_bytes, 0.0)

    def seconds(streamed: float) -> float:
        computed = gone - streamed
        return max(
            (total - gone + 2 * streamed) / device.bytes_per_s + kv_s,
            device_compute * (1 - computed / total) + attention_s,
            gone / host.total_bytes_per_s,
            host_compute * computed / total,
            streamed / link.bytes_per_s,
        )

    # The greater of lines that rise and lines that fall: where it is least, halving finds.
    low, high = 0.0, gone
    for _ in range(60):
        third = (high - low) / 3
        if seconds(low + third) <= seconds(high - third):
            high -= third
        else:
            low += third
    return seconds((low + high) / 2)
