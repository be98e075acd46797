"""Checks a conversation and brings it into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ambidex.server import limits
from ambidex.server.errors import ApiError

#: Names that a template gets from us; a request cannot set them.
RESERVED = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
)

#: OpenAI's newer name of a role -> the name that templates know.
_ROLE_NAMES: Mapping[str, str] = {"developer": "system"}


def _bad(message: str, index: int) -> ApiError:
    return ApiError(400, f"messages[{index}]: {message}", param="messages")


def _text(content: Any, index: int) -> Any:
    """Content parts joined to one text; only text parts exist here."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad("'content' must be a string or a list of parts.", index)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise _bad(
                f"a content part of type {str(kind)[:40]!r} is not supported; this server takes "
                "text only.",
                index,
            )
    return "\n".join(texts)


def _tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Templates want a call's arguments as an object; clients send them as JSON text."""
    if not isinstance(calls, list):
        raise _bad("'tool_calls' must be a list.", index)
    converted = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad("each of 'tool_calls' needs a 'function' with a 'name'.", index)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            limits.check_num_values(arguments.encode(), f"messages[{index}]: a tool call")
            try:
                arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
            except (msgspec.DecodeError, ValueError, RecursionError):
                raise _bad("the arguments of a tool call are not valid JSON.", index) from None
            if isinstance(arguments, str):
                raise _bad("the arguments of a tool call must be a JSON object.", index)
        converted.append({**call, "function": {**function, "arguments": arguments or {}}})
    return converted


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for the template; raises a 400 that names the one at fault."""
    if not messages:
        raise ApiError(400, "'messages' is empty; send at least one message.", param="messages")
    checked = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad("'role' is missing.", index)
        clean = {name: value for name, value in message.items() if value is not None}
        clean["role"] = _ROLE_NAMES.get(role, role)
        clean["content"] = _text(message.get("content"), index)
        if clean.get("tool_calls"):
            clean["tool_calls"] = _tool_calls(clean["tool_calls"], index)
        elif clean["content"] is None:
            if role != "assistant":
                raise _bad("'content' is missing.", index)
            clean["content"] = ""
        checked.append(clean)
    return checked


def num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of all contents, as :func:`check_messages` left them."""
    return sum(len(message["content"] or "") for message in messages)


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Extra variables for the template; raises a 400 where one is not the client's to set."""
    taken = sorted(RESERVED & set(kwargs or ()))
    if taken:
        raise ApiError(
            400,
            f"'chat_template_kwargs' cannot set '{taken[0]}'. Use the request's own field.",
            param="chat_template_kwargs",
        )
    odd = [name for name in kwargs or () if not name.isidentifier()]
    if odd:
        raise ApiError(
            400,
            f"'chat_template_kwargs' holds {odd[0][:40]!r}, which is no name of a variable. Use "
            "letters, digits and underscores.",
            param="chat_template_kwargs",
        )
    return dict(kwargs or {})
