"""Devices by name: ours, and those of the entry-point group ``ambidex.devices``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from ambidex.errors import OptionError

if TYPE_CHECKING:
    from ambidex.device.base import Accelerator
    from ambidex.memory.cost_model import ComputeRate

#: Entry points of other packages: name -> ``make(settings, core_rate, cpus) -> Accelerator``.
GROUP = "ambidex.devices"

#: ``settings`` is what comes after the name and a colon; ``core_rate()`` measures what a core of
#: this machine reaches; ``cpus``: where the device's own threads may run.
Maker = Callable[[str, Callable[[], "ComputeRate"], Sequence[int]], "Accelerator"]


def _make_sim(
    settings: str, core_rate: Callable[[], ComputeRate], cpus: Sequence[int]
) -> Accelerator:
    from ambidex.device.sim import make_sim

    return make_sim(settings, core_rate, cpus)


DEVICES: dict[str, Maker] = {"sim": _make_sim}


def device_names() -> list[str]:
    """Names of accelerators that can be asked for."""
    return sorted({*DEVICES, *(entry.name for entry in entry_points(group=GROUP))})


def make_accelerator(
    text: str, core_rate: Callable[[], ComputeRate], cpus: Sequence[int]
) -> Accelerator:
    """The device of ``name`` or ``name:settings``. Raises OptionError with the nearest name."""
    name, _, settings = text.partition(":")
    maker = DEVICES.get(name)
    if maker is None:
        found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
        if not found:
            names = ["auto", "cpu", *device_names()]
            near = difflib.get_close_matches(name, names, 1)
            raise OptionError(
                f"--device {name}: there is no such device."
                f"{f' Did you mean {near[0]}?' if near else ''} Known here: {', '.join(names)}."
            )
        try:
            maker = cast(Maker, found[0].load())
        except Exception as error:  # Another's package fails in many ways.
            raise OptionError(
                f"--device {name}: its package registers {found[0].value}, which cannot be loaded: "
                f"{error}. Install the package again, or choose another device."
            ) from error
    return maker(settings, core_rate, cpus)
