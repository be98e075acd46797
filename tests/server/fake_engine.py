"""An engine without a model: the next token is a function of the last one.

The "tokenizer" maps a byte to the id of the same number, so that prompts choose what happens:

- the next token of ``a`` .. ``z`` is the next letter, and ``z`` is followed by ``a``; any other
  byte is followed by ``a``;
- a prompt that starts with ``!crash`` kills the process when it is scheduled, ``!refuse`` is
  refused with a sentence, ``!fail`` fails in its second step, ``!slow`` takes 0.1 s a token and
  ``!hang`` blocks the whole engine for 30 s.

Settings come through ``hf_overrides``: ``step_s`` (seconds a step), ``fail_start`` (a sentence),
``crash_start`` (an exit status), ``load_s`` (seconds the model takes to load), ``memory`` (name ->
capacity and accounts; each request that runs adds to the first one's staging) and ``modules``.
"""

from __future__ import annotations

import os
import time

from ambidex.config import EngineConfig
from ambidex.engine.foretold import StepSpeed
from ambidex.engine.messages import EngineInfo, EngineStats
from ambidex.errors import InvalidModelError, RequestError
from ambidex.memory.ledger import MemorySnapshot
from ambidex.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs

VOCAB_SIZE = 256
EOS = 0


def next_token(token_id: int) -> int:
    if ord("a") <= token_id < ord("z"):
        return token_id + 1
    return ord("a")


def logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top = [(token_id, -0.5)] + [((token_id + i) % VOCAB_SIZE, -0.5 - i) for i in range(1, num_top)]
    return TokenLogprobs(token_id, -0.5, 1, top[:num_top])


def prompt_logprobs(request: EngineRequest) -> list[TokenLogprobs | None] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    return [None, *(logprobs(i, num_top) for i in request.prompt_token_ids[1:])]


class _Running:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.last = request.prompt_token_ids[-1]
        self.num_output = 0
        self.not_before = 0.0

    def starts_with(self, text: str) -> bool:
        return bytes(self.request.prompt_token_ids[:16]).startswith(text.encode())


class FakeEngine:
    """The interface of ``ambidex.engine.engine.Engine``."""

    def __init__(self, config: EngineConfig) -> None:
        settings = config.model.hf_overrides
        if "fail_start" in settings:
            raise InvalidModelError(str(settings["fail_start"]))
        if "crash_start" in settings:
            os._exit(int(settings["crash_start"]))
        time.sleep(float(settings.get("load_s", 0.0)))
        self._config = config
        self._step_s = float(settings.get("step_s", 0.0))
        self._running: dict[str, _Running] = {}
        self._queries = 0
        self._seen: set[tuple[int, ...]] = set()
        self._hits = 0

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._config.model.model,
            tokenizer_path="",
            max_model_len=self._config.model.max_model_len or 2048,
            vocab_size=VOCAB_SIZE,
            num_blocks=64,
            block_size=16,
            dtype="float32",
            source="a fake",
            memory=self.memory(),
            modules=dict(self._config.model.hf_overrides.get("modules", {})),
        )

    def memory(self) -> list[MemorySnapshot]:
        given = self._config.model.hf_overrides.get("memory", {})
        found = [
            MemorySnapshot(name, each["capacity"], dict(each["accounts"]))
            for name, each in given.items()
        ]
        if found:
            staging = found[0].accounts.get("staging", 0)
            found[0].accounts["staging"] = staging + 1000 * len(self._running)
        return found

    def speed(self) -> dict[str, StepSpeed]:
        given = self._config.model.hf_overrides.get("speed", {})
        return {kind: StepSpeed(*values) for kind, values in given.items()}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add_request(self, request: EngineRequest) -> None:
        running = _Running(request)
        if running.starts_with("!refuse"):
            raise RequestError("The fake engine refuses this prompt.", "prompt")
        if running.starts_with("!bug"):
            raise KeyError("a bug in add_request")
        key = tuple(request.prompt_token_ids)
        self._queries += len(key)
        self._hits += len(key) if key in self._seen else 0
        self._seen.add(key)
        self._running[request.request_id] = running

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def step(self, timeout_s: float) -> list[EngineOutput]:
        now = time.monotonic()
        ready = [r for r in self._running.values() if r.not_before <= now]
        time.sleep(self._step_s if ready else min(timeout_s, 0.01))
        return [self._advance(running) for running in ready]

    def _advance(self, running: _Running) -> EngineOutput:
        request = running.request
        params = request.params
        if running.starts_with("!crash"):
            os.kill(os.getpid(), 9)
        if running.starts_with("!hang"):
            time.sleep(30)
        if running.starts_with("!slow"):
            running.not_before = time.monotonic() + 0.1
        if running.starts_with("!fail") and running.num_output == 1:
            del self._running[request.request_id]
            return EngineOutput(
                request.request_id, [], FinishReason.ERROR, error="The fake engine gave up."
            )
        is_first = running.num_output == 0
        if params.max_tokens == 0:
            del self._running[request.request_id]
            return EngineOutput(
                request.request_id,
                [],
                FinishReason.LENGTH,
                prompt_logprobs=prompt_logprobs(request),
            )
        token_id = next_token(running.last)
        running.last = token_id
        running.num_output += 1
        output = EngineOutput(request.request_id, [token_id])
        if params.logprobs is not None:
            output.logprobs = [logprobs(token_id, params.logprobs)]
        if is_first:
            output.prompt_logprobs = prompt_logprobs(request)
        if token_id in params.stop_token_ids:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = token_id
        elif running.num_output >= (params.max_tokens or 10_000):
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            del self._running[request.request_id]
        return output

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            kv_cache_usage=min(1.0, len(self._running) / 64),
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
        )

    def close(self) -> None:
        self._running.clear()
