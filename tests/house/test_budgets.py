"""The house does not grow: each number here may only fall. Who lowers one writes the new number here. A further feature may
bring a builder, its value and a part, with an option, and a further schedule its order: what that takes comes on top."""

from __future__ import annotations

import argparse

import pytest

from zbsolve.cli.app import parser
from zbsolve.features.table import FEATURES
from zbsolve.systems.table import SYSTEMS

from ..support.house import ROOT

LIBRARY = ("zbsolve", "profiler")
MOST = {
    "lines": 78_772,
    "files": 407,
    "exec lines": 18_034,
    "exec files": 89,
    "commands": 12,
    "options": 149,
    "benchmarks": 20,
}
OF_A_FEATURE = {"lines": 200, "files": 3, "exec lines": 100, "exec files": 1, "options": 1}
OF_A_SCHEDULE = {"lines": 20}
MORE_FEATURES, MORE_SCHEDULES = len(FEATURES) - 15, len(SYSTEMS) - 35  # than there were when these numbers were written


def counted() -> dict[str, int]:
    """Library files and lines, commands and their options, and scripts of benchmarks."""
    files = {path: path.read_text(encoding="utf-8").count("\n") for part in LIBRARY for path in (ROOT / part).rglob("*.py")}
    executor = {path: lines for path, lines in files.items() if path.is_relative_to(ROOT / "zbsolve" / "exec")}
    (commands,) = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    options = [action.dest for one in commands.choices.values() for action in one._actions if action.option_strings]
    return {
        "lines": sum(files.values()),
        "files": len(files),
        "exec lines": sum(executor.values()),
        "exec files": len(executor),
        "commands": len(commands.choices),
        "options": len(options),
        "benchmarks": len([path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")]),
    }


NOW = counted()


@pytest.mark.parametrize("what", MOST)
def test_the_house_does_not_grow(what: str) -> None:
    most = MOST[what] + MORE_FEATURES * OF_A_FEATURE.get(what, 0) + MORE_SCHEDULES * OF_A_SCHEDULE.get(what, 0)
    assert NOW[what] <= most, f"{what}: {NOW[what]}, {most} at most; take something out"
    assert NOW[what] > 0.97 * MOST[what], f"{what}: {NOW[what]} now: write that as the most"
