"""Benchmarks of the search: suites are data, reports keep every sample, a comparison fails only on what is worse."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import BadInput, Step, pipeline, solve
from zbsolve.bench import runs, suites
from zbsolve.bench.regressions import compare_reports, regressions_as_markdown
from zbsolve.bench.runs import Report, Result, Settings, run_suite
from zbsolve.bench.suites import SUITES, suite
from zbsolve.cli import main
from zbsolve.util.machine import machine_facts

from ..support.profiles import equal_layers

SMALL = {
    "even": pipeline([1] * 2, [1] * 2, [1] * 2, microbatches=2),
    "uneven": pipeline([3, 5, 2], [4, 1, 6], [2, 2, 1], microbatches=2, comm=1, objective="span"),
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(runs, "suite", lambda name: SMALL)
    monkeypatch.setattr(suites, "suite", lambda name: SMALL)


def result(name: str = "a", value: int = 100, bound: int = 90, seconds=(1.0, 1.1, 1.05), pace: float = 0.01) -> Result:
    count = len(seconds)
    return Result(name, "d" * 16, "p", "greedy", (value,) * count, (bound,) * count, tuple(seconds), (pace,) * count)


def report(*results: Result, **changes) -> Report:
    base = Report("small", None, 1.0, 0, {"cpu": "x", "cores": 2}, {"zbsolve": "0"}, results or (result(),))
    return replace(base, **changes)


def test_suites_are_the_same_each_time_and_can_be_solved():
    for name, least in zip(SUITES, (15, 80), strict=True):
        problems = suite(name)
        assert len(problems) >= least
        assert {n: p.digest for n, p in suite(name).items()} == {n: p.digest for n, p in problems.items()}
        assert len({p.digest for p in problems.values()}) == len(problems)
    assert all(len(problem.passes) <= 800 for problem in suite("small").values())
    with pytest.raises(BadInput, match="suite 'huge'"):
        suite("huge")


def test_a_run_keeps_every_sample_and_comes_back_from_its_file(tiny, tmp_path):
    now = run_suite("small", Settings(effort=0.2, repeats=2))
    assert [one.name for one in now.results] == list(SMALL)
    assert all(len(one.seconds) == len(one.values) == len(one.yardstick) == 2 for one in now.results)
    assert all(one.bound <= one.value for one in now.results)
    assert {"cpu", "cores", "python"} <= set(now.machine)
    now.save(tmp_path / "now.json")
    assert Report.load(tmp_path / "now.json") == now


def test_effort_gives_the_same_values_and_bounds(tiny):
    a, b = (run_suite("small", Settings(effort=0.2, repeats=1)) for _ in range(2))
    assert [(one.values, one.bounds, one.proof) for one in a.results] == [(o.values, o.bounds, o.proof) for o in b.results]


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        (result(), ()),
        (result(value=101), ("value",)),
        (result(bound=89), ("bound",)),
        (result(seconds=(2.0, 2.1, 2.2)), ("time",)),
        (result(value=101, bound=89, seconds=(9.0, 9.0, 9.0)), ("value", "bound", "time")),
        (result(seconds=(1.0, 5.0, 5.0)), ()),  # one run as quick as before: noise
        (result(seconds=(2.0, 2.1, 2.2), pace=0.02), ()),  # the machine was half as fast then
        (result(value=99, bound=95), ()),
    ],
)
def test_what_is_worse(now, worse):
    found = compare_reports(report(), report(now))
    assert found.rows[0].worse == worse
    assert found.failed == bool(worse)


def test_noise_of_the_machine_is_no_regression():
    rng = random.Random(7)

    def noisy() -> Report:
        return report(*(result(f"p{i}", seconds=[rng.uniform(1.0, 1.6) for _ in range(3)]) for i in range(40)))

    assert sum(compare_reports(noisy(), noisy()).failed for _ in range(200)) <= 2


def test_a_suite_that_is_slower_as_a_whole_fails():
    before = report(*(result(f"p{i}", seconds=(1.0, 1.3, 1.6)) for i in range(9)))
    after = report(*(result(f"p{i}", seconds=(1.9, 2.2, 2.6)) for i in range(9)))
    assert compare_reports(before, after).slower
    assert not compare_reports(after, before).failed


def test_times_of_other_machines_or_too_few_samples_are_not_compared():
    slow = result(seconds=(50.0, 50.0, 50.0))
    other = compare_reports(report(), report(slow, machine={"cpu": "y", "cores": 2}))
    assert not other.failed
    assert other.why == "another machine (cpu)"
    single = compare_reports(report(result(seconds=(1.0,))), report(result(seconds=(9.0,))))
    assert single.why == "fewer than 3 repeats"
    assert not single.failed


def test_missing_new_and_changed_problems():
    both = report(result("a"), result("b"))
    assert compare_reports(both, report(result("a"))).rows[1].worse == ("missing",)
    assert compare_reports(report(result("a")), both).new == ("b",)
    assert compare_reports(report(result("a")), replace(both, suite="another folder")).new == ("b",)
    with pytest.raises(BadInput, match="have no problem in common"):
        compare_reports(report(result("a")), report(result("b")))
    with pytest.raises(BadInput, match="problem 'a' is another one now"):
        compare_reports(report(), report(replace(result(), digest="e" * 16)))
    with pytest.raises(BadInput, match=r"field 'effort' differs: 1\.0 in the base, 2\.0 now"):
        compare_reports(report(), report(effort=2.0))


def test_markdown_shows_what_changed_first():
    text = regressions_as_markdown(
        compare_reports(report(result("a"), result("b|c")), report(result("a"), result("b|c", 101))), machine_facts()
    )
    assert text.startswith("### zbsolve bench: worse")
    assert "| b\\|c | 100 → 101 | 90 |" in text
    assert text.index("b\\|c") < text.index("| a |")
    assert "1 worse, 0 better" in text


def test_on_the_command_line(tiny, tmp_path, capsys):
    now, worse = tmp_path / "now.json", tmp_path / "worse.json"
    assert main(["bench", "small", "--effort", "0.1", "--repeats", "1", "-o", str(now)]) == 0
    assert "2 problems: 2 optimal" in capsys.readouterr().out
    assert main(["bench", "--against", str(now), str(now)]) == 0
    assert "fine" in capsys.readouterr().out
    body = json.loads(now.read_text())
    body["results"][0]["values"][0] += 1
    worse.write_text(json.dumps(body))
    assert main(["bench", "--against", str(now), str(worse)]) == 1
    assert "**worse: value**" in capsys.readouterr().out
    assert main(["bench", "small", "--effort", "0.1", "--repeats", "1", "--against", str(now), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] is False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it(number, code, tiny, monkeypatch, capsys):
    pressed = []

    def press(search, where, state):
        if not pressed:
            pressed.append(True)
            signal.raise_signal(number)

    monkeypatch.setattr("zbsolve.cli.tools.Search.show", press)
    assert main(["bench", "small", "--effort", "0.1", "--repeats", "1"]) == code
    assert capsys.readouterr().err == "zbsolve bench: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["big"], "'big' is no suite (small, full), and no file or folder"),
        (["small", "--repeats", "0"], "repeats: at least 1"),
        (["small", "--effort", "-1"], "effort: -1 is not"),
        (["now.json", "--against", "nowhere.json"], "nowhere.json: no such file"),
    ],
)
def test_bad_input_is_one_line(tiny, capsys, arguments, line):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_problems_of_ones_own(tmp_path, monkeypatch, capsys):
    """Files and folders: profiles with a step, problems, schedules; one report against another as with a suite."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    equal_layers().save(folder / "model.json")
    SMALL["even"].save(folder / "even.json.gz")
    solve(SMALL["uneven"], effort=0.1).save(folder / "uneven.json")
    report().save(folder / "earlier.json")
    step = "@ranks=2,microbatches=3"
    command = ["bench", f"mine{step}", "mine/even.json.gz", "--effort", "0.1", "--repeats", "1"]
    assert main([*command, "-o", "now.json"]) == 0
    now = Report.load("now.json")
    assert now.suite == f"mine{step} even.json.gz"
    digests = {one.name: one.digest for one in now.results}
    problem = Step(2, 3).problem(equal_layers())
    assert digests == {
        "even": SMALL["even"].digest,
        "model single p2 m3": problem.digest,
        "uneven": SMALL["uneven"].digest,
        "mine/even.json.gz": SMALL["even"].digest,
    }
    assert main([*command, "--against", "now.json"]) == 0
    capsys.readouterr()
    for words, said in (
        (["mine"], "mine/model.json: holds a profile, and ranks of its step are missing"),
        (["mine/earlier.json"], "add --against base.json"),
        (["mine/earlier.json", "small"], "mine/earlier.json: holds a bench, not a profile or a problem or a schedule"),
        ([f"mine{step},placement=auto"], "instead of auto"),
        (["mine@ranks=two"], "mine@ranks=two: argument --ranks: invalid int value"),
        (["mine@rank=2"], "'rank=2' is no word of a step"),
        ([str(tmp_path / "mine" / "..")], "no profile, problem or schedule in this folder"),
    ):
        (tmp_path / "now.json").unlink(missing_ok=True)
        assert main(["bench", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_damaged_report_names_the_field(tmp_path, capsys):
    path = tmp_path / "now.json"
    report().save(path)
    body = json.loads(path.read_text())
    body["results"][0]["seconds"] = ["soon"]
    path.write_text(json.dumps(body))
    assert main(["bench", "--against", str(path), str(path)]) == 2
    assert "results[0]: field 'seconds'[0] has a wrong type (str, not float)" in capsys.readouterr().err


def test_the_kept_base_is_of_these_problems():
    """Else the job that compares with it stops. To make a new one: .ci/run says how."""
    base = Report.load(Path(__file__).parents[2] / "benchmarks" / "base-small.json")
    assert {one.name: one.digest for one in base.results} == {name: one.digest for name, one in suite("small").items()}
