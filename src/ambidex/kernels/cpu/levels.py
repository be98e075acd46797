"""Which instruction-set level of the native kernels runs here. No torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ambidex.errors import OptionError

#: Every level, the plainest first.
LEVELS = ("generic", "v3", "v4", "v4_vnni", "amx")
#: Names of one machine under several systems.
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def machine_name(name: str | None = None) -> str:
    """``x86_64`` or ``aarch64``, however the system spells it."""
    found = (name or platform.machine()).lower()
    return _MACHINES.get(found, found)


def recorded_levels(path: Path | None = None, machine: str | None = None) -> dict[str, Any]:
    """Level -> record of the run in which its tests passed, on machines of this kind.

    Read from the installed ``levels.json``, or from ``benchmarks/levels.json`` of the source tree;
    empty where there is neither.
    """
    here = Path(__file__).parent
    for candidate in (path,) if path else (here / "levels.json", _in_source_tree(here)):
        if candidate.is_file():
            records = json.loads(candidate.read_text()).get(machine_name(machine), {})
            return {level: record for level, record in records.items() if record["passed"]}
    return {}


def _in_source_tree(here: Path) -> Path:
    # src/ambidex/kernels/cpu
    return here.parents[3] / "benchmarks" / "levels.json"


def choose_level(
    supported: Sequence[str], recorded: Collection[str], forced: str | None = None
) -> tuple[str, str | None]:
    """The level to run, and a note where it is not the best one that the processor has.

    ``supported`` is the plainest first. ``forced`` is AMBIDEX_CPU_LEVEL. A level that is not in
    ``recorded`` is not picked by itself, except for the plainest where there is no other. Raises
    :class:`OptionError` for a forced level that is unknown or not supported.
    """
    if forced:
        return _check_forced(forced.strip().lower(), supported), None
    best = supported[-1]
    chosen = next((level for level in reversed(supported) if level in recorded), supported[0])
    if chosen == best and chosen in recorded:
        return chosen, None
    if chosen in recorded:
        note = f"tests of {best} have not been recorded as passed, so {chosen} is used"
    else:
        note = f"no level's tests have been recorded as passed, so {chosen}, the plainest, is used"
    return chosen, (
        f"CPU kernels: {note}. AMBIDEX_CPU_LEVEL={best} forces the other; "
        "benchmarks/record_levels.py tests it."
        if chosen != best
        else f"CPU kernels: {note}."
    )


def _check_forced(forced: str, supported: Sequence[str]) -> str:
    if forced in supported:
        return forced
    why = "this processor, system or build lacks" if forced in LEVELS else "Ambidex does not know"
    raise OptionError(
        f"AMBIDEX_CPU_LEVEL is '{forced}', a level that {why}. There are: {', '.join(supported)}."
    )


def usable_level(
    library: Any, recorded: Collection[str], forced: str | None = None
) -> tuple[str, str | None]:
    """:func:`choose_level` of what ``library``, the native one, supports, without tile registers
    where this process is refused them. They are asked for where they are used, and only then: a
    process that may have them needs larger signal stacks.
    """
    supported = library.supported_levels()
    level, note = choose_level(supported, recorded, forced)
    if level != "amx" or library.permit_tiles():
        return level, note
    level, _ = choose_level([name for name in supported if name != "amx"], recorded, forced)
    return level, (
        f"CPU kernels: the system refuses this process tile registers, so {level} is used."
    )


def kernel_table_name(environ: Mapping[str, str]) -> str:
    """``native`` or ``reference``: AMBIDEX_CPU_KERNELS, checked."""
    name = environ.get("AMBIDEX_CPU_KERNELS", "").strip().lower() or "native"
    if name not in ("native", "reference"):
        raise OptionError(f"AMBIDEX_CPU_KERNELS must be native or reference, not '{name}'.")
    return name
