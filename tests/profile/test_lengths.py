"""Runs whose microbatches differ in length: factors found again, steps replayed; and runs where they explain nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from zbsolve import BadInput, Profile, Schedule, Trace, solve, verify
from zbsolve.cli import main
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.profile import from_trace
from zbsolve.profile.lengths import factors_of, lengths_of, stalls_of
from zbsolve.search.today import even_stages, today_of
from zbsolve.show.run_text import today_line

from ..support.recorded import a_schedule, primus_run, with_lengths

STEPS = 7


def lengths(seed: int = 1, steps: int = STEPS, spread: float = 0.4) -> np.ndarray:
    """Of eight microbatches a step, each step its own."""
    found: np.ndarray = np.exp(spread * np.random.default_rng(seed).standard_normal((steps, 8)))
    return found


def varied(folder: Path, placement: str = "single", noise: float = 0.01, blocking: bool = True) -> Trace:
    """A run of steps with those lengths, whose passes vary by `noise` beside."""
    schedule = a_schedule(placement, split=False, blocking=blocking, times=100, comm=700)
    return read_trace(primus_run(folder, with_lengths(schedule, lengths().tolist(), noise)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return varied(tmp_path_factory.mktemp("varied") / "run")


@pytest.mark.parametrize("placement", ["single", "loop"])
@pytest.mark.parametrize("blocking", [True, False])
def test_known_factors_are_found_again(placement: str, blocking: bool, tmp_path: Path) -> None:
    """Within 1 %, up to what all have in common; the step replays within 1 %, where medians alone are 5 % off at least."""
    trace = varied(tmp_path / "run", placement, blocking=blocking)
    known = lengths()[trace.median_step]
    ratio = np.array(trace.facts["microbatch_factors"]) / known
    assert np.abs(ratio / np.median(ratio) - 1).max() < 0.01
    assert bool(trace.problem.sending.any()) == blocking
    measured = trace.median().makespan
    assert trace.planned().timeline().makespan == pytest.approx(measured, rel=0.01)
    for i, step in enumerate(trace.steps):
        assert trace.replayed(i).makespan == pytest.approx(step.makespan, rel=0.01)
    alike = trace.problem.scaled(1 / np.array(trace.facts["microbatch_factors"]))
    alone = Schedule(alike, trace.schedule).timeline().makespan
    assert abs(alone / measured - 1) > 0.05
    found = lengths_of(trace)
    assert found.explain
    assert found.left < 0.02 < 0.1 < found.spread


def test_passes_that_vary_by_themselves_get_none(tmp_path: Path) -> None:
    schedule = a_schedule("single", split=False, times=100, comm=700)
    trace = read_trace(primus_run(tmp_path / "run", with_lengths(schedule, np.ones((STEPS, 8)).tolist(), noise=0.15)))
    assert "microbatch_factors" not in trace.facts
    assert not lengths_of(trace).explain
    assert trace.problem.alike


def test_lengths_that_change_nothing_of_the_step_get_none(tmp_path: Path) -> None:
    """Where medians alone replay as well, microbatches stay alike, and proofs need no more assumptions."""
    schedule = a_schedule("single", split=False, times=100, comm=700)
    rows = lengths(spread=0.004).tolist()
    trace = read_trace(primus_run(tmp_path / "run", with_lengths(schedule, rows)))
    found = lengths_of(trace)
    assert found.explain
    assert factors_of(trace, found) == ()
    assert trace.problem.alike


def test_a_long_microbatch_is_no_stall_and_one_long_pass_is(tmp_path: Path) -> None:
    schedule = a_schedule("single", split=False, times=100, comm=700)
    rows = np.array(lengths(spread=0.2))
    rows[3, 2] = 6.0
    trace = read_trace(primus_run(tmp_path / "run", with_lengths(schedule, rows.tolist())))
    assert stalls_of(trace) == ()
    step = trace.steps[1]
    row = trace.problem.index["2F4"]
    step.end[row] = step.start[row] + 9 * (step.end[row] - step.start[row])
    assert [(one.step, one.name) for one in stalls_of(trace)] == [(1, "2F4")]


def test_its_profile_keeps_the_lengths(run: Trace, tmp_path: Path) -> None:
    """The problem that it makes is the run's; another number of microbatches is refused, and so says how to go on."""
    from_trace(run).save(tmp_path / "p.json")
    profile = Profile.load(tmp_path / "p.json")
    assert list(profile.microbatch_factors) == run.facts["microbatch_factors"]
    problem = profile.problem(4, 8)
    assert np.abs(problem.passes.duration - run.problem.passes.duration).max() <= 1
    schedule = solve(problem, effort=0.2)
    assert not verify(problem, schedule)
    assert schedule.certificate is not None
    assert schedule.certificate.bound <= problem.work or "by number" in schedule.certificate.proof
    with pytest.raises(BadInput, match=r"knows how long 8 microbatches are .* not 6; without that field all are alike"):
        profile.problem(4, 6)
    body = json.loads((tmp_path / "p.json").read_text())
    del body["microbatch_factors"]
    (tmp_path / "p.json").write_text(json.dumps(body))
    assert Profile.load(tmp_path / "p.json").problem(4, 6).alike


def test_what_the_step_could_be_counts_with_them(run: Trace) -> None:
    """Also where stages are cut in two; even stages leave microbatches as long as they are."""
    today = today_of(run, effort=0.3)
    assert [one.placement for one in today.found] == ["single", "vee", "loop"]
    assert not today.alike
    for one in today.found:
        assert one.schedule.certificate is not None
        assert one.schedule.certificate.bound <= one.value
        work = int((one.schedule.problem.passes.duration - one.schedule.problem.sending).sum())
        assert work == int((run.problem.passes.duration - run.problem.sending).sum())
    line = today_line(today)
    assert "by the medians of all steps, microbatches as long as in this one: " in line
    even = even_stages(run.problem)
    own = (even.passes.duration - even.sending)[even.rows("F")].reshape(4, 8)
    assert (own == own[0]).all()
    assert len(set(own[0].tolist())) == 8


def test_the_command_says_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    varied(tmp_path / "run")
    assert main(["profile", "--from-trace", str(tmp_path / "run"), "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert "messages block their sender: " in said
    assert "microbatches differ in length: in the median step they take " in said
    assert main(["profile", "--from-trace", str(tmp_path / "run"), "--seconds", "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert len(body["microbatch_factors"]) == 8
    assert body["today"]["microbatches_alike"] is False
