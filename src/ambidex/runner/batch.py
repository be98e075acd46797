"""From a scheduler's decision to the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ambidex.kernels.metadata import ROW_PAD, AttentionMetadata, padded
from ambidex.kv.cache import KVCache
from ambidex.layers.batch import Batch
from ambidex.runner.decision import ScheduledRequest


def order_requests(requests: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
    """Single tokens first, longest context first, then chunks: what attention kernels like.
    The order changes no result."""
    return sorted(requests, key=lambda r: (len(r.token_ids) > 1, -r.start))


def build_batch(
    requests: Sequence[ScheduledRequest], kv_cache: KVCache, row_pad: int = ROW_PAD
) -> Batch:
    """The batch of ``requests``, in the order given (see :func:`order_requests`), its rows padded
    to a multiple of ``row_pad``."""
    counts = [len(request.token_ids) for request in requests]
    num_tokens = sum(counts)
    token_ids = np.zeros(padded(num_tokens, row_pad), dtype=np.int64)
    positions = np.zeros_like(token_ids)
    starts = [0]
    for request, count in zip(requests, counts, strict=True):
        first = starts[-1]
        if count == 1:
            token_ids[first] = request.token_ids[0]
            positions[first] = request.start
        else:
            token_ids[first : first + count] = request.token_ids
            positions[first : first + count] = np.arange(request.start, request.start + count)
        starts.append(first + count)
    context_lens = [r.start + n for r, n in zip(requests, counts, strict=True)]
    size = kv_cache.block_size
    attention = []
    for group, num_blocks in enumerate(kv_cache.num_blocks):
        tables = [request.block_tables[group] for request in requests]
        attention.append(
            AttentionMetadata(
                block_size=size,
                num_blocks=num_blocks,
                window=kv_cache.groups[group].window,
                query_starts=starts,
                context_lens=context_lens,
                block_tables=tables,
                group=group,
            )
        )
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        num_tokens=num_tokens,
        kv_cache=kv_cache,
        attention=attention,
        max_position=max(context_lens) - 1,
    )
