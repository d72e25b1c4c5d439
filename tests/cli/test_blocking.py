"""Links that block their sender, from the command line: numbers, solve, check, pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbsolve import Problem, Profile, Schedule, pipeline, preset
from zbsolve.cli import main
from zbsolve.show.pictures.gantt import MESSAGE

NUMBERS = "numbers --ranks 2 --F 10ms --BW 20ms --comm 4ms"


def run(line: str, folder: Path) -> int:
    return main([part.replace("@", str(folder) + "/") for part in line.split()])


def solved(line: str, folder: Path) -> Schedule:
    assert run(f"solve @{line} --ranks 2 --microbatches 3 --effort 0.1 -o @out.json", folder) == 0
    return Schedule.load(folder / "out.json")


@pytest.fixture
def profiles(tmp_path):
    assert run(f"{NUMBERS} -o @free.json", tmp_path) == run(f"{NUMBERS} blocking=yes -o @blocking.json", tmp_path) == 0
    return tmp_path


def test_the_profile_and_the_option_say_it(profiles):
    assert Profile.load(profiles / "blocking.json").link.blocking
    blocking = [solved(line, profiles) for line in ("blocking.json", "free.json --blocking")]
    free = [solved(line, profiles) for line in ("free.json", "blocking.json --no-blocking")]
    assert [one.problem.sending.any() for one in (*blocking, *free)] == [True, True, False, False]
    assert blocking[0].certificate.value == blocking[1].certificate.value > free[0].certificate.value
    assert free[0].certificate.value == free[1].certificate.value
    assert run("check @out.json --bound", profiles) == 0


def test_the_profile_is_shown_with_it(tmp_path, capsys):
    for option, there in (("blocking=yes", True), ("", False)):
        assert run(f"{NUMBERS} {option} -o @p.json", tmp_path) == 0
        assert ("the sender computes nothing meanwhile" in capsys.readouterr().out) is there


def test_an_option_against_a_file_is_refused(profiles, capsys):
    solved("blocking.json", profiles)
    assert run("solve @out.json --no-blocking -o @again.json", profiles) == 2
    assert "--no-blocking" in capsys.readouterr().err


def test_a_picture_shows_the_message_within_its_pass(profiles):
    for name, there in (("blocking", True), ("free", False)):
        solved(f"{name}.json", profiles)
        assert run("show @out.json -o @x.svg", profiles) == 0
        drawn = (profiles / "x.svg").read_text()
        assert (MESSAGE in drawn) is there
        assert ("message that blocks its sender" in drawn) is there


def test_microbatches_that_differ_go_through_files(tmp_path, capsys):
    problem = pipeline([2, 3], BW=[4, 5], microbatches=4, comm=1, blocking=True).scaled([1, 2, 1, 3])
    problem.save(tmp_path / "problem.json")
    assert Problem.load(tmp_path / "problem.json") == problem
    assert run("solve @problem.json --effort 0.2 -o @out.json", tmp_path) == 0
    assert run("check @out.json --bound --json", tmp_path) == 0
    assert '"violations": []' in capsys.readouterr().out
    for ending in ("svg", "html", "trace.json"):
        assert run(f"show @out.json -o @x.{ending}", tmp_path) == 0
    assert run("show @out.json", tmp_path) == 0
    assert preset("1f1b", problem).timeline().value >= Schedule.load(tmp_path / "out.json").certificate.value
