"""Which instruction-set level is picked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ambidex.errors import OptionError
from ambidex.kernels.cpu.levels import (
    LEVELS,
    choose_level,
    kernel_table_name,
    machine_name,
    recorded_levels,
    usable_level,
)


def test_the_best_recorded_level_is_picked() -> None:
    assert choose_level(LEVELS, LEVELS) == ("amx", None)
    assert choose_level(LEVELS[:-1], LEVELS) == ("v4_vnni", None)
    assert choose_level(("generic", "v3"), LEVELS) == ("v3", None)
    assert choose_level(("generic",), LEVELS) == ("generic", None)


def test_a_level_without_a_record_is_not_picked_and_a_note_says_so() -> None:
    level, note = choose_level(LEVELS, ["generic", "v3"])
    assert level == "v3"
    assert note is not None and "tests of amx" in note and "AMBIDEX_CPU_LEVEL=amx" in note
    # Also where a plainer one has none.
    assert choose_level(LEVELS, ["v4"])[0] == "v4"


def test_without_any_record_the_plainest_is_picked() -> None:
    level, note = choose_level(LEVELS, [])
    assert level == "generic"
    assert note is not None and "no level" in note and "AMBIDEX_CPU_LEVEL=amx" in note
    level, note = choose_level(("generic",), [])
    assert level == "generic"
    assert note is not None and "AMBIDEX_CPU_LEVEL" not in note


@pytest.mark.parametrize("forced", ["v4", "V4", " v4 "])
def test_a_level_can_be_forced(forced: str) -> None:
    assert choose_level(LEVELS, [], forced) == ("v4", None)


@pytest.mark.parametrize(("forced", "why"), [("v9", "does not know"), ("v4", "lacks")])
def test_a_level_that_is_not_there_is_refused(forced: str, why: str) -> None:
    with pytest.raises(OptionError, match=why) as caught:
        choose_level(("generic", "v3"), [], forced)
    assert f"'{forced}'" in str(caught.value) and "generic, v3." in str(caught.value)


def test_an_empty_variable_forces_nothing() -> None:
    assert choose_level(("generic", "v3"), ["v3"], "") == ("v3", None)


def library(permits: bool, asked: list[str]) -> SimpleNamespace:
    def permit() -> bool:
        asked.append("tiles")
        return permits

    return SimpleNamespace(supported_levels=lambda: list(LEVELS), permit_tiles=permit)


def test_tiles_are_asked_for_only_where_they_are_used() -> None:
    asked: list[str] = []
    assert usable_level(library(True, asked), LEVELS[:-1])[0] == "v4_vnni"
    assert usable_level(library(True, asked), LEVELS, "v3") == ("v3", None)
    assert asked == []
    assert usable_level(library(True, asked), LEVELS) == ("amx", None)
    assert asked == ["tiles"]


def test_without_tiles_the_next_level_is_used_and_a_note_says_so() -> None:
    level, note = usable_level(library(False, []), LEVELS)
    assert level == "v4_vnni"
    assert note is not None and "refuses this process tile registers, so v4_vnni is used" in note
    with pytest.raises(OptionError, match="'amx', a level that this processor, system or build"):
        usable_level(library(False, []), LEVELS, "amx")


def test_records_of_another_machine_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "levels.json"
    record = {"passed": True, "cpu": "a processor"}
    failed = {"passed": False, "cpu": "a processor"}
    path.write_text(json.dumps({"x86_64": {"v3": record, "v4": failed}}))
    assert recorded_levels(path, "AMD64") == {"v3": record}
    assert recorded_levels(path, "arm64") == {}
    assert recorded_levels(tmp_path / "missing.json") == {}


def test_the_records_in_the_repository_are_whole() -> None:
    recorded = recorded_levels(machine="x86_64")
    assert set(recorded) <= set(LEVELS)
    for record in recorded.values():
        assert {"passed", "cpu", "date", "tests", "version"} <= set(record)
        assert record["tests"] > 0


def test_what_is_recorded_was_tested_in_every_family_of_kernels() -> None:
    root = Path(__file__).parents[2]
    found = re.search(r"set\(all_families ([\w ]+)\)", (root / "CMakeLists.txt").read_text())
    assert found
    # benchmarks/record_levels.py runs these files.
    files = {path.name for path in root.glob("tests/kernels/test_native_*.py")}
    assert {f"test_native_{family}.py" for family in found[1].split()} <= files


def test_one_machine_has_one_name() -> None:
    assert machine_name("arm64") == machine_name("aarch64") == "aarch64"
    assert machine_name("AMD64") == "x86_64"
    assert machine_name()


def test_the_table_of_kernels_is_chosen_by_name() -> None:
    assert kernel_table_name({}) == "native"
    assert kernel_table_name({"AMBIDEX_CPU_KERNELS": ""}) == "native"
    assert kernel_table_name({"AMBIDEX_CPU_KERNELS": "Reference"}) == "reference"
    with pytest.raises(OptionError, match="native or reference, not 'fast'"):
        kernel_table_name({"AMBIDEX_CPU_KERNELS": "fast"})
