"""`solve` takes a schedule: its problem is solved anew, and options that say something else are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbsolve import Schedule
from zbsolve.cli import main

from ..support.profiles import toy_profile


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("solved")
    toy_profile().save(folder / "profile.json")
    out = str(folder / "schedule.json")
    step = ["--ranks", "2", "--microbatches", "4", "--placement", "vee", "--recompute", "1", "--method", "greedy"]
    assert main(["solve", str(folder / "profile.json"), *step, "-o", out]) == 0
    return out


def test_its_problem_is_solved_anew(solved: str, tmp_path: Path) -> None:
    out = tmp_path / "again.json"
    same = ["--ranks", "2", "--placement", "0,1,1,0", "--partition", "1,1,1,1", "--recompute", "1", "--no-fused"]
    for options in ([], same):
        assert main(["solve", solved, *options, "--effort", "0.05", "-o", str(out)]) == 0
        assert Schedule.load(out).problem == Schedule.load(solved).problem


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--ranks", "3"], "--ranks 3: {} holds a schedule with ranks 2: leave the option out, or name a profile"),
        (["--placement", "loop"], "--placement loop: {} holds a schedule with placement vee"),
        (["--placement", "auto"], "--placement auto: {} holds a schedule with placement vee"),
        (["--partition", "balanced"], "--partition balanced: {} holds a schedule with partition (1, 1, 1, 1)"),
        (["--objective", "span"], "--objective span: {} holds a schedule with objective makespan"),
        (["--fused"], "--fused: {} holds a schedule with fused False"),
        (["--recompute", "all"], "--recompute all: {} holds a schedule with recompute 1: leave"),
        (["--memory", "3GiB"], "--memory 3GiB: {} holds a schedule, and its problem says what ranks have for activations"),
    ],
)
def test_what_contradicts_it_is_refused(
    solved: str, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", solved, *options]) == 2
    assert line.format(solved) in capsys.readouterr().err


def test_a_profile_needs_its_step(solved: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = solved.replace("schedule.json", "profile.json")
    assert main(["solve", profile, "--ranks", "2"]) == 2
    assert capsys.readouterr().err == "zbsolve solve: --microbatches: is needed with a profile\n"


@pytest.mark.parametrize(("backward", "name", "other"), [("1f1b", "zb-h1", ""), ("zb-h1", "1f1b", "1f1b-split")])
def test_a_name_keeps_its_backward(
    solved: str, backward: str, name: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file has one backward: `solve` refuses a name that needs the other one, and a race says why in the same line."""
    profile, path = solved.replace("schedule.json", "profile.json"), str(tmp_path / "one.json")
    step = ["--ranks", "2", "--microbatches", "4"]
    assert main(["solve", profile, *step, "--method", backward, "-o", path]) == 0
    capsys.readouterr()
    assert main(["solve", path, "--method", name]) == 2
    said = capsys.readouterr().err.removeprefix(f"zbsolve solve: {name}: ").strip()
    assert f"{path} has " in said
    assert (f"the same order there is {other};" in said) == bool(other)
    assert main(["solve", path, "--method", f"{backward},{name}"]) == 0
    assert f"{name}: cannot be: {said}\n" in capsys.readouterr().out
    if other:
        assert main(["solve", path, "--method", other]) == 0
        assert main(["solve", path, "--method", name, "--no-fused"]) == 0


def test_a_race_begins_with_the_files_own_schedule(solved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", solved, "--method", "gpipe,auto", "--effort", "0.05", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schedules"][0]["name"] == solved
