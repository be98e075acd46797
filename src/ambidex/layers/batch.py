"""What a model is given to compute in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ambidex.kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from ambidex.kv.cache import KVCache


@dataclass(slots=True)
class Batch:
    """Tokens of all requests of a step, one after the other.

    ``token_ids`` and ``positions`` are [padded] int64: ``num_tokens`` real rows, then rows that
    round the count up to what the kernel table asks for (token 0 at position 0; they write no KV).
    """

    token_ids: Tensor
    positions: Tensor
    num_tokens: int
    kv_cache: KVCache
    #: One entry a KV group.
    attention: list[AttentionMetadata]
    #: Largest position, so that position tables can grow without asking the device.
    max_position: int
