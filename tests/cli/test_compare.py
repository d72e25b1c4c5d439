"""`zbsolve compare` of several schedules: names, files, other engines' files and the best one, in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbsolve import Problem, Schedule, Step, preset, solve
from zbsolve.cli import main
from zbsolve.profile.named_steps import step_for

from ..support.profiles import equal_layers
from ..support.runs import random_run, trace_of

GRID = "F0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile, 1F1B by hand as a grid, and a schedule."""
    monkeypatch.chdir(tmp_path)
    equal_layers().save("profile.json")
    Path("mine.txt").write_text(GRID, encoding="utf-8")
    solve(Step(2, 4).problem(equal_layers()), effort=0.1).save("solved.json")
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_race_of_names_and_the_best_in_one_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every value is what each method alone gives, a name on its own placement; the best goes into the file."""
    methods = ["1f1b", "interleaved", "zb-v", "auto", "gems"]
    step = ["--ranks", "2", "--microbatches", "4", "--placement", "auto", "--effort", "0.2", "--method", ",".join(methods)]
    body = compared(capsys, "solve", "profile.json", *step, "-o", "best.json", "-o", "x.html", "-o", "x.svg")
    value = {row["name"]: row["value"] for row in body["schedules"]}
    profile = equal_layers()
    for name, placement in (("1f1b", "single"), ("interleaved", "loop"), ("zb-v", "vee")):
        step_of_name = step_for(name, profile, Step(2, 4, placement))
        assert value[name] == preset(name, step_of_name.problem(profile)).timeline().value
    assert list(value) == methods
    assert body["absent"] == []
    assert value["auto"] == min(value.values()) == Schedule.load("best.json").timeline().value
    assert all(row["certificate"]["bound"] <= row["value"] for row in body["schedules"])
    assert "on one axis of time" in Path("x.svg").read_text(encoding="utf-8")


def test_files_and_imports_on_a_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = compared(capsys, "compare", "mine.txt", "solved.json", "mine.txt", "--profile", "profile.json")
    rows = body["schedules"]
    step = step_for("1f1b", equal_layers(), Step(2, 4))
    assert rows[0]["value"] == preset("1f1b", step.problem(equal_layers())).timeline().value
    assert rows[1]["value"] == Schedule.load("solved.json").certificate.value
    assert rows[2]["difference"] == {"moved": 0, "first": []}
    absent = compared(capsys, "compare", "solved.json", "mine.txt")["absent"]
    assert absent == [{"name": "mine.txt", "why": "it says no times: add --profile profile.json"}]


def numbers(path: str, *times: str) -> None:
    """A profile of four equal parts by `zbsolve numbers`."""
    words = [word for pair in zip(("--F", "--B", "--W"), times, strict=True) for word in pair]
    assert main(["numbers", "--ranks", "4", *words, "-o", path]) == 0


def test_a_files_order_is_timed_by_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same order by times twice as long is as good as one that was found for them, not 100 % longer; without a profile
    the table says that its times differ."""
    numbers("old.json", "6ms", "7ms", "5ms")
    numbers("new.json", "12ms", "14ms", "10ms")
    step = ["--ranks", "4", "--microbatches", "8", "--effort", "0.2"]
    assert main(["solve", "old.json", *step, "-o", "s.json"]) == 0
    assert main(["solve", "new.json", *step, "-o", "t.json"]) == 0
    old, new = (Schedule.load(path).timeline().value for path in ("s.json", "t.json"))
    assert new == 2 * old
    body = compared(capsys, "compare", "s.json", "t.json", "--profile", "new.json")
    first, best = body["schedules"]
    assert (first["value"], best["value"], best["ratio"]) == (new, new, 1.0)
    assert (best["difference"], best["other_times"]) == ({"moved": 0, "first": []}, "")
    assert main(["compare", "s.json", "t.json"]) == 0
    said = capsys.readouterr().out
    assert "t.json has other times than s.json: " in said
    assert "0F0 12.00 ms in place of 6.00 ms" in said
    assert "less time than" not in said
    body = compared(capsys, "compare", "s.json", "t.json", "--profile", "old.json")
    assert [row["value"] for row in body["schedules"]] == [old, old]
    assert main(["compare", "s.json", "solved.json", "--profile", "new.json"]) == 0
    assert "solved.json: cannot be: an order for 8 layers, and the profile has 4" in capsys.readouterr().out


def test_what_cannot_be_is_listed_with_its_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["--ranks", "4", "--microbatches", "5", "--memory", "1300", "--method", "1f1b,dualpipe-v,gpipe"]
    body = compared(capsys, "solve", "profile.json", *step)
    why = {row["name"]: row["why"] for row in body["absent"]}
    assert [row["name"] for row in body["schedules"]] == ["1f1b"]
    assert "microbatches" in why["dualpipe-v"]
    assert "rank 0 needs 1500 bytes" in why["gpipe"]
    Path("broken.txt").write_text("F0 B0\nB0 F0\n", encoding="utf-8")
    solve(Step(2, 5).problem(equal_layers()), effort=0.1).save("five.json")
    what = ["compare", "solved.json", "broken.txt", "five.json", "1f1b", "--profile", "profile.json"]
    body = compared(capsys, *what)
    why = {row["name"]: row["why"] for row in body["absent"]}
    assert "wait for each other" in why["broken.txt"]
    assert "microbatches" in why["five.json"]
    assert why["1f1b"] == "a name, not a file: solve --method 1f1b,auto compares schedules by name"
    assert main(what) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: cannot be: " in said for name in why)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "1f1b"], "compare: 1f1b: a name, not a file"),
        (["compare", "nothing.json", "nowhere.csv"], "zbsolve compare: nothing.json: no such file\n"),
        (["compare", "solved.json", "nowhere.csv"], "zbsolve compare: nowhere.csv: no such file\n"),
        (["compare", "solved.json", "profile.json"], "--profile names one that says times"),
        (["compare", "solved.json", "mine.txt", "-o", "x.gif"], "x.gif: unknown ending; one of .html .svg"),
        (["compare", "solved.json", "solved.json", "--baseline", "a", "b"], "--baseline is for a run"),
        (["compare", "solved.json", "solved.json", "--within", "1%"], "--within is for two profiles"),
        (["solve", "profile.json", "--method", "1f1b,auto"], "--ranks: is needed with a profile"),
        (["solve", "profile.json", "--method", "1f1b,1f1c"], "method '1f1c': one of auto, greedy, "),
    ],
)
def test_bad_use_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_run_of_another_schedule_is_refused_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = preset("gpipe", Schedule.load("solved.json").problem)
    trace_of(other, random_run(other, 0)).save("ran.json")
    assert main(["compare", "solved.json", "ran.json"]) == 2
    assert capsys.readouterr().err.startswith("zbsolve compare: ran.json: a run of another order of problem ")


def test_a_problem_file_is_solved_and_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What Python writes with `Problem.save` is solved as it is; options that contradict it are refused."""
    problem = Step(2, 4).problem(equal_layers())
    problem.save("problem.json")
    assert Problem.load("problem.json") == problem == Problem.load("solved.json")
    assert main(["solve", "problem.json", "--effort", "0.1", "-o", "again.json"]) == 0
    assert Schedule.load("again.json").problem == problem
    assert main(["solve", "problem.json", "--microbatches", "5"]) == 2
    assert "holds a problem with microbatches 4" in capsys.readouterr().err


def test_a_page_says_what_is_to_be_doubted_of_its_numbers(tmp_path: Path) -> None:
    profile, page = str(tmp_path / "p.json"), tmp_path / "x.html"
    assert main(["numbers", "--ranks", "2", "--F", "1ms", "--B", "1ms", "--W", "1ms", "--BW", "4ms", "-o", profile]) == 0
    step = ["--ranks", "2", "--microbatches", "4", "--method", "1f1b,zb-h1"]
    assert main(["solve", profile, *step, "-o", str(page)]) == 0
    assert "<p>To be doubted: (B + W) / BW is 0.50: B and W do the work of BW" in page.read_text(encoding="utf-8")
