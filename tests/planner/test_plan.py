"""`plan`: the whole space with a certificate that is checked without a search, and the command."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbsolve
from zbsolve import BadInput, Infeasible
from zbsolve.cli import main
from zbsolve.ilp import recheck
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.planner import (
    CLUSTERS,
    SHAPES,
    Plan,
    Shape,
    candidate,
    check_plan,
    layout_profile,
    planning,
    searches,
    shape_by_name,
)
from zbsolve.planner.bounds import space_bounds
from zbsolve.planner.bounds.bound_row import bound_rows
from zbsolve.planner.bounds.layout_rules import refuted
from zbsolve.planner.candidate import unsolved
from zbsolve.planner.estimates import Promise
from zbsolve.planner.layout import FIELDS, FULL_OFFLOAD, HALF_OFFLOAD, LOOP, NONE, SHARDED, SINGLE, VEE, Layout, table_of
from zbsolve.planner.plan_file import read_space
from zbsolve.planner.searches import SpaceRace
from zbsolve.planner.solved_space import families
from zbsolve.planner.space import Only, layouts
from zbsolve.search.state import Contest
from zbsolve.search.task import Task, solve_task
from zbsolve.search.task_runner import TaskRunner
from zbsolve.show.plan_report import plan_as_text
from zbsolve.show.schedule_report import schedule_as_page
from zbsolve.systems.table import presets_of
from zbsolve.util.clock import Clock
from zbsolve.util.text import format_gap, format_time, format_times, in_one_unit

A100 = CLUSTERS["a100"]
SMALL = Shape.gpt(1024, 8, 6, vocabulary=8192)
COMMAND = ["plan", "gpt-3.6b@layers=4", "--devices", "4", "--batch", "8", "--cluster", "a100", "--effort", "0.3"]


@cache
def small() -> Plan:
    """Of a small model on 8 devices."""
    return zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=1.0)


@cache
def piped() -> Plan:
    """With 1F1B on eight pipeline ranks as its best: no optimal schedule."""
    layout = Layout(1, 1, 8, 1, SINGLE, 1, 16, zero=0)
    found = [one.solved(zbsolve.solve(one.problem, method="1f1b")) for one in unsolved(SMALL, layout, A100, small().memory)]
    return replace(small(), candidates=(min(found, key=lambda one: one.value),))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    small().save(path)
    return path


def test_the_plan_is_the_best_of_the_space_and_says_so() -> None:
    """Every layout has a bound, those that may be better are open, and none that was solved is below its own."""
    plan = small()
    table = layouts(SMALL, 8, 16, A100)
    assert len(plan.bounds.step) == len(table.dp)
    assert 0 <= plan.gap < 0.1
    assert plan.open == int((plan.bounds.step < plan.best.value - 1e-3).sum())
    row = {table.row(i): i for i in range(len(table.dp))}
    for one in plan.candidates:
        assert plan.bounds.step[row[one.layout]] <= one.value + 1e-3
        assert zbsolve.verify(one.schedule.problem, one.schedule) == ()
        assert one.profile == layout_profile(SMALL, one.layout, A100)
        assert sum(one.memory().values()) <= plan.memory
    assert [one.value for one in plan.candidates] == sorted(one.value for one in plan.candidates)
    assert plan.near[0] is plan.best
    assert 0 < plan.mfu(plan.best) < 1
    b, s, layers, h, v = 16, 2048, 6, 1024, 8192  # 2205.05198, appendix A, equation 7: of the whole square of attention
    flops = 72 * b * s * layers * h * h * (1 + s / (6 * h) + v / (12 * h * layers))
    assert plan.mfu(plan.best) == pytest.approx(flops / (plan.best.value / 1e6 * 8 * A100.peak))
    assert plan.tokens(plan.best) == pytest.approx(16 * 2048 / 8 / (plan.best.value / 1e6))


def test_many_microbatches_repeat_a_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "MIN_REPEATED", 2000)
    layout = Layout(2, 1, 8, 1, SINGLE, 1, 128, zero=1)
    found = []
    for step in unsolved(SMALL, layout, A100, small().memory):
        answer = solve_task(step.task({"method": "greedy", "effort": 1.0}), Contest(), {})
        assert answer.schedule is not None
        assert answer.schedule.problem.digest == step.problem.digest
        found.append(step.solved(answer.schedule))
    one = min(found, key=lambda one: one.value)
    certificate = one.schedule.certificate
    assert certificate is not None
    assert zbsolve.verify(one.schedule.problem, one.schedule) == ()
    assert one.value == pytest.approx(certificate.value + one.behind)
    assert certificate.gap < 0.02
    stated = Bound(certificate.bound, certificate.proof, certificate.relaxation, certificate.ranks)
    assert recheck(one.schedule.problem, stated, 10.0).value >= certificate.bound


def test_first_schedules_of_layouts_that_offload_everything_are_near_their_bound() -> None:
    """Policies let forwards run ahead of copies until ranks wait for each other in collectives; one microbatch after the
    other takes more than ten times as long."""
    shape, cluster = shape_by_name("llama3-70b"), CLUSTERS["h100"]
    layout = Layout(2, 2, 16, 1, SINGLE, 2, 64, sequence=1, vocabulary=SHARDED, zero=1, offload=FULL_OFFLOAD)
    split = next(unsolved(shape, layout, cluster, cluster.memory))
    found = solve_task(split.task({"method": "greedy", "effort": 0.1}), Contest(), {}).schedule
    assert found is not None
    assert found.certificate is not None
    assert found.certificate.value <= 1.25 * found.certificate.bound


def test_families_cover_the_space() -> None:
    plan, found = small(), families(small().space)
    for field in FIELDS:
        mine = [one for one in found if one.field == field]
        assert sum(one.layouts for one in mine) == len(plan.bounds.rule)
        assert min(one.lost for one in mine) == pytest.approx(plan.bounds.least / plan.best.value - 1)
    by, zero = plan.bounds.by, np.asarray(plan.bounds.layout.zero)
    assert (by >= 0).any()  # a family of dominated layouts loses no more than those that dominate them do for sure
    for one in (family for family in found if family.field == "zero"):
        for i in np.flatnonzero((zero == int(one.value)) & (by >= 0)).tolist():
            assert one.lost <= plan.bounds.step[by[i]] / plan.best.value - 1 + 1e-12


def test_a_model_is_a_shape_or_the_name_of_one() -> None:
    def made(model: Any) -> zbsolve.planner.Plan:
        return zbsolve.plan(model, 4, 8, "a100", effort=0.1)

    assert made("gpt-3.6b@layers=4").best.value == made(shape_by_name("gpt-3.6b@layers=4")).best.value
    with pytest.raises(BadInput, match=r"gpt-3\.7b"):
        made("gpt-3.7b")


def test_the_same_effort_gives_the_same_plan() -> None:
    again = zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=1.0)
    assert again.best.layout == small().best.layout
    assert again.best.value == small().best.value
    assert (again.bounds.pipeline == small().bounds.pipeline).all()


@pytest.mark.slow
def test_the_best_are_searched_longer_and_effort_is_counted_as_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: dict[tuple[Layout, bool], list[float]] = {}

    def noted(one: candidate.Unsolved, options: Mapping[str, Any]) -> Task:
        spent.setdefault((one.layout, one.step.fused), []).append(options["effort"])
        return task_of(one, {**options, "method": "greedy", "effort": 0.01})  # for a quick test

    task_of = candidate.Unsolved.task
    monkeypatch.setattr(candidate.Unsolved, "task", noted)
    found = zbsolve.plan(SMALL, 8, 64, A100, memory="2.8GiB", effort=3.0)
    assert (1 - searches.NAMED_SHARE) * 3.0 - 0.01 <= sum(map(sum, spent.values())) <= 3.0001  # named orders had the rest
    again = {layout: efforts for (layout, _), efforts in spent.items() if len(efforts) > 1}
    assert 1 <= len(again) <= -(-len(spent) // searches.REDUCTION)  # layouts of which no step can be built count too
    assert all(efforts[1] == pytest.approx(searches.REDUCTION * efforts[0]) for efforts in again.values())
    searched = [one.layout for one in found.candidates if one.layout in {layout for layout, _ in spent}]
    assert {*searched[: 2 * len(spent) // 3]} >= set(again)  # others were found behind some of them


def test_no_plan_is_worse_than_named_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever searches find: here 1F1B alone."""
    monkeypatch.setattr(
        candidate.Unsolved, "task", lambda one, options: Task(one, one.problem, {"method": "1f1b"}, one.behind)
    )
    fixed = (("dp", 1), ("tp", 1), ("pp", 4), ("placement", SINGLE), ("size", 1), ("recompute", NONE), ("vocabulary", 0))
    fixed += (("slices", 1), ("offload", 0))
    found = zbsolve.plan(SMALL, 4, 8, A100, memory="12GiB", seconds=1e-6, only=Only("", fixed)).best
    step = next(unsolved(SMALL, found.layout, A100, 12 << 30))
    named = {name: one.timeline().makespan + step.behind for name, one in presets_of(step.problem, searched=False)}
    assert found.value == min(named.values()) < named["1f1b-split"]


def test_what_a_search_finds_counts_for_layouts_like_it() -> None:
    """The further the more a layout differs; and until it ends, they are put off."""
    table = table_of([Layout(1, 1, 8, 2, VEE, slices=one, recompute=other) for one in (1, 2, 4) for other in (0, 1)])
    promise = Promise.of(table, np.full(6, 10.0))
    promise.begun(0)
    assert promise.step[0] == promise.step.max() > 10
    promise.ended(0, 20.0)
    same, near, far = promise.step[[0, 1, 3]]
    assert 20 > same > near > far > 10


def test_what_is_out_of_the_race_says_nothing_of_others() -> None:
    table = table_of([Layout(1, 1, 8, 2, VEE), Layout(1, 1, 8, 2, VEE, recompute=1)])
    promise = Promise.of(table, np.array([np.inf, 10.0]))
    promise.begun(0)
    before = promise.step[1]
    promise.ended(0, np.inf)
    assert promise.step[1] == before < np.inf


def test_where_only_fused_backwards_fit_they_are_searched() -> None:
    """Full recompute keeps little, and W of all blocks more: so backwards in two do not fit."""
    shape = Shape.gpt(1024, 8, 8)
    with pytest.raises(Infeasible):
        zbsolve.plan(shape, 1, 8, A100, memory=3_600_000_000, effort=0.1)
    found = zbsolve.plan(shape, 1, 8, A100, memory=3_700_000_000, effort=0.1)
    steps = [one.step for one in unsolved(shape, found.best.layout, A100, 3_700_000_000)]
    assert [one.fused for one in steps] == [found.best.step.fused] == [True]


def test_a_poor_schedule_brings_a_search_with_fused_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = Counter[Layout]()

    def counted(model: Any, layout: Layout, *others: Any) -> Iterator[candidate.Unsolved]:
        looked_at[layout] += 1
        return unsolved(model, layout, *others)

    monkeypatch.setattr(searches, "unsolved", counted)
    zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=0.4)
    assert set(looked_at.values()) == {1}
    looked_at.clear()
    monkeypatch.setattr(searches, "POOR", 0.0)  # all are
    zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=1.0)
    assert 2 in looked_at.values()


def test_the_page_of_a_plans_schedule_says_whose_word_its_bound_is(saved: Path) -> None:
    schedule = zbsolve.Schedule.from_json(json.loads(saved.read_text())["schedule"])
    assert schedule.certificate is not None
    text = schedule_as_page(schedule.certified(schedule.certificate.unchecked()))
    assert ", as a file says" in text
    assert "proven bound" not in text
    assert re.search(r"<title>Schedule: .* passes \(estimated: cost model, [^()]*\)</title>", text)


@pytest.mark.parametrize("field", ["step", "bound"])
def test_show_names_a_step_that_is_no_number(saved: Path, tmp_path: Path, field: str, capsys: Any) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(json.loads(saved.read_text()) | {field: float("nan")}))
    assert main(["show", str(damaged)]) == 2
    assert "finite numbers are needed" in capsys.readouterr().err


def test_a_plan_file_is_checked_without_a_search(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_plan(saved)
    assert found.wrong == ()
    assert found.step == pytest.approx(small().best.value)
    assert found.bound == pytest.approx(small().bound)
    read, space = read_space(saved), small().space
    assert read.solved == space.solved
    assert len(read.solved) == len(small().candidates)
    assert (read.value, read.bound) == (small().best.value, small().bound)
    assert (read.bounds.step == space.bounds.step).all()
    assert zbsolve.Schedule.load(saved).problem == small().best.schedule.problem
    assert zbsolve.Profile.load(saved) == small().best.profile
    assert main(["check", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "the bounds of all" in said
    assert "of the schedule alone: makespan" in said
    assert "proven again: " in said
    assert main(["show", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "proven optimal: no order of these passes takes less" in said  # as check does, without a search
    assert (
        f"the step takes {format_time(small().best.value)}; no layout's takes less than {format_time(small().bound)}" in said
    )
    assert main(["solve", str(saved), "--effort", "0.01", "--json"]) == 0
    capsys.readouterr()
    assert main(["check", str(saved), "--bound"]) == 0
    assert main(["check", str(saved), "--bound", "-o", str(saved)]) == 2


@pytest.mark.parametrize("relaxation", ["path", "ranks", "whole problem"])
def test_a_certificate_inside_a_plan_is_proven_again_or_not_believed(
    relaxation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schedule that is not optimal, whose certificate says that it is."""
    plan = piped()
    certificate = plan.best.schedule.certificate
    assert certificate is not None
    assert certificate.gap > 0
    ranks = (0,) if relaxation == "ranks" else ()
    false = replace(certificate, bound=certificate.value, relaxation=relaxation, ranks=ranks)
    path = tmp_path / "false.json"
    replace(plan, candidates=(replace(plan.best, schedule=plan.best.schedule.certified(false)),)).save(path)
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "not proven here (check --bound proves it again, if it holds)\n" in said
    assert "proven optimal" not in said
    assert main(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] is None
    assert main(["check", str(path), "--bound", "--seconds", "5"]) == 1
    assert "is not proven again" in capsys.readouterr().out


def solved_alone(layout: Layout) -> candidate.Candidate:
    """The layout on its balanced partition, greedily."""
    steps = candidate.unsolved(SMALL, layout, A100, small().memory)
    found = [one.solved(zbsolve.solve(one.problem, method="greedy", effort=0.1)) for one in steps]
    return min(found, key=lambda one: one.value)


@pytest.mark.parametrize("offload", [HALF_OFFLOAD, FULL_OFFLOAD])
def test_a_plan_with_offload_is_checked(offload: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a layout that copies, as the plan that was found: bounds, the schedule with its copies, and what a device needs."""
    layout = Layout(1, 4, 2, 2, LOOP, 1, 16, offload=offload)
    found = solved_alone(layout)
    assert {"O", "R"} < set(found.schedule.problem.passes.kinds)
    assert sum(found.memory().values()) <= small().memory
    plan, path = replace(small(), candidates=(found,)), tmp_path / "plan.json"
    assert 0 < plan.bounds.step[plan.number(found)] <= found.value
    plan.save(path)
    assert check_plan(path).wrong == ()
    assert read_space(path).best == plan.number(found)
    assert main(["export", str(path), "--to", "jaxpp", "-o", str(tmp_path / "x")]) == 2
    assert "passes of kind O, R" in capsys.readouterr().err


def test_a_plan_says_how_much_of_the_exchange_is_exposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of replicas: each stage's exchange is a pass of the plan, beside the computing of other stages where it can be."""
    layout = Layout(2, 1, 4, 2, VEE, 1, 8, zero=1)
    found = solved_alone(layout)
    problem = found.schedule.problem
    sums = problem.passes.duration[problem.rows("C")]
    assert len(sums) == 8
    assert 0 < found.exposed < sums.sum()
    plan, path = replace(small(), candidates=(found,)), tmp_path / "plan.json"
    assert plan.bounds.step[plan.number(found)] <= found.value
    plan.save(path)
    assert check_plan(path).wrong == ()
    said = plan_as_text(plan)
    busiest = np.bincount(problem.passes.rank[problem.rows("C")], sums).max()
    exposed = format_times(found.exposed, busiest, found.behind)[0]
    assert f"after its last compute pass: exchange of gradients {exposed} (of " in said
    assert "1.2 times as long as without messages beside it (assumed)), update and constant" in said
    assert main(["export", str(path), "--to", "jaxpp", "-o", str(tmp_path / "x")]) == 0
    capsys.readouterr()


def _raise_a_bound(body: dict[str, Any]) -> None:
    step = np.array(body["space"]["pipeline"])
    row = int(np.flatnonzero(step > 0)[step[step > 0].argmin()])
    body["space"]["pipeline"][row] += max(2, int(0.02 * step[row]))


def _lose_a_layout(body: dict[str, Any]) -> None:
    row = next(i for i, one in enumerate(body["space"]["pipeline"]) if one > 0)
    body["space"]["pipeline"][row] = -1


def _shorter(body: dict[str, Any]) -> None:
    body["step"] *= 0.9


def _faster(body: dict[str, Any]) -> None:
    body["profile"]["layers"][1]["F"] -= 1


def _elsewhere(body: dict[str, Any]) -> None:
    body["layout"]["zero"] = 0 if body["layout"]["zero"] else 1


def _beyond_serial(body: dict[str, Any]) -> None:
    body["space"]["pipeline"] = [2**50 if one > 0 else one for one in body["space"]["pipeline"]]


def _no_number(name: str) -> Any:
    return lambda body: body.update({name: float("nan")})


def _better_elsewhere(body: dict[str, Any]) -> None:
    body["space"]["steps"][-1] = 0.999 * body["step"]


def _below_its_bound(body: dict[str, Any]) -> None:
    body["space"]["steps"][0] = 0.5 * body["bound"]


def _dominated(body: dict[str, Any]) -> None:
    body["space"]["by"] = [-1 if one < 0 else one + 1 for one in body["space"]["by"]]


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (_raise_a_bound, "its bound does not follow"),
        (_lose_a_layout, "its bound does not follow"),
        (_beyond_serial, "its bound does not follow"),
        (_no_number("step"), "field 'step' is nan"),
        (_no_number("bound"), "field 'bound' is nan"),
        (_shorter, "field 'step' is"),
        (_faster, "field 'profile' is not what"),
        (_elsewhere, "of another step than the layout's|field 'step' is|field 'profile' is not"),
        (_better_elsewhere, "field 'steps' has one of"),
        (_below_its_bound, "its step is below its bound"),
        (_dominated, "field 'by' names layouts that do not dominate"),
    ],
)
def test_what_does_not_follow_is_named(tamper: Any, said: str, saved: Path, tmp_path: Path) -> None:
    body = json.loads(saved.read_text())
    tamper(body)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(body))
    found = check_plan(path)
    assert any(part in line for line in found.wrong for part in said.split("|"))
    assert main(["check", str(path)]) == 1


def test_a_bound_beyond_the_serial_time_holds_where_nothing_fits_only() -> None:
    bounds = small().bounds
    rows = bound_rows(bounds.costs, bounds.layout, small().memory)
    nothing = refuted(rows, np.full(len(rows), -1))
    assert not nothing[small().bounds.pipeline > 0].any()
    for huge in (2**50, 2**61, 2**62 + 2**61, 2**63 - 1):
        assert (refuted(rows, np.full(len(rows), huge)) == nothing).all()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pipeline", lambda column: [2**70, *column[1:]], "field 'pipeline'"),
        ("pipeline", lambda column: [2**62, *column[1:]], "field 'pipeline'"),
        ("pipeline", lambda column: [-2, *column[1:]], "field 'pipeline'"),
        ("rule", lambda column: [2**70, *column[1:]], "field 'rule'"),
        ("rules", lambda names: names[:-1], "field 'rules' has other rules than this version knows: plan again"),
        ("by", lambda column: [2**70, *column[1:]], "field 'by'"),
        ("solved", lambda column: [2**31 - 1, *column[1:]], "field 'solved' has 2147483647"),
        ("steps", lambda column: column[1:], "need one step for each layout"),
        ("steps", lambda column: [-1.0, *column[1:]], "field 'steps'"),
        ("layouts", lambda columns: {**columns, "more": columns["dp"]}, "field 'layouts' is not the space"),
        ("layouts", lambda columns: {**columns, "dp": []}, "field 'layouts' is not the space"),
        ("layouts", lambda columns: {**columns, "dp": [2**70]}, "field 'dp'|layouts"),
    ],
)
def test_damaged_spaces_are_one_line(name: str, change: Any, said: str, saved: Path, tmp_path: Path, capsys: Any) -> None:
    body = json.loads(saved.read_text())
    body["space"][name] = change(body["space"][name])
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(body))
    assert main(["check", str(path)]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|"))
    assert error.count("\n") == 1


def test_memory_in_which_nothing_fits() -> None:
    with pytest.raises(Infeasible) as error:
        zbsolve.plan(SMALL, 8, 16, A100, memory="100MB")
    assert str(error.value).startswith("memory: no layout fits 100000000 bytes")
    assert "the least that any needs is" in str(error.value)
    assert "most of it" in str(error.value)


@pytest.mark.parametrize("field", ["inside", "between"])
def test_a_cluster_file_without_a_link(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    A100.save(path)
    body = json.loads(path.read_text())
    del body[field]
    path.write_text(json.dumps(body))
    assert main(["plan", "gpt-3.6b", "--devices", "4", "--batch", "8", "--cluster", str(path)]) == 2
    assert capsys.readouterr().err == f"zbsolve plan: {path}: field '{field}' is missing\n"


def test_a_cluster_is_a_name_or_a_file_too(tmp_path: Path) -> None:
    A100.save(tmp_path / "cluster.json")
    few = replace(SMALL, layers=2)
    found = [zbsolve.plan(few, 2, 4, one, effort=0.1) for one in ("a100", tmp_path / "cluster.json", A100)]
    assert {one.best.value for one in found} == {found[0].best.value}
    assert all(one.cluster == A100 for one in found)
    with pytest.raises(BadInput, match="did you mean a100"):
        zbsolve.plan(few, 2, 4, "a10", effort=0.1)


@pytest.mark.parametrize("way", ["interrupted", "stopped"])
def test_what_ends_early_keeps_the_best_plan_and_its_bound(way: str) -> None:
    told: list[str] = []

    def progress(line: str) -> None:
        told.append(line)
        if way == "interrupted":
            raise KeyboardInterrupt

    plan = zbsolve.plan(SMALL, 8, 16, A100, memory="3GiB", effort=1.0, progress=progress, stop=lambda: bool(told))
    assert len(told) == len(plan.candidates) == 1
    assert 0 <= plan.gap < 1
    assert plan.bound == min(plan.bounds.least, plan.best.value)


def test_no_time_is_enough_for_one_layout() -> None:
    """Bounds may take all of it: then nothing is looked at but until there is a plan."""
    plan = zbsolve.plan(SMALL, 8, 16, A100, memory="3GiB", seconds=1e-6)
    assert len(plan.candidates) <= 1 + searches.FIRST_LOOKS
    assert 0 <= plan.gap < 1


def test_bounds_are_raised_part_by_part_until_half_of_the_time_left_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest first: what an end leaves holds as well, and a clock that counts effort does not end them."""
    monkeypatch.setattr(space_bounds, "PART", 50)
    table = layouts(SMALL, 8, 16, A100)
    cheap = space_bounds.cheap_bounds(SMALL, table, A100, small().memory)
    parts = list(space_bounds.raising(cheap, small().memory, np.inf))
    assert len(parts) == -(-int(np.isfinite(cheap.step).sum()) // 50) > 2
    assert (np.diff([one.least for one in parts]) >= 0).all()
    for one in (parts[0], parts[-1]):
        assert not len(space_bounds.unproven(one, small().memory))
    for effort, count in ((None, 1), (1.0, len(parts))):
        clock = Clock(1e-6, effort)
        ran = SpaceRace(
            SMALL, A100, small().memory, clock, TaskRunner(None, True), 0, cheap, lambda line: None, lambda: False
        )
        ran.raise_bounds()
        assert (ran.bounds.pipeline == parts[count - 1].pipeline).all()


def test_ctrl_c_while_bounds_are_raised_keeps_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed_at_last(*arguments: Any) -> Iterator[space_bounds.SpaceBounds]:
        yield from islice(space_bounds.raising(*arguments), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(space_bounds, "PART", 5)
    monkeypatch.setattr(searches, "FIRST_ROWS", 15)
    monkeypatch.setattr(searches, "raising", pressed_at_last)
    plan = zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=1.0)
    cheap = space_bounds.cheap_bounds(SMALL, plan.bounds.layout, A100, plan.memory)
    assert 5 < (plan.bounds.pipeline != cheap.pipeline).sum() <= 10
    assert plan.bound == min(plan.bounds.least, plan.best.value)


@pytest.mark.parametrize("ends", [1, 2])
def test_ctrl_c_before_the_bounds_of_all_layouts_leaves_a_plan_of_plain_ones(
    ends: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of one stage a rank: in their order as named, and with their own bound. Before that there is none."""
    came: list[space_bounds.SpaceBounds] = []

    def pressed(*arguments: Any) -> space_bounds.SpaceBounds:
        if len(came) == ends - 1:
            raise KeyboardInterrupt
        came.append(space_bounds.cheap_bounds(*arguments))
        return came[0]

    planning.compiled()
    monkeypatch.setattr(planning, "cheap_bounds", pressed)
    if ends == 1:
        with pytest.raises(KeyboardInterrupt):
            zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=1.0)
        return
    plan = zbsolve.plan(SMALL, 8, 16, A100, memory="12GiB", effort=1.0)
    (best,), given = plan.candidates, ("placement", "vocabulary", "slices", "offload")
    assert dict(plan.only.fixed) == {name: getattr(Layout(), name) for name in given}
    assert "only layouts placement single, vocabulary whole, slices 1, offload none" in plan_as_text(plan)
    steps = unsolved(SMALL, best.layout, A100, 12 << 30)
    named = [one.solved(order) for one in steps for _, order in presets_of(one.problem, searched=False)]
    assert best.value == min(one.value for one in named if not zbsolve.verify(one.schedule.problem, one.schedule))
    assert 0 < plan.bound <= best.value
    plan.save(tmp_path / "plan.json")
    assert check_plan(tmp_path / "plan.json").wrong == ()


def test_a_wide_gap_is_said_beside_the_headline() -> None:
    plan, none = small(), np.zeros(len(small().bounds.behind))
    low = np.minimum(plan.bounds.pipeline, int(0.7 * plan.best.value))
    wide = replace(plan, bounds=replace(plan.bounds, pipeline=low, behind=none))
    assert wide.gap > 0.2 > plan.gap
    assert "is not excluded" not in plan_as_text(plan)
    (line,) = (line for line in plan_as_text(wide).splitlines() if line.startswith("plans within"))
    assert line.endswith(f"; a step shorter by up to {format_gap(wide.gap)} is not excluded")


def test_ctrl_c_writes_the_best_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def pressing(line: str) -> None:
        if "layouts solved" in line:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("zbsolve.cli.tools.progress_line", pressing)
    path = tmp_path / "plan.json"
    assert main([*COMMAND, "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert "1 solved" in said.out
    assert "interrupted: this is the best found until then" in said.err
    assert check_plan(path).wrong == ()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*COMMAND, "-o", str(path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "plans within 1%",
        "MFU counts attention's whole square",
        "proven bound over the space",
        "what families of layouts lose",
        "estimated",
        "their measured error is 10.5% in the mean",
    ):
        assert words in said
    assert main(["check", str(path), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["wrong"] == []
    assert main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bound"] == pytest.approx(checked["bound"])
    assert found["plans"][0]["step"] == pytest.approx(checked["step"])
    assert set(found["plans"][0]["memory"]) == {"states", "gathered", "activations", "messages and inside passes"}
    for one in found["plans"]:
        assert one["bound"] <= one["step"] + 1e-3
        assert one["bounded_by"] in said
        step, tokens = f"{one['step'] / 1e3:,.2f} ms", f"{one['tokens_per_second_and_device']:,.0f}"
        (line,) = (line for line in said.splitlines() if step in line and tokens in line)
        assert f"{one['mfu']:.1%}" in line
        assert f"{one['bubble']:.1%}" in line
        _, parts = in_one_unit([sum(one["memory"].values()), *one["memory"].values()])
        assert f"= {' + '.join(parts[1:])} GiB" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["plan"], "model: name one"),
        (["plan", "gpt-3.6b", "--batch", "8"], "--devices is needed"),
        (["plan", "gpt-3.6", "--devices", "4", "--batch", "8"], "model 'gpt-3.6': unknown; did you mean gpt-3.6b or "),
        (["plan", "gpt-3.6b@depth=3", "--devices", "4", "--batch", "8"], "'depth=3' is none of layers=N"),
        (["plan", "gpt-3.6b@", "--devices", "4", "--batch", "8"], "'' is none of layers=N"),
        (["plan", "gpt-3.6b@sequence=abc", "--devices", "4", "--batch", "8"], "sequence is 'abc', no whole number"),
        (["plan", "gpt-3.6b@layers=3,layers=4", "--devices", "4", "--batch", "8"], "layers is there twice"),
        (["plan", "gpt-3.6b@layers=1001", "--devices", "4", "--batch", "8"], "1001 layers are more than a plan has"),
        (["plan", "gpt-3.6b@hidden=99999999999", "--devices", "4", "--batch", "8"], "is a size of model or cluster right?"),
        (["plan", "gpt-3.6b", "--devices", str(2**62), "--batch", "8"], "at least 1 of each is needed, and 1048576 at most"),
        (["plan", "gpt-3.6b", "--devices", "8", "--batch", str(2**62)], "at least 1 of each is needed, and 1048576 at most"),
        (["plan", "gpt-3.6b", "--devices", "4", "--batch", "8", "--cluster", "b20"], "did you mean b200"),
        (["plan", "gpt-3.6b", "--devices", "1009", "--batch", "8"], "batch 8: fewer sequences than 1009 devices"),
        (["plan", "gpt-3.6b", "--devices", "4", "--batch", "8", "--cluster", "none.json"], "none.json: no such file"),
        (["plan", "--cluster", "a100,none.csv", "-o", "x.json"], "none.csv: no such file"),
    ],
)
def test_bad_use_is_one_line(change: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(change) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_constants_are_fitted_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path(__file__).parents[2] / "benchmarks/measured_steps/vtrain-fit.csv"
    few = tmp_path / "rows.csv"
    few.write_text("\n".join(rows.read_text(encoding="utf-8").splitlines()[:10]))
    assert main(["plan", "--cluster", f"a100,{few}", "-o", str(tmp_path / "c.json")]) == 0
    fitted = json.loads((tmp_path / "c.json").read_text())
    assert fitted["source"].startswith("fitted: 5 measured steps")
    assert 0 < fitted["error"] < 0.2
    assert capsys.readouterr().out == ""
    small = ["plan", "gpt-3.6b@layers=2", "--devices", "2", "--batch", "4", "--effort", "0.1"]
    assert main([*small, "--cluster", str(tmp_path / "c.json")]) == 0
    assert f"their measured error is {fitted['error']:.1%} in the mean" in capsys.readouterr().out


def test_names_of_models() -> None:
    assert shape_by_name("llama3-70b@sequence=4096").sequence == 4096
    sizes = {name: round(one.parameters / 1e9, 1) for name, one in SHAPES.items()}
    assert sizes["gpt-175b"] == 174.6
    assert sizes["llama3-405b"] == pytest.approx(405.8, abs=0.3)
    published = pytest.importorskip("zbsolve.models.published_models").PUBLISHED
    for name, shape in SHAPES.items():
        if name in published:
            one = published[name]
            mine = (shape.layers, shape.hidden, shape.heads, shape.vocabulary, shape.kv_heads, shape.inner)
            assert mine == (one.layers, one.width, one.heads, one.vocabulary, one.block.kv_heads, one.block.ffn)
    with pytest.raises(BadInput, match="layers is 0"):
        shape_by_name("gpt-3.6b@layers=0")
