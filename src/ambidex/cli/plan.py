"""``ambidex plan``: what fits, where it lies and how fast it is, before anything is loaded."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ambidex.cli.common import print_help, resolve, say, wants
from ambidex.errors import OptionError
from ambidex.options import WORKS, Option
from ambidex.options_accelerator import check_room

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.memory.model_shape import ModelShape
    from ambidex.memory.planner import Plan
    from ambidex.memory.profile import HardwareProfile
    from ambidex.options import Resolved

#: Of a plan that does not fit.
EXIT_REFUSED = 1

OPTIONS = (
    Option("--gpu", WORKS, "str", dest="plan.gpu", default_help="none", is_accelerator=True,
           help="an accelerator of the table, A10, or memory=24GB,bandwidth=936GB/s,..."),
    Option("--cpu", WORKS, "str", dest="plan.cpu", default_help="a common one beside --gpu",
           help="a host of the table: epyc-9354"),
    Option("--ram", WORKS, "gib", dest="plan.ram", low=1, unit="GiB", default_help="the host's",
           help="memory of the host: 64GB, or a number of GiB"),
    Option("--this-machine", WORKS, "flag", dest="plan.this_machine", default=False,
           no_form=False, help="the machine that this runs on, as without --gpu and --cpu"),
    Option("--measure", WORKS, "flag", dest="plan.measure", default=False, no_form=False,
           help="measure this machine anew: for a change, or other programs at the last time"),
    Option("--prompt-len", WORKS, "count", dest="plan.prompt_len", default=512, low=1,
           unit="tokens", help="tokens of the prompt whose times are predicted"),
    Option("--output-len", WORKS, "count", dest="plan.output_len", default=128, low=1,
           unit="tokens", help="tokens of its answer"),
    Option("--json", WORKS, "flag", dest="plan.json", default=False, no_form=False,
           help="one JSON object instead of text"),
    Option("--svg", WORKS, "str", dest="plan.svg", default_help="none",
           help="a picture of both memories and of the layers, to this file; '-': to stdout"),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    if wants(argv, "--help", "-h", "--help-all"):
        print_help("plan", "MODEL [--gpu NAME] [OPTIONS]", OPTIONS, argv)
        print("\n".join(_built_in()))
        return 0
    resolved = resolve("plan", argv, OPTIONS)
    if resolved is None:
        return 0
    _check(resolved)
    config = resolved.engine_config()
    if resolved.values["plan.gpu"] is not None:
        # A configuration file may name a device of this machine.
        config = replace(config, device=replace(config.device, device="auto"))
    for note in resolved.notes:
        say(f"ambidex: {note}")

    from ambidex.cli.plan_text import describe, refused, refused_json, to_json
    from ambidex.memory.hardware_table import find_gpu
    from ambidex.memory.planner import PlanRefused, make_plan
    from ambidex.weights.shape import model_shape

    values = resolved.values
    lengths = {name: values[f"plan.{name}"] for name in ("prompt_len", "output_len")}

    # Half the bytes, as vLLM has it beside a GPU; lanes of this machine compute in float32.
    auto_dtype = "float32" if values["plan.gpu"] is None else find_gpu(values["plan.gpu"]).half

    def reshape(other: EngineConfig) -> ModelShape:
        return model_shape(config.model.model, other, auto_dtype)

    shape = reshape(config)
    profile = _profile(resolved, config)
    try:
        plan = make_plan(shape, profile, config, reshape=reshape, **lengths)
    except PlanRefused as error:
        reason = error.reason
        if not error.proposals:
            from ambidex.cli.plan_smallest import smallest_machine

            reason = f"{error} {smallest_machine(shape, profile, config, reshape)}".rstrip()
        if values["plan.json"]:
            found = refused_json(reason, error, shape, profile, lengths)
            print(json.dumps(found, ensure_ascii=False))
        say(f"ambidex: error: {reason}")
        if not values["plan.json"]:
            for line in refused(error):
                print(line)
        return EXIT_REFUSED
    if values["plan.svg"] is not None:
        _draw(plan, values["plan.svg"])
    if values["plan.json"]:
        print(json.dumps(to_json(plan, config, lengths), ensure_ascii=False))
    elif values["plan.svg"] != "-":
        print("\n".join(describe(plan, config)))
    return 0


def _built_in() -> Iterator[str]:
    """The names that are built in, as lines of the help."""
    from ambidex.memory.hardware_table import CPUS, GPUS
    from ambidex.memory.public_shapes import PUBLIC_SHAPES

    for title, names in (
        ("Models that are built in, beside every config.json and GGUF file", PUBLIC_SHAPES),
        ("Names for --gpu", [row.name.replace(" ", "-") for row in GPUS]),
        ("Names for --cpu", [row.name.replace(" ", "-") for row in CPUS]),
    ):
        yield f"\n{title}:"
        yield textwrap.fill(
            ", ".join(names),
            98,
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )


def _check(resolved: Resolved) -> None:
    """Raises :class:`OptionError` where two options describe two machines, or two outputs one
    stream."""
    values = resolved.values
    named = [name for name in ("gpu", "cpu") if values[f"plan.{name}"] is not None]
    if named and values["plan.this_machine"]:
        raise OptionError(
            f"--this-machine and --{named[0]} {values[f'plan.{named[0]}']} name two machines. "
            "Leave one of them out."
        )
    if named and values["plan.measure"]:
        raise OptionError(
            f"--measure measures this machine, and --{named[0]} {values[f'plan.{named[0]}']} names "
            "another. Leave one of them out."
        )
    device = values["device"]
    if named and device != "auto" and resolved.sources["device"] == "command line":
        raise OptionError(
            f"--device {device} is a device of this machine, and --{named[0]} "
            f"{values[f'plan.{named[0]}']} names another machine. Leave one of them out."
        )
    if values["plan.gpu"] is not None:
        check_room(values, f"--gpu {values['plan.gpu']}")
    if values["plan.json"] and values["plan.svg"] == "-":
        raise OptionError(
            "--json and --svg - both write to standard output. Give --svg a file's name."
        )


def _profile(resolved: Resolved, config: EngineConfig) -> HardwareProfile:
    """The machine that the options describe."""
    gpu, cpu, ram = (resolved.values[f"plan.{name}"] for name in ("gpu", "cpu", "ram"))
    if gpu is not None or cpu is not None:
        from ambidex.memory.hardware_table import table_profile

        found = table_profile(gpu, cpu, ram)
        threads, cores = config.cpu_threads, found.host.num_threads
        # The environment's is about this machine.
        is_meant = resolved.sources["cpu_threads"].startswith(("command line", "file"))
        if is_meant and threads != cores:
            say(
                f"ambidex: --cpu-threads {threads}: no effect here: {found.host.name} is planned "
                "with all its cores. --cpu takes the numbers of another."
            )
        return found
    from ambidex import logs
    from ambidex.device.profile_cache import this_machine
    from ambidex.memory.host import host_capacity_bytes
    from ambidex.weights.hub import cache_dir

    # It says so where it has to measure, which takes seconds.
    logs.configure(config.log.level, config.log.format)
    profile = this_machine(config, cache_dir(), anew=resolved.values["plan.measure"])
    # What the system and the container leave now, as the engine's ledger has it.
    size = host_capacity_bytes() if ram is None else ram
    return replace(profile, host=replace(profile.host, memory_bytes=size))


def _draw(plan: Plan, name: str) -> None:
    from ambidex.cli.plan_svg import draw

    text = draw(plan)
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--svg: {name} cannot be written: {error.strerror}. Give another file, or '-' for "
            "standard output."
        ) from None
