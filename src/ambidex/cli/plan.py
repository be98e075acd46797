"""``ambidex plan``: what fits, where it lies and how fast it is, before anything is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ambidex.cli.common import print_help, resolve, say, wants
from ambidex.errors import OptionError, OutOfMemory
from ambidex.options import WORKS, Option

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.memory.planner import Plan
    from ambidex.memory.profile import HardwareProfile
    from ambidex.options import Resolved

OPTIONS = (
    Option("--gpu", WORKS, "str", dest="plan.gpu", default_help="none", is_accelerator=True,
           help="an accelerator of the table, A10, or memory=24GB,bandwidth=936GB/s,..."),
    Option("--cpu", WORKS, "str", dest="plan.cpu", default_help="a common one beside --gpu",
           help="a host of the table: epyc-9354"),
    Option("--ram", WORKS, "gib", dest="plan.ram", low=1, unit="GiB", default_help="the host's",
           help="memory of the host: 64GB, or a number of GiB"),
    Option("--this-machine", WORKS, "flag", dest="plan.this_machine", default=False,
           no_form=False, help="the machine that this runs on, as without --gpu and --cpu"),
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
        return 0
    resolved = resolve("plan", argv, OPTIONS)
    if resolved is None:
        return 0
    _check(resolved)
    config = _beside_gpu(resolved, resolved.engine_config())
    for note in resolved.notes:
        say(f"ambidex: {note}")

    from ambidex.cli.plan_text import describe, refused, refused_json, to_json
    from ambidex.memory.planner import PlanRefused, make_plan
    from ambidex.weights.shape import model_shape

    values = resolved.values
    lengths = {name: values[f"plan.{name}"] for name in ("prompt_len", "output_len")}
    shape = model_shape(config.model.model, config)
    profile = _profile(resolved, config)
    try:
        plan = make_plan(
            shape,
            profile,
            config,
            reshape=lambda other: model_shape(config.model.model, other),
            **lengths,
        )
    except OutOfMemory as error:
        if values["plan.json"]:
            print(json.dumps(refused_json(error, shape, profile, lengths), ensure_ascii=False))
        elif isinstance(error, PlanRefused):
            for line in refused(error):
                print(line)
        raise
    if values["plan.svg"] is not None:
        _draw(plan, values["plan.svg"])
    if values["plan.json"]:
        print(json.dumps(to_json(plan, config, lengths), ensure_ascii=False))
    elif values["plan.svg"] != "-":
        print("\n".join(describe(plan, config)))
    return 0


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
    device = values["device"]
    if named and device != "auto" and resolved.sources["device"] == "command line":
        raise OptionError(
            f"--device {device} is a device of this machine, and --{named[0]} "
            f"{values[f'plan.{named[0]}']} names another machine. Leave one of them out."
        )
    if values["plan.json"] and values["plan.svg"] == "-":
        raise OptionError(
            "--json and --svg - both write to standard output. Give --svg a file's name."
        )


def _beside_gpu(resolved: Resolved, config: EngineConfig) -> EngineConfig:
    """The configuration of a lane with the GPU that is named: ``--dtype auto`` is half the bytes, as
    vLLM has it there. (Lanes of this machine hold plain weights in float32.)"""
    from dataclasses import replace

    if resolved.values["plan.gpu"] is None:
        return config
    model = config.model
    if model.dtype == "auto":
        model = replace(model, dtype="bfloat16")
    # A configuration file may name a device of this machine.
    return replace(config, model=model, device=replace(config.device, device="auto"))


def _profile(resolved: Resolved, config: EngineConfig) -> HardwareProfile:
    """The machine that the options describe."""
    from dataclasses import replace

    gpu, cpu, ram = (resolved.values[f"plan.{name}"] for name in ("gpu", "cpu", "ram"))
    if gpu is not None or cpu is not None:
        from ambidex.memory.hardware_table import table_profile

        return table_profile(gpu, cpu, ram)
    from ambidex.device.profile_cache import this_machine

    profile = this_machine(config)
    if ram is None:
        return profile
    return replace(profile, host=replace(profile.host, memory_bytes=ram))


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
