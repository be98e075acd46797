"""The server's side of the engine, without HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fake_frontend import fake_frontend

from ambidex.config import EngineConfig, ModelConfig
from ambidex.engine.async_engine import (
    MAX_WAITING_OUTPUTS,
    AsyncEngine,
    EngineUnavailableError,
)
from ambidex.engine.frontend import Frontend, Submission, TextFrontend, read_chat_template
from ambidex.engine.messages import EngineInfo
from ambidex.errors import EngineDeadError, InvalidModelError, OptionError, RequestError
from ambidex.request import EngineRequest, SamplingParams
from conftest import wait_until

T = TypeVar("T")

PARAMS = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=2000)


def run(test: Callable[[AsyncEngine], Awaitable[T]], settings: Any = None, **options: Any) -> T:
    """Runs ``test`` with a started engine in an event loop of its own."""

    async def main() -> T:
        config = EngineConfig(ModelConfig("fake-model", hf_overrides=settings or {}))
        engine = AsyncEngine(
            config,
            engine_factory="fake_engine:FakeEngine",
            **{"frontend_factory": fake_frontend, **options},
        )
        try:
            await engine.start()
            return await asyncio.wait_for(test(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def text_of(engine: AsyncEngine, prompt: str, params: SamplingParams = PARAMS) -> str:
    parts = [
        part.delta_text
        async for output in engine.generate(prompt, params)
        for part in output.outputs
    ]
    return "".join(parts)


def test_generate() -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = [output async for output in engine.generate("a", PARAMS)]
        assert [output.outputs[0].delta_text for output in outputs] == list("bcdef")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].text == "bcdef"
        assert engine.num_requests == 0

    run(test)


def test_a_reader_that_does_not_read_finds_the_rest_in_one() -> None:
    """For a stalled client no more is kept than its answer, however long that gets."""
    many = SamplingParams(max_tokens=500, logprobs=1)

    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit("a", many)
        # Its bookkeeping ends with the last token; nobody has read any by then.
        await until(lambda: engine.num_requests == 0)
        parts = [part async for output in stream for part in output.outputs]
        assert len(parts) == MAX_WAITING_OUTPUTS
        text = "".join(chr(ord("a") + i % 26) for i in range(1, 501))
        assert "".join(part.delta_text for part in parts) == parts[-1].text == text
        for name in ("token_ids", "logprobs"):
            deltas = [item for part in parts for item in getattr(part, f"delta_{name}")]
            assert deltas == getattr(parts[-1], name)
        assert [part.finish_reason for part in parts] == [None] * 15 + ["length"]

    run(test)


def test_many_at_once() -> None:
    async def test(engine: AsyncEngine) -> list[str]:
        return await asyncio.gather(*(text_of(engine, "xyz"[i % 3]) for i in range(200)))

    texts = run(test)
    assert texts == [("yzabc", "zabcd", "abcde")[i % 3] for i in range(200)]


def test_leaving_a_generator_aborts() -> None:
    async def test(engine: AsyncEngine) -> None:
        generator = engine.generate("!slow", LONG)
        async for _ in generator:
            break
        assert engine.num_requests == 1
        await generator.aclose()  # type: ignore[attr-defined]
        assert engine.num_requests == 0
        assert await text_of(engine, "a") == "bcdef"
        await until(lambda: engine.stats.num_running == 0)

    run(test)


def test_cancelling_a_task_aborts() -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(text_of(engine, "!slow", LONG))
        await until(lambda: engine.num_requests == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.num_requests == 0)

    run(test)


def test_ids_are_unique() -> None:
    async def test(engine: AsyncEngine) -> None:
        async with await engine.submit("!slow", LONG, request_id="one"):
            with pytest.raises(RequestError, match="'one'"):
                await engine.submit("a", PARAMS, request_id="one")
        async with await engine.submit("a", PARAMS, request_id="one") as stream:
            assert [output.finished async for output in stream][-1]

    run(test)


def test_start_raises_the_engines_own_error() -> None:
    async def test(engine: AsyncEngine) -> None:
        raise AssertionError("not reached")

    with pytest.raises(InvalidModelError, match="it is broken"):
        run(test, {"fail_start": "it is broken"})
    with pytest.raises(EngineDeadError, match="exit code 7"):
        run(test, {"crash_start": 7})


def test_health_of_a_stopped_engine() -> None:
    async def test(engine: AsyncEngine) -> None:
        assert (await engine.health()).is_ok
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGSTOP)
        try:
            while (health := await engine.health(0.2)).is_ok:
                pass
            assert health.state == "hung"
            assert "not answered" in health.message
        finally:
            os.kill(engine.engine_pid, signal.SIGCONT)
        while not (await engine.health(0.2)).is_ok:
            pass

    run(test, hang_s=1.5)


def test_waiting_for_a_restart_is_bounded() -> None:
    async def test(engine: AsyncEngine) -> None:
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        with pytest.raises(EngineUnavailableError, match="restarted"):
            await engine.submit("a", PARAMS)

    run(test, {"load_s": 2}, restart_wait_s=0.2)


def test_a_restart_reads_the_tokenizer_again() -> None:
    """The model's files may have been replaced while it was served."""
    made: list[Frontend] = []

    def factory(config: EngineConfig, info: EngineInfo) -> Frontend:
        shorter = replace(info, max_model_len=info.max_model_len - 2000 * len(made))
        made.append(fake_frontend(config, shorter))
        return made[-1]

    async def test(engine: AsyncEngine) -> None:
        assert await text_of(engine, "a") == "bcdef"
        pid = engine.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        # Asked while there is none, and answered by what is there afterwards.
        with pytest.raises(RequestError, match="maximum context length is 48 tokens"):
            await text_of(engine, "a" * 100)
        assert len(made) == 2
        assert engine.frontend is made[1]
        assert await text_of(engine, "a") == "bcdef"

    run(test, frontend_factory=factory)


def test_a_request_prepared_for_a_dead_engine_is_prepared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = engine.frontend
        prepare = TextFrontend.prepare
        used: list[Frontend] = []

        def prepare_and_die(self: TextFrontend, submission: Submission) -> list[EngineRequest]:
            used.append(self)
            if self is first:
                assert engine.engine_pid is not None
                os.kill(engine.engine_pid, signal.SIGKILL)
                wait_until(lambda: engine.state == "restarting", "its death is known")
            return prepare(self, submission)

        monkeypatch.setattr(TextFrontend, "prepare", prepare_and_die)
        assert await text_of(engine, "a") == "bcdef"
        assert used == [first, engine.frontend]
        assert first is not engine.frontend

    run(test)


def test_a_bug_in_the_text_side_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine) -> None:
        process = engine.frontend.process

        def broken(outputs: list[Any]) -> Any:
            if any(output.request_id == "bad" for output in outputs):
                raise ValueError("a bug")
            return process(outputs)

        monkeypatch.setattr(engine.frontend, "process", broken)
        with pytest.raises(Exception, match="could not run this request"):
            async for _ in engine.generate("a", PARAMS, request_id="bad"):
                pass
        assert await text_of(engine, "a") == "bcdef"
        assert engine.num_requests == 0

    run(test)


def test_a_bug_in_taking_messages_in_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs is told, and a new engine process serves the next."""

    async def test(engine: AsyncEngine) -> None:
        def fail(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(engine, "_count_tokens", fail)
        with pytest.raises(EngineDeadError):
            await text_of(engine, "a")
        monkeypatch.undo()
        assert await text_of(engine, "a") == "bcdef"

    run(test)


def test_chat_template_option(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template(str(file)) == "{{ messages }}"
    assert read_chat_template("{{ 1 }}") == "{{ 1 }}"
    with pytest.raises(OptionError, match="--chat-template"):
        read_chat_template(str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="pipe is no regular file"):
        read_chat_template(str(tmp_path / "pipe"))
