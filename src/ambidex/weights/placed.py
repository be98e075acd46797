"""Kernels over two memories: each product runs where its weight lies.

A weight's rows (output features) may be resident on the accelerator, copied to it ahead of use, or
multiplied with on the host; the parts of one product run at the same time. Results of the host stay
there until something on the accelerator needs them, so that between the two matrices of an MLP on
the host nothing crosses the link; ``crossing.py`` says what does. Every kernel treats a row of a
weight alone, so the tokens are the same wherever it lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ambidex.device.queued import QueuedKernels, memory_of, num_bytes, rows_of
from ambidex.weights.crossing import Crossings
from ambidex.weights.placed_weight import (
    PANEL_ROWS,
    ROW_UNIT,
    Ordered,
    Place,
    PlacedWeight,
    Uncut,
    ring_bytes,
    row_ranges,
)
from ambidex.weights.streamer import StagedRows, Streamer

if TYPE_CHECKING:
    from ambidex.device.base import Accelerator, Event
    from ambidex.kernels.metadata import AttentionMetadata
    from ambidex.kernels.quantized import Quantized
    from ambidex.kernels.rows import TensorRows
    from ambidex.kernels.table import Weight
    from ambidex.weights.compressed import Compression
    from ambidex.weights.expert_slots import ExpertSlots, SharedExperts


class HostTable(Protocol):
    """What packing on the host's side needs of its kernel table."""

    def temporary_weights(self) -> contextlib.AbstractContextManager[None]:
        """Weights packed within lie in memory that is freed with them."""

    def stack(self, parts: list[Any]) -> Any:
        """Packed matrices, one below the other, as one."""

    def keep(self, pieces: list[Tensor]) -> Tensor:
        """Copy bytes, one piece behind the other, into the memory of weights that stay."""

    def room(self, num_bytes: int) -> Tensor:
        """That much of it, to be written to."""

    def packed_in(self, memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Any:
        """The matrix of numbers that lies packed in ``memory``."""


class PlacedKernels:
    """The kernel table of a lane whose accelerator works together with the host.

    ``host``: the host's table, on a stream of its own.
    """

    can_record = False

    def __init__(self, device: Accelerator, host: QueuedKernels, inner: HostTable) -> None:
        self._device = device
        self._kernels = cast("QueuedKernels", device.kernels)
        self._host = host
        self._inner = inner
        self.name = device.name
        self.description = f"{device.kernels.description}, and the host's {host.inner.description}"
        self.row_pad = device.kernels.row_pad
        self.gathers_kv = device.kernels.gathers_kv
        self.ACTIVATIONS: Mapping[str, Any] = device.kernels.ACTIVATIONS
        self._streamer: Streamer | None = None
        self._experts: ExpertSlots | None = None
        #: Of weights whose place says so; None: they stay as they are.
        self.compression: Compression | None = None
        #: Weights with rows on the host, in the order of execution.
        self._order: list[Ordered] = []
        self._crossings = Crossings(device, host)
        #: Rows of weights by where they were multiplied with.
        self.num_rows = {"resident": 0, "streamed": 0, "host": 0}

    @property
    def host(self) -> QueuedKernels:
        """The host's table, on its stream."""
        return self._host

    @property
    def num_activation_bytes(self) -> int:
        """Bytes of activations that crossed the link."""
        return self._crossings.num_bytes

    @property
    def streamer(self) -> Streamer | None:
        """None where nothing is streamed."""
        return self._streamer

    @property
    def experts(self) -> ExpertSlots | None:
        """None where no experts of the host are cached."""
        return self._experts

    # ---------------------------------------------------------------- weights

    def pack(self, weight: Tensor | Quantized | TensorRows, precise: bool = False) -> Weight:
        return self.place([weight], precise, None)

    def packed_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return self._kernels.packed_bytes(shape, dtype)

    def pack_table(self, weight: Tensor | Quantized | TensorRows) -> Weight:
        return self.place([weight], True, None)

    def pack_head(self, table: Weight) -> Weight:
        return table

    def head_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return 0

    def pack_parts(
        self, parts: Sequence[Tensor | Quantized | TensorRows], precise: bool = False
    ) -> Weight:
        return self.place(parts, precise, None)

    def unpack_gguf(self, name: str, type_name: str, rows: Any, columns: int) -> Quantized | None:
        return self._host.unpack_gguf(name, type_name, rows, columns)

    def place(
        self,
        parts: Sequence[Tensor | Quantized | TensorRows],
        precise: bool,
        place: Place | None,
        is_paired: bool = False,
    ) -> Any:
        """Pack a matrix and put its rows where ``place`` says; None: all on the accelerator.

        Beside what is held in the end it takes the host's memory for this one matrix.
        """
        if place is not None and not place.resident_rows:
            kept = self._keep_on_host(parts, precise, place.is_compressed)
            if is_paired and kept.shape[0] // 2 % PANEL_ROWS:
                place = Uncut(place, kept.shape[0] // 2)
            return PlacedWeight(kept.shape, is_paired, None, kept, place.streamed_rows)
        rows = rows_of(parts)
        if rows is not None and not is_paired:
            return self._place_rows(rows, place)
        with self._inner.temporary_weights():
            whole = self._host.pack_parts(parts, precise)
            num_rows = whole.shape[0] // (2 if is_paired else 1)
            if place is not None and is_paired and num_rows % PANEL_ROWS:
                # The second half does not begin where a weight can be cut.
                place = Uncut(place, num_rows)
            count = num_rows if place is None else min(place.resident_rows, num_rows)
            resident = host = None
            if count:
                ranges = row_ranges(0, count, num_rows, is_paired)
                resident = whole.gather(ranges, self._store)
            if count < num_rows:
                host = whole.gather(
                    row_ranges(count, num_rows, num_rows, is_paired), self._inner.keep
                )
            shape = whole.shape
            del whole
        if host is None:
            return resident
        assert place is not None
        return PlacedWeight(shape, is_paired, resident, host, place.streamed_rows)

    def _place_rows(self, rows: TensorRows, place: Place | None) -> Any:
        """The same for a matrix of which some rows are read, packed and put in their place at a
        time."""
        num_rows, columns = rows.shape
        count = num_rows if place is None else min(place.resident_rows, num_rows)

        def part(
            start: int, end: int, memory: Tensor, write: Callable[[Tensor, Tensor], object]
        ) -> Any:
            for first, block in rows.blocks(start, end):
                at = self.packed_bytes((first - start, columns), rows.dtype)
                with self._inner.temporary_weights():
                    for piece in memory_of(self._host.pack(block)):
                        data = piece.flatten().view(torch.uint8)
                        write(memory[at : at + len(data)], data)
            return self._inner.packed_in(memory, (end - start, columns), rows.dtype)

        resident = host = None
        if count:
            size = self.packed_bytes((count, columns), rows.dtype)
            there = self._device.empty((size,), torch.uint8, "weights")
            resident = part(0, count, there, self._device.write)
        if place is None or count == num_rows:
            return resident
        size = self.packed_bytes((num_rows - count, columns), rows.dtype)
        host = part(count, num_rows, self._inner.room(size), Tensor.copy_)
        return PlacedWeight(rows.shape, False, resident, host, place.streamed_rows)

    def _keep_on_host(
        self, parts: Sequence[Tensor | Quantized | TensorRows], precise: bool, is_compressed: bool
    ) -> Any:
        """A matrix that stays on the host as a whole, packed where it stays."""
        if self.compression is None or not is_compressed:
            return self._host.pack_parts(parts, precise)
        with self._inner.temporary_weights():
            whole = self._host.pack_parts(parts, precise)
            made = self.compression.compress(whole, self._host, self._inner.keep)
            return made or whole.gather([(0, whole.shape[0])], self._inner.keep)

    def _store(self, pieces: list[Tensor]) -> Tensor:
        stored = self._device.empty((num_bytes(pieces),), torch.uint8, "weights")
        end = 0
        for piece in pieces:
            self._device.write(stored[end : end + piece.numel()], piece)
            end += piece.numel()
        return stored

    def set_order(self, order: Sequence[Ordered], streamer: Streamer | None) -> None:
        """Weights with rows on the host, in the order of execution."""
        layers = [item for item in order if not item.is_head]
        largest = ring_bytes(layers, 1, 1) if streamer is not None else 0
        for item in order:
            weight = item.weight
            row_bytes = weight.host_bytes / max(weight.num_host, 1)
            if item.is_head and 0 < largest < weight.host_bytes:
                units = max(int(largest / row_bytes / ROW_UNIT), 1)
                weight.piece_rows = units * ROW_UNIT
        self._order = list(order)
        self._streamer = streamer

    def set_experts(self, experts: ExpertSlots | None) -> None:
        """The accelerator's cache of the host's experts; None: the host computes all of them."""
        self._experts = experts

    def begin_step(self, num_tokens: int, num_logits: int) -> None:
        """Tell how many rows the step's products have."""
        if self._experts is not None:
            self._experts.begin_step(num_tokens)
        if self._streamer is None:
            return
        order = []
        for item in self._order:
            rows = num_logits if item.is_head else num_tokens
            count = item.weight.streamed_rows(rows) if rows else 0
            if count:
                pieces = item.weight.pieces(count)
                order += [item.weight.staged(end, start) for start, end in pieces]
        self._streamer.begin_step(order)

    def set_filled_rows(self, count: int) -> None:
        """Tell how many rows of the step that has begun are requests'; the others fill it up."""
        if self._experts is not None:
            self._experts.num_filled_rows = count

    def counts(self) -> dict[str, int]:
        """What has been launched so far, by name."""
        counts = {f"rows_{place}": count for place, count in self.num_rows.items()}
        counts["activation_bytes"] = self.num_activation_bytes
        if self._streamer is not None:
            counts |= self._streamer.counts()
        if self._experts is not None:
            counts |= self._experts.counts()
        return counts

    def add_counts(self, counts: Mapping[str, int]) -> None:
        for place in self.num_rows:
            self.num_rows[place] += counts[f"rows_{place}"]
        self._crossings.num_bytes += counts["activation_bytes"]
        if self._streamer is not None:
            self._streamer.add_counts(counts)

    def arrivals(self) -> dict[StagedRows, Event]:
        """See ``Streamer.arrivals``."""
        return {} if self._streamer is None else self._streamer.arrivals()

    def set_arrivals(self, events: Mapping[StagedRows, Event]) -> None:
        """See ``Streamer.set_arrivals``."""
        if self._streamer is not None:
            self._streamer.set_arrivals(events)

    def end_step(self) -> None:
        """Tell that all of the step has been launched."""
        if self._streamer is not None:
            self._streamer.end_step()

    def close(self) -> None:
        """End the host's stream, and let go of what lies on the device."""
        self._host.stream.close()
        self._crossings.close()
        self._order.clear()
        self._streamer = self._experts = None

    # ---------------------------------------------------------------- crossing the link

    def put(self, x: Tensor) -> Tensor:
        """``x``, of the host, on the accelerator."""
        return self._to_device(x)

    def fetch(self, x: Tensor) -> Tensor:
        """``x`` in the host's memory, computed."""
        if self._device.owns(x) and x.numel():
            self._crossings.num_bytes += num_bytes([x])
            return self._device.to_host(x)
        self._host.stream.record().wait()
        if not x.numel():
            # A step whose results nobody reads: what has failed in it has to show all the same.
            self._device.compute.record().wait()
        return x

    def _to_device(self, x: Tensor) -> Tensor:
        return self._crossings.to_device(x)

    def _to_host(self, x: Tensor) -> Tensor:
        return self._crossings.to_host(x)

    def _on_host(self, *operands: Tensor | None) -> bool:
        """Whether none of them lies on the accelerator."""
        return not any(x is not None and self._device.owns(x) for x in operands)

    # ---------------------------------------------------------------- products

    def linear(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(weight, PlacedWeight):
            x, residual = self._to_device(x), self._optional(residual)
            self.num_rows["resident"] += weight.shape[0]
            return self._kernels.linear(x, weight, bias, residual)
        return self._product(
            x,
            weight,
            bias,
            residual,
            lambda table, x, part, bias, residual: table.linear(x, part, bias, residual),
        )

    def gated_linear(
        self, x: Tensor, weight: Any, activation: str, bias: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, PlacedWeight):
            self.num_rows["resident"] += weight.shape[0]
            return self._kernels.gated_linear(self._to_device(x), weight, activation, bias)
        return self._product(
            x,
            weight,
            bias,
            None,
            lambda table, x, part, bias, _: table.gated_linear(x, part, activation, bias),
        )

    def _product(
        self,
        x: Tensor,
        weight: PlacedWeight,
        bias: Tensor | None,
        residual: Tensor | None,
        multiply: Callable[[QueuedKernels, Tensor, Any, Tensor | None, Tensor | None], Tensor],
    ) -> Tensor:
        """Each part of ``weight`` where its rows are, the host's first, so that it begins early;
        then side by side on the accelerator, and on the host if it goes on there. All of it stays
        on the host where that is the only part."""
        resident, total = weight.num_resident, weight.num_rows
        streamed = weight.streamed_rows(len(x)) if len(x) else 0
        computed = weight.num_host - streamed
        self.num_rows["resident"] += resident * weight.halves
        self.num_rows["streamed"] += streamed * weight.halves
        self.num_rows["host"] += computed * weight.halves

        def part_of_bias(start: int, end: int, on_host: bool) -> Tensor | None:
            if bias is None:
                return None
            ranges = row_ranges(start, end, total, weight.is_paired)
            return self._crossings.constant(bias, ranges, on_host)

        of_host = arrive = None
        if computed:
            is_all = not resident and not streamed
            adds = is_all and self._on_host(residual)
            of_host = multiply(
                self._host,
                self._to_host(x),
                weight.on_host(streamed, self._inner.stack),
                part_of_bias(resident + streamed, total, True),
                residual if adds else None,
            )
            if is_all:
                self._crossings.note_product(of_host)
                return of_host if adds or residual is None else self.add(of_host, residual)
            # Before the accelerator's parts are launched: it is under way while they run.
            arrive = self._crossings.begin(of_host)
        x = self._to_device(x)
        # Where one part is all of it, it adds the residual itself.
        num_parts = bool(resident) + bool(computed) + len(weight.pieces(streamed))
        alone = residual if num_parts == 1 else None
        alone = self._optional(alone)
        parts = []
        if resident:
            bias_part = part_of_bias(0, resident, False)
            parts.append(multiply(self._kernels, x, weight.resident, bias_part, alone))
        if streamed:
            assert self._streamer is not None, "nothing was said of streaming"
            for start, end in weight.pieces(streamed):
                bias_part = part_of_bias(resident + start, resident + end, False)
                with self._streamer.use(weight.staged(end, start)) as staged:
                    parts.append(multiply(self._kernels, x, staged, bias_part, alone))
        out = parts[0] if len(parts) == 1 else self._kernels.join(parts)
        if of_host is not None and arrive is not None:
            out = self._join_sides(out, of_host, arrive)
        return out if residual is None or alone is not None else self.add(out, residual)

    def _join_sides(
        self, of_device: Tensor, of_host: Tensor, arrive: Callable[[], Tensor]
    ) -> Tensor:
        """Parts of a product side by side, on the accelerator; and on the host if asked."""
        is_computed = self._device.compute.record()
        out = self._kernels.join([of_device, arrive()])

        def on_host() -> Tensor:
            return self._host.join([self._crossings.fetch_after(of_device, is_computed), of_host])

        self._crossings.mirror(out, on_host, [])
        return out

    def embedding(self, token_ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        """A table that is not on the accelerator is looked up on the host."""
        if not isinstance(weight, PlacedWeight):
            return self._kernels.embedding(self._to_device(token_ids), weight, scale)
        assert weight.resident is None, "a table is not cut"
        self.num_rows["host"] += len(token_ids)
        return self._host.embedding(self._to_host(token_ids), weight.host, scale)

    def moe(
        self,
        x: Tensor,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        weights: Tensor,
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        """Experts lie together: on the accelerator, or all of a layer on the host; of those the
        accelerator computes the ones that are in its cache, where that pays."""
        on_host = [isinstance(weight, PlacedWeight) for weight in (*gate_up, *down)]
        if not any(on_host):
            x, weights, experts = map(self._to_device, (x, weights, experts))
            return self._kernels.moe(x, gate_up, down, weights, experts, activation)
        assert all(on_host), "a layer's experts lie in one memory"
        if self._experts is not None:
            layer = self._experts.find(gate_up, *experts.shape)
            if layer is not None:
                return self._shared_moe(x, layer, weights, experts, activation)
            self._experts.note_use(gate_up, len(experts), experts.shape[1])
        self.num_rows["host"] += experts.numel()
        return self._host.moe(
            self._to_host(x),
            [weight.host for weight in gate_up],
            [weight.host for weight in down],
            self._to_host(weights),
            self._to_host(experts),
            activation,
        )

    def _shared_moe(
        self, x: Tensor, layer: SharedExperts, weights: Tensor, experts: Tensor, activation: str
    ) -> Tensor:
        """Each expert where it lies, at the same time; their sum on the accelerator."""
        assert self._experts is not None
        chosen = self._to_host(experts)
        self._experts.note_use(layer.experts.key, len(chosen), chosen.shape[1], chosen)
        # The host's first, so that it begins early.
        of_host = self._host.expert_outputs(
            self._to_host(x), layer.host_gate_up, layer.host_down, chosen, activation
        )
        x, weights, experts = map(self._to_device, (x, weights, experts))
        of_device = self._kernels.expert_outputs(
            x, layer.device_gate_up, layer.device_down, experts, activation
        )
        return self._kernels.combine_experts(
            [of_device, self._to_device(of_host)], weights, experts
        )

    # ---------------------------------------------------------------- the rest: on the accelerator

    def _optional(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self._to_device(x)

    def position_rows(self, table: Tensor, positions: Tensor) -> Tensor:
        return self._kernels.position_rows(table, self._to_device(positions))

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        def on_host() -> Tensor:
            there = self._crossings.constant(weight, [(0, len(weight))], True)
            kept = None if residual is None else self._to_host(residual)
            return self._host.rms_norm(self._to_host(x), there, eps, offset, kept)

        def on_device() -> Tensor:
            kept = self._optional(residual)
            return self._kernels.rms_norm(self._to_device(x), weight, eps, offset, kept)

        return self._on_either(on_host, on_device, x, residual)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        def on_host() -> Tensor:
            there = [
                None if part is None else self._crossings.constant(part, [(0, len(part))], True)
                for part in (weight, bias)
            ]
            return self._host.layer_norm(self._to_host(x), there[0], there[1], eps)

        return self._on_either(
            on_host, lambda: self._kernels.layer_norm(self._to_device(x), weight, bias, eps), x
        )

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._on_either(
            lambda: self._host.add(self._to_host(x), self._to_host(y)),
            lambda: self._kernels.add(self._to_device(x), self._to_device(y)),
            x,
            y,
        )

    def _on_either(
        self,
        on_host: Callable[[], Tensor],
        on_device: Callable[[], Tensor],
        x: Tensor,
        y: Tensor | None = None,
    ) -> Tensor:
        """What is small is computed where its operands lie, and on the host too if asked. Heads of
        queries and keys are the accelerator's: so is attention."""
        if x.dim() != 2:
            return on_device()
        if self._on_host(x, y):
            return on_host()
        made = on_device()
        self._crossings.mirror(made, on_host, [x, y])
        return made

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Between two matrices of the host: on the host."""
        if self._device.owns(x):
            return self._kernels.activate(x, activation)
        return self._host.activate(x, activation)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if self._device.owns(x):
            return self._kernels.softcap(x, cap)
        return self._host.softcap(x, cap)

    def take_logit_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return self._on_either(
            lambda: self._host.take_logit_rows(self._to_host(x), rows),
            lambda: self._kernels.take_logit_rows(x, rows),
            x,
        )

    def rope(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key = self._to_device(query), self._to_device(key)
        return self._kernels.rope(query, key, cos, sin, self._to_device(positions))

    def kv_layout(
        self, num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return self._kernels.kv_layout(num_kv_heads, num_slots, head_dim, dtype)

    def write_kv(
        self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], metadata: AttentionMetadata
    ) -> None:
        self._kernels.write_kv(self._to_device(key), self._to_device(value), cache, metadata)

    def attention(
        self,
        query: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        scale: float,
        softcap: float = 0.0,
    ) -> Tensor:
        return self._kernels.attention(self._to_device(query), cache, metadata, scale, softcap)

    def route_experts(
        self, router_logits: Tensor, top_k: int, *, normalise: bool, softmax_first: bool = True
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.route_experts(
            self._to_device(router_logits),
            top_k,
            normalise=normalise,
            softmax_first=softmax_first,
        )
