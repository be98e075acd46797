"""Rotary embedding, the paged KV cache and attention over it."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase
from ambidex.kernels.metadata import AttentionMetadata

#: Tokens whose keys lie together in the cache. Every block size is a multiple.
UNIT = 8

# Codes of KvType in attention.h.
_KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


class AttentionOps(NativeBase):
    """See kernels/reference.py for what each computes.

    A layer's cache is ``(keys, values)``: values [kv_heads, slots, head_dim], keys [kv_heads,
    slots / 8, head_dim, 8]. Of type int8 it is ``(keys, values, key_scales, value_scales)`` with
    float32 scales [kv_heads, slots], one for each token and head: its largest magnitude / 127.
    """

    def kv_layout(
        self, num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of a layer's cache, all zero at first. ``num_slots`` counts tokens, the
        zero block included. Raises KernelError for a type that there are no kernels for."""
        if dtype not in _KV_TYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in _KV_TYPES)
            raise KernelError(f"There is no KV cache of {dtype}; use one of {names}.")
        if num_slots % UNIT or min(num_kv_heads, num_slots, head_dim) <= 0:
            raise KernelError(
                f"A KV cache cannot have {num_kv_heads} heads of {head_dim} and {num_slots} slots; "
                f"slots must be a multiple of {UNIT}."
            )
        layout: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((num_kv_heads, num_slots // UNIT, head_dim, UNIT), dtype),
            ((num_kv_heads, num_slots, head_dim), dtype),
        ]
        if dtype is torch.int8:
            layout += [((num_kv_heads, num_slots), torch.float32)] * 2
        return layout

    def set_metadata(self, metadata: AttentionMetadata) -> None:
        """Make ``metadata`` what attention and write_kv read of its KV group, in the calls that
        follow and in what is replayed. The numbers are kept in ``metadata.derived["native"]`` and
        must live until then. Raises KernelError if they do not describe a step."""
        kept = metadata.derived.get("native")
        if kept is None:
            kept = metadata.derived["native"] = _flatten(metadata)
        starts, lens, tables, width = kept
        self._context.set_sequences(len(lens), starts.buffer_info()[0], lens.buffer_info()[0])
        self._context.set_group(metadata.group, tables.buffer_info()[0], width)

    def rope(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn ``query`` and ``key`` [n, heads, head_dim] in place by the rows ``positions`` [n] of
        ``cos`` and ``sin`` [max_positions, width]. Where a position has no row, the result is
        NaN."""
        self._check_heads(query, "query")
        self._check_heads(key, "key")
        max_positions, width = cos.shape
        head_dim = query.shape[2]
        for what, table in (("cos", cos), ("sin", sin)):
            self._check_rows(table, what, width)
            if table.shape != cos.shape or not table.is_contiguous():
                raise KernelError(f"{what} is {list(table.shape)}; cos and sin must be alike.")
        if key.shape[0] != query.shape[0] or key.shape[2] != head_dim or 2 * width > head_dim:
            raise KernelError(
                f"rope cannot turn query {list(query.shape)} and key {list(key.shape)} by tables "
                f"of width {width}."
            )
        rows = self._rows(query)
        if rows >= 0 and (
            positions.dtype is not torch.int64
            or positions.dim() != 1
            or positions.shape[0] < query.shape[0]
            or not positions.is_contiguous()
            or positions.device.type != "cpu"
        ):
            raise KernelError(
                f"positions are {positions.dtype} {list(positions.shape)} on {positions.device}, "
                f"and must be int64 [{query.shape[0]}]."
            )
        self._native.rope(
            self._context,
            query.data_ptr(),
            query.stride(0),
            query.shape[1],
            key.data_ptr(),
            key.stride(0),
            key.shape[1],
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            width,
            max_positions,
            positions.data_ptr() if rows >= 0 else 0,
            rows,
        )
        return query, key

    def write_kv(
        self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], metadata: AttentionMetadata
    ) -> None:
        """Store ``key`` and ``value`` [n, kv_heads, head_dim] where the block tables say. Values
        become finite, as the reference has it; keys keep NaN."""
        self._check_heads(key, "key")
        self._check_heads(value, "value")
        if value.shape != key.shape:
            raise KernelError(f"value is {list(value.shape)}, and key is {list(key.shape)}.")
        rows = self._rows(key)
        store = self._cache(cache, metadata, key.shape[1], key.shape[2])
        if rows >= 0:
            self._set_metadata_for(rows, metadata)
        self._native.write_kv(
            self._context,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            store,
            rows,
        )

    def attention(
        self,
        query: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        scale: float,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of ``query`` [n, heads, head_dim] over the cached keys and values, of
        which :meth:`write_kv` has written this step's. Returns [n, heads * head_dim]; rows that
        belong to no sequence are zero."""
        self._check_heads(query, "query")
        heads, head_dim = query.shape[1:]
        kv_heads = cache[0].shape[0]
        if kv_heads == 0 or heads % kv_heads:
            raise KernelError(f"{heads} heads cannot share {kv_heads} KV heads.")
        rows = self._rows(query)
        store = self._cache(cache, metadata, kv_heads, head_dim)
        if rows >= 0:
            self._set_metadata_for(rows, metadata)
        out = self._empty(query, heads * head_dim)
        self._native.attention(
            self._context,
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            out.stride(0),
            heads // kv_heads,
            metadata.window or 0,
            store,
            rows,
            scale,
            softcap,
        )
        return out

    def _set_metadata_for(self, rows: int, metadata: AttentionMetadata) -> None:
        if metadata.query_starts[-1] > rows:
            raise KernelError(
                f"The step has {metadata.query_starts[-1]} query rows, and {rows} are given."
            )
        self.set_metadata(metadata)

    def _cache(
        self, cache: tuple[Tensor, ...], metadata: AttentionMetadata, kv_heads: int, head_dim: int
    ) -> object:
        """The native description of a layer's cache, checked."""
        size = metadata.block_size
        if size < UNIT or size & (size - 1):
            raise KernelError(f"Blocks of {size} tokens: the size must be 8, 16, 32, 64 or 128.")
        dtype = cache[0].dtype
        layout = self.kv_layout(kv_heads, (metadata.num_blocks + 1) * size, head_dim, dtype)
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in cache]
        if given != layout:
            raise KernelError(f"The KV cache is {given}, and must be {layout}.")
        if any(not tensor.is_contiguous() or tensor.device.type != "cpu" for tensor in cache):
            raise KernelError("The KV cache must be contiguous and on the CPU.")
        addresses = [tensor.data_ptr() for tensor in cache] + [0, 0]
        return self._native.KvCache(
            *addresses[:4],
            kv_heads,
            head_dim,
            metadata.num_blocks,
            size.bit_length() - 1,
            metadata.group,
            _KV_TYPES[dtype],
        )

    def _check_heads(self, x: Tensor, what: str) -> None:
        """Raises KernelError unless ``x`` is float32 [n, heads, head_dim] on the CPU, of which only
        rows may lie apart."""
        if x.device.type != "cpu":
            raise KernelError(f"{what} is on {x.device}; the CPU's kernels cannot read it.")
        if x.dtype is not torch.float32 or x.dim() != 3:
            raise KernelError(
                f"{what} is {x.dtype} {list(x.shape)}, and must be float32 [rows, heads, head_dim]."
            )
        if 0 in x.shape[1:]:
            raise KernelError(f"{what} is {list(x.shape)}: there is nothing in a row.")
        if (x.shape[2] > 1 and x.stride(2) != 1) or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
            raise KernelError(f"{what}: the numbers of a row do not lie side by side.")


def _flatten(metadata: AttentionMetadata) -> tuple[array[int], array[int], array[int], int]:
    """int32 query starts, context lengths and block tables, and the width of a table."""
    starts, lens = array("i", metadata.query_starts), array("i", metadata.context_lens)
    tables = metadata.block_tables
    if len(starts) != len(lens) + 1 or len(tables) != len(lens) or starts[0] != 0:
        raise KernelError(
            f"{len(lens)} context lengths do not fit {len(starts)} query starts and "
            f"{len(tables)} block tables."
        )
    width = max(map(len, tables), default=0)
    flat = array("i")
    for index, table in enumerate(tables):
        num_rows, length = starts[index + 1] - starts[index], lens[index]
        if not 0 <= num_rows <= length or len(table) * metadata.block_size < length:
            raise KernelError(
                f"Sequence {index} has {num_rows} query rows, {length} tokens and "
                f"{len(table)} blocks of {metadata.block_size}."
            )
        flat.extend(table)
        flat.extend([-1] * (width - len(table)))
    return starts, lens, flat, width
