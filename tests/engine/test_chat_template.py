"""Chat templates: as transformers renders them, and bounded."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ambidex.engine.chat_template import ChatTemplate
from ambidex.engine.tokenizer import Tokenizer
from ambidex.errors import RequestError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: In the manner of Llama 2's: alternating roles, a bos token, trimmed contents.
ALTERNATING = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- set content = (system if loop.first and system is defined else '') ~ message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
#: In the manner of Llama 3.1's and Qwen's: tools as JSON, calls, namespaces, macros, breaks.
TOOLS = """
{%- macro describe(tool) -%}
- {{ tool.function.name }}: {{ tool | tojson(indent=2) }}
{% endmacro -%}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools is not none and tools %}
    {{- 'TOOLS\n' }}{%- for tool in tools %}{{ describe(tool) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- '[' ~ message.role ~ (' last' if loop.index0 == ns.last else '') ~ '] ' }}
    {{- message.content | trim }}{{ '\n' }}
    {%- if message.name is defined %}{{ '(' ~ message.name ~ ')' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
{{- date_string if date_string is defined }}
"""
#: Reads content only as a list of parts.
PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }};{% endif %}{% endfor %}{% endfor %}"
)

USER = [{"role": "user", "content": "Hi there"}]
LONG = [
    {"role": "system", "content": "Be <b>kind</b> & brief"},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "caf\u00e9?"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "K\u00f6ln", "n": [1, None]}},
            }
        ],
    },
    {"role": "tool", "name": "weather", "content": "12 <C>"},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "\u00e9 & <x>", "parameters": {"a": 1}},
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(
    template: str, messages: Any, *, tools: Any = None, prompt: bool = True, **variables: Any
) -> str:
    return ChatTemplate(template).render(
        messages,
        tools=tools,
        add_generation_prompt=prompt,
        continue_final_message=False,
        variables={**VARIABLES, **variables},
    )


def reference(template: str, messages: Any, **options: Any) -> str:
    utils = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="transformers is the reference"
    )
    chat = [{k: v for k, v in m.items() if v is not None} for m in messages]
    rendered, _ = utils.render_jinja_template([chat], chat_template=template, **options)
    return str(rendered[0])


class TestAgainstTransformers:
    @pytest.mark.parametrize("prompt", [True, False])
    @pytest.mark.parametrize(
        ("template", "messages", "tools"),
        [
            (CHATML, USER, None),
            (CHATML, LONG, None),
            (ALTERNATING, USER, None),
            (ALTERNATING, LONG, None),
            (TOOLS, LONG, None),
            (TOOLS, CALLS, [TOOL]),
            (TOOLS, CALLS, [TOOL, TOOL]),
        ],
    )
    def test_text(self, template: str, messages: Any, tools: Any, prompt: bool) -> None:
        wanted = reference(
            template, messages, tools=tools, add_generation_prompt=prompt, **VARIABLES
        )
        assert render(template, messages, tools=tools, prompt=prompt) == wanted

    def test_variables(self) -> None:
        wanted = reference(TOOLS, USER, date_string="today", **VARIABLES)
        assert render(TOOLS, USER, prompt=False, date_string="today") == wanted

    @pytest.mark.parametrize("template", [CHATML, ALTERNATING])
    @pytest.mark.parametrize("final", ["One, two", "One, ", "x"])
    def test_continue_final_message(self, template: str, final: str) -> None:
        messages = [*USER, {"role": "assistant", "content": final}]
        wanted = reference(template, messages, continue_final_message=True, **VARIABLES)
        text = ChatTemplate(template).render(
            messages,
            tools=None,
            add_generation_prompt=False,
            continue_final_message=True,
            variables=VARIABLES,
        )
        assert text == wanted
        assert final.strip() in text[-len(final) - 2 :]

    @pytest.mark.model
    def test_smollm2(self, smollm2_metadata: Any) -> None:
        template = smollm2_metadata["tokenizer.chat_template"]
        for messages in (USER, LONG):
            wanted = reference(template, messages, add_generation_prompt=True, **VARIABLES)
            assert render(template, messages) == wanted


class TestMessages:
    def test_text_parts(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert "user\na\nb<|im_end|>" in render(CHATML, [{"role": "user", "content": parts}])
        assert render(PARTS, [{"role": "user", "content": parts}]) == "a;b;"
        assert render(PARTS, USER) == "Hi there;"

    def test_arguments_as_json_text(self) -> None:
        call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
        messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
        assert '<call>f {"a": 1}' in render(TOOLS, messages)
        call["function"]["arguments"] = "{oops"
        with pytest.raises(RequestError, match=r"function\.arguments' is not valid JSON"):
            render(TOOLS, messages)
        # The caller's own messages stay as they are.
        assert call["function"]["arguments"] == "{oops"

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "is empty"),
            ("text", "must be a list"),
            (["text"], r"messages\[0\]' must be an object"),
            ([{"content": "x"}], r"messages\[0\]\.role"),
            ([{"role": 5, "content": "x"}], r"messages\[0\]\.role"),
            ([{"role": "user"}], "has no content"),
            ([{"role": "user", "content": None}], "has no content"),
            ([{"role": "user", "content": 5}], "a text or a list of text parts"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                "type 'image_url'; only text parts",
            ),
            ([{"role": "user", "content": [{"type": "text"}]}], r"\[0\]\.text' must be a text"),
            ([{"role": "assistant", "tool_calls": {}}], "tool_calls' must be a list"),
            ([{"role": "assistant", "tool_calls": [1]}], "must hold a function"),
            ([{"role": "user", "content": "x", "extra": object()}], "only JSON values"),
        ],
    )
    def test_bad_messages(self, messages: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            render(CHATML, messages)
        assert caught.value.param is not None
        assert caught.value.param.startswith("messages")

    def test_deep_nesting(self) -> None:
        deep: Any = "x"
        for _ in range(500):
            deep = [deep]
        with pytest.raises(RequestError, match="64 levels"):
            render(CHATML, [{"role": "user", "content": "x", "extra": deep}])
        with pytest.raises(RequestError, match="64 levels"):
            render(CHATML, USER, tools=[{"x": deep}])

    def test_options_that_exclude_each_other(self, byte_level: Tokenizer) -> None:
        with pytest.raises(RequestError, match="exclude each other"):
            byte_level.apply_chat_template(USER, continue_final_message=True)
        with pytest.raises(RequestError, match="has no content to continue"):
            byte_level.apply_chat_template(
                [*USER, {"role": "assistant", "tool_calls": []}],
                add_generation_prompt=False,
                continue_final_message=True,
            )
        with pytest.raises(RequestError, match="'messages' cannot be given"):
            ChatTemplate(CHATML).render(
                USER,
                tools=None,
                add_generation_prompt=True,
                continue_final_message=False,
                variables={"messages": []},
            )

    def test_the_template_refuses(self) -> None:
        with pytest.raises(RequestError, match="Roles must alternate"):
            render(ALTERNATING, [*USER, *USER])


class TestSandbox:
    @pytest.mark.parametrize(
        "template",
        [
            "{% for i in range(1000000) %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for a in 'x'*999 %}{% for b in 'x'*999 %}{% for c in 'x'*999 %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(40) }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{% for x in range(10) recursive %}{{ loop(range(10)) }}{% endfor %}",
            "{% for x in range(10000) %}{{ 'x' * 10000 }}{% endfor %}",
            "{{ 'a' * 100000000000 }}",
            "{{ [1] * 100000000000 }}",
            "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
            "{% endfor %}",
            "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
            "{% endfor %}",
            "{{ 2 ** 1000000000 }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%1000000000d' | format(1) }}",
            "{{ '{:>1000000000}'.format(1) }}",
            "{{ 'a'.ljust(1000000000) }}",
            "{{ 'a' | center(1000000000) }}",
            "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
            "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
            "{{ (['a' * 1000000] * 1000000) | join }}",
            "{{ ('a' * 1000000).join(['b'] * 1000000) }}",
            "{{ lipsum(1000000) }}",
        ],
    )
    def test_bounded(self, template: str) -> None:
        start_s = time.monotonic()
        with pytest.raises(RequestError):
            render(template, USER)
        # Seconds, where without bounds it would be hours or all memory.
        assert time.monotonic() - start_s < 60

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update(role='x') }}",
            "{{ namespace(__class__=1) }}",
            "{{ raise_exception.__globals__.x }}",
            "{{ undefined_thing.field }}",
            "{{ 1 // 0 }}",
            "{{ messages[7].content }}",
            "{% include 'file' %}",
            "{% import '/etc/passwd' as x %}",
        ],
    )
    def test_errors_are_the_clients(self, template: str) -> None:
        with pytest.raises(RequestError, match="The chat template"):
            render(template, USER)

    @pytest.mark.parametrize("template", ["{% for m in messages", "{{ x", "{% nonesuch %}"])
    def test_syntax_errors(self, template: str) -> None:
        with pytest.raises(RequestError, match=r"not valid.*line 1") as caught:
            render(template, USER)
        assert caught.value.param == "chat_template"

    def test_too_large(self) -> None:
        with pytest.raises(RequestError, match="at most"):
            ChatTemplate("x" * (1024 * 1024 + 1))

    def test_one_rendering_does_not_use_up_the_next(self) -> None:
        template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done")
        for _ in range(60):
            text = template.render(
                USER,
                tools=None,
                add_generation_prompt=False,
                continue_final_message=False,
                variables={},
            )
            assert text == "done"
