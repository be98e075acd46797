"""``--offload-compress`` while a lane is loaded: for which weights, what memory it takes, and what
the user is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ambidex.layers.module import Matrix, Parameter, Place, Table
from ambidex.runner.placing import placed_weights
from ambidex.weights.compressed import Compression
from ambidex.weights.placed_weight import decompressed_bytes, row_counts

if TYPE_CHECKING:
    from ambidex.config import OffloadConfig, SchedulerConfig
    from ambidex.models.registry import CausalLM
    from ambidex.runner.hands import Hands

OFF = "Streamed weights are not compressed (--offload-compress)"


class Compressing:
    """Before, while and after weights are loaded. Without ``--offload-compress``, or without an
    accelerator, nothing happens."""

    def __init__(self, hands: Hands, model: CausalLM, offload: OffloadConfig) -> None:
        self._hands = hands
        self._compression: Compression | None = None
        #: Sentences that the user should read once.
        self.notes: list[str] = []
        #: Of the accelerator's memory beside the ring, at most: the largest weight.
        self.staging_bytes = 0
        accelerator, placed = hands.accelerator, hands.placed
        if not offload.compress or accelerator is None or placed is None:
            return
        link = accelerator.link.limited(offload.link_limit_bytes_per_s)
        made = Compression(link.bytes_per_s, accelerator.rate.bytes_per_s)
        sizes = [each.num_bytes for _, each in model.named_parameters() if _fits(each)]
        if not made.judge()[0] or not sizes:
            self.notes.append(made.describe())
            return
        self._compression = placed.compression = made
        self.staging_bytes = max(sizes)

    def places(
        self, model: CausalLM, places: Mapping[str, Place], limits: SchedulerConfig
    ) -> dict[str, Place]:
        """``places`` where those of weights that are always streamed as a whole say so."""
        if self._compression is None:
            return dict(places)
        parameters = dict(model.named_parameters())
        counts = row_counts(limits.max_num_batched_tokens)
        marked = {}
        for path, place in places.items():
            is_whole = not place.resident_rows and all(
                place.streamed_rows(count) >= parameters[path].shape[0] // _halves(parameters[path])
                for count in counts
            )
            marked[path] = replace(place, is_compressed=is_whole and _fits(parameters[path]))
        return marked

    def start(self, model: CausalLM) -> None:
        """All weights are loaded, and there is a ring where some are streamed."""
        made, placed, accelerator = self._compression, self._hands.placed, self._hands.accelerator
        if made is None or placed is None or accelerator is None:
            return
        if not made.num_weights + made.num_left:
            self.notes.append(
                f"{OFF}: no matrix is streamed as a whole. Rows of which the host computes some, "
                "and tied embeddings, cross the link as they are."
            )
            return
        self.notes.append(made.describe())
        num_bytes = decompressed_bytes(placed_weights(model))
        if num_bytes:
            assert placed.streamer is not None
            accelerator.ledger.reserve("staging", "a decompressed weight", num_bytes)
            placed.streamer.decompress_into(num_bytes)


def _fits(parameter: Parameter) -> bool:
    """Whether it is a matrix that only products read: rows of a table are looked up, too."""
    is_product = isinstance(parameter, Matrix) and not isinstance(parameter, Table)
    return is_product and parameter.dtype is torch.bfloat16


def _halves(parameter: Parameter) -> int:
    return 2 if isinstance(parameter, Matrix) and parameter.is_paired else 1
