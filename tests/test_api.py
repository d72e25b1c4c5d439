"""The public names are in one place: `zbsolve`."""

from __future__ import annotations

import pytest

import zbsolve
from zbsolve import Step, pipeline

from .support.profiles import equal_layers


def test_every_name_is_there() -> None:
    for name in zbsolve.__all__:
        assert getattr(zbsolve, name) is getattr(zbsolve, name), name
    assert set(zbsolve.__all__) <= set(dir(zbsolve))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="module 'zbsolve' has no attribute 'solved'"):
        _ = zbsolve.solved


def test_problems_and_schedules_are_shown_in_a_line() -> None:
    problem = pipeline(F=[10] * 2, BW=[20] * 2, microbatches=4)
    shown = f"<Problem {problem.digest}: 2 ranks, 2 stages, 4 microbatches, 16 passes>"
    assert repr(problem) == shown
    assert repr(zbsolve.preset("1f1b", problem)).startswith(f"<Schedule of {shown}: no certificate")


@pytest.mark.parametrize("wrong", [equal_layers(), "profile.json"])
def test_solve_refuses_what_is_no_problem(wrong: object) -> None:
    with pytest.raises(zbsolve.BadInput, match=f"solve: a Problem is needed, not a {type(wrong).__name__}"):
        zbsolve.solve(wrong)  # type: ignore[arg-type]
    passes = [zbsolve.Pass("F", 0, 0, 0, 1), zbsolve.Pass("AF", 1, 0, 1, 1, streams=("comm:1",))]
    with pytest.raises(zbsolve.BadInput, match="solve: rank 1, the last, has no pass on its compute stream"):
        zbsolve.solve(zbsolve.Problem.of(passes, []))


def test_scripts_need_nothing_else() -> None:
    problem = zbsolve.problem_for("1f1b", 2, 4, 300, 320, 210)
    assert zbsolve.preset("1f1b", problem).timeline().makespan == (4 + 1) * 830
    assert {"gpipe", "1f1b"} < {one.name for one in zbsolve.systems.SYSTEMS}
    step = Step(2, 4, "auto")
    schedule, tried = zbsolve.solve_auto(equal_layers(), step, effort=0.1)
    assert min(one.value for one in tried if one.value) == schedule.certificate.value
    found = zbsolve.frontier(equal_layers(4), Step(2, 2), points=2, effort=0.1)
    assert found.points[0].memory < found.points[-1].memory
    assert callable(zbsolve.compare)
    assert callable(zbsolve.updates)
    assert pipeline is zbsolve.pipeline
