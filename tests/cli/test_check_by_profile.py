"""`zbsolve check schedule.json --profile new.json`: is an order still valid by new times, and still the best?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import Profile, Step, solve
from zbsolve.cli import main

from ..support.profiles import equal_layers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles old, twice as slow, with a first layer whose W is far longer, and of little memory; the best order by old."""
    monkeypatch.chdir(tmp_path)
    old = replace(equal_layers(4), capacity=600)
    old.save("old.json")
    replace(old, layers=tuple(replace(one, F=20, B=24, W=16, BW=40) for one in old.layers)).save("twice.json")
    replace(old, layers=(replace(old.layers[0], F=2, B=3, W=60, BW=63), *old.layers[1:])).save("other.json")
    replace(old, capacity=500).save("little.json")
    solve(Step(4, 8).problem(old), effort=0.2).save("s.json")
    return tmp_path


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit status, and all that was said."""
    capsys.readouterr()
    status = main(["check", *words])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_times_twice_as_long_leave_it_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for profile in ("old.json", "twice.json"):
        status, said = checked(capsys, "s.json", "--profile", profile, "--seconds", "2")
        assert status == 0
        assert f"s.json: holds by the times of {profile}" in said
        assert "still within 1.00% of the best; proven: " in said


def test_another_order_is_shorter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the search alone finds; a share that is large enough lets the order pass."""
    best = solve(Step(4, 8).problem(Profile.load("other.json")), effort=0.3).timeline().value
    status, said = checked(capsys, "s.json", "--profile", "other.json", "--seconds", "2", "--json")
    body = json.loads(said)
    assert (status, body["good"], body["holds"]) == (1, False, True)
    assert body["bound"] <= body["best"] <= best < body["value"]
    assert body["excess"] == pytest.approx(body["value"] / body["best"] - 1)
    status, said = checked(capsys, "s.json", "--profile", "other.json", "--seconds", "2")
    assert (status, "another order takes " in said) == (1, True)
    status, said = checked(capsys, "s.json", "--profile", "other.json", "--seconds", "2", "--within", "20%")
    assert (status, "still within 20.00% of the best" in said) == (0, True)


def test_it_does_not_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = checked(capsys, "s.json", "--profile", "little.json")
    assert (status, "memory: rank 0 holds" in said) == (1, True)
    assert "s.json: does not hold by the times of little.json" in said
    status, said = checked(capsys, "s.json", "--profile", "little.json", "--json")
    assert (status, json.loads(said)["holds"], json.loads(said)["value"]) == (1, False, None)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--profile", "old.json", "--within", "much"], "--within 'much': a share such as 1% or 0.01"),
        (["--profile", "old.json", "--bound"], "ask different things: give one of them"),
        (["--within", "1%"], "go with --profile"),
        (["--profile", "nothing.json"], "nothing.json: no such file"),
    ],
)
def test_bad_use_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    status, said = checked(capsys, "s.json", *words)
    assert (status, said.count("\n")) == (2, 1)
    assert line in said
