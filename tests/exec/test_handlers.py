"""The executor is open to kinds: a builder and a handler make a new one run, and no other part of it knows any."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import zbsolve.exec
from zbsolve import BadInput, Problem
from zbsolve.build import with_links
from zbsolve.build.links import MESSAGES
from zbsolve.exec.ahead import lengths
from zbsolve.exec.handlers import HANDLERS, PARTS, Handler, Part, RankState
from zbsolve.exec.lowering import lower
from zbsolve.kinds import KINDS, Kind, kinds_that, register
from zbsolve.models.presets import mlp
from zbsolve.problem.tables import CARGO, Edges
from zbsolve.util.errors import RunFailed

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule, toy, worst_difference
from ..support.trials import Batches, Trial, too_far

RAN: list[str] = []


def note(state: Any, action: Any, given: Tensor | None) -> Tensor | None:
    """What both toy kinds do: note that they ran, and hand on what they are given."""
    RAN.append(action.name)
    assert action.name[1:] in {f"T{action.part}", f"S{action.part}"}
    assert {"F", "B", "W", action.kind} == action.companions
    return given


TOYS = {"T": Handler(note), "S": Handler(note, takes="", makes="what S made", repeatable=True)}


def with_pause(problem: Problem) -> Problem:
    """Each stage pauses between F and B of a microbatch: a pass T that carries nothing."""
    table, place, forwards = with_rows(problem, "T", problem.rows("F"))
    waits = problem.edges.only(np.flatnonzero(problem.passes.are("B")[problem.edges.after]))
    own = problem.passes.are("F")[waits.before]
    behind = Edges.of(place[waits.before[own]], waits.after[own])
    return replace(problem, passes=table, edges=problem.edges + Edges.of(forwards, place[forwards]) + behind)


def with_stop(problem: Problem) -> Problem:
    """Activations stop at a pass S on their way to the next stage: it takes them from F, and they go on from it."""
    forwards = problem.rows("F")[problem.passes.stage[problem.rows("F")] < problem.stages - 1]
    table, place, forwards = with_rows(problem, "S", forwards)
    edges, carried = problem.edges, problem.edges.carrying("activation")
    moved = replace(edges, before=np.where(carried, place[edges.before], edges.before))
    return replace(problem, passes=table, edges=moved + Edges.of(forwards, place[forwards], carries=CARGO[1]))


def forth(state: Any, action: Any, given: Tensor | None) -> Tensor:
    """A number that goes along the stages beside activations, and is that of the stage."""
    RAN.append(action.name)
    number = torch.zeros(()) if given is None else given + 1
    assert number.item() == action.stage
    return number


def back(state: Any, action: Any, given: Tensor | None) -> Tensor:
    """Two numbers that come back beside gradients: how many of four stages are behind this one, and the microbatch."""
    RAN.append(action.name)
    assert given is None or given.tolist() == [2 - action.stage, action.part]
    return torch.tensor([3.0 - action.stage, action.part])


CHAINS = {"QF": Handler(forth), "QB": Handler(back)}


def with_chains(problem: Problem) -> Problem:
    """Registered kinds whose passes of each microbatch send to the next stage, and to the one before."""
    for kind, plain, cargo in (("QF", "F", "activation"), ("QB", "B", "gradient")):
        register(Kind(kind, "numbers between stages", "#dbbee6"))
        table, place, rows = with_rows(problem, kind, problem.rows(plain))
        edges, passes = problem.edges, problem.passes
        models = edges.carrying(cargo) & passes.are(plain)[edges.before] & passes.are(plain)[edges.after]
        sent = edges.only(np.flatnonzero(models))
        own = replace(sent, before=place[sent.before], after=place[sent.after], bytes=0 * sent.bytes)
        problem = replace(problem, passes=table, edges=edges + own + Edges.of(rows, place[rows]))
    return problem


def with_rows(problem: Problem, kind: str, beside: Any) -> tuple[Any, Any, Any]:
    """The table with a pass of this kind for each row of `beside`; row → the row of its pass; `beside`."""
    columns = {name: getattr(problem.passes, name)[beside] for name in ("stage", "microbatch", "rank")}
    table = problem.passes.more(kind, "compute", duration=np.ones(len(beside), np.int64), **columns)
    place = np.zeros(len(problem.passes), np.int64)
    place[beside] = len(problem.passes) + np.arange(len(beside))
    return table, place, beside


BUILDERS = {"T": with_pause, "S": with_stop, "MB": lambda problem: with_links(problem, "rank", 1), "QF": with_chains}


def batch(place: int, step: int) -> Batches:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    return x.chunk(4), x.flip(0).chunk(4)


def on_two_ranks(rank: int, seed: int) -> dict[str, Any]:
    """A step with each kind on two ranks: how far it is from the unsplit model, and how often a toy kind ran."""
    found: dict[str, Any] = {}
    for kind, build in BUILDERS.items():
        RAN.clear()
        trial = Trial(problem=build(a_problem((0, 1, 1, 0), 4, layers=4)), layers=toy, batch=batch, order=seed)
        with mock.patch.dict(HANDLERS, (TOYS if kind in TOYS else CHAINS)):
            found[kind] = trial.ran(trial.pipeline()) | {"ran": len(RAN)}
    return found


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind, handler in TOYS.items():
        monkeypatch.setitem(HANDLERS, kind, handler)
    RAN.clear()
    yield
    RAN.clear()


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("kind", TOYS)
def test_a_kind_from_outside_runs_and_gradients_are_the_unsplit_models(kind: str, placement: tuple[int, ...]) -> None:
    for seed in range(3):
        problem = BUILDERS[kind](a_problem(placement, 3))
        count = len(RAN)
        assert worst_difference(random_schedule(problem, seed), mlp(0)) < 1e-5
        assert sorted(RAN[count:]) == sorted(name for name in problem.names if kind in name)
    assert len(RAN) == 3 * 3 * (len(placement) - (kind == "S"))


@pytest.mark.usefixtures("toys")
def test_one_device_has_the_parts_that_users_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each rank whose problem has its kind, called around passes and when steps begin."""

    class Counting(Part):
        name, calls = "counting", Counter[str]()

        def begin(self, data: Any) -> None:
            self.calls["begun"] += 1

        def around(self, kind: str, run: Any) -> Any:
            def counted(state: RankState, action: Any, given: Any) -> Any:
                self.calls[kind] += state.part(Counting) is self
                return run(state, action, given)

            return counted

    more = [*PARTS, lambda rank: Counting() if "T" in rank.problem.passes.kinds else None]
    monkeypatch.setattr("zbsolve.exec.one_device.PARTS", more)
    assert worst_difference(random_schedule(with_pause(a_problem((0, 1), 3))), mlp(0)) < 1e-5
    assert worst_difference(random_schedule(a_problem((0, 1), 3)), mlp(0)) < 1e-5
    assert Counting.calls == {"begun": 2} | dict.fromkeys("FBWT", 6)


def test_a_kind_from_outside_runs_on_ranks() -> None:
    ranks = on_ranks(2, f"{__name__}:on_two_ranks", 3)
    assert too_far(ranks, 1e-6) == {}
    for rank in ranks:
        assert rank["T"]["ran"] == 8
        assert rank["S"]["ran"] in (4, 8)  # the last stage has none
        assert rank["QF"]["ran"] == 16


def test_kinds_that_only_begin_work_are_those_that_do_something_beside() -> None:
    sent = set(MESSAGES.flat)  # what they hand on leaves like any message, or with the pass that is helped
    begun = {kind for kind, one in HANDLERS.items() if one.ended is not None}
    assert begun == {*kinds_that(begun=True), *kinds_that(away=True)} - sent


def test_a_kind_without_a_handler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(HANDLERS, "T")
    with pytest.raises(BadInput, match=r"pass 0T0: run does not know passes of kind T yet \(only F B W .*BH"):
        lower(random_schedule(with_pause(a_problem((0, 1), 2))))


def test_a_handler_may_refuse_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def check(graph: Any, rows: Any) -> None:
        asked.append(rows.tolist())
        raise BadInput(f"pass {graph.one(rows[0]).name}: not today")

    problem = with_pause(a_problem((0, 1), 2))
    monkeypatch.setitem(HANDLERS, "T", Handler(TOYS["T"].run, check))
    with pytest.raises(BadInput, match="pass 0T0: not today"):
        lower(random_schedule(problem))
    assert asked == [problem.rows("T").tolist()]


@pytest.mark.usefixtures("toys")
def test_a_pass_that_makes_nothing_though_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "S", Handler(lambda state, action, given: None))
    schedule = random_schedule(with_stop(a_problem((0, 1), 2)))
    with pytest.raises(RunFailed, match=r"pass 0S\d: it made nothing, but other passes take what it makes"):
        worst_difference(schedule, mlp(0))


@pytest.mark.usefixtures("toys")
def test_what_a_pass_takes_must_come_along_an_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "S", replace(TOYS["S"], takes="activation"))
    problem = with_stop(a_problem((0, 1, 2), 2))
    lower(random_schedule(problem))
    mute = np.where(problem.passes.are("S")[problem.edges.after], CARGO.index(""), problem.edges.carries)
    with pytest.raises(BadInput, match="pass 1S0: no edge brings its input"):
        lower(random_schedule(replace(problem, edges=replace(problem.edges, carries=mute))))


@pytest.mark.usefixtures("toys")
def test_a_kind_that_can_run_again_does_not_end_what_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = random_schedule(with_stop(a_problem((0, 1), 4)), 1)
    far = lengths(lower(schedule))
    monkeypatch.setitem(HANDLERS, "S", replace(TOYS["S"], repeatable=False))
    near = lengths(lower(schedule))
    assert sum(near) < sum(far)
    assert lower(schedule)[0].actions[near[0]].kind == "S"


def test_the_executor_names_kinds_beside_their_handlers_alone() -> None:
    """But for what the three passes of a split took when it was tried."""
    root, named, handled = Path(zbsolve.exec.__file__).parent, set(), set()
    for path in root.rglob("*.py"):
        home = path.relative_to(root).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in KINDS:
                named.add(home)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and "HANDLERS" in ast.unparse(node).split(" = ")[0]:
                handled.add(home)
            assert not (isinstance(node, ast.alias) and node.name == "KINDS"), path
    assert named == {*handled, "choices.py"}
    assert not handled & {"base", "interpreter.py", "lowering.py"}
