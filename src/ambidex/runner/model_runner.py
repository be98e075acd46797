"""One rank's model: it loads, it computes a step, it samples."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ambidex.layers.sampler import Sampler, SamplerRow, prompt_logprobs
from ambidex.memory.step_memory import LOGIT_ROWS
from ambidex.request import TokenLogprobs
from ambidex.runner.batch import build_batch, order_requests
from ambidex.runner.decision import Decision, ScheduledRequest, StepResult

if TYPE_CHECKING:
    from ambidex.device.base import Device
    from ambidex.kernels.table import Kernels
    from ambidex.kv.cache import KVCache
    from ambidex.layers.sampler import BestTokens
    from ambidex.models.registry import CausalLM
    from ambidex.runner.graphs import GraphReplayer
    from ambidex.runner.replay import Replayer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunnerRequest:
    """What the runner remembers of a request between steps."""

    row: SamplerRow


class ModelRunner:
    """Computes decisions. Everything here happens in the lane's thread."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kv_cache: KVCache,
        replayer: Replayer | GraphReplayer | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """``kernels``: what the model was built with, where that is not the device's table."""
        self.device = device
        self._kernels = kernels or device.kernels
        self.model = model
        self.kv_cache = kv_cache
        #: Replays a recorded step; None: every step is computed call by call.
        self.replayer = replayer
        is_native = device.kernels.name == "native"
        self._sampler = Sampler(cast("BestTokens", device.kernels) if is_native else None)
        self._requests: dict[str, RunnerRequest] = {}

    def execute(self, decision: Decision, *, retries: bool = True) -> StepResult:
        """Compute one step: write KV, sample where asked.

        Where a step fails, each of its requests is computed alone: those that fail again get an
        error, the others their tokens. Without ``retries`` it raises what the step raised.
        """
        for request_id in decision.forget:
            self._requests.pop(request_id, None)
        requests = order_requests(decision.requests)
        result = StepResult(decision.step)
        began = time.perf_counter()
        try:
            if requests:
                self._execute(requests, result)
        except Exception as error:  # Whatever it is, it must not take down the other requests.
            self._settle()
            if not retries:
                raise
            logger.warning("step %d failed (%s); its requests run alone", decision.step, error)
            result = StepResult(decision.step)
            for request in requests:
                self._execute_alone(request, result)
        result.step_s = time.perf_counter() - began
        return result

    def _execute_alone(self, request: ScheduledRequest, result: StepResult) -> None:
        state = self._requests.get(request.request_id)
        if state is not None:
            # Without what the failed step may have appended.
            row, end = state.row, request.start + len(request.token_ids)
            tokens = row.token_ids[:end] if request.sample else row.token_ids
            state.row = SamplerRow(row.params, tokens, row.num_prompt_tokens)
        try:
            self._execute([request], result)
        except Exception as error:
            self._settle()
            logger.exception("request %s failed", request.request_id)
            reason = (str(error) or "out of memory").splitlines()[0]
            result.errors[request.request_id] = f"Computing this request failed: {reason}"

    def _settle(self) -> None:
        """After a failed step: wait until nothing of it runs any more."""
        try:
            self.device.synchronize()
        except RuntimeError as error:
            logger.debug("of the failed step: %s", error)

    @torch.inference_mode()
    def _execute(self, requests: list[ScheduledRequest], result: StepResult) -> None:
        self._remember(requests)
        kernels = self._kernels
        batch = build_batch(requests, self.kv_cache, kernels.row_pad)
        model_began = time.perf_counter()
        ends = batch.attention[0].query_starts
        chosen = [i for i, request in enumerate(requests) if request.sample]
        rows = [ends[i + 1] - 1 for i in chosen]
        logits: Tensor | None = None
        best: tuple[Tensor, Tensor] | None = None
        if self.replayer is not None and self.replayer.fits(batch, len(rows)):
            hidden, logits, best = self.replayer.replay(batch, rows)
            logits = kernels.fetch(logits)
        else:
            kernels.begin_step(batch.num_tokens, len(rows))
            batch.positions = kernels.put(batch.positions)
            hidden = self.model(batch)
            if rows:
                logits = self.model.head(kernels.take_logit_rows(hidden, rows))
            kernels.end_step()
            # What has failed shows here, too.
            logits = kernels.fetch(hidden[:0] if logits is None else logits)
        result.model_s += time.perf_counter() - model_began
        for index, request in enumerate(requests):
            if self._requests[request.request_id].row.params.prompt_logprobs is not None:
                self._score_prompt(request, hidden[ends[index] : ends[index + 1]], result)
        if rows and logits is not None:
            self._sample(logits, best, [requests[i] for i in chosen], result)

    def forget_all(self) -> None:
        """Forget every request, as if none had come."""
        self._requests.clear()

    def close(self) -> None:
        """Drop the model, the cache and the kernels; the runner cannot be used afterwards."""
        self._requests.clear()
        del self.model, self.kv_cache, self.replayer, self._sampler, self._kernels

    def _remember(self, requests: list[ScheduledRequest]) -> None:
        for request in requests:
            new = request.new
            if new is not None:
                row = SamplerRow(new.params, list(new.token_ids), new.num_prompt_tokens)
                self._requests[request.request_id] = RunnerRequest(row)

    def _sample(
        self,
        logits: Tensor,
        best: tuple[Tensor, Tensor] | None,
        requests: list[ScheduledRequest],
        result: StepResult,
    ) -> None:
        rows = [self._requests[request.request_id].row for request in requests]
        sampled = self._sampler(logits, rows, best)
        for index, request in enumerate(requests):
            error = sampled.errors.get(index)
            if error is not None:
                result.errors[request.request_id] = error
                continue
            token = sampled.token_ids[index]
            rows[index].token_ids.append(token)
            result.sampled[request.request_id] = [token]
            logprobs = sampled.logprobs[index]
            if logprobs is not None:
                result.logprobs[request.request_id] = [logprobs]

    def _score_prompt(self, request: ScheduledRequest, hidden: Tensor, result: StepResult) -> None:
        """Log probabilities of the prompt tokens in this chunk, each given by the row before it:
        the last row of a chunk scores the first token of the next."""
        row = self._requests[request.request_id].row
        wanted = row.params.prompt_logprobs
        assert wanted is not None
        scores: list[TokenLogprobs | None] = [None] if request.start == 0 else []
        # Rows at or after the last prompt token score no prompt token.
        count = min(len(request.token_ids), row.num_prompt_tokens - 1 - request.start)
        for first in range(0, count, LOGIT_ROWS):
            end = min(first + LOGIT_ROWS, count)
            targets = row.token_ids[request.start + first + 1 : request.start + end + 1]
            logits = self._kernels.fetch(self.model.head(hidden[first:end]))
            scores += prompt_logprobs(logits, targets, wanted)
        if scores:
            result.prompt_logprobs[request.request_id] = scores
