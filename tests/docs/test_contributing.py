"""CONTRIBUTING, followed to the letter in a copy of the project: a schedule, a kind of pass, a feature of a step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support.docs import blocks, commands, text_of
from ..support.house import ROOT

pytestmark = pytest.mark.slow

WHERE = r"In `(?P<path>[^`]+)`, (?P<side>above|below) `(?P<anchor>[^`]+)`|The new file `(?P<new>[^`]+)`"
STEP = re.compile(rf"(?:{WHERE}):\n\n```(?:python|csv)\n(?P<code>.*?)```", re.S)
NEEDED = ("zbsolve", "profiler", "benchmarks", "tests", "examples", "pyproject.toml", "docs")
PARTS = ("Add a schedule", "Add a kind of pass", "Add a feature to a step")
PROFILE = ROOT / "benchmarks" / "profiles" / "measured-gpt-tiny-cpu.json"


def followed(folder: Path) -> list[str]:
    """What the page says to write, written; the files that were touched."""
    touched = []
    for step in STEP.finditer(text_of("CONTRIBUTING.md")):
        path = folder / (step["path"] or step["new"])
        touched.append(str(path.relative_to(folder)))
        if step["new"]:
            path.write_text(step["code"], encoding="utf-8")
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (found,) = (i for i, line in enumerate(lines) if step["anchor"] in line)
        place = found + (step["side"] == "below")
        blank = "\n\n" if step["code"].startswith("@") else ""
        path.write_text("".join([*lines[:place], step["code"], blank, *lines[place:]]), encoding="utf-8")
    return touched


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the schedule and the kind added; compiled kernels are copied too."""
    folder = tmp_path_factory.mktemp("copy")
    for name in NEEDED:
        source = ROOT / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy2(source, folder / name)
    assert followed(folder) == [
        "zbsolve/systems/one_direction.py",
        "zbsolve/systems/systems.csv",
        "tests/systems/test_eager_1f1b.py",
        "loading.py",
        "test_loading.py",
        "loaded.py",
        "clipping.py",
        "clipped.py",
        "zbsolve/build/loading.py",
        "zbsolve/features/loading.py",
        "zbsolve/features/table.py",
        "zbsolve/features/table.py",
        "tests/features/test_loading.py",
    ]
    shutil.copy(PROFILE, folder / "profile.json")
    return folder


def run(folder: Path, *words: str, given: str = "") -> str:
    """What a command says, in the copy. given: its standard input."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}  # many processes read its sources
    how: dict[str, Any] = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([sys.executable, *words], input=given, **how)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def said(copy: Path) -> dict[str, list[str]]:
    """Part of the page → what the commands below its steps say, all of them run as they stand, by one process."""
    shown = {}
    for part in PARTS:
        text = text_of("CONTRIBUTING.md").split(f"## {part}")[1].split("\n## ")[0]
        those = [one for one in blocks("CONTRIBUTING.md") if one.language == "sh" and one.text in text]
        shown[part] = [words for block in those for words in commands(block)]
    given = json.dumps([words for part in PARTS for words in shown[part]])
    told = iter(json.loads(run(copy, "-m", "tests.support.page_commands", given=given)))
    return {part: [next(told) for _ in shown[part]] for part in PARTS}


def test_the_schedule_is_known_solved_and_holds(said: dict[str, list[str]]) -> None:
    systems, solved, checked, tested = said["Add a schedule"]
    assert re.search(r"^eager-1f1b +single .* 7$", systems, re.M)
    assert "by eager-1f1b" in solved
    assert "eager.json: holds" in checked
    assert re.search(r"\d+ passed", tested)


def test_the_kind_is_solved_drawn_and_run(said: dict[str, list[str]]) -> None:
    tested, _, checked, shown, ran, _, crossing, clipped = said["Add a kind of pass"]
    assert "1 passed" in tested
    assert re.search(r"loading.json: holds .*\n.*\nproven again: ", checked)
    assert "loading of the batch" in shown
    assert re.search(r"clipping.json: holds .*\n.*\nproven again: ", crossing)
    assert "check: right" in ran
    assert "check: right" in clipped


def test_the_feature_is_an_option_and_runs(copy: Path, said: dict[str, list[str]]) -> None:
    _, checked, ran, tested, _ = said["Add a feature to a step"]
    assert "loading.json: holds" in checked
    assert "check: right" in ran
    assert "2 passed" in tested
    assert "| `--loading TIME` | `loading` | that loading" in (copy / "docs/features.md").read_text(encoding="utf-8")


def test_what_was_added_is_clean(copy: Path) -> None:
    pytest.importorskip("ruff")
    folders = ("--no-cache", "zbsolve", "tests/systems", "tests/features")
    for words in (("check",), ("format", "--check")):
        run(copy, "-m", "ruff", *words, *folders)
