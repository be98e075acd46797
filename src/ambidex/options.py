"""Options, resolved once: command line, then environment, then file, then default.

``OPTIONS`` is one table of every option and variable of ours, of vLLM and of people's guides:
it *works*, has *no effect* here (one line says why) or is *refused* (why, and what to use instead).
``resolve`` reads a command; ``resolve_keywords`` the keyword arguments of ``LLM``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ambidex.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from ambidex.errors import OptionError
from ambidex.option_types import (
    NO_EFFECT,
    REFUSED,
    WORKS,
    Option,
    convert,
    refusal,
    settle,
    show,
)
from ambidex.options_accelerator import check_file, device_config, offload_config
from ambidex.options_file import FileEntry, FileOptions, entries, hint, switched_off
from ambidex.options_table import GROUPS, OPTIONS, SERVER

__all__ = [
    "NO_EFFECT",
    "OPTIONS",
    "REFUSED",
    "WORKS",
    "FileOptions",
    "Option",
    "Resolved",
    "config_path",
    "format_help",
    "resolve",
    "resolve_keywords",
]

#: Commands whose first positional argument is MODEL, and that take no other.
_MODEL_COMMANDS = frozenset({"serve", "run", "chat", "plan"})
#: Commands that open a server; elsewhere the server's options have no effect.
_SERVER_COMMANDS = frozenset({"serve", "plan"})

#: Options that ask for something else than a start.
_ACTIONS = ("help", "help_all", "version", "print_config")

COMMAND_LINE = "command line"
ARGUMENT = "argument"
DEFAULT = "default"

_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
#: Kubernetes sets these for a service called "vllm" or "ambidex".
_KUBERNETES = re.compile(r"[A-Z0-9_]+_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)")


@dataclass(frozen=True, slots=True)
class _Given:
    """One mention of an option, before its text is a value."""

    option: Option
    raw: Any
    #: What an error begins with: ``--port``, ``OMP_NUM_THREADS``, ``c.yaml, line 3: port``.
    where: str
    source: str
    negated: bool = False
    #: ``--hf-overrides.a.b``: ("a", "b").
    path: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What mentions of one thing have in common: a row ``NCCL_*`` stands for many."""
        return self.where if self.option.name.endswith("*") else self.option.key


@dataclass(frozen=True)
class Resolved:
    """All values by ``dest``, where each comes from, and a line for each that has no effect."""

    command: str
    values: Mapping[str, Any]
    #: ``command line``, ``environment (NAME)``, ``file (PATH, line N)`` or ``default``.
    sources: Mapping[str, str]
    notes: tuple[str, ...]
    positionals: tuple[str, ...]
    options: tuple[Option, ...] = OPTIONS

    def explain(self) -> list[tuple[str, str, str]]:
        """Rows of (name, value, source) for ``--print-config``; never a key."""
        rows = []
        for option in _working(self.options, self.command):
            if option.is_variable or not option.dest or option.dest in _ACTIONS:
                continue
            value = self.values.get(option.dest)
            text = show(option, value) or option.default_help or "none"
            if option.secret and value:
                text = f"*** ({len(value)})" if isinstance(value, list) else "***"
            rows.append((option.name, text, self.sources.get(option.dest, DEFAULT)))
        return rows

    def engine_config(self, default_model: str | None = None) -> EngineConfig:
        """Raises :class:`OptionError` where no model is named, or values contradict each other."""
        values = self.values
        model = values["model"] or default_model
        if not model:
            raise OptionError(
                f"No model is given. Write `ambidex {self.command} MODEL`, where MODEL is a "
                "folder, a GGUF file, an alias such as smollm2-135m-instruct or a hub id."
            )
        length, cap = _context(values["max_model_len"])
        scheduler = SchedulerConfig(
            max_num_seqs=values["max_num_seqs"],
            max_num_batched_tokens=values["max_num_batched_tokens"],
            enable_chunked_prefill=values["enable_chunked_prefill"],
            policy=values["scheduling_policy"],
        )
        if (
            length is not None
            and not scheduler.enable_chunked_prefill
            and scheduler.max_num_batched_tokens < length
        ):
            raise OptionError(
                f"Without chunked prefill a prompt is computed in one step, and "
                f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is less than "
                f"--max-model-len {length}. Give --max-num-batched-tokens {length}, or leave "
                "--no-enable-chunked-prefill out."
            )
        return EngineConfig(
            model=ModelConfig(
                model=model,
                tokenizer=values["tokenizer"],
                dtype=values["dtype"],
                max_model_len=length,
                max_model_len_cap=cap,
                hf_overrides=self._hf_overrides(),
                revision=values["revision"],
                served_model_names=tuple(values["served_model_names"] or ()),
                chat_template=values["chat_template"],
                seed=values["seed"],
                generation_config=values["generation_config"],
                max_logprobs=1_000_000 if values["max_logprobs"] == -1 else values["max_logprobs"],
                quantization=values["quantization"],
            ),
            cache=CacheConfig(
                block_size=values["block_size"],
                enable_prefix_caching=values["enable_prefix_caching"],
                kv_cache_dtype=values["kv_cache_dtype"],
                kv_cache_bytes=values["kv_cache_bytes"] or None,
                num_blocks=values["num_blocks"],
            ),
            scheduler=scheduler,
            log=LogConfig(
                level=values["log_level"],
                format=values["log_format"],
                enable_log_requests=values["enable_log_requests"],
                disable_log_stats=values["disable_log_stats"],
            ),
            device=device_config(values),
            offload=offload_config(values, self.sources),
            cpu_threads=values["cpu_threads"],
            enforce_eager=values["enforce_eager"],
            cpu_bind=values["cpu_bind"],
            quantization_cache=values["quantization_cache"],
        )

    def server_config(self) -> ServerConfig:
        """Raises :class:`OptionError` where a key comes without a certificate."""
        values = self.values
        if values["ssl_keyfile"] and not values["ssl_certfile"]:
            raise OptionError(
                "--ssl-keyfile needs the certificate too. Give it with --ssl-certfile."
            )
        return ServerConfig(
            host=values["host"],
            port=values["port"],
            api_keys=tuple(values["api_keys"] or ()),
            admin_api_keys=tuple(values["admin_api_keys"] or ()),
            allowed_origins=tuple(values["allowed_origins"] or ()),
            ssl_certfile=values["ssl_certfile"],
            ssl_keyfile=values["ssl_keyfile"],
            root_path=values["root_path"],
            uvicorn_log_level=values["uvicorn_log_level"],
            shutdown_timeout_s=values["shutdown_timeout_s"],
            max_body_bytes=values["max_body_bytes"],
            response_role=values["response_role"],
        )

    def _hf_overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        if (folder := self.values["hf_config_path"]) is not None:
            overrides |= _read_model_config(folder)
        for name in ("rope_scaling", "rope_theta"):
            if self.values[name] is not None:
                overrides[name] = self.values[name]
        return overrides | (self.values["hf_overrides"] or {})


def resolve(
    argv: Sequence[str],
    env: Mapping[str, str],
    file: FileOptions | Mapping[str, Any] | None = None,
    *,
    command: str = "serve",
    extra: Sequence[Option] = (),
) -> Resolved:
    """The values of a command line (without the command itself), an environment and a file.

    ``extra`` are options of this command alone; they go before those of the table. Raises
    :class:`OptionError` for an unknown option (with the nearest one), a wrong value, and for
    refused options, all of them in one error, a line each.
    """
    table = _Table((*extra, *OPTIONS), command)
    given, positionals = _parse_argv(argv, table)
    source = FileOptions.of("the configuration", file) if isinstance(file, Mapping) else file
    from_env, unknown = _read_env(env, table)
    from_file, off = _read_file(source, table) if source is not None else ([], [])
    layers = _settled([given, from_env, from_file])
    notes = list(_repeated(layers[0]))
    if positionals and command in _MODEL_COMMANDS:
        layers[0].append(_positional_model(positionals, given, table))
    if source is not None:
        notes += source.notes
    values, sources, judged = _judge(layers, table, command)
    if source is not None and source.fallback_model is not None and not values.get("model"):
        values["model"] = source.fallback_model
        sources["model"] = f"file ({source.path})"
    return Resolved(
        command,
        values,
        sources,
        (*notes, *off, *judged, *unknown),
        tuple(positionals),
        table.options,
    )


def resolve_keywords(keywords: Mapping[str, Any], env: Mapping[str, str]) -> Resolved:
    """The values of ``LLM(model=..., block_size=32, ...)``; arguments go before ``env``."""
    table = _Table(OPTIONS)
    given = []
    for name, value in keywords.items():
        option, negated = table.find_key(name)
        if option is None:
            raise OptionError(f"Unknown argument {name}. {table.nearest(name, 'argument')}")
        if value is not None:
            given.append(_Given(option, value, name, ARGUMENT, negated))
    from_env, unknown = _read_env(env, table)
    values, sources, judged = _judge(_settled([given, from_env]), table, "LLM")
    return Resolved("run", values, sources, (*judged, *unknown), ())


def config_path(
    argv: Sequence[str], *, command: str = "serve", extra: Sequence[Option] = ()
) -> str | None:
    """The value of ``--config``, which must be known before anything can be resolved."""
    given, _ = _parse_argv(argv, _Table((*extra, *OPTIONS), command))
    paths = [g.raw for g in given if g.option.dest == "config"]
    return paths[-1] if paths else None


def format_help(command: str, extra: Sequence[Option] = (), *, everything: bool = False) -> str:
    """The options of a command by group, with default and one line each.

    ``everything`` adds those that have no effect or are refused.
    """
    lines: list[str] = []
    working = list(_working((*extra, *OPTIONS), command))
    named = [option for option in working if not option.is_variable]
    own = [option for option in extra if option.kind == WORKS]
    sections = [(f"Options of {command}", own)]
    sections += [(group, [o for o in named if o.group == group]) for group in GROUPS]
    for title, options in sections:
        if options:
            lines += ["", f"{title}:"]
            for option in options:
                lines += _help_lines(option)
    lines += ["", "Environment:"]
    for option in working:
        if option.is_variable:
            lines.append(f"  {option.name:<30} {option.help}")
    lines += [f"  {name:<30} the same as {o.name}" for o in named for name in o.env]
    if everything:
        for kind, title in ((NO_EFFECT, "No effect here"), (REFUSED, "Refused")):
            lines += ["", f"{title}:"]
            lines += [f"  {o.name:<42} {o.reason}" for o in OPTIONS if o.kind == kind]
    else:
        lines += ["", "vLLM's other options are known too: see --help-all."]
    return "\n".join(lines[1:])


def _help_lines(option: Option) -> list[str]:
    names = ", ".join((option.name, *(a for a in option.aliases if not a.startswith("--"))))
    if option.type == "flag" and option.no_form and option.name.startswith("--"):
        names += f", --no-{option.name[2:]}"
    default = option.default_help or show(option, option.default)
    text = option.help
    if default and option.type != "flag":
        text += f" [{default}]"
    elif option.type == "flag" and option.no_form:
        text += " [on]" if option.default else " [off]"
    if len(names) > 30:
        return [f"  {names}", f"  {'':<30} {text}"]
    return [f"  {names:<30} {text}"]


def _working(options: Iterable[Option], command: str) -> Iterator[Option]:
    """Working options that matter to the command; of two with one ``dest`` the first."""
    seen: set[str] = set()
    for option in options:
        hidden = option.quiet or (option.group == SERVER and command not in _SERVER_COMMANDS)
        if option.kind != WORKS or hidden:
            continue
        if option.dest and not option.is_variable:
            if option.dest in seen:
                continue
            seen.add(option.dest)
        yield option


class _Table:
    """Options by every spelling. An option that stands earlier wins a name."""

    def __init__(self, options: tuple[Option, ...], command: str = "serve") -> None:
        self.options = options
        self.command = command
        self.by_name: dict[str, Option] = {}
        self.by_env: dict[str, Option] = {}
        self.prefixes: list[tuple[str, Option]] = []
        for option in options:
            for name in option.env:
                self.by_env.setdefault(name, option)
            if option.is_variable and option.name.endswith("*"):
                self.prefixes.append((option.name[:-1], option))
            elif option.is_variable:
                self.by_env.setdefault(option.name, option)
            else:
                for name in (option.name, *option.aliases):
                    self.by_name.setdefault(name, option)

    def find(self, name: str) -> tuple[Option | None, bool]:
        """The option of a spelling with its dashes, and whether it is its ``--no-`` form."""
        name = name.replace("_", "-")
        option = self.by_name.get(name)
        if option is not None:
            return option, False
        if name.startswith("--no-"):
            option = self.by_name.get(f"--{name[5:]}")
            if option is not None and option.type == "flag" and option.no_form:
                return option, True
        return None, False

    def find_key(self, key: str) -> tuple[Option | None, bool]:
        """The option of a key in a file or of a keyword argument, which has no dashes before."""
        return (None, False) if key.startswith("-") else self.find(f"--{key}")

    def find_env(self, name: str) -> Option | None:
        option = self.by_env.get(name)
        if option is None:
            option = next((o for prefix, o in self.prefixes if name.startswith(prefix)), None)
        return option

    def nearest(self, name: str, what: str = "option") -> str:
        """``The nearest option is --port.``"""
        import difflib

        bare = name.strip("-").replace("_", "-").lower()
        names = [known[2:] for known in self.by_name if known.startswith("--")]
        found = difflib.get_close_matches(bare, names, n=1, cutoff=0.5)
        if not found:
            return f"See `ambidex {self.command} --help` for what there is."
        right = f"--{found[0]}" if what == "option" else found[0].replace("-", "_")
        return f"The nearest {what} is {right}."


def _parse_argv(argv: Sequence[str], table: _Table) -> tuple[list[_Given], list[str]]:
    given: list[_Given] = []
    positionals: list[str] = []
    words = list(argv)
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word == "--":
            positionals += words[i:]
            break
        if not word.strip():
            raise OptionError(
                f"Argument {i} is blank. In a pasted command that is a backslash with a space "
                "behind it: the shell ends the command there and drops the lines below. Nothing "
                "may follow a backslash at a line's end, not even a comment."
            )
        if not _is_option(word):
            if word.startswith("--"):
                name = word.split()[0]
                raise OptionError(
                    f"{word!r} came as one word. Give {name} and its value as two, or {name}=VALUE."
                )
            positionals.append(word)
            continue
        name, path, text = _split(word, table)
        option, negated = table.find(name)
        if option is None:
            raise OptionError(f"Unknown option {name}. {table.nearest(name)}")
        if option.type == "flag":
            if text is None and i < len(words) and words[i].lower() in ("true", "false"):
                text, i = words[i], i + 1
            raw: Any = True if text is None else text
        elif text is not None:
            raw = text
        elif option.type == "list":
            end = i
            while end < len(words) and not _is_option(words[end]) and words[end].strip():
                end += 1
            raw, i = words[i:end], end
            if len(raw) == 1:
                raw = raw[0]
        elif i < len(words) and not _is_option(words[i]):
            raw, i = words[i], i + 1
        else:
            raw = True if option.type == "optional" else None
        if raw is None or raw == []:
            found = f"; the next word is {words[i]}" if i < len(words) else ""
            raise OptionError(f"{name} needs a value{found}. Write {name}=VALUE.")
        given.append(_Given(option, raw, name, COMMAND_LINE, negated, path))
    return given, positionals


def _is_option(word: str) -> bool:
    # "-" is a name, -1 is a number, and what has a space in it is text such as "- a list".
    return (
        word.startswith("-")
        and word != "-"
        and not (_NEGATIVE.fullmatch(word) or " " in word.partition("=")[0])
    )


def _split(word: str, table: _Table) -> tuple[str, tuple[str, ...], str | None]:
    """``--a.b.c=1`` as (``--a``, (``b``, ``c``), ``1``); ``-O3`` as (``-O``, (), ``3``)."""
    name, equals, text = word.partition("=")
    value = text if equals else None
    if table.find(name)[0] is not None:
        return name, (), value
    head, *path = name.split(".")
    option, _ = table.find(head)
    if path and option is not None and option.takes_path and all(path):
        return head, tuple(path), value
    if word.startswith("-O") and not word.startswith("-O."):
        return "-O", (), word[2:]
    return name, (), value


def _positional_model(positionals: list[str], given: list[_Given], table: _Table) -> _Given:
    if len(positionals) > 1:
        raise OptionError(
            f"{positionals[1]!r} is one argument too many: MODEL is {positionals[0]!r}. An "
            "option begins with two dashes, and a value with spaces stands in quotes."
        )
    models = [g.raw for g in given if g.option.dest == "model"]
    if models and models[-1] != positionals[0]:
        raise OptionError(
            f"Two models are named, {positionals[0]} and --model {models[-1]}. Give one."
        )
    return _Given(table.by_name["--model"], positionals[0], "MODEL", COMMAND_LINE)


def _repeated(given: Iterable[_Given]) -> Iterator[str]:
    last: dict[str, _Given] = {}
    for one in given:
        before = last.get(one.option.key)
        last[one.option.key] = one
        if before is None or one.option.takes_path or one.option.type == "list":
            continue
        if (before.raw, before.where) != (one.raw, one.where):
            yield f"{one.where} is given after {before.where}: the last one counts."


def _read_env(env: Mapping[str, str], table: _Table) -> tuple[list[_Given], list[str]]:
    """What the environment gives, the strongest name of an option first, and lines on unknown
    variables that look like ours."""
    ranked: list[tuple[int, _Given]] = []
    unknown: list[str] = []
    for name, text in env.items():
        if not text.strip():
            continue
        option = table.find_env(name)
        if option is not None:
            rank = option.env.index(name) if name in option.env else 0
            ranked.append((rank, _Given(option, text, name, f"environment ({name})")))
        elif name.startswith(("VLLM_", "AMBIDEX_")) and not _KUBERNETES.fullmatch(name):
            unknown.append(f"{name} is not known here and has no effect.")
    # Stable: the last one of a key counts, as on a command line.
    ranked.sort(key=lambda item: -item[0])
    return [one for _, one in ranked], unknown


def _read_file(file: FileOptions, table: _Table) -> tuple[list[_Given], list[str]]:
    """What the file gives, and a line on what a section that is switched off holds."""
    given: list[_Given] = []
    seen: dict[tuple[str, tuple[str, ...]], tuple[FileEntry, Any]] = {}
    read = list(entries(file, lambda key: table.find_key(key)[0] is not None))
    for entry in read:
        head, *path = entry.name.split(".")
        option, negated = table.find_key(head)
        if option is None or (path and not option.takes_path):
            near = hint(entry) or table.nearest(head)
            if table.find_key(head.lstrip("-"))[0] is not None:
                near = "In a file options are written without dashes before them."
            raise OptionError(f"{entry.where}: unknown option {entry.key!r}. {near}")
        if option.dest in ("config", *_ACTIONS):
            raise OptionError(f"{entry.where}: {entry.key} belongs on the command line.")
        subject, source = f"{entry.where}: {entry.key}", f"file ({entry.where})"
        one = _Given(option, entry.item.value, subject, source, negated, tuple(path))
        value = None if one.raw is None else _value(one)
        if entry.is_idle:
            continue
        first, before = seen.setdefault((option.key, one.path), (entry, value))
        if before != value:
            said, other = ("null" if v is None else show(option, v) for v in (value, before))
            raise OptionError(
                f"{subject} says {said}, and {first.key}{first.place} says {other}: they are the "
                "same option. Keep one of them."
            )
        if first is entry and one.raw is not None:
            given.append(one)
    check_file({key: found for (key, path), found in seen.items() if not path})
    return given, list(switched_off(read))


def _settled(layers: Sequence[Sequence[_Given]]) -> list[list[_Given]]:
    """The same mentions, with what the options are beside the device that the layers name."""
    mentions = ([one for one in layer if one.option.dest == "device"] for layer in layers)
    named = next(filter(None, mentions), [])
    device = convert(named[-1].option, named[-1].raw, named[-1].where) if named else "auto"
    has_accelerator = DeviceConfig(device).names_accelerator or any(
        one.option.is_accelerator for layer in layers for one in layer
    )
    return [
        [replace(one, option=settle(one.option, has_accelerator)) for one in layer]
        for layer in layers
    ]


def _judge(
    layers: Sequence[Sequence[_Given]], table: _Table, command: str
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Values, sources and notes. A key that an earlier layer gives is not looked at again."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    settled: set[str] = set()
    idle: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for layer in layers:
        merged = _merge(layer)
        for key, (one, value) in merged.items():
            if key in settled:
                continue
            option = one.option
            shown = show(option, value) if option.type != "flag" or value is False else ""
            subject = f"{one.where} {shown}".strip()
            reason = refusal(option, value)
            if reason is not None:
                refused.setdefault(reason, []).append(subject)
            elif option.kind != WORKS:
                why = option.reason if option.kind == NO_EFFECT else _harmless(option)
                if not option.quiet:
                    idle.setdefault(why, []).append(subject)
            elif option.group == SERVER and command not in _SERVER_COMMANDS:
                if one.source in (COMMAND_LINE, ARGUMENT):
                    idle.setdefault(f"`{command}` starts no server", []).append(subject)
            elif option.dest:
                values[option.dest] = value
                sources[option.dest] = one.source
        settled |= merged.keys()
    if refused:
        raise OptionError(
            "\n".join(
                f"{', '.join(subjects)} cannot be used: {reason}"
                for reason, subjects in refused.items()
            )
        )
    for option in table.options:
        if option.kind == WORKS and option.dest and not option.inverted:
            values.setdefault(option.dest, option.default)
            sources.setdefault(option.dest, DEFAULT)
    notes = [f"{', '.join(s)}: no effect here: {why}." for why, s in idle.items()]
    return values, sources, notes


def _harmless(option: Option) -> str:
    return option.harmless_reason or "that is how it is here anyway"


def _merge(layer: Sequence[_Given]) -> dict[str, tuple[_Given, Any]]:
    """The last mention of each key with its value; JSON options gather fields, lists items."""
    merged: dict[str, tuple[_Given, Any]] = {}
    for one in layer:
        value = _value(one)
        before: Any = merged[one.key][1] if one.key in merged else None
        if isinstance(before, dict) and isinstance(value, dict):
            value = _update(before, value)
        elif isinstance(before, list) and isinstance(value, list) and one.source == COMMAND_LINE:
            value = before + value
        merged[one.key] = (one, value)
    return merged


def _value(one: _Given) -> Any:
    if one.path:
        return _nested(one)
    value = convert(one.option, one.raw, one.where)
    if one.option.type == "flag":
        return value != (one.negated != one.option.inverted)
    return value


def _nested(one: _Given) -> dict[str, Any]:
    """``--cc.a.b 1`` as ``{"a": {"b": 1}}``; ``--cc.a+ x,y`` as ``{"a": ["x", "y"]}``."""
    *outer, last = one.path
    value = one.raw
    if last.endswith("+"):
        last, value = last[:-1], str(value).split(",")
    elif isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            # A word needs no quotes here.
            value = one.raw
    nested: dict[str, Any] = {last: value}
    for name in reversed(outer):
        nested = {name: nested}
    return nested


def _update(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in new.items():
        old = result.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _update(old, value)
        result[name] = value
    return result


def _context(value: int | str) -> tuple[int | None, int | None]:
    """The length asked for and the cap: ``auto:N`` is (None, N)."""
    if isinstance(value, int):
        return value, None
    _, _, cap = value.partition(":")
    return None, int(cap) if cap else None


def _read_model_config(folder: str) -> dict[str, Any]:
    path = os.path.expanduser(folder)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if os.path.exists(path) and not os.path.isfile(path):
        # A pipe would block, and a device has no end.
        raise OptionError(f"--hf-config-path: {path} is no regular file. Give a local folder.")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        raise OptionError(
            f"--hf-config-path: there is no {path}. Give a local folder with a config.json."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"--hf-config-path: {path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise OptionError(f"--hf-config-path: {path} holds no JSON object.")
    return config
