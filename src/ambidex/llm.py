"""The offline API: prompts in, texts out, in this process. Names and forms are vLLM's.

with LLM(model="smollm2-135m-instruct") as llm:
    for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ambidex.config import EngineConfig
from ambidex.engine.engine import Engine
from ambidex.engine.frontend import Submission, default_frontend
from ambidex.engine.interrupts import interrupts_wait
from ambidex.engine.output import RequestOutput
from ambidex.engine.progress import Progress
from ambidex.engine.summary import memory_report
from ambidex.engine.tokenizer import Tokenizer
from ambidex.errors import EngineDeadError, RequestError, memory_refusal
from ambidex.options import resolve_keywords
from ambidex.request import EngineRequest, SamplingParams

logger = logging.getLogger(__name__)

_PROMPT_FORMS = "A prompt is a text, {'prompt': TEXT} or {'prompt_token_ids': [IDS]}."

#: A text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]
#: A checked request, and what the engine will run for it: one sequence for each of its ``n``.
_Prepared = tuple[Submission, list[EngineRequest]]


class LLM:
    """A loaded model.

    ``options`` are the command line's, with underscores: ``max_model_len=4096``,
    ``dtype="float32"``, ``enable_prefix_caching=False``. Raises :class:`AmbidexError` for anything
    that is the caller's to correct. Use it as a context manager, or call :meth:`close`: both
    give all memory back. Several threads may call it; their requests share the steps.
    """

    def __init__(self, model: str, *, config: EngineConfig | None = None, **options: Any) -> None:
        #: Sentences that the user should read once; logged, unless ``config`` came from outside.
        self.notes: list[str] = []
        is_resolved_here = config is None
        if config is None:
            resolved = resolve_keywords({"model": model, **options}, os.environ)
            config = resolved.engine_config()
            self.notes += resolved.notes
        #: Held by whoever steps the engine.
        self._lock = threading.RLock()
        #: Held only while ``_engine`` is taken away.
        self._closing = threading.Lock()
        self._engine: Engine | None = None
        try:
            self._engine = Engine(config)
            self.info = self._engine.info()
            self._frontend = default_frontend(config, self.info)
        except BaseException as error:
            self.close()
            refused = memory_refusal(error)
            if refused is None:
                raise
            raise refused from None
        self.notes += [*self.info.notes, *self._frontend.notes]
        for note in self.notes if is_resolved_here else ():
            logger.warning(note)
        self._ids = itertools.count()
        #: What the engine produced for each request that runs, until its caller takes it.
        self._outputs: dict[str, deque[RequestOutput]] = {}

    @property
    def engine(self) -> Engine:
        """The engine, for its counters; raises EngineDeadError after :meth:`close`."""
        engine = self._engine
        if engine is None:
            raise EngineDeadError("This LLM was closed. Make a new one.")
        return engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lanes' threads and free weights and KV cache; harmless when called again, or by
        several threads. Where another thread is generating, it gets EngineDeadError."""
        with self._closing:
            engine, self._engine = self._engine, None
        if engine is None:
            return
        # Nobody steps in a forked child; whoever held the lock during the fork is not there.
        with contextlib.nullcontext() if engine.is_forked else self._lock:
            # No step has been begun since, and the last one has ended.
            engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: ``encode``, ``decode``, ``apply_chat_template``."""
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (``generation_config.json``), else OpenAI's."""
        return self._frontend.sampling_params({}, 16)

    def make_sampling_params(
        self, values: Mapping[str, Any], default_max_tokens: int | None = 16
    ) -> SamplingParams:
        """``values`` by name, completed with :meth:`get_default_sampling_params`."""
        return self._frontend.sampling_params(values, default_max_tokens)

    def memory_snapshot(self) -> dict[str, Any]:
        """Each memory's ledger by account, where the weights are, and after the first hundred steps
        how long they took beside what was predicted: what ``/ledger`` shows."""
        info = self.engine.info()
        return memory_report(info.memory, info.modules, self.engine.speed())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs have the order of the prompts.

        ``sampling_params`` is one for all or one a prompt. Raises RequestError, before anything
        runs, for a prompt or parameter that cannot be served.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else prompts
        if not isinstance(several, Iterable):
            raise RequestError(_PROMPT_FORMS, "prompts")
        prepared = self._prepare(list(several), sampling_params, priority, add_special=True)
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: lists of ``{"role": ..., "content": ...}``."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.render_chat(
                conversation,  # type: ignore[arg-type]
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        prepared = self._prepare(prompts, sampling_params, None, add_special=False)
        return self._run(prepared, use_tqdm)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The text that the model's chat template makes of a conversation."""
        options = {name: value for name, value in options.items() if value is not None}
        return self._frontend.apply_chat_template(messages, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, with an output a step; leaving the iterator early aborts it.

        Raises RequestError at once, and starts with the first output asked for.
        """
        prepared = self._prepare([prompt], sampling_params, None, add_special=add_special_tokens)
        return self._outputs_of(prepared)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        *,
        add_special: bool,
    ) -> list[_Prepared]:
        """All requests, checked before any is queued: a wrong one leaves nothing behind."""
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for name, values in (("sampling_params", each), ("priority", priority)):
            if values is not None and len(values) != len(prompts):
                raise RequestError(
                    f"There are {len(prompts)} prompts and {len(values)} {name}; give one a "
                    "prompt.",
                    name,
                )
        now = time.monotonic()
        prepared = []
        for index, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
            submission = Submission(
                request_id=str(next(self._ids)),
                prompt=_prompt_content(prompt),
                params=chosen,
                arrival_s=now,
                priority=priority[index] if priority else 0,
                add_special_tokens=add_special,
            )
            prepared.append((submission, self._frontend.prepare(submission)))
        return prepared

    def _run(self, prepared: Sequence[_Prepared], show_progress: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with Progress("Requests", is_shown=show_progress) as progress:
            for output in self._outputs_of(prepared):
                if output.finished:
                    done[output.request_id] = output
                    progress.update(len(done), len(prepared))
        return [done[submission.request_id] for submission, _ in prepared]

    def _outputs_of(self, prepared: Sequence[_Prepared]) -> Iterator[RequestOutput]:
        """Run these to their end. What a step gives for others is kept for whoever runs them."""
        # Before the lock, which a thread of the parent may have held during the fork.
        self.engine.check_process()
        running = {submission.request_id: requests for submission, requests in prepared}
        mine: deque[RequestOutput] = deque()
        try:
            with self._lock, interrupts_wait():
                for submission, requests in prepared:
                    self._frontend.register(submission, requests)
                    self._outputs[submission.request_id] = mine
                    for request in requests:
                        self.engine.add_request(request)
            while running:
                with self._lock:
                    # Another thread's step may have brought what this one waits for.
                    while not mine:
                        self._step()
                    output = mine.popleft()
                    if output.finished:
                        del running[output.request_id], self._outputs[output.request_id]
                if output.error:
                    logger.warning("request %s failed: %s", output.request_id, output.error)
                yield output
        finally:
            with self._lock, interrupts_wait():
                for request_id, requests in running.items():
                    self._outputs.pop(request_id, None)
                    self._frontend.forget(request_id)
                    engine = self._engine
                    if engine is not None:
                        engine.abort([request.request_id for request in requests])

    def _step(self) -> None:
        """Begin a step, or take in one that is done; between the two it waits for it."""
        with interrupts_wait():
            updates = self.engine.step(0)
            results, stopped = self._frontend.process(updates)
            if stopped:
                self.engine.abort(stopped)
            for result in results:
                self._outputs[result.request_id].append(result)
        if not updates:
            self.engine.wait()


def _prompt_content(prompt: Prompt) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    for name in ("prompt_token_ids", "prompt"):
        if isinstance(prompt, Mapping) and name in prompt:
            content: str | Sequence[int] = prompt[name]
            return content
    raise RequestError(_PROMPT_FORMS, "prompt")
