"""A model's step, recorded once and replayed for every batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.metadata import AttentionMetadata
from ambidex.layers.batch import Batch
from ambidex.layers.module import submodules
from ambidex.layers.rope import Rope

if TYPE_CHECKING:
    from ambidex.kernels.cpu.recording import Recording
    from ambidex.kernels.native import NativeKernels
    from ambidex.kv.cache import KVCache
    from ambidex.models.registry import CausalLM

logger = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """A step's results, which the next replay overwrites."""

    #: [num_tokens, hidden]
    hidden: Tensor
    #: [num_logit_rows, vocab]
    logits: Tensor
    #: [num_logit_rows] each: the best tokens, and whether a row is finite; None: not looked for.
    best: tuple[Tensor, Tensor] | None


class Replayer:
    """Records ``model`` on a kernel table that can, and replays it.

    A replay is one native call, whatever the number of layers; it computes the same bits as the
    calls that were recorded.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        model: CausalLM,
        kv_cache: KVCache,
        max_tokens: int,
        max_logit_rows: int,
    ) -> None:
        self._kernels = kernels
        self._model = model
        self._kv_cache = kv_cache
        self._max_tokens = max_tokens
        self._max_logit_rows = max_logit_rows
        self._ropes = [module for module in submodules(model) if isinstance(module, Rope)]
        self._recording: Recording | None = None

    #: Numbers of rows that have to be computed once before a server is ready.
    warm_up_rows: Sequence[int] = ()

    @property
    def num_replays(self) -> int:
        return self._recording.num_replays if self._recording is not None else 0

    @property
    def num_calls(self) -> int:
        """Native calls that one replay stands for."""
        return self._recording.num_calls if self._recording is not None else 0

    @property
    def arena_bytes(self) -> int:
        """Bytes of the results of a step with the largest batch."""
        return self._recording.arena.num_bytes if self._recording is not None else 0

    def arena_tensors(self) -> list[Tensor]:
        """The memory of those results."""
        return self._recording.arena.tensors() if self._recording is not None else []

    def record(self) -> bool:
        """Whether the model could be recorded; some operations cannot."""
        try:
            self._recording = self._kernels.record(
                self._max_tokens, self._max_logit_rows, self._compute
            )
        except KernelError as error:
            logger.info("Steps are computed call by call: %s", error)
            return False
        return True

    def _compute(self, num_rows: int) -> tuple[Tensor, Tensor]:
        cache = self._kv_cache
        # Stands for any batch: only the number of rows is looked at.
        ids = torch.from_numpy(np.empty(num_rows, np.int64))
        attention = [
            AttentionMetadata(cache.block_size, count, group.window, [0], [], [], group=index)
            for index, (count, group) in enumerate(zip(cache.num_blocks, cache.groups, strict=True))
        ]
        batch = Batch(ids, ids, num_rows, cache, attention, max_position=0)
        hidden = self._model(batch)
        return hidden, self._model.head(self._kernels.take_logit_rows(hidden, []))

    def fits(self, batch: Batch, num_logit_rows: int) -> bool:
        return batch.num_tokens <= self._max_tokens and num_logit_rows <= self._max_logit_rows

    def replay(self, batch: Batch, logit_rows: Sequence[int]) -> Replayed:
        """Compute ``batch``, and the logits of its rows ``logit_rows``."""
        recording = self._recording
        assert recording is not None
        for rope in self._ropes:
            rope.prepare(batch.max_position)
        self._kernels.set_step(batch.token_ids, batch.positions, batch.num_tokens)
        for metadata in batch.attention:
            self._kernels.set_metadata(metadata)
        self._kernels.set_logit_rows(logit_rows)
        recording.replay()
        count = len(logit_rows)
        return Replayed(
            recording.hidden[: batch.num_tokens],
            recording.logits[:count],
            (recording.best[:count], recording.is_finite[:count]),
        )
