"""What several commands share: options resolved, help, sampling options, notes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ambidex.cli.config_file import resolve_command
from ambidex.options import WORKS, Option, Resolved, format_help

if TYPE_CHECKING:
    from ambidex.config import EngineConfig

#: Options of ``run`` and ``chat`` -> fields of SamplingParams.
SAMPLING_OPTIONS = (
    Option("--temperature", WORKS, "float", low=0, help="0 is greedy", dest="sampling.temperature",
           default_help="the model's, else 1"),
    Option("--top-p", WORKS, "float", low=0, high=1, help="nucleus sampling", dest="sampling.top_p",
           default_help="the model's, else 1"),
    Option("--top-k", WORKS, "int", low=-1, help="the k best tokens only; 0 is all",
           dest="sampling.top_k", default_help="the model's, else 0"),
    Option("--min-p", WORKS, "float", low=0, high=1,
           help="tokens at least this likely relative to the best",
           dest="sampling.min_p", default_help="0"),
    Option("--repetition-penalty", WORKS, "float", low=0, help="above 1 discourages repetition",
           dest="sampling.repetition_penalty", default_help="the model's, else 1"),
    Option("--presence-penalty", WORKS, "float", low=-2, high=2, help="-2 to 2",
           dest="sampling.presence_penalty", default_help="0"),
    Option("--frequency-penalty", WORKS, "float", low=-2, high=2, help="-2 to 2",
           dest="sampling.frequency_penalty", default_help="0"),
    Option("--max-tokens", WORKS, "int", low=0, aliases=("-n",), help="tokens to generate at most",
           dest="sampling.max_tokens", default_help="512 for run, the context's end for chat"),
    Option("--stop", WORKS, "list", help="strings that end the text", dest="sampling.stop"),
    Option("--ignore-eos", WORKS, "flag", default=False, no_form=False,
           help="go on after an end-of-sequence token", dest="sampling.ignore_eos"),
    Option("--system", WORKS, "str", help="the system message", dest="system"),
)  # fmt: skip


def wants(argv: Sequence[str], *names: str) -> bool:
    """Whether a word of the command line is one of ``names``: asked before options are checked,
    so that help is at hand for a command line that is wrong."""
    return any(word in names for word in argv)


def print_help(command: str, summary: str, extra: Sequence[Option], argv: Sequence[str]) -> None:
    """The command's usage and options on stdout."""
    print(f"usage: ambidex {command} {summary}\n")
    print(format_help(command, extra, everything=wants(argv, "--help-all")))


def resolve(command: str, argv: Sequence[str], extra: Sequence[Option] = ()) -> Resolved | None:
    """The options; None after ``--print-config``, which prints each value and its source."""
    resolved = resolve_command(argv, os.environ, command=command, extra=extra)
    if resolved.values.get("print_config"):
        rows = resolved.explain()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, value, source in rows:
            print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
        for note in resolved.notes:
            say(f"ambidex: {note}")
        return None
    return resolved


def sampling_values(resolved: Resolved) -> dict[str, Any]:
    """Sampling parameters that were given, by their field names."""
    values: Mapping[str, Any] = resolved.values
    found = {
        name.removeprefix("sampling."): value
        for name, value in values.items()
        if name.startswith("sampling.") and value is not None
    }
    if resolved.values.get("seed") is not None:
        found["seed"] = resolved.values["seed"]
    return found


def say(text: str) -> None:
    """A line for people: stderr, so that stdout holds the answer alone."""
    print(text, file=sys.stderr, flush=True)


def single_user_config(resolved: Resolved) -> EngineConfig:
    """The engine's configuration for one conversation: a KV cache for one sequence is enough."""
    from dataclasses import replace

    from ambidex.weights.hub import DEFAULT_MODEL

    config = resolved.engine_config(DEFAULT_MODEL)
    if resolved.sources.get("max_num_seqs", "default") == "default":
        config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))
    return config


def load(resolved: Resolved) -> Any:
    """The ``LLM`` of a single-user command, with one line on how MODEL was resolved."""
    from ambidex import logs

    config = single_user_config(resolved)
    logs.configure("WARNING" if config.log.level == "INFO" else config.log.level, config.log.format)
    for note in resolved.notes:
        say(f"ambidex: {note}")
    # Before anything is fetched: it fails where PyTorch does not work.
    from ambidex.engine.summary import describe_threads
    from ambidex.llm import LLM
    from ambidex.weights.hub import resolve_model

    # Fetched here, where what happens can be shown, and not while the engine starts.
    resolve_model(config.model.model, revision=config.model.revision, progress=say)
    llm = LLM(config.model.model, config=config)
    info = llm.info
    say(f"ambidex: {info.source}")
    say(f"ambidex: {info.dtype}; context of {info.max_model_len} tokens")
    kernels = f"{info.kernels}, {describe_threads(info)}"
    say(f"ambidex: KV cache in {info.kv_cache_dtype}; kernels: {kernels}")
    for note in llm.notes:
        say(f"ambidex: {note}")
    return llm
