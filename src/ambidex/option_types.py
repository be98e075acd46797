"""The form of one option, and how its text becomes a value. Standard library only.

Counts: ``8k`` is 8,000, ``8K`` is 8,192 (also m/M, g/G, t/T). Sizes: ``40GB`` is 40 * 10^9 bytes,
``40GiB`` is 40 * 2^30; ``40g`` and ``40G`` follow the rule of the counts.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ambidex.errors import OptionError

WORKS = "works"
NO_EFFECT = "no_effect"
REFUSED = "refused"

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Option:
    """One option, or one environment variable (a ``name`` without dashes; ``*`` at its end: all
    variables that begin so).

    ``kind`` is what happens: WORKS sets ``dest``; NO_EFFECT gives one line with ``reason``;
    REFUSED is an error with ``reason`` and ``replacement``, except for the values in ``harmless``
    (and for false, null and empty), which have no effect. ``refused_values`` maps patterns of
    values of an option that otherwise works, or has no effect, to why they are refused.
    """

    name: str
    kind: str
    #: A key of TYPES.
    type: str = "str"
    default: Any = None
    #: What the default means, where it is None.
    default_help: str = ""
    help: str = ""
    group: str = ""
    reason: str = ""
    replacement: str = ""
    #: Variables that give the value too, the strongest first.
    env: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    #: Key of ``Resolved.values``; empty: the value is read elsewhere, or nowhere.
    dest: str = ""
    #: A flag that has a ``--no-`` form.
    no_form: bool = True
    #: A flag that sets ``dest`` to false.
    inverted: bool = False
    choices: tuple[Any, ...] = ()
    #: Other spellings of a choice.
    normal: Mapping[str, Any] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    #: What the numbers are, for the error message.
    unit: str = ""
    harmless: tuple[Any, ...] = ()
    harmless_reason: str = ""
    refused_values: Mapping[str, str] = field(default_factory=dict)
    #: Never printed.
    secret: bool = False
    #: No line at start: set by images and shells, not by people.
    quiet: bool = False
    #: Works beside an accelerator only; without one it has no effect, for ``reason``.
    needs_accelerator: bool = False
    #: Names an accelerator, beside which those work.
    is_accelerator: bool = False
    #: Fields that are different beside an accelerator.
    with_accelerator: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_variable(self) -> bool:
        return not self.name.startswith("-")

    @property
    def key(self) -> str:
        """What two ways of saying the same thing have in common."""
        return self.dest or self.name

    @property
    def takes_path(self) -> bool:
        """True where ``--name.field value`` is allowed."""
        return self.type in ("json", "json_or_str")


def settle(option: Option, has_accelerator: bool) -> Option:
    """The option as it is on this machine: one that needs an accelerator has no effect without."""
    if has_accelerator:
        return replace(option, **option.with_accelerator) if option.with_accelerator else option
    if option.needs_accelerator:
        # Without a place for its value: two such options do not say the same thing any more.
        return replace(option, kind=NO_EFFECT, dest="")
    return option


def show(option: Option, value: Any) -> str:
    """The value as a person would write it, short, and never a secret."""
    if value is None:
        return ""
    if option.secret:
        return "***"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        text = json.dumps(value, default=str)
    elif isinstance(value, list | tuple):
        text = " ".join(str(item) for item in value)
    elif option.type in ("size", "gib") and isinstance(value, int):
        text = show_bytes(value)
    elif option.type == "bandwidth" and isinstance(value, float):
        text = f"{value / 1e9:g}GB/s"
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else text[:57] + "..."


def show_bytes(num_bytes: int) -> str:
    """``37.25GiB``: four digits, in the largest unit that leaves at least one whole."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g}{unit}"
    return str(num_bytes)


def convert(option: Option, raw: Any, where: str) -> Any:
    """``raw`` (text, or what YAML or Python gave) as the option's value.

    Raises :class:`OptionError` that begins with ``where``.
    """
    try:
        value = TYPES[option.type](raw)
    except ValueError as error:
        shown = "this value" if option.secret else _written(raw)
        detail = f" ({error})" if str(error) else ""
        expected = EXPECTED[option.type]
        # "a number of GiB" says the unit itself.
        says_unit = option.unit in expected
        hint = "" if says_unit else f" ({option.unit})"
        raise OptionError(f"{where} must be {expected}{hint}, not {shown}{detail}.") from None
    if isinstance(value, str) and option.normal:
        value = option.normal.get(value.lower(), value)
    if option.choices and value is not None:
        value = _choose(option, value, where)
    _check_range(option, value, where, raw)
    return value


def _written(raw: Any) -> str:
    """What was given, but for its middle where it is long."""
    try:
        text = repr(raw)
    except ValueError:  # An integer of thousands of digits.
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:40]}...{text[-10:]}"


def refusal(option: Option, value: Any) -> str | None:
    """Why this value is refused, or None."""
    text = show(option, value).lower()
    for pattern, reason in option.refused_values.items():
        if fnmatch.fnmatchcase(text, pattern):
            return reason
    if option.kind != REFUSED or value in (None, False, "", [], {}) or text == "none":
        return None
    if any(value == harmless for harmless in option.harmless):
        return None
    replacement = f" {option.replacement}" if option.replacement else ""
    return f"{option.reason}.{replacement}"


def _choose(option: Option, value: Any, where: str) -> Any:
    for choice in option.choices:
        if value == choice or str(value).lower() == str(choice).lower():
            return choice
    if any(fnmatch.fnmatchcase(str(value).lower(), p) for p in option.refused_values):
        return value
    names = ", ".join(str(choice) for choice in option.choices)
    raise OptionError(f"{where} must be one of {names}, not {value!r}.")


def _check_range(option: Option, value: Any, where: str, raw: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = option.low, option.high
    if (low is None or value >= low) and (high is None or value <= high):
        return
    unit = f" ({option.unit})" if option.unit else ""
    if high is None:
        expected = f"at least {low:g}"
    elif low is None:
        expected = f"at most {high:g}"
    else:
        expected = f"between {low:g} and {high:g}"
    shown = f"{raw.strip():.60}" if isinstance(raw, str) else _written(raw)
    raise OptionError(f"{where} must be {expected}{unit}, not {shown}.")


# Each function takes text or a Python value and raises ValueError; the message is a detail or "".

_NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
#: Of a number as it is written; more is nonsense, and overflows a float.
_MAX_DIGITS = 100
#: Of bytes and counts.
_MAX_COUNT = 2**60
_COUNT_UNITS = {
    "": 1,
    **{u: 1000**i for i, u in enumerate("kmgt", 1)},
    **{u: 1024**i for i, u in enumerate("KMGT", 1)},
}
_SIZE_UNITS = {
    "b": 1,
    **{f"{u}b": 1000**i for i, u in enumerate("kmgt", 1)},
    **{f"{u}ib": 1024**i for i, u in enumerate("kmgt", 1)},
}


def _number_with_unit(raw: Any) -> tuple[float | int, str]:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError("")
    if isinstance(raw, int) and abs(raw) >= 10**_MAX_DIGITS:
        raise ValueError("it is too large")
    match = _NUMBER.fullmatch(str(raw).strip())
    if match is None:
        raise ValueError("")
    number = match[1]
    if len(number) > _MAX_DIGITS:
        raise ValueError("it is too large")
    return (float(number) if "." in number else int(number)), match[2]


def to_str(raw: Any) -> str:
    # YAML reads `api-key: 1234` as a number.
    if isinstance(raw, str):
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    raise ValueError("")


def to_flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    if str(raw).lower() not in words:
        raise ValueError("")
    return words[str(raw).lower()]


def to_int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise ValueError("")
    if isinstance(raw, str) and not raw.isascii():
        # int() takes the digits of every script.
        raise ValueError("its digits are not 0 to 9")
    if isinstance(raw, int) and abs(raw) >= 10**_MAX_DIGITS:
        raise ValueError("it is too large")
    try:
        return int(raw)
    except ValueError:
        raise ValueError("") from None


def to_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError("")
    if isinstance(raw, str) and not raw.isascii():
        raise ValueError("its digits are not 0 to 9")
    try:
        value = float(raw)
    except OverflowError:
        raise ValueError("it is too large") from None
    except ValueError:
        raise ValueError("") from None
    if not math.isfinite(value):
        raise ValueError("it is not finite")
    return value


def to_count(raw: Any) -> int:
    number, unit = _number_with_unit(raw)
    if unit not in _COUNT_UNITS:
        raise ValueError("the units are k, m, g, t and K, M, G, T")
    value = number * _COUNT_UNITS[unit]
    if value != int(value):
        raise ValueError("it is no whole number")
    return _bounded(int(value))


def _bounded(value: int) -> int:
    if abs(value) > _MAX_COUNT:
        raise ValueError(f"the most is 2^60, {_MAX_COUNT}")
    return value


def _to_bytes(raw: Any, bare: int) -> int:
    number, unit = _number_with_unit(raw)
    if unit == "":
        return _bounded(round(number * bare))
    if unit in _COUNT_UNITS:
        return _bounded(round(number * _COUNT_UNITS[unit]))
    if unit.lower() not in _SIZE_UNITS:
        raise ValueError("the units are B, KB, MB, GB, TB and KiB, MiB, GiB, TiB")
    return _bounded(round(number * _SIZE_UNITS[unit.lower()]))


def to_size(raw: Any) -> int:
    """Bytes; a bare number is bytes."""
    return _to_bytes(raw, 1)


def to_gib(raw: Any) -> int:
    """Bytes; a bare number is GiB."""
    return _to_bytes(raw, GIB)


_BANDWIDTH = re.compile(r"(.*\d\s*)([KMGTkmgt]i?)?(?:B/s|Bps|B)?", re.ASCII | re.DOTALL)


def to_bandwidth(raw: Any) -> float:
    """Bytes a second; a bare number is GB/s (10^9), and 16GB/s, 16GiB/s, 500MB/s are as they say.

    Bits a second are refused: ``Gb/s`` is eight times less than what is mostly meant.
    """
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError("")
    match = _BANDWIDTH.fullmatch(str(raw).strip())
    if match is None:
        raise ValueError("the units are GB/s, MB/s, KB/s and GiB/s, MiB/s, KiB/s")
    return float(to_size(f"{match[1].strip()}{match[2] or 'G'}B"))


def to_device(raw: Any) -> str:
    """``auto``, ``cpu``, or a device with or without settings, ``sim:memory=2GiB,link=4GB/s``.

    What a device makes of its settings it says itself, when it is made.
    """
    name, colon, settings = to_str(raw).strip().partition(":")
    known = name.lower()
    if known in _HARDWARE or (known in ("auto", "cpu") and not colon):
        return f"{known}{colon}{settings}"
    if known == "sim":
        return f"sim:{settings}" if settings else "sim"
    added = _added_devices()
    if name in added:
        return f"{name}{colon}{settings}"
    raise ValueError(f"packages here add {', '.join(added) or 'none'}")


#: Not there yet, which the table of options says.
_HARDWARE = ("cuda", "gpu")


def _added_devices() -> list[str]:
    """Devices that installed packages add, by name."""
    # Here, because reading what is installed takes a while and is hardly ever asked for.
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group="ambidex.devices")})


def to_context(raw: Any) -> int | str:
    """Tokens, or ``auto``, or ``auto:N`` (the model's limit, but no more than N)."""
    text = str(raw).strip().lower()
    if text in ("auto", "-1"):
        return "auto"
    if text.startswith("auto:"):
        cap = to_count(str(raw).strip()[5:])
        if cap < 1:
            raise ValueError("the cap is at least 1")
        return f"auto:{cap}"
    return to_count(raw)


def to_threads(raw: Any) -> int:
    """OpenMP writes one number a nesting level, ``4,2``; the first counts."""
    return to_int(raw.split(",")[0] if isinstance(raw, str) else raw)


_CPUS = r"\d+(-\d+)?(,\d+(-\d+)?)*"
_CPU_BIND = re.compile(rf"auto|none|nobind|numa:{_CPUS}|{_CPUS}(\|{_CPUS})*", re.ASCII)


def to_cpu_bind(raw: Any) -> str:
    """What ``kernels/cpu/topology.py`` takes; vLLM gives each rank a part, ``0-31|32-63``."""
    if isinstance(raw, list | tuple):
        raw = ",".join(map(str, raw))
    text = re.sub(r"\s+", "", to_str(raw)).lower()
    if not _CPU_BIND.fullmatch(text):
        raise ValueError("")
    return text


def parse_json(text: str) -> Any:
    """Strict JSON; ValueError says at which character it fails."""

    def reject(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=reject)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_json(raw: Any) -> dict[str, Any] | None:
    value = parse_json(raw) if isinstance(raw, str) else raw
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("")
    return dict(value)


def to_json_or_str(raw: Any) -> Any:
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        return to_json(raw)
    return raw


def to_list(raw: Any) -> list[str]:
    if isinstance(raw, str) and raw.lstrip().startswith("["):
        raw = parse_json(raw)
    if isinstance(raw, str | int | float) and not isinstance(raw, bool):
        return [str(raw)]
    if not isinstance(raw, Sequence) or not all(isinstance(i, str | int | float) for i in raw):
        raise ValueError("")
    return [str(item) for item in raw]


def to_any(raw: Any) -> Any:
    return raw


TYPES: Mapping[str, Callable[[Any], Any]] = {
    "str": to_str,
    "flag": to_flag,
    "int": to_int,
    "float": to_float,
    "count": to_count,
    "size": to_size,
    "gib": to_gib,
    "context": to_context,
    "threads": to_threads,
    "cpu_bind": to_cpu_bind,
    "bandwidth": to_bandwidth,
    "device": to_device,
    "json": to_json,
    "json_or_str": to_json_or_str,
    "list": to_list,
    "optional": to_any,
    "any": to_any,
}

EXPECTED: Mapping[str, str] = {
    "str": "text",
    "flag": "true or false",
    "int": "a whole number",
    "float": "a number",
    "count": "a whole number such as 8192, 8k (8,000) or 8K (8,192)",
    "size": "a size such as 8GiB, 40GB or a number of bytes",
    "gib": "a size such as 8GiB, 40GB or a number of GiB",
    "context": "a number of tokens such as 8192, 8k or 1M, or auto, or auto:131072",
    "threads": "a whole number",
    "cpu_bind": "auto, none, numa:0, or CPUs such as 0-15 or 0,2,4",
    "bandwidth": "a rate such as 16GB/s, 500MB/s or a number of GB/s",
    "device": "one of auto, cpu, sim, sim:memory=2GiB,link=4GB/s, or a device of a package",
    "json": "a JSON object such as '{\"key\": 1}' (in single quotes, for the shell)",
    "json_or_str": "a JSON object or a word",
    "list": "one or more values, or a JSON list",
    "optional": "text",
    "any": "text",
}
