"""What a configuration file says: options by name, and the nested sections that people write.

``cli/config_file.py`` reads YAML into :class:`FileOptions`; ``options.py`` knows what they mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ambidex.errors import OptionError
from ambidex.option_types import to_flag

#: Section -> its keys -> the option that each means.
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "gpu_offload": {
        "enabled": "cpu-offload",
        "cpu_memory_size": "cpu-offload-gb",
        "swap_space": "swap-space",
        "offload_layers": "offload-layers",
    },
    "scheduler": {
        "max_num_batched_tokens": "max-num-batched-tokens",
        "max_num_seqs": "max-num-seqs",
        "chunked_prefill": "enable-chunked-prefill",
    },
    "quantization": {
        "method": "quantization",
        "offload_quantized": "offload-quantized",
    },
}

#: ``enabled: false`` puts these of its section out of force.
_SWITCHED = frozenset({"cpu_memory_size", "offload_layers"})
#: Words that are an option too, and no section where they have one value.
_ALSO_OPTIONS = frozenset({"quantization"})


@dataclass(frozen=True, slots=True)
class FileItem:
    """One key of a file, or of a mapping within it."""

    #: As written, with ``-`` or ``_``.
    key: str
    #: A plain Python value.
    value: Any
    #: 1-based.
    line: int | None = None
    #: What a mapping holds, key by key, those that stand twice too.
    items: tuple[FileItem, ...] | None = None


@dataclass(frozen=True)
class FileOptions:
    """Options out of a file, in its order; ``cli/config_file.py`` makes one."""

    path: str
    items: tuple[FileItem, ...] = ()
    notes: tuple[str, ...] = ()
    #: MODEL, where nothing else names one.
    fallback_model: str | None = None

    @classmethod
    def of(cls, path: str, values: Mapping[str, Any]) -> FileOptions:
        """The same from a mapping, which has no lines."""
        return cls(path, tuple(_items(values)))

    def where(self, item: FileItem) -> str:
        return self.path if item.line is None else f"{self.path}, line {item.line}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One option of a file, sections resolved."""

    item: FileItem
    #: ``c.yaml, line 3``
    where: str
    #: As written: ``max_num_seqs``, ``scheduler.max_num_seqs``.
    key: str
    #: The option's own name; a key outside of sections is its own.
    name: str
    #: Its section is switched off: it must be right, and changes nothing.
    is_idle: bool = False

    @property
    def place(self) -> str:
        """Where another line of the same file sees it: `` on line 3``."""
        return "" if self.item.line is None else f" on line {self.item.line}"


def entries(file: FileOptions, is_option: Callable[[str], bool]) -> Iterator[FileEntry]:
    """Every option of the file, in its order, with what its sections hold.

    Raises :class:`OptionError` for a section that is none, and for a key that it does not have;
    ``is_option`` says whether a word names an option.
    """
    for item in file.items:
        section = item.key.replace("-", "_")
        if section not in SECTIONS or (section in _ALSO_OPTIONS and item.items is None):
            yield FileEntry(item, file.where(item), item.key, item.key)
        elif item.items is not None:
            yield from _section(file, section, item.items, is_option)
        elif item.value is not None:
            raise OptionError(
                f"{file.where(item)}: {item.key} is a section, with the keys {_keys(section)} "
                f"below it, and not {item.value!r:.60}."
            )


def switched_off(read: Iterable[FileEntry]) -> Iterator[str]:
    """A line on what ``enabled: false`` puts out of force."""
    idle = [entry for entry in read if entry.is_idle]
    if idle:
        names = ", ".join(entry.key for entry in idle)
        yield f"{idle[0].where}: {names}: no effect here: gpu_offload.enabled is false."


def hint(entry: FileEntry) -> str:
    """What may be meant by a word that is no option; empty where that is about no section."""
    import difflib

    word = entry.key.replace("-", "_")
    if entry.item.items is not None:
        near = difflib.get_close_matches(word, SECTIONS, 1)
        return f"The nearest section is {near[0]}." if near else ""
    head, dot, rest = word.partition(".")
    if dot and rest in SECTIONS.get(head, {}):
        return f"Write {rest} below {head}:, on a line of its own and indented."
    homes = [section for section, keys in SECTIONS.items() if word in keys]
    return f"It is a key of the section {homes[0]}: indent it below that." if homes else ""


def _section(
    file: FileOptions,
    section: str,
    items: tuple[FileItem, ...],
    is_option: Callable[[str], bool],
) -> Iterator[FileEntry]:
    keys = SECTIONS[section]
    is_off = any(item.key == "enabled" and _is_false(item.value) for item in items)
    for item in items:
        key = item.key.replace("-", "_")
        if key not in keys:
            raise OptionError(
                f"{file.where(item)}: unknown key {item.key!r} in {section}. "
                + _nearest(section, key, is_option(item.key))
            )
        is_idle = is_off and section == "gpu_offload" and key in _SWITCHED
        yield FileEntry(item, file.where(item), f"{section}.{item.key}", keys[key], is_idle)


def _nearest(section: str, key: str, is_option: bool) -> str:
    import difflib

    near = difflib.get_close_matches(key, SECTIONS[section], 1)
    if near:
        return f"The nearest key is {near[0]}."
    if is_option:
        return "It is an option of its own: write it without a section, not indented."
    return f"Its keys are {_keys(section)}."


def _keys(section: str) -> str:
    *some, last = SECTIONS[section]
    return f"{', '.join(some)} and {last}"


def _is_false(value: Any) -> bool:
    with contextlib.suppress(ValueError):
        return not to_flag(value)
    # Refused where its value is read.
    return False


def _items(values: Mapping[str, Any]) -> Iterator[FileItem]:
    for key, value in values.items():
        yield FileItem(
            key, value, items=tuple(_items(value)) if isinstance(value, Mapping) else None
        )
