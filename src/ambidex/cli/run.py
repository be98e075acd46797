"""``ambidex run``: one prompt, one answer, streaming."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ambidex.cli.common import (
    SAMPLING_OPTIONS,
    load,
    print_help,
    resolve,
    sampling_values,
    say,
    wants,
)
from ambidex.errors import OptionError, RequestError
from ambidex.options import WORKS, Option

if TYPE_CHECKING:
    from ambidex.engine.output import RequestOutput
    from ambidex.llm import LLM
    from ambidex.options import Resolved

#: Tokens of an answer, where nothing else is said.
DEFAULT_MAX_TOKENS = 512

OPTIONS = (
    Option("--prompt", WORKS, "str", aliases=("-p",), help="the prompt; '-' reads stdin",
           dest="prompt"),
    Option("--json", WORKS, "flag", default=False, no_form=False, dest="json",
           help="one JSON object instead of streaming text"),
    Option("--raw", WORKS, "flag", default=False, no_form=False, dest="raw",
           help="the prompt as it is, without the chat template"),
    *SAMPLING_OPTIONS,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    if wants(argv, "--help", "-h", "--help-all"):
        print_help("run", "[MODEL] -p PROMPT [OPTIONS]", OPTIONS, argv)
        return 0
    resolved = resolve("run", argv, OPTIONS)
    if resolved is None:
        return 0
    prompt = _read_prompt(resolved)
    with load(resolved) as llm:
        return _answer(llm, resolved, prompt)


def _read_prompt(resolved: Resolved) -> str:
    prompt: str | None = resolved.values["prompt"]
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"Standard input is not UTF-8 text: {error}.", "prompt") from None
    if not prompt:
        model = resolved.values["model"]
        hint = f" Was {model!r} meant as the prompt? It was taken as MODEL." if model else ""
        raise OptionError(
            f"There is no prompt. Give one with -p 'TEXT', or write it to standard input.{hint}"
        )
    return prompt


def _answer(llm: LLM, resolved: Resolved, prompt: str) -> int:
    params = llm.make_sampling_params(sampling_values(resolved), DEFAULT_MAX_TOKENS)
    text = prompt if resolved.values["raw"] else _render(llm, prompt, resolved.values["system"])
    as_json = resolved.values["json"]
    began = time.perf_counter()
    first = None
    output = None
    for output in llm.stream(text, params, add_special_tokens=resolved.values["raw"]):
        if first is None and output.outputs[0].token_ids:
            first = time.perf_counter()
        if not as_json:
            sys.stdout.write(output.outputs[0].delta_text)
            sys.stdout.flush()
    ended = time.perf_counter()
    assert output is not None, "a stream ends with an output"
    if output.error:
        raise RequestError(output.error)
    timings = _timings(output, began, first or ended, ended)
    if as_json:
        print(json.dumps(_to_json(llm, output, timings), ensure_ascii=False))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        say(_summary(output, timings))
    return 0


def _render(llm: LLM, prompt: str, system: str | None) -> str:
    messages = [{"role": "system", "content": system}] if system is not None else []
    try:
        return llm.render_chat([*messages, {"role": "user", "content": prompt}])
    except RequestError as error:
        raise RequestError(f"{error} Or use --raw to complete the prompt as it is.") from None


def _timings(
    output: RequestOutput, began: float, first: float, ended: float
) -> dict[str, float | None]:
    num_prompt = len(output.prompt_token_ids)
    num_more = len(output.outputs[0].token_ids) - 1
    return {
        "time_to_first_token_s": round(first - began, 4),
        "total_s": round(ended - began, 4),
        "prefill_tokens_per_s": round(num_prompt / (first - began), 2) if first > began else None,
        "decode_tokens_per_s": round(num_more / (ended - first), 2)
        if num_more > 0 and ended > first
        else None,
    }


def _to_json(llm: LLM, output: RequestOutput, timings: dict[str, float | None]) -> dict[str, Any]:
    answer = output.outputs[0]
    num_prompt, num_output = len(output.prompt_token_ids), len(answer.token_ids)
    return {
        "model": llm.info.model,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
        "timings": timings,
    }


def _summary(output: RequestOutput, timings: dict[str, float | None]) -> str:
    answer = output.outputs[0]
    rate = timings["decode_tokens_per_s"]
    return (
        f"ambidex: {len(output.prompt_token_ids)} prompt tokens, first token after "
        f"{timings['time_to_first_token_s']:.2f} s; {len(answer.token_ids)} tokens"
        + (f" at {rate:.1f} tokens per second" if rate else "")
        + f" ({answer.finish_reason})"
    )
