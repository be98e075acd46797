"""Runs a model step by step with batches, chunks and block tables that a test chooses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ambidex.checkpoint_names import NameTable
from ambidex.device.cpu import CPUDevice
from ambidex.kv.block import NO_BLOCK
from ambidex.kv.cache import KVCache
from ambidex.layers.module import BuildContext
from ambidex.models.registry import CausalLM, build_model
from ambidex.runner.batch import build_batch, order_requests
from ambidex.runner.decision import ScheduledRequest
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.load import load_weights


@dataclass
class Loaded:
    """A model with its weights."""

    model: CausalLM
    context: BuildContext
    unused: list[str]


def load(
    folder: Path,
    *,
    max_model_len: int = 512,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """The model of a checkpoint folder, through the engine's own loader."""
    device = CPUDevice(1)
    checkpoint = open_checkpoint(folder, overrides)
    context = BuildContext(device, dtype, max_model_len)
    model = build_model(context, checkpoint.config)
    unused = load_weights(model.named_parameters(), NameTable(model.names), checkpoint, device)
    return Loaded(model, context, unused)


@dataclass
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


class Session:
    """Sequences over one paged cache.

    Blocks are handed out in a shuffled order and start full of garbage, as does what lies in them
    beyond a sequence's end; blocks that leave a window are taken back and filled with it.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        block_size: int = 16,
        num_tokens: int = 2048,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.loaded = loaded
        self.groups = loaded.context.kv_groups(kv_dtype)
        num_blocks = num_tokens // block_size
        counts = [num_blocks] * len(self.groups)
        self.cache = KVCache(loaded.context.device, self.groups, counts, block_size, kv_dtype)
        self.block_size = block_size
        shuffled = random.Random(seed)
        self._free = [shuffled.sample(range(num_blocks), num_blocks) for _ in self.groups]
        for group in range(len(self.groups)):
            for block in range(num_blocks):
                self._spoil(group, block)
        self._sequences: dict[str, _Sequence] = {}
        #: Blocks that were given back because they had left a window.
        self.num_blocks_left = 0

    def _spoil(self, group: int, block: int) -> None:
        num_slots = (self.cache.num_blocks[group] + 1) * self.block_size
        for layer in self.groups[group].layers:
            keys, values = self.cache.layer(layer)
            # write_kv never stores a value that is not finite.
            for store, garbage in ((keys, float("nan")), (values, torch.finfo(values.dtype).max)):
                # Some layouts hold several tokens an entry.
                size = self.block_size * store.shape[1] // num_slots
                store[:, block * size : (block + 1) * size] = garbage

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Compute the next tokens of some sequences: logits [tokens, vocab] of each."""
        requests = []
        for name, tokens in chunks.items():
            sequence = self._sequences.setdefault(name, _Sequence(tables=[[] for _ in self.groups]))
            start = len(sequence.token_ids)
            sequence.token_ids += tokens
            self._allocate(sequence, start)
            tables = tuple(list(table) for table in sequence.tables)
            requests.append(ScheduledRequest(name, list(tokens), start, tables, sample=True))
        requests = order_requests(requests)
        batch = build_batch(requests, self.cache)
        hidden = self.loaded.model(batch)
        starts = batch.attention[0].query_starts
        return {
            request.request_id: self.loaded.model.head(hidden[starts[i] : starts[i + 1]])
            for i, request in enumerate(requests)
        }

    def _allocate(self, sequence: _Sequence, start: int) -> None:
        for group, table in enumerate(sequence.tables):
            window = self.groups[group].window
            if window is not None:
                for index in range(max(0, start - window + 1) // self.block_size):
                    if table[index] != NO_BLOCK:
                        self._spoil(group, table[index])
                        self._free[group].insert(0, table[index])
                        table[index] = NO_BLOCK
                        self.num_blocks_left += 1
            while len(table) * self.block_size < len(sequence.token_ids):
                table.append(self._free[group].pop())

    def run(self, prompts: Mapping[str, Sequence[int]], budget: int) -> dict[str, Tensor]:
        """Logits of every token of ``prompts``, at most ``budget`` tokens a step: the first prompt
        is served first, so that steps mix chunks of several, single tokens among them."""
        parts: dict[str, list[Tensor]] = {name: [] for name in prompts}
        rest = {name: list(tokens) for name, tokens in prompts.items()}
        while any(rest.values()):
            chunks, left = {}, budget
            for name, tokens in rest.items():
                # Leave a token for each sequence that follows.
                count = min(len(tokens), max(1, left - len(rest) + len(chunks) + 1))
                if count and left:
                    chunks[name], rest[name] = tokens[:count], tokens[count:]
                    left -= count
            for name, logits in self.step(chunks).items():
                parts[name].append(logits)
        return {name: torch.cat(logits) for name, logits in parts.items()}

    def generate(
        self, last: Mapping[str, Tensor], count: int
    ) -> dict[str, tuple[list[int], Tensor]]:
        """Greedily ``count`` tokens of each sequence, all in one batch, from the logits of its
        last token: token ids, and the logits [count, vocab] that chose them."""
        names = list(last)
        rows = {name: [last[name][-1]] for name in names}
        tokens: dict[str, list[int]] = {name: [] for name in names}
        for index in range(count):
            for name in names:
                tokens[name].append(int(rows[name][-1].argmax()))
            if index + 1 < count:
                for name, logits in self.step({name: tokens[name][-1:] for name in names}).items():
                    rows[name].append(logits[0])
        return {name: (tokens[name], torch.stack(rows[name])) for name in names}
