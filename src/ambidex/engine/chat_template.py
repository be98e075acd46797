"""Chat templates: messages become one prompt text, in a sandbox with bounds.

Templates come with models and may be sent by clients, so they run in jinja2's immutable sandbox
and with a budget: loop passes, the size of strings that operators build, and the size of the
result are limited. What a template refuses, or runs out of, is a client's error.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ambidex.errors import RequestError

#: Bounds of one rendering: characters of the result or of any string on the way, loop passes.
MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_LOOP_PASSES = 5_000_000
#: What a call counts for: it takes that much longer than a pass.
_PASSES_PER_CALL = 25
MAX_TEMPLATE_CHARS = 1024 * 1024
_MAX_JSON_DEPTH = 64

#: A width or a precision in a format string that is large or taken from a value.
_WIDE_FIELD = re.compile(r"[0-9]{5,}|%[-+ #0]*\*|\{[^{}]*:[^{}]*\{")

_CONTINUE_MARK = "\ue000continue\ue001 "

#: Variables that the template gets from us; ``chat_template_kwargs`` may not replace them.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})

_ROLES_WITH_CONTENT = frozenset({"system", "developer", "user", "tool"})


class ChatTemplate:
    """One compiled template. Rendering is thread-safe."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"The chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are "
                "accepted.",
                param="chat_template",
            )
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self._code = environment.compile(_Bounded(environment).visit(tree))
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"The chat template is not valid: {error.message} (line {error.lineno}).",
                param="chat_template",
            ) from error
        except (RecursionError, SyntaxError, _LimitError) as error:
            raise RequestError(
                "The chat template is nested too deeply or too large to be compiled.",
                param="chat_template",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text.

        With ``continue_final_message`` the text ends within the last message, so that the model
        goes on writing it. Raises :class:`RequestError`.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other: set one "
                "of them to false.",
                param="continue_final_message",
            )
        reserved = sorted(_RESERVED & variables.keys())
        if reserved:
            raise RequestError(
                f"'{reserved[0]}' cannot be given as a template variable: it is set from the "
                "request itself.",
                param="chat_template_kwargs",
            )
        # Asked for every request: one client's variables must not decide for the others.
        chat = _normalized(messages, self._probe_parts(variables))
        final = _mark_final(chat) if continue_final_message else None
        text = self._run(
            {
                **_plain(variables, "chat_template_kwargs"),
                "messages": chat,
                "tools": None if tools is None else _plain(tools, "tools"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return text if final is None else _cut_at_mark(text, final)

    def _run(self, variables: Mapping[str, Any]) -> str:
        # An environment of its own for each rendering: it carries the budget.
        environment = _Environment()
        template = jinja2.Template.from_code(
            environment, self._code, environment.make_globals(None)
        )
        parts = []
        size = 0
        try:
            for part in template.generate(variables):
                size += len(part)
                if size > MAX_TEXT_CHARS:
                    raise _LimitError(f"its text exceeds {MAX_TEXT_CHARS} characters")
                parts.append(part)
        except _LimitError as error:
            raise RequestError(
                f"The chat template was stopped: {error}.", param="messages"
            ) from None
        except jinja2.TemplateError as error:
            raise RequestError(
                f"The chat template refuses these messages: {error.message or error}",
                param="messages",
            ) from error
        except (RecursionError, MemoryError):
            raise RequestError(
                "The chat template was stopped: it recurses too deeply or wants too much memory.",
                param="messages",
            ) from None
        # The sandbox runs the model's code on a client's data: any error there is theirs.
        except Exception as error:
            raise RequestError(
                f"The chat template fails on these messages: {type(error).__name__}: {error}. "
                "Check that each message has the fields that this model's template reads.",
                param="messages",
            ) from error
        return "".join(parts)

    def _probe_parts(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template can only read content that is a list of parts."""
        probe = "ambidex content probe"
        for wants_parts in (False, True):
            content: Any = [{"type": "text", "text": probe}] if wants_parts else probe
            try:
                text = self._run(
                    {
                        **_plain(variables, "chat_template_kwargs"),
                        "messages": [{"role": "user", "content": content}],
                        "tools": None,
                        "add_generation_prompt": False,
                    }
                )
            except RequestError:
                continue
            if probe in text:
                return wants_parts
        return False


class _LimitError(Exception):
    """A template ran out of its budget."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is nothing."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block call, so that the tag has a scope of its own as elsewhere.
        call = self.call_method("_inner", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _inner(self, caller: Any) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscore names, which could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # So written that a template may have a field named self.
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} begins with an underscore")


class _Bounded(NodeTransformer):
    """Sends every loop and every ``~`` through a filter that counts."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
        return self._filtered(parts, "_joined")

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(
            node, name, [], [], None, None, lineno=node.lineno, environment=self._environment
        )


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox as chat templates expect it, with the budget of one rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # A loop over a constant must be counted too, not folded away.
            optimized=False,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            cache_size=0,
        )
        self._passes = 0
        self.filters["tojson"] = _to_json
        self.filters["_counted"] = self._counted
        self.filters["_joined"] = self._joined
        for name in ("center", "format", "indent", "join", "replace", "wordwrap"):
            self.filters[name] = _guarded_filter(name, self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _make_dict
        self.globals["namespace"] = _Namespace
        # Makes text out of nothing, as much as asked for.
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    _check_size(_size(sequence) * count)
        elif operator == "**":
            if not isinstance(right, (int, float)) or abs(right) > 64:
                raise _LimitError("an exponent exceeds 64")
        elif isinstance(left, str):
            _check_text_call("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Macros and methods alike come here, so recursion is counted with the loops.
        self._charge(_PASSES_PER_CALL)
        if isinstance(obj, jinja2.runtime.LoopContext) and args:
            args = (self._counted(args[0]), *args[1:])
        # The sandbox wraps str.format; the method itself is below.
        method = getattr(obj, "__wrapped__", obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _check_text_call(getattr(method, "__name__", ""), text, (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def _counted(self, iterable: Any) -> Any:
        if isinstance(iterable, jinja2.Undefined):
            return iterable
        if not isinstance(iterable, (list, tuple, str, Mapping, range)):
            # A generator, or a view of a mapping: at most one item more than is allowed.
            iterable = list(itertools.islice(iterable, MAX_LOOP_PASSES + 1))
        self._charge(len(iterable))
        return iterable

    def _charge(self, passes: int) -> None:
        self._passes += passes
        if self._passes > MAX_LOOP_PASSES:
            raise _LimitError(f"it makes more than {MAX_LOOP_PASSES} loop passes and calls")

    def _joined(self, parts: list[Any]) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def _check_text_call(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Refuses text methods and filters whose result would be far larger than what goes in."""
    if name in ("format", "format_map") and _WIDE_FIELD.search(text):
        raise _LimitError("a format field is more than 9,999 characters wide")
    if name == "replace" and len(args) >= 2:
        old, new = args[0], args[1]
        _check_size(len(text) + text.count(str(old)) * _size(new))
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_size(sum(_size(item) + len(text) for item in args[0]))
    for value in args:
        if isinstance(value, int):
            _check_size(value)


def _guarded_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """One of jinja2's own filters behind the check; it keeps its calling convention."""

    @functools.wraps(inner)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # Some filters get the evaluation context first.
        plain = [a for a in args if not isinstance(a, nodes.EvalContext)]
        if name == "join":
            separator = plain[1] if len(plain) > 1 else kwargs.get("d", "")
            items = plain[0] if isinstance(plain[0], (list, tuple)) else ()
            _check_text_call(name, str(separator), (items,))
        elif plain:
            _check_text_call(name, str(plain[0]), (*plain[1:], *kwargs.values()))
        return inner(*args, **kwargs)

    return guarded


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _check_size(size: int) -> None:
    if size > MAX_TEXT_CHARS:
        raise _LimitError(f"it builds a value of more than {MAX_TEXT_CHARS} items")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own filter this escapes nothing for HTML: models are trained on plain JSON.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """A copy out of JSON types alone: a template never sees an object with methods of its own."""
    if depth > _MAX_JSON_DEPTH:
        raise RequestError(
            f"'{param}' is nested more than {_MAX_JSON_DEPTH} levels deep.", param=param
        )
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, param, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise RequestError(
        f"'{param}' holds a value of type {type(value).__name__}; only JSON values are accepted.",
        param=param,
    )


def _normalized(messages: Sequence[Mapping[str, Any]], wants_parts: bool) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError("'messages' must be a list of messages.", param="messages")
    if not messages:
        raise RequestError("'messages' is empty: give at least one message.", param="messages")
    chat = []
    for i, source in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(source, Mapping):
            raise RequestError(f"'{where}' must be an object with a role.", param=where)
        # Fields without a value are dropped: many templates take a null for a text.
        message = {k: v for k, v in _plain(source, where).items() if v is not None}
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"'{where}.role' must be a text.", param=f"{where}.role")
        if "content" in message:
            message["content"] = _content(message["content"], f"{where}.content", wants_parts)
        elif role in _ROLES_WITH_CONTENT:
            raise RequestError(
                f"'{where}' with role '{role}' has no content.", param=f"{where}.content"
            )
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
        # Reasoning goes by three names; templates read the first or the second.
        for name in ("reasoning_content", "thinking", "reasoning"):
            if name in message:
                reasoning = message[name]
                message.setdefault("thinking", reasoning)
                message["reasoning_content"] = reasoning
                break
        chat.append(message)
    return chat


def _content(content: Any, where: str, wants_parts: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    if not isinstance(content, list):
        raise RequestError(f"'{where}' must be a text or a list of text parts.", param=where)
    parts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        # OpenAI's other name for a text part.
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                f"'{where}[{i}]' has type '{kind}'; only text parts are supported: "
                '{"type": "text", "text": ...}.',
                param=where,
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise RequestError(f"'{where}[{i}].text' must be a text.", param=where)
        parts.append({"type": "text", "text": text})
    return parts if wants_parts else "\n".join(part["text"] for part in parts)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"'{where}' must be a list.", param=where)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"'{where}[{i}]' must hold a function.", param=where)
        arguments = function.get("arguments")
        # OpenAI sends arguments as JSON text, templates want the object.
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise RequestError(
                    f"'{where}[{i}].function.arguments' is not valid JSON.", param=where
                ) from None
    return calls


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Put a mark behind the last message's text; returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _CONTINUE_MARK
        return text
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    raise RequestError(
        "'continue_final_message' is set, but the last message has no content to continue.",
        param="continue_final_message",
    )


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_MARK.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "'continue_final_message' is set, but this model's chat template does not write the "
            "last message as it is. Leave the option out.",
            param="continue_final_message",
        )
    # A template that trims its messages has trimmed the space of the mark as well.
    kept_space = text.startswith(_CONTINUE_MARK, at)
    return text[:at] if kept_space else text[:at].rstrip()
