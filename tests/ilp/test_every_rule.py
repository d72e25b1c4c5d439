"""Every rule that gives bounds: its bound holds, `check --bound` proves it again, and one that is too high is not believed.

A rule is a place in the source where a `Bound` is made with its proof. A new one fails here until it has an example.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import zbsolve
from zbsolve import Problem, Schedule, pipeline, solve
from zbsolve.build import with_offload
from zbsolve.cli import main
from zbsolve.ilp.bounds import any_choice, many
from zbsolve.ilp.bounds.bound import (
    AREA,
    BOTH_ENDS,
    CHOICES,
    GROUP_KINDS,
    IDLE,
    IN_A_ROW,
    OWN_WINDOWS,
    PATH,
    SEARCHED_RANKS,
    STREAMS,
    WHOLE,
    WINDOW_KINDS,
    WORK,
    Bound,
)
from zbsolve.ilp.bounds.closed_forms import all_closed_forms
from zbsolve.ilp.bounds.copies import with_more_room, without_copies
from zbsolve.ilp.bounds.many import bound_of_many
from zbsolve.ilp.cp import make_solver, ranks_refute, solve_cp, streams_bound
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks.end_losses import both_ends
from zbsolve.ilp.ranks.lanes import group_bound, group_of
from zbsolve.ilp.steady.windows import higher_in_a_row
from zbsolve.search import finder
from zbsolve.search.certify import certificate_of, work_bound
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from ..support import exact, exact_streams

HELD = {"held_until_B": 6, "held_until_W": 4}
COPYING = pipeline([30, 30], [40, 40], [20, 20], comm=3, microbatches=4, held_until_B=2, held_until_W=2, capacity=4)
PROBLEMS = {
    "plain": pipeline([30] * 3, [40] * 3, [20] * 3, microbatches=4, comm=5, **HELD, capacity=30),
    "tight": pipeline([30] * 3, [40] * 3, [20] * 3, microbatches=4, comm=5, **HELD, capacity=10),
    "two": pipeline([30] * 3, [40] * 3, [20] * 3, microbatches=5, comm=5, **HELD, capacity=20),
    "long": pipeline([20] * 4, [20] * 4, [18] * 4, microbatches=100, comm=1, held_until_B=4, held_until_W=2, capacity=12),
    "small": pipeline([3, 4], [5, 6], [2, 1], microbatches=3, comm=1, **HELD, capacity=20),
    "vee, span": pipeline(
        [50] * 4, [50] * 4, [45] * 4, placement="vee", microbatches=2, comm=2, objective="span", **HELD, capacity=20
    ),
    "uneven, span": pipeline([6, 1, 4], [1, 7, 6], [2, 7, 5], microbatches=2, objective="span", **HELD, capacity=30),
    "slow copies": with_offload(COPYING, 95, 95),
    "fast copies": with_offload(replace(COPYING.head(2), capacity=(8, 8)), 5, 5),
}


def form(name: str, text: str) -> Bound:
    """The closed form whose proof has this text."""
    return next(one for one in all_closed_forms(PROBLEMS[name]) if text in one.proof)


def of_many(name: str, kind: str) -> Bound:
    """The closed form of this kind that one microbatch gives."""
    problem = PROBLEMS[name]
    found = (one for one in many._forms(problem.head(1), problem.microbatches) if one.kind == kind and len(one.ranks) < 2)
    return max(found, key=lambda one: one.value)


def energy_of_many(name: str, text: str) -> Bound:
    """The highest closed form with this text that one microbatch gives."""
    forms = many._forms(PROBLEMS[name].head(1), PROBLEMS[name].microbatches)
    return max((one for one in forms if text in one.proof), key=lambda one: one.value)


def of_ranks(name: str, kind: str, ranks: tuple[int, ...], value: int) -> Bound:
    """What a search over these ranks proves, where it does."""
    problem = PROBLEMS[name]
    return group_bound(problem, group_of(problem, Bound(value, "", kind, ranks)), value)


def of_both_ends(name: str) -> Bound:
    """What rank 0's memory must hold, and what it loses at both ends."""
    found = both_ends(PROBLEMS[name], 0)
    assert found is not None
    found.raise_losses(3_000)
    return found.bound


def in_a_row(name: str) -> Bound:
    """What microbatches in a row prove."""
    one, count = PROBLEMS[name].head(1), PROBLEMS[name].microbatches
    return higher_in_a_row(one, count, bound_of_many(one, count), Clock(9.0, 0.5))


def of_streams(name: str, ranks: tuple[int, ...], value: int) -> Bound:
    """What CP-SAT proves about these ranks."""
    assert ranks_refute(PROBLEMS[name], ranks, value, make_solver(60.0, 1, seed=0, effort=5.0))
    return streams_bound(ranks, value)


def by_solver(name: str, prove: Callable[[State], None]) -> Bound:
    """What an exact solver proves about the whole."""
    state = State(PROBLEMS[name], Clock(60.0), work_bound(PROBLEMS[name]))
    prove(state)
    return state.bound


def over_choices(name: str) -> Bound:
    """What holds whatever is copied."""
    return any_choice.bound_over_choices(PROBLEMS[name])


def copying(name: str) -> Bound:
    """The least window with time for the copies that memory asks for."""
    problem = PROBLEMS[name]
    base, copies = without_copies(problem)
    return any_choice._copying(problem, with_more_room(problem, base, copies), copies, -1, problem.work)


# Place in the source → examples: the problem, what makes the bound, and what its proof says.
Example = tuple[str, Callable[[str], Bound], str]
RULES: dict[str, list[Example]] = {
    "certify.work_bound": [("plain", lambda name: work_bound(PROBLEMS[name]), "the busiest rank works")],
    "closed_forms._closed_forms": [("two", lambda name: form(name, "the longest chain"), "the longest chain of passes")],
    "closed_forms._of_rank": [
        ("two", lambda name: form(name, "rank 1: its passes run one at a time"), "rank 1: its passes run one at a time"),
        ("vee, span", lambda name: form(name, "in the window"), "in the window of rank"),
        ("plain", lambda name: form(name, "no order avoids"), "no order avoids 100 µs idle"),
        ("tight", lambda name: form(name, "is full of"), "while its memory is full of what one microbatch needs"),
    ],
    "closed_forms._of_side_streams": [("slow copies", lambda name: form(name, "d2h:1: its"), "d2h:1: its passes run one")],
    "energy.bounds_of_pools": [
        ("tight", lambda name: form(name, "does not fit"), "does not fit 10 bytes sooner"),
        ("tight", lambda name: form(name, "whole microbatches"), "do not fit 10 bytes sooner"),
    ],
    "two_ends.idle_of_two": [
        ("plain", lambda name: form(name, "one of them is"), "the end of the step on rank 0, one of them")
    ],
    "any_choice.bound_over_choices": [("fast copies", over_choices, "whatever is copied: the longest chain")],
    "any_choice._copying": [("slow copies", copying, "whatever is copied: d2h:")],
    "many._forms": [("plain", lambda name: of_many(name, WORK), "the busiest rank works")],
    "many._idle": [("plain", lambda name: of_many(name, IDLE), "whatever the number of microbatches")],
    "many._energy": [
        ("tight", lambda name: energy_of_many(name, "does not fit"), "does not fit 10 bytes sooner"),
        ("tight", lambda name: energy_of_many(name, "whole"), "do not fit 10 bytes sooner"),
    ],
    "windows._bound": [("long", in_a_row, "no 25 microbatches in a row come as fast")],
    "lanes.group_bound": [
        ("two", lambda name: of_ranks(name, GROUP_KINDS[False], (0,), 750), "rank 0: no order of its passes fits 749 µs"),
        ("two", lambda name: of_ranks(name, GROUP_KINDS[True], (0, 1), 750), "; left out: "),
        (
            "vee, span",
            lambda name: of_ranks(name, WINDOW_KINDS[False], (0, 1), 847),
            "rank 1 in the window of rank 0: no order of its",
        ),
        (
            "vee, span",
            lambda name: of_ranks(name, WINDOW_KINDS[True], (0, 1, 0), 847),
            "ranks 1, 0 in the window of rank 0",
        ),
        (
            "uneven, span",
            lambda name: of_ranks(name, OWN_WINDOWS, (0, 1), 41),
            "ranks 0, 1, each in its window: no order of their passes",
        ),
    ],
    "end_losses.bound": [("two", of_both_ends, "while memory fills and")],
    "cp.streams_bound": [("slow copies", lambda name: of_streams(name, (1,), 1167), "copies and memory too")],
    "finder.cp": [("small", lambda name: by_solver(name, lambda state: finder.cp(state, 0, 60.0)), "CP-SAT searched")],
    "finder.milp": [
        ("small", lambda name: by_solver(name, lambda state: finder.milp(state, "cbc", 0)), "milp cbc: the whole")
    ],
}
# They hand on what another place made, or prove it again.
FORWARDED = {
    "proof_check._recheck",
    "certify.proven_again",
    "certify.certified_as",
    "solve_many._bound_again",
    "task_runner._shown",
}
KINDS = {PATH, WORK, IDLE, AREA, BOTH_ENDS, IN_A_ROW, *SEARCHED_RANKS, STREAMS, WHOLE, CHOICES}
EXAMPLES = [(place, i) for place, examples in RULES.items() for i in range(len(examples))]


@cache
def bound_of(place: str, number: int) -> tuple[Problem, Bound, str]:
    """An example: problem, bound, and what its proof says."""
    name, made, text = RULES[place][number]
    return PROBLEMS[name], made(name), text


@cache
def schedule_of(problem: Problem) -> Schedule:
    return solve(problem, effort=0.1, prefer=None)


def places() -> Iterator[str]:
    """Where the source makes a bound that has a kind and says more than that nothing is known, once a call."""
    for path in Path(zbsolve.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "Bound(" in text else ():
            if isinstance(function, ast.FunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "Bound" and len(call.args) > 2:
                        nothing = ast.unparse(call.args[0]) == "0" or ast.unparse(call.args[1]) == "''"
                        yield from () if nothing else [f"{path.stem}.{function.name}"]


def test_every_rule_and_kind_has_an_example() -> None:
    found = Counter(places())
    assert set(found) == {*RULES, *FORWARDED}
    assert all(len(examples) >= found[place] for place, examples in RULES.items())
    assert {bound_of(*one)[1].kind for one in EXAMPLES} == KINDS


@pytest.mark.parametrize(("place", "number"), EXAMPLES)
def test_it_is_proven_again_and_one_that_is_too_high_is_not(
    place: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, bound, text = bound_of(place, number)
    schedule = schedule_of(problem)
    value = int(schedule.timeline().value)
    assert text in bound.proof
    assert bound.value <= value
    assert bound.value > problem.work or bound.kind == WORK
    schedule.certified(certificate_of(schedule, bound, "a test")).save(tmp_path / "s.json")
    assert main(["check", str(tmp_path / "s.json"), "--bound", "--seconds", "30"]) == 0
    assert "proven again: " in capsys.readouterr().out
    wrong = replace(bound, value=value + 1)
    assert recheck(problem, wrong, 0.5).value <= value


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "long"])  # that one's optimum is not known
def test_no_example_is_above_the_optimum(name: str) -> None:
    """By two oracles that know nothing of bounds or of each other: dynamic programming, and CP-SAT on the whole, which for
    the span gives a schedule alone."""
    problem = PROBLEMS[name]
    least = (exact_streams if len(problem.side_stream) else exact).optimum(problem)
    found = solve_cp(problem, None, 0, 60.0, effort=0.2)
    assert found.schedule is not None
    value = found.schedule.timeline().value
    assert found.bound == least == value or problem.objective == "span"
    highest = max(one.value for given, one, _ in (bound_of(*example) for example in EXAMPLES) if given is problem)
    assert highest <= least <= value
