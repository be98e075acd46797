"""What a way to place weights costs, by the cost model: a few steps that stand for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ambidex.config import OffloadConfig, SchedulerConfig
from ambidex.memory.cost_model import CostModel
from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.operations import StepLoad
from ambidex.memory.profile import HardwareProfile
from ambidex.memory.split import SplitTable
from ambidex.memory.weight_places import Draft, Placement, WeightKind, WeightPlace

#: Tokens of a prompt where nobody says otherwise.
TYPICAL_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Mix:
    """What placements are compared at: a token of one request, a token of each of ``num_seqs``
    requests, and ``chunk_tokens`` of a prompt. Each counts alike, as a ratio: a placement is the
    better one whose product of the three times is smaller."""

    num_seqs: int = 16
    chunk_tokens: int = 2048
    num_context: int = TYPICAL_PROMPT

    @property
    def loads(self) -> tuple[StepLoad, StepLoad, StepLoad]:
        context = max(self.num_context, 1)
        return (
            StepLoad(1, 1, context),
            StepLoad(self.num_seqs, 1, context),
            StepLoad(1, self.chunk_tokens, self.chunk_tokens),
        )


def typical_mix(shape: ModelShape, limits: SchedulerConfig, kv_bytes: int) -> Mix:
    """``kv_bytes``: of the KV cache, which bounds how many requests run at once."""
    at_once = kv_bytes // max(shape.kv_bytes_per_token * TYPICAL_PROMPT, 1)
    return Mix(max(min(limits.max_num_seqs, at_once), 1), limits.max_num_batched_tokens)


class Judge:
    """Steps of ``shape`` on ``profile`` for any placement."""

    def __init__(
        self, shape: ModelShape, profile: HardwareProfile, offload: OffloadConfig, mix: Mix
    ) -> None:
        assert profile.device is not None
        assert profile.link is not None
        self.shape = shape
        self.profile = profile
        self.mix = mix
        self._offload = offload
        self.link_bytes_per_s = profile.link.limited(offload.link_limit_bytes_per_s).bytes_per_s
        self.host_bytes_per_s = profile.host.bytes_per_s
        self._weights = {weight.path: weight for weight in shape.weights}
        self._is_computed = lru_cache(maxsize=None)(self._decide)
        #: Drafts, by identity, with what is known of them.
        self._models: dict[int, tuple[Draft, CostModel]] = {}
        self._seconds: dict[int, tuple[float, ...]] = {}

    def _model(self, draft: Draft) -> CostModel:
        if id(draft) not in self._models:
            model = CostModel(
                self.profile,
                self.shape,
                draft.places,
                link_limit=self._offload.link_limit_bytes_per_s,
                is_async=self._offload.is_async,
                ring_bytes=draft.ring_layers * draft.ring_layer_bytes,
                compress=self._offload.compress,
            )
            self._models[id(draft)] = draft, model
        return self._models[id(draft)][1]

    def seconds(self, draft: Draft) -> tuple[float, ...]:
        """Of each of the mix's loads, with the best shares of streamed rows."""
        model = self._model(draft)
        if id(draft) not in self._seconds:
            self._seconds[id(draft)] = self._measure(model)
        return self._seconds[id(draft)]

    def _measure(self, model: CostModel) -> tuple[float, ...]:
        loads = self.mix.loads
        shares = {load.num_tokens: model.best_share(load) for load in loads}
        table = SplitTable(tuple(sorted(shares.items())))
        return tuple(model.seconds(load, table) for load in loads)

    def cost(self, draft: Draft) -> float:
        """What the mix comes to: the mean ratio."""
        return math.prod(self.seconds(draft)) ** (1 / 3)

    def table(self, draft: Draft) -> SplitTable:
        """The streamed share by tokens per step."""
        mix = self.mix
        return self._model(draft).table(mix.chunk_tokens, mix.num_seqs, max(mix.num_context, 1))

    def computes(self, path: str) -> bool:
        """Whether a weight that has one place, and cannot be resident, is better off computed on
        the host than streamed."""
        return self._is_computed(self._weights[path])

    def _decide(self, weight: WeightShape) -> bool:
        alone = ModelShape(
            name=self.shape.name,
            model_type=self.shape.model_type,
            num_layers=0,
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            vocab_size=self.shape.vocab_size,
            num_heads=self.shape.num_heads,
            head_dim=self.shape.head_dim,
            weights=(weight,),
            kv=(),
            max_positions=None,
        )
        assert weight.kind is not WeightKind.TABLE

        def cost(placement: Placement) -> float:
            places = {weight.path: WeightPlace(placement, 0)}
            model = CostModel(
                self.profile, alone, places, link_limit=self._offload.link_limit_bytes_per_s
            )
            return math.prod(model.seconds(load) for load in self.mix.loads)

        return cost(Placement.HOST) <= cost(Placement.STREAM)
