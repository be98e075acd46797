"""How long a step takes, wherever its weights lie: rooflines and what overlaps, pure arithmetic.

On one processor a step is the sum of its operations, each as long as the longer of reading and
computing. With an accelerator beside the host each product runs where its weight lies:

- RESIDENT: on the device. HOST: on the host while the device waits, and its activations cross to it
  and back. SPLIT: both at once, each with its rows, so the longer one counts; the host's path has
  both crossings.
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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.operations import (
    StepLoad,
    attention_parts,
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
    #: Of them: those whose input crosses to the host, and whose output crosses back; between the
    #: two products of an MLP nothing does.
    num_in: int
    num_out: int


class _Segment(NamedTuple):
    """Layers one after the other, all of which stream, or none."""

    is_streaming: bool
    num_layers: int
    items: tuple[_Item, ...]


class _Parts(NamedTuple):
    """Seconds of one item's products, all rows on the device or all on the host, and of crossings;
    for one number of rows."""

    item: _Item
    num_tokens: int
    device_read: float
    device_compute: float
    host_read: float
    host_compute: float
    bytes_in: float
    bytes_out: float


class CostModel:
    """Steps of one model on one machine, its weights in ``places`` (by path).

    Without places, or on a machine without an accelerator, all is on the host; a machine with one
    and no places has all weights on the accelerator. ``is_async``: copies run ahead of use;
    ``ring_bytes``: how far (None: as far as they like).
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
    ) -> None:
        self.profile = profile
        self.shape = shape
        self._is_async = is_async
        self._ring_bytes = math.inf if ring_bytes is None else ring_bytes
        self._host = profile.host
        #: What the lane itself runs on, where its keys and values are too.
        self._lane = profile.device or profile.host
        link = profile.link or LinkRate(math.inf)
        self._link = link.limited(link_limit)
        self._link_back = profile.link_back or link
        self._dram = profile.host.total_bytes_per_s
        self._segments = _segments(shape, places)
        items = [item for segment in self._segments for item in segment.items]
        self.has_split = any(item.placement is Placement.SPLIT for item in items)
        #: Operations whose start is counted with them.
        self._num_started = sum(item.number for item in items) + shape.num_layers
        self._parts_at = lru_cache(maxsize=64)(self._measure)

    def step(self, load: StepLoad, streamed: float | SplitTable = 0.0) -> StepTime:
        """One step, of the host's rows of SPLIT weights the share ``streamed`` copied; a table has
        one by the rows of the product."""
        attention, segments = self._parts_at(load)
        at = streamed if isinstance(streamed, float) else None
        rate = self._host.bytes_per_s
        found = self._step(load, attention, segments, streamed, at, rate)
        for _ in range(_ROUNDS):
            # Copies take a part of the memory's rate while the processor reads it.
            copied = found[1] / found[0].seconds if found[0].seconds else 0.0
            left = min(self._host.bytes_per_s, max(self._dram - copied, self._dram / 4))
            if abs(left - rate) < 1e-3 * rate:
                break
            rate = left
            found = self._step(load, attention, segments, streamed, at, rate)
        return found[0]

    def seconds(self, load: StepLoad, streamed: float | SplitTable = 0.0) -> float:
        return self.step(load, streamed).seconds

    def best_share(self, load: StepLoad) -> float:
        """The share of the host's rows of SPLIT weights to copy with which a step is shortest; the
        least that is as good."""
        if not self.has_split:
            return 0.0
        tried = {n / _COARSE: self.seconds(load, n / _COARSE) for n in range(_COARSE + 1)}
        for step in (1 / (4 * _COARSE), 1 / (16 * _COARSE)):
            best = min(tried, key=lambda share: tried[share])
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

    def _measure(
        self, load: StepLoad
    ) -> tuple[tuple[float, float], tuple[tuple[_Segment, tuple[_Parts, ...]], ...]]:
        """What does not depend on shares: attention over all layers, and each item's parts."""
        lane = self._lane
        kept = lane.kept_share(step_bytes(self.shape, load)) if lane.kept else 0.0
        pairs = [attention_parts(lane, self.shape, kv, load, kept) for kv in self.shape.kv]
        # Groups follow each other, and each of their operations takes the longer part.
        read = sum(a for a, b in pairs if a >= b)
        compute = sum(b for a, b in pairs if b > a)
        found = []
        for segment in self._segments:
            parts = []
            for item in segment.items:
                rows = load.num_seqs if item.is_head else load.num_tokens
                weight = item.weight
                numbers = rows * self.profile.activation_bytes
                is_elsewhere = item.placement in (Placement.HOST, Placement.SPLIT)
                host = product_parts(self._host, weight, rows) if is_elsewhere else (0.0, 0.0)
                device = product_parts(lane, weight, rows, kept=kept)
                parts.append(
                    _Parts(
                        item=item,
                        num_tokens=rows,
                        device_read=device[0],
                        device_compute=device[1],
                        host_read=host[0],
                        host_compute=host[1],
                        bytes_in=item.num_in * numbers * weight.columns,
                        # Of experts the host adds up what a token chose.
                        bytes_out=item.num_out * numbers * item.num_rows / weight.num_experts,
                    )
                )
            found.append((segment, tuple(parts)))
        return (read, compute), tuple(found)

    def _step(
        self,
        load: StepLoad,
        attention: tuple[float, float],
        segments: Sequence[tuple[_Segment, tuple[_Parts, ...]]],
        streamed: float | SplitTable,
        share: float | None,
        dram_rate: float,
    ) -> tuple[StepTime, float]:
        """A step while the host's processor reads ``dram_rate``; also the bytes copied."""
        lane, is_host_lane = self._lane, self.profile.device is None
        memory, arithmetic = (DRAM, HOST_ARITHMETIC) if is_host_lane else (HBM, DEVICE_ARITHMETIC)
        busy = dict.fromkeys((HBM, DEVICE_ARITHMETIC, DRAM, HOST_ARITHMETIC, LINK), 0.0)
        #: Seconds of the step's course, by what they were spent on.
        held = dict.fromkeys((*busy, SYNCHRONISATION, FIXED), 0.0)
        slower = self._host.bytes_per_s / dram_rate
        back_rate = self._link_back.bytes_per_s
        total = fixed = synced = copied_bytes = host_bytes = 0.0

        def spend(name: str, seconds: float) -> None:
            held[name] += seconds

        num_layers = max(self.shape.num_layers, 1)
        for segment, parts in segments:
            begun = dict(held)
            link_bytes, num_copies, course = 0.0, 0, 0.0
            for p in parts:
                item = p.item
                count = item.number
                if not p.num_tokens:
                    continue
                host_share = item.host_rows / item.num_rows
                if item.placement is Placement.RESIDENT:
                    on_device, on_host, copied = 1.0, 0.0, 0.0
                elif item.placement is Placement.HOST:
                    on_device, on_host, copied = 0.0, 1.0, 0.0
                elif item.placement is Placement.STREAM:
                    on_device, on_host, copied = 1.0, 0.0, 1.0
                else:
                    if share is None:
                        assert isinstance(streamed, SplitTable)
                        wanted = streamed.share(p.num_tokens)
                    else:
                        wanted = share
                    rows = streamed_rows(wanted, item.host_rows)
                    copied = rows / item.num_rows
                    on_host = host_share - copied
                    on_device = 1.0 - on_host
                device = max(p.device_read, p.device_compute) * on_device * count
                device += lane.launch_s * count if on_device else 0.0
                busy[memory] += p.device_read * on_device * count
                busy[arithmetic] += p.device_compute * on_device * count
                link_bytes += copied * item.weight.num_bytes * count
                num_copies += count if copied else 0
                if not on_host:
                    fixed += lane.launch_s * count
                    course += device
                    spend(memory if p.device_read >= p.device_compute else arithmetic, device)
                    continue
                read = p.host_read * on_host * count
                compute = p.host_compute * on_host * count
                busy[DRAM] += read
                busy[HOST_ARITHMETIC] += compute
                host_bytes += read * self._host.bytes_per_s
                cross = self.profile.sync_s * (item.num_in + item.num_out)
                cross += p.bytes_in / back_rate + on_host * p.bytes_out / self._link.bytes_per_s
                link_bytes += on_host * p.bytes_out
                launch = self._host.launch_s * count
                host = max(read * slower, compute)
                if on_device and device > host + launch + cross:
                    course += device
                    spend(memory if p.device_read >= p.device_compute else arithmetic, device)
                    continue
                course += host + launch + cross
                synced += cross
                fixed += launch
                spend(DRAM if read * slower >= compute else HOST_ARITHMETIC, host)
                spend(SYNCHRONISATION, cross)
                spend(FIXED, launch)
            part = segment.num_layers / num_layers
            launches = lane.launch_s * segment.num_layers
            course += part * sum(attention) + launches
            fixed += launches
            for name, seconds in zip((memory, arithmetic), attention, strict=True):
                busy[name] += part * seconds
                spend(name, part * seconds)
            copied_bytes += link_bytes
            copy_s = link_bytes / self._link.bytes_per_s + num_copies * self._link.latency_s
            busy[LINK] += copy_s
            if not segment.is_streaming or not self._is_async:
                if segment.is_streaming:
                    spend(LINK, copy_s)
                    course += copy_s
                total += course
                continue
            # What came before has filled the ring, at best.
            ahead = min(total, self._ring_bytes / self._link.bytes_per_s)
            left = copy_s - ahead
            if left > course:
                held.update(begun)
                spend(LINK, left)
            total += max(course, left)
        steps = lane.step_s + load.num_seqs * lane.token_s + load.num_tokens * lane.prompt_token_s
        if lane.small_bytes_per_s:
            # Measured: what is left beside products and attention is counted, too.
            operations, small_s = small_parts(lane, self.shape, load)
            steps += (operations - self._num_started) * lane.launch_s
            total += small_s
            busy[memory] += small_s
            spend(memory, small_s)
        total, fixed = total + steps, fixed + steps
        spend(FIXED, steps)
        hbm_read = busy[HBM]
        busy[DRAM] += copied_bytes / self._dram
        if not is_host_lane:
            busy[HBM] += copied_bytes / lane.total_bytes_per_s
        # Whatever the order, a memory does not give more than it can to all together.
        shared_dram = (host_bytes + copied_bytes) / self._dram if copied_bytes else 0.0
        shared_hbm = (hbm_read * lane.bytes_per_s + copied_bytes) / lane.total_bytes_per_s
        for name, seconds in ((DRAM, shared_dram), (HBM, 0.0 if is_host_lane else shared_hbm)):
            if seconds > total:
                total = seconds
                held[name] = seconds
        limit = max(held, key=lambda name: held[name])
        parts_s = {**busy, SYNCHRONISATION: synced, FIXED: fixed}
        return StepTime(total, limit, {k: v for k, v in parts_s.items() if v}), copied_bytes


def step_time(
    profile: HardwareProfile,
    shape: ModelShape,
    places: Mapping[str, WeightPlace] | None,
    load: StepLoad,
    streamed: float | SplitTable = 0.0,
) -> StepTime:
    """One step; see :class:`CostModel`, which is for many."""
    return CostModel(profile, shape, places).step(load, streamed)


def _is_head(weight: WeightShape) -> bool:
    return weight.kind is WeightKind.TIED or weight.path.startswith("head.")


def _segments(shape: ModelShape, places: Mapping[str, WeightPlace] | None) -> tuple[_Segment, ...]:
    """Equal weights together: 80 layers are as quick as one."""
    layers: list[tuple[int | None, list[WeightShape]]] = []
    heads = [weight for weight in shape.weights if _is_head(weight)]
    for weight in (*(w for w in shape.weights if not _is_head(w)), *heads):
        if weight.kind in (WeightKind.VECTOR, WeightKind.TABLE):
            continue  # Read in passing, or a few rows of it.
        index = layer_index(weight.path)
        if index is None or not layers or layers[-1][0] != index:
            layers.append((index, []))
        layers[-1][1].append(weight)
    found: list[tuple[bool, int, dict[tuple[object, ...], _Item]]] = []
    for index, weights in layers:
        placed = [(w, None if places is None else places[w.path]) for w in weights]
        linked = (Placement.STREAM, Placement.SPLIT)
        streams = any(place is not None and place.placement in linked for _, place in placed)
        if not found or found[-1][0] != streams:
            found.append((streams, 0, {}))
        _, count, items = found[-1]
        found[-1] = (streams, count + (index is not None), items)
        stays = False
        for number, (weight, place) in enumerate(placed):
            item = _item(weight, place)
            following = placed[number + 1][1] if number + 1 < len(placed) else None
            on_host = item.placement is Placement.HOST
            # Between an MLP's matrices activations stay where they are.
            goes_on = (
                on_host
                and (weight.is_paired or weight.kind is WeightKind.EXPERTS)
                and not stays
                and following is not None
                and following.placement is Placement.HOST
            )
            crosses = item.placement in (Placement.HOST, Placement.SPLIT)
            item = item._replace(
                num_in=int(crosses and not stays), num_out=int(crosses and not goes_on)
            )
            stays = goes_on
            key = (
                *(weight.rows, weight.columns, weight.kind, weight.form, weight.num_bytes),
                *(weight.num_experts, weight.num_chosen, *item[1:5], *item[6:]),
            )
            known = items.get(key)
            if known is None:
                items[key] = item
            else:
                items[key] = known._replace(
                    number=known.number + 1,
                    num_in=known.num_in + item.num_in,
                    num_out=known.num_out + item.num_out,
                )
    if len(found) > 1 and found[0][0] and not found[-1][0]:
        # Steps follow each other: what comes last lets the next step's first copies run ahead.
        found.insert(0, found.pop())
    return tuple(_Segment(streams, n, tuple(items.values())) for streams, n, items in found)


def _item(weight: WeightShape, place: WeightPlace | None) -> _Item:
    rows = weight.module.rows
    placement = Placement.RESIDENT if place is None else place.placement
    host_rows = 0 if place is None else rows - place.resident_rows
    return _Item(weight, placement, rows, host_rows, _is_head(weight), 1, 0, 0)


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
            if weight.kind in (WeightKind.VECTOR, WeightKind.TABLE):
                continue
            rows = load.num_seqs if _is_head(weight) else load.num_tokens
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


def with_link_limit(profile: HardwareProfile, limit: float | None) -> HardwareProfile:
    """The same machine where no more than ``limit`` bytes a second may be copied."""
    if limit is None or profile.link is None:
        return profile
    return replace(profile, link=profile.link.limited(limit))
