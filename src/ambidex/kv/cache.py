"""The paged KV cache: the tensors behind the block manager's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ambidex.kv.block import KVGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ambidex.device.base import Device


class KVCache:
    """Keys and values of every layer, [kv_heads, (num_blocks + 1) * block_size, head_dim] each or
    the like: the kernel table says how.

    The last block of a group is never allocated: it stays zero, and kernels may read it in place
    of positions that must not be seen.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._group_of: dict[int, int] = {}
        for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True)):
            layout = device.kernels.kv_layout(
                group.num_kv_heads, (count + 1) * block_size, group.head_dim, dtype
            )
            for layer in group.layers:
                self._layers[layer] = tuple(device.zeros(*part, "kv_cache") for part in layout)
                self._group_of[layer] = index

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's keys and values, as the kernel table lays them out."""
        return self._layers[layer]

    def tensors(self) -> list[Tensor]:
        """Everything that it is made of."""
        return [part for layer in self._layers.values() for part in layer]

    def group_of(self, layer: int) -> int:
        """Index of the KV group that the layer belongs to."""
        return self._group_of[layer]


def kv_cache_bytes(groups: Sequence[KVGroup], num_blocks: Sequence[int], block_size: int) -> int:
    """Bytes that :class:`KVCache` takes, the zero blocks included."""
    return sum(
        group.bytes_per_token * (count + 1) * block_size
        for group, count in zip(groups, num_blocks, strict=True)
    )
