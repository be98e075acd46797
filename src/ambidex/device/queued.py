"""A kernel table whose calls are launched on a stream: results are there once it has run them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ambidex.errors import DeviceError
from ambidex.kernels.rows import TensorRows

if TYPE_CHECKING:
    from ambidex.device.base import Stream
    from ambidex.kernels.metadata import AttentionMetadata
    from ambidex.kernels.quantized import Quantized
    from ambidex.kernels.table import Kernels, Weight
    from ambidex.memory.cost_model import ComputeRate


class Memory(Protocol):
    """Where a table's operands lie and its results go."""

    name: str

    def store(self, tensor: Tensor, account: str = "weights") -> Tensor: ...

    def to_host(self, tensor: Tensor) -> Tensor: ...

    def owns(self, tensor: Tensor) -> bool: ...

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor: ...


def memory_of(operand: Any) -> list[Tensor]:
    """The tensors behind an operand: itself, or what a weight or a list of them lies in."""
    if operand is None:
        return []
    if isinstance(operand, Tensor):
        return [operand]
    if isinstance(operand, list | tuple):
        return [tensor for item in operand for tensor in memory_of(item)]
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    operand.moved(note)
    return found


def rows_of(parts: Sequence[Any]) -> TensorRows | None:
    """The only part of a matrix, where it is read some rows at a time."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], TensorRows) else None


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class QueuedKernels:
    """The calls of ``inner``, on ``stream``, over tensors in ``memory``.

    An operand that lies elsewhere is a DeviceError at the call, as on a GPU. ``rate``: how fast the
    clock lets the calls be.
    """

    can_record = False

    def __init__(
        self, inner: Kernels, stream: Stream, memory: Memory, rate: ComputeRate, description: str
    ) -> None:
        self.inner = inner
        self.stream = stream
        self.name = memory.name
        self.description = description
        self.row_pad = inner.row_pad
        self.gathers_kv = inner.gathers_kv
        self.ACTIVATIONS: Mapping[str, Any] = inner.ACTIVATIONS
        self._memory = memory
        self._rate = rate
        self._in_use = threading.Lock()
        #: Calls by name.
        self.num_calls: dict[str, int] = {}

    def put(self, x: Tensor) -> Tensor:
        return self._memory.store(x, "activations")

    def fetch(self, x: Tensor) -> Tensor:
        return self._memory.to_host(x)

    def begin_step(self, num_tokens: int, num_logits: int) -> None:
        """Nothing has to be fetched ahead."""

    def end_step(self) -> None:
        """Nothing goes on after it."""

    @property
    def memory(self) -> Memory:
        """Where results go."""
        return self._memory

    @property
    def rate(self) -> ComputeRate:
        """How fast the clock lets the calls be."""
        return self._rate

    # ---------------------------------------------------------------- weights, made on the host

    def pack(self, weight: Tensor | Quantized | TensorRows, precise: bool = False) -> Weight:
        with self._alone():
            return self.inner.pack(weight, precise)

    def packed_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return self.inner.packed_bytes(shape, dtype)

    def pack_table(self, weight: Tensor | Quantized | TensorRows) -> Weight:
        with self._alone():
            return self.inner.pack_table(weight)

    def pack_head(self, table: Weight) -> Weight:
        with self._alone():
            return self.inner.pack_head(table)

    def head_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return self.inner.head_bytes(shape, dtype)

    def pack_parts(
        self, parts: Sequence[Tensor | Quantized | TensorRows], precise: bool = False
    ) -> Weight:
        with self._alone():
            return self.inner.pack_parts(parts, precise)

    def unpack_gguf(self, name: str, type_name: str, rows: Any, columns: int) -> Quantized | None:
        with self._alone():
            return self.inner.unpack_gguf(name, type_name, rows, columns)

    def compress_words(self, words: Tensor, unit_words: int, max_bytes: int) -> Tensor | None:
        with self._alone():
            return self.inner.compress_words(words, unit_words, max_bytes)

    def kv_layout(
        self, num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return self.inner.kv_layout(num_kv_heads, num_slots, head_dim, dtype)

    # ---------------------------------------------------------------- launching

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A kernel table's threads compute for one thread at a time: the stream's, or whoever packs
        weights while nothing is launched."""
        is_alone = self._in_use.acquire(blocking=False)
        assert is_alone, (
            f"two threads use the kernel table of {self.name} at once: weights are packed before "
            "work is launched, or after it has been waited for"
        )
        try:
            yield
        finally:
            self._in_use.release()

    def _launch(
        self,
        name: str,
        operands: Sequence[Any],
        call: Callable[[], Any],
        outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
        flops: float = 0.0,
        writes: Sequence[Tensor] = (),
        read_bytes: float | None = None,
        cost: Callable[[], tuple[float, float]] | None = None,
    ) -> list[Tensor]:
        """Queue ``call``; its results are copied to tensors of the given shapes. ``writes``: what
        it changes; ``read_bytes``: what it reads where that is not all of its operands; ``cost``:
        operations and bytes read, where the step's lengths decide them."""
        read = memory_of(list(operands))
        self._check_memory(name, [*read, *writes])
        made = [self._memory.empty(*output) for output in outputs]
        written = num_bytes(made)
        moved = (num_bytes(read) if read_bytes is None else read_bytes) + written

        def seconds() -> float:
            assert cost is not None
            flops, read_bytes = cost()
            return self._rate.seconds(flops, read_bytes + written)

        def work() -> None:
            with self._alone():
                results = call()
            if not made:
                return
            results = results if isinstance(results, tuple) else (results,)
            for result, out in zip(results, made, strict=True):
                out.copy_(result.reshape(out.shape))

        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        self.stream.launch(
            name,
            work,
            self._rate.seconds(flops, moved) if cost is None else seconds,
            reads=read,
            writes=[*made, *writes],
        )
        return made

    def _check_memory(self, name: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if not self._memory.owns(tensor):
                raise DeviceError(
                    f"{name} on {self._memory.name} was given a tensor of shape "
                    f"{list(tensor.shape)} that lies in another memory."
                )

    def _like(
        self, name: str, x: Tensor, operands: Sequence[Any], call: Callable[[], Any]
    ) -> Tensor:
        """A call with one result, of the shape of ``x``."""
        return self._launch(name, operands, call, [(tuple(x.shape), x.dtype)])[0]

    # ---------------------------------------------------------------- operations

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        rows, columns = weight.shape
        return self._launch(
            "linear",
            (x, weight, bias, residual),
            lambda: self.inner.linear(x, weight, bias, residual),
            [((len(x), rows), torch.float32)],
            2.0 * len(x) * rows * columns,
        )[0]

    def gated_linear(
        self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None
    ) -> Tensor:
        rows, columns = weight.shape
        return self._launch(
            "gated_linear",
            (x, weight, bias),
            lambda: self.inner.gated_linear(x, weight, activation, bias),
            [((len(x), rows // 2), torch.float32)],
            2.0 * len(x) * rows * columns,
        )[0]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """``parts`` [n, width of each] side by side."""
        width = sum(part.shape[1] for part in parts)
        return self._launch(
            "join",
            parts,
            lambda: torch.cat(list(parts), 1),
            [((len(parts[0]), width), torch.float32)],
        )[0]

    def embedding(self, token_ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        return self._launch_rows(
            "embedding",
            token_ids,
            weight,
            lambda: self.inner.embedding(token_ids, weight, scale),
        )

    def position_rows(self, table: Tensor, positions: Tensor) -> Tensor:
        return self._launch_rows(
            "position_rows",
            positions,
            table,
            lambda: self.inner.position_rows(table, positions),
        )

    def _launch_rows(self, name: str, ids: Tensor, table: Any, call: Callable[[], Any]) -> Tensor:
        rows, width = table.shape
        read_bytes = num_bytes(memory_of(table)) * len(ids) / max(rows, 1)
        return self._launch(
            name, (ids, table), call, [((len(ids), width), torch.float32)], read_bytes=read_bytes
        )[0]

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self._like(
            "rms_norm",
            x,
            (x, weight, residual),
            lambda: self.inner.rms_norm(x, weight, eps, offset, residual),
        )

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return self._like(
            "layer_norm", x, (x, weight, bias), lambda: self.inner.layer_norm(x, weight, bias, eps)
        )

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._like("add", x, (x, y), lambda: self.inner.add(x, y))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return self._like("activate", x, (x,), lambda: self.inner.activate(x, activation))

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._like("softcap", x, (x,), lambda: self.inner.softcap(x, cap))

    def take_logit_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        rows = list(rows)
        shape = (len(rows), x.shape[1])
        return self._launch(
            "take_logit_rows",
            (x,),
            lambda: self.inner.take_logit_rows(x, rows),
            [(shape, torch.float32)],
        )[0]

    def rope(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = len(positions) * (cos.shape[1] * cos.itemsize + sin.shape[1] * sin.itemsize)
        turned = self._launch(
            "rope",
            (query, key, positions, cos, sin),
            # It may work in place: query and key are parts of the projection's result, which
            # nobody else reads.
            lambda: self.inner.rope(query, key, cos, sin, positions),
            [(tuple(query.shape), query.dtype), (tuple(key.shape), key.dtype)],
            writes=(query, key),
            read_bytes=num_bytes([query, key, positions]) + rows,
        )
        return turned[0], turned[1]

    def write_kv(
        self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], metadata: AttentionMetadata
    ) -> None:
        self._launch(
            "write_kv",
            (key, value),
            lambda: self.inner.write_kv(key, value, cache, metadata),
            [],
            writes=cache,
        )

    def attention(
        self,
        query: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        scale: float,
        softcap: float = 0.0,
    ) -> Tensor:
        num_rows, heads, head_dim = query.shape
        return self._launch(
            "attention",
            (query,),
            lambda: self.inner.attention(query, cache, metadata, scale, softcap),
            [((num_rows, heads * head_dim), torch.float32)],
            writes=cache,
            cost=lambda: (
                4.0 * heads * head_dim * _scores(metadata),
                num_bytes([query]) + kv_bytes(cache, metadata),
            ),
        )[0]

    def decompress_words(self, payload: Tensor, num_words: int, out: Tensor) -> None:
        self._launch(
            "decompress_words",
            (payload,),
            lambda: self.inner.decompress_words(payload, num_words, out),
            [],
            writes=(out,),
            read_bytes=num_bytes([payload, out]),
        )

    def route_experts(
        self, router_logits: Tensor, top_k: int, *, normalise: bool, softmax_first: bool = True
    ) -> tuple[Tensor, Tensor]:
        shape = (len(router_logits), top_k)
        weights, experts = self._launch(
            "route_experts",
            (router_logits,),
            lambda: self.inner.route_experts(
                router_logits, top_k, normalise=normalise, softmax_first=softmax_first
            ),
            [(shape, torch.float32), (shape, torch.int64)],
        )
        return weights, experts

    def moe(
        self,
        x: Tensor,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        weights: Tensor,
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        return self._launch(
            "moe",
            (x, list(gate_up), list(down), weights, experts),
            lambda: self.inner.moe(x, gate_up, down, weights, experts, activation),
            [(tuple(x.shape), x.dtype)],
            cost=lambda: _cost_of(_used(gate_up, down, experts), x),
        )[0]

    def expert_outputs(
        self,
        x: Tensor,
        gate_up: Sequence[Weight | None],
        down: Sequence[Weight | None],
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        """Which experts are None is read when the call runs, and at every replay anew: whoever
        changes the lists waits for what was launched before."""

        self._check_memory("expert_outputs", memory_of([list(gate_up), list(down)]))
        shape = (*experts.shape, x.shape[1])
        return self._launch(
            "expert_outputs",
            (x, experts),
            lambda: self.inner.expert_outputs(x, gate_up, down, experts, activation),
            [(shape, torch.float32)],
            cost=lambda: _cost_of(_used(gate_up, down, experts), x),
        )[0]

    def combine_experts(self, parts: Sequence[Tensor], weights: Tensor, experts: Tensor) -> Tensor:
        parts = list(parts)
        num_rows, _, width = parts[0].shape
        return self._launch(
            "combine_experts",
            (parts, weights, experts),
            lambda: self.inner.combine_experts(parts, weights, experts),
            [((num_rows, width), torch.float32)],
            2.0 * parts[0].numel(),
        )[0]


def _used(
    gate_up: Sequence[Weight | None], down: Sequence[Weight | None], experts: Tensor
) -> list[tuple[int, Weight, Weight]]:
    """Of the experts that are chosen and here: by how many rows, and their matrices."""
    ids, counts = experts.unique(return_counts=True)
    found = []
    for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
        first, second = gate_up[expert], down[expert]
        if first is not None and second is not None:
            found.append((count, first, second))
    return found


def _cost_of(used: Sequence[tuple[int, Weight, Weight]], x: Tensor) -> tuple[float, float]:
    """Operations and bytes read: an expert's matrices once, whatever the number of its rows."""
    flops, read_bytes = 0.0, num_bytes([x])
    for count, *weights in used:
        flops += 2.0 * count * sum(math.prod(weight.shape) for weight in weights)
        read_bytes += sum(weight.num_bytes for weight in weights)
    return flops, read_bytes


def _scores(metadata: AttentionMetadata) -> int:
    """How many pairs of a query and a key a step has, at most."""
    starts, total = metadata.query_starts, 0
    for index, context in enumerate(metadata.context_lens):
        count = starts[index + 1] - starts[index]
        total += count * context - count * (count - 1) // 2
    return total


def kv_bytes(cache: Sequence[Tensor], metadata: AttentionMetadata) -> float:
    """Bytes of keys and values that attention of a step reads, once a sequence."""
    slots = metadata.num_blocks * metadata.block_size
    return sum(metadata.context_lens) * sum(math.prod(t.shape) * t.itemsize for t in cache) / slots
