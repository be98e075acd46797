"""``ambidex chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ambidex.cli.common import (
    SAMPLING_OPTIONS,
    load,
    print_help,
    resolve,
    sampling_values,
    say,
    wants,
)
from ambidex.errors import RequestError

if TYPE_CHECKING:
    from ambidex.llm import LLM
    from ambidex.request import SamplingParams


HELP = (
    "ambidex: /clear starts over, /help shows this, /exit or Ctrl-D ends; Ctrl-C stops an answer, "
    "and ends the chat where none is being written"
)

#: Tokens of the context that are kept for the answer when old turns have to go.
ROOM_FOR_ANSWER = 64


def main(argv: Sequence[str]) -> int:
    if wants(argv, "--help", "-h", "--help-all"):
        print_help("chat", "[MODEL] [OPTIONS]", SAMPLING_OPTIONS, argv)
        return 0
    resolved = resolve("chat", argv, SAMPLING_OPTIONS)
    if resolved is None:
        return 0
    with load(resolved) as llm:
        params = llm.make_sampling_params(sampling_values(resolved), None)
        system = resolved.values["system"]
        start = [{"role": "system", "content": system}] if system is not None else []
        say(HELP)
        _converse(llm, params, start)
    return 0


def _converse(llm: LLM, params: SamplingParams, start: list[dict[str, str]]) -> None:
    messages = list(start)
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.buffer.readline().decode("utf-8")
        except UnicodeDecodeError:
            say("ambidex: that line was not UTF-8 text; please write it again")
            continue
        except KeyboardInterrupt:
            say("")
            return
        text = line.strip()
        if not line or text in ("/exit", "/quit"):
            return
        if not text:
            continue
        if text == "/help":
            say(HELP)
            continue
        if text == "/clear":
            messages = list(start)
            say("ambidex: the conversation was cleared")
            continue
        messages.append({"role": "user", "content": text})
        _forget_old_turns(llm, messages, len(start))
        answer = _answer(llm, params, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _forget_old_turns(llm: LLM, messages: list[dict[str, str]], num_kept: int) -> None:
    """Drop the oldest question and answer while the conversation fills the context; the first
    ``num_kept`` messages (the system's) and the last question stay."""
    limit = llm.info.max_model_len
    room = min(ROOM_FOR_ANSWER, limit // 4)
    num_dropped = 0
    while len(messages) > num_kept + 2:
        prompt = llm.render_chat(messages)
        if len(llm.get_tokenizer().encode(prompt, add_special_tokens=False)) + room <= limit:
            break
        del messages[num_kept : num_kept + 2]
        num_dropped += 1
    if num_dropped:
        say(
            f"ambidex: the context of {limit} tokens is full: the oldest {num_dropped} of the "
            "conversation's turns were dropped (/clear drops all)"
        )


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]]) -> str | None:
    """Streams the answer; None where there was none (an error, which is shown)."""
    text = ""
    try:
        prompt = llm.render_chat(messages)
        for output in llm.stream(prompt, params, add_special_tokens=False):
            if output.error:
                raise RequestError(output.error)
            sys.stdout.write(output.outputs[0].delta_text)
            sys.stdout.flush()
            text = output.outputs[0].text
    except RequestError as error:
        say(f"ambidex: {error}")
        return None
    except KeyboardInterrupt:
        say(" (stopped)")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return text
