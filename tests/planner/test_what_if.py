"""A plan again with one number changed, and the fronts over memory and devices: what is found and proven carries over."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import zbsolve
from zbsolve import BadInput, Link
from zbsolve.cli import main
from zbsolve.planner import CLUSTERS, Layout, Plan, PlanFront, Shape, layout_profile, plan_front, what_if
from zbsolve.planner.answers import LINK_CHANGES, Answer
from zbsolve.planner.bounds.layout_rules import NEVER
from zbsolve.planner.candidate import step_of
from zbsolve.planner.case import LESS_IS_EASIER, MORE_IS_EASIER, OF_LAYERS, Case, case_of, changed, no_harder
from zbsolve.planner.costs.layer_formulas import after_pipeline, exchange_pass
from zbsolve.planner.costs.rank_costs import costs_of
from zbsolve.planner.space import layouts
from zbsolve.show.plan_report import answer_as_json, front_as_text, what_if_as_text

A100 = CLUSTERS["a100"]
SMALL = Shape.gpt(1024, 8, 6, vocabulary=8192)
CASE = Case(SMALL, 16, 16, A100, A100.memory)
COMMAND = ["plan", "gpt-3.6b@layers=4", "--devices", "4", "--batch", "8", "--cluster", "a100", "--effort", "0.2"]
ASKED = ("memory=3GiB", "memory+20%", "links", "memory=1MiB")


@cache
def small() -> Plan:
    """Of a small model on 8 devices."""
    return zbsolve.plan(SMALL, 8, 16, A100, memory="6GiB", effort=0.5)


@cache
def answered() -> tuple[Plan, tuple[Answer, ...]]:
    return what_if(small(), ASKED, effort=0.2)


@cache
def front(over: str, *at: int) -> PlanFront:
    return plan_front(small(), over, at or None, effort=0.2)


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("memory=96GiB", CASE._replace(memory=96 * 2**30)),
        ("memory+10%", CASE._replace(memory=int(1.1 * A100.memory))),
        ("memory-10GB", CASE._replace(memory=A100.memory - 10**10)),
        ("devices=72", CASE._replace(devices=72)),
        ("nodes+1", CASE._replace(devices=24)),
        ("nodes=0.5x", CASE._replace(devices=8)),
        ("batch=2x", CASE._replace(batch=32)),
        ("between.bandwidth=2x", CASE._replace(cluster=replace(A100, between=Link(30.0, 160_000.0)))),
        ("inside.latency=10us", CASE._replace(cluster=replace(A100, inside=Link(10.0, 180_000.0)))),
        ("messages=800Gbit/s", CASE._replace(cluster=replace(A100, messages=100_000.0))),
        ("peak+50%", CASE._replace(cluster=replace(A100, peak=1.5 * A100.peak))),
        ("node=4", CASE._replace(cluster=replace(A100, node=4))),
        (" overlap = 0.5 ", CASE._replace(cluster=replace(A100, overlap=0.5))),
    ],
)
def test_one_number_changes(text: str, case: Case) -> None:
    assert changed(CASE, text) == case


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory", "not like memory=96GiB"),
        ("memori=1GiB", "'memori' is no number of a plan; did you mean memory?"),
        ("memory=fast", "'fast' is no such number"),
        ("memory=0", "memory would be 0: a whole number from 1 up"),
        ("devices=2.5", "'2.5' is no such number"),
        ("devices-16", "devices would be 0"),
        ("nodes+0.5", "'0.5' is no such number"),
        ("nodes=1.3x", "devices would be 20.8"),
        ("overlap=2", "field 'overlap' is 2"),
        ("between.bandwidth=0x", "'between': field 'bandwidth'|between: field 'bandwidth'|between.bandwidth"),
        ("hbm=wide", "field 'hbm'"),
    ],
)
def test_bad_changes_are_one_line(text: str, said: str) -> None:
    with pytest.raises(BadInput) as error:
        changed(CASE, text)
    assert str(error.value).startswith(f"change '{text}'")
    assert any(part in str(error.value) for part in said.split("|"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("slow_host", [False, True])
@pytest.mark.parametrize("name", [*MORE_IS_EASIER, *LESS_IS_EASIER, "memory"])
def test_what_is_easier_makes_nothing_longer(name: str, slow_host: bool) -> None:
    """Each time, message and exchange of each layout: so schedules of the one are schedules of the other."""
    constants = {"overlap": 0.5, "host_memory": 10**11, "contention": 3.0, "host": 1e6 if slow_host else A100.host}
    base = CASE._replace(cluster=replace(A100, **constants))
    text = f"{name}=0.5x" if name in LESS_IS_EASIER else f"{name}=1.9x"
    easier = changed(base, text)
    assert no_harder(easier, base, in_slices=False)
    assert no_harder(easier, base) == (name not in OF_LAYERS)
    assert not no_harder(base, easier)
    assert no_harder(base, base)
    table = layouts(SMALL, base.devices, base.batch, A100)
    for mine, theirs in zip(_times(easier, table), _times(base, table), strict=True):
        assert (mine <= theirs).all()


def test_a_slice_may_take_longer_where_layers_take_less() -> None:
    """The host limits the forward, and less of it is attention: the first slice, which has least of that, takes longer."""
    base = CASE._replace(cluster=replace(A100, host=1000.0))
    layout = Layout(pp=2, size=1, count=2, slices=2)
    cases = base, changed(base, "hbm=1.9x")
    steps = (step_of(layout, A100.memory).problem(layout_profile(SMALL, layout, case.cluster)) for case in cases)
    before, after = (step.passes.duration[step.index["0F0"]] for step in steps)
    assert after > before


def _times(case: Case, table: zbsolve.planner.Layout) -> list[np.ndarray]:
    costs = costs_of(SMALL, table, case.cluster)
    behind = after_pipeline(1e9, table, case.cluster)
    exchanged = exchange_pass(1e9, table, case.cluster)
    return [*costs.block, *costs.embedding, *costs.head, costs.sent, *costs.copies, *costs.exchange, exchanged, behind]


def test_memory_of_hosts_changes_in_whole_bytes() -> None:
    little = CASE._replace(cluster=replace(A100, host_memory=1001))
    assert changed(little, "host_memory+50%").cluster.host_memory == 1501
    known = Case(SMALL, 8, 8, replace(A100, copies=None, host_memory=None), 1)
    for text in ("copies.bandwidth=2x", "host_memory=2x"):
        with pytest.raises(BadInput, match="is no number of a plan"):
            changed(known, text)


def test_what_is_not_comparable_carries_nothing_over() -> None:
    for text in ("devices=8", "batch=32", "peak=2x", "efficiency=2x", "launch=0.5x", "node=4"):
        other = changed(CASE, text)
        assert not no_harder(CASE, other)
        assert not no_harder(other, CASE)
    mixed = changed(changed(CASE, "memory=2x"), "messages=0.5x")
    assert not no_harder(mixed, CASE)


@pytest.mark.slow
def test_each_answer_has_a_value_and_a_bound() -> None:
    plan, answers = answered()
    assert [one.change for one in answers][:2] == list(ASKED[:2])
    assert [one.change.partition("=")[0] for one in answers[2:5]] == ["inside.bandwidth", "between.bandwidth", "messages"]
    assert plan.best.value <= small().best.value
    for one in answers[:5]:
        assert one.plan is not None
        assert 0 < one.bound <= one.plan.best.value + 1e-3
        assert one.bound >= one.plan.bound - 1e-3
        assert zbsolve.verify(one.plan.best.schedule.problem, one.plan.best.schedule) == ()
        assert sum(one.plan.best.memory().values()) <= one.case.memory
        for other, there in ((case_of(plan), plan), *((two.case, two.plan) for two in answers[:5] if two.plan)):
            if no_harder(one.case, other):  # its own order is tried here too
                assert one.plan.best.value <= there.best.value + 1e-3
            if no_harder(other, one.case):
                assert one.bound >= min(there.bound, one.plan.best.value) - 1e-3
    assert answers[5].plan is None
    assert "no layout fits" in answers[5].reason


def test_answers_as_text_say_what_is_proven() -> None:
    plan, answers = answered()
    said = what_if_as_text(plan, answers)
    assert "memory=1MiB: memory: no layout fits 1048576 bytes" in said
    assert "link" in said.splitlines()[-1]
    for one in answers[:5]:
        assert one.plan is not None
        low, high = one.bound / plan.best.value - 1, one.plan.best.value / plan.bound - 1
        assert low <= high
        (line,) = (line for line in said.splitlines() if line.startswith(one.change))
        assert f"{low:+.1%} to {high:+.1%}" in line


def test_no_share_is_proven_that_the_change_excludes() -> None:
    """More memory, or faster links, make no step longer, and less memory none shorter: whatever the gap is."""
    plan, answers = answered()
    fields = {one["change"]: one for one in (answer_as_json(plan, answer) for answer in answers) if "step" in one}
    assert {change: one["proven"][1] <= 0 for change, one in fields.items()} == {
        "memory=3GiB": False,
        **dict.fromkeys(("memory+20%", *LINK_CHANGES), True),
    }
    assert fields["memory=3GiB"]["proven"][0] >= 0
    for one in fields.values():
        assert one["proven"][0] <= one["against"] + 1e-12
        assert one["against"] <= one["proven"][1] + 1e-12
        assert one["bound"] <= one["step"]
    most = max(LINK_CHANGES, key=lambda change: -fields[change]["against"])
    line = what_if_as_text(plan, answers).splitlines()[-1]
    assert line.startswith("no link limits") or line.endswith(f"{-fields[most]['proven'][0]:.1%} at most in any plan")


def test_what_ends_early_keeps_its_answers() -> None:
    told: list[str] = []
    plan, answers = what_if(
        small(), ["memory+10%", "messages=2x"], effort=0.1, progress=told.append, stop=lambda: bool(told)
    )
    assert [one.change for one in answers] == ["memory+10%"]
    assert plan.best.value <= small().best.value

    def press(line: str) -> None:
        raise KeyboardInterrupt

    _, answers = what_if(small(), ["memory+10%"], effort=0.1, progress=press)
    assert len(answers) == 1  # the plan as it was, in more memory


@pytest.mark.slow
def test_the_front_over_memory_falls() -> None:
    found = front("memory")
    assert list(found.at) == sorted(found.at)
    assert small().memory in found.at
    values, bounds = [point.value for point in found.points], [point.bound for point in found.points]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    for at, point in zip(found.at, found.points, strict=True):
        assert point.bound <= point.value
        assert point.peak <= at == point.memory
        assert zbsolve.verify(point.schedule.problem, point.schedule) == ()
    assert found.efficient[0]
    assert found.efficient == tuple(i == 0 or values[i] < values[i - 1] for i in range(len(values)))
    assert found.plan.best.value <= small().best.value


def test_the_front_over_devices_says_what_is_no_faster() -> None:
    found = front("devices", 2, 8, 16)
    assert found.at == (2, 8, 16)
    assert all(point.bound <= point.value for point in found.points)
    body, said = found.to_json(), front_as_text(found)
    assert [one["devices"] for one in body["points"]] == [2, 8, 16]
    assert said.count("no shorter than with less") == sum(not one["efficient"] for one in body["points"])
    slow = replace(found, points=(*found.points[:2], found.points[0]))
    assert slow.efficient[2] is False
    assert "no shorter than with less" in front_as_text(slow)


def test_orders_of_other_plans_are_tried() -> None:
    """A plan with no time of its own, from another's candidates."""
    again = zbsolve.plan(SMALL, 8, 16, A100, memory="8GiB", effort=1e-3, start=small().near)
    assert again.best.value <= small().best.value + 1e-3
    row = again.number(again.best)
    assert again.bounds.pipeline[row] != NEVER


@pytest.mark.slow
def test_the_command_asks_further(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--what-if", "nodes=2x", "--front", "memory=20GiB,30GiB"]
    assert main([*COMMAND, *asked]) == 0
    said = capsys.readouterr().out
    assert "\nwhat if " in said
    assert "\nnodes=2x " in said
    assert "the front of step over memory" in said
    assert main([*COMMAND, *asked, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [one["change"] for one in body["what_if"]] == ["nodes=2x"]
    assert body["what_if"][0]["proven"][0] <= body["what_if"][0]["against"] <= body["what_if"][0]["proven"][1]
    assert body["front"]["over"] == "memory"
    assert {20 * 2**30, 30 * 2**30} <= {one["memory"] for one in [*body["front"]["points"], *body["front"]["missing"]]}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--what-if", "memory"], "change 'memory': not like"),
        (["--what-if", "devices=1009"], "change 'devices=1009': batch 8: fewer sequences"),
        (["--front", "batch"], "front 'batch': one of memory, devices"),
        (["--front", "memory=0"], "at least 1 is needed"),
        (["--front", "devices=ten"], "front 'devices=ten'"),
    ],
)
def test_bad_questions_are_one_line(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND[:-1], "1e9", *asked]) == 2  # an effort that no test waits for
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
