"""Sources of schedules: each is a row, and a search can do without any of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest

from zbsolve.planner import CLUSTERS, Layout, shape_by_name
from zbsolve.planner.candidate import unsolved
from zbsolve.planner.layout import LOOP, SHARDED
from zbsolve.planner.searches import EFFORT_PER_PASS
from zbsolve.search import finder, sources
from zbsolve.search.certify import work_bound
from zbsolve.search.finder import _in_turns, find, search_of
from zbsolve.search.solver import search
from zbsolve.search.sources import (
    AHEAD,
    ANEW,
    ANEW_SOLVER,
    FIRST,
    LAST,
    MANY_PASSES,
    PACED,
    POOR_OF_MANY,
    TURNS,
    Source,
    anew_seconds,
    arms_of,
)
from zbsolve.search.state import BLOCK_SOLVER, State
from zbsolve.util.clock import Clock
from zbsolve.verifier import verify

from ..support.problems import uniform

NAMES = list(dict.fromkeys(source.name for table in (FIRST, AHEAD, TURNS, ANEW, LAST) for source in table))


def state_of(effort: float, without: str = "") -> State:
    problem = uniform("vee", 3, 8, (3, 4, 2), 3)
    return State(problem, Clock(60.0, effort), work_bound(problem), without=frozenset((without,)))


def test_the_page_has_a_row_for_each_source() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert sorted(rows[1:]) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_search_does_without_a_source(name: str) -> None:
    state = state_of(0.2, without=name)
    search(state, "auto", 0)
    assert state.schedule is not None
    assert verify(state.problem, state.schedule) == ()
    assert state.bound.value <= state.value


@pytest.mark.parametrize("name", NAMES)
def test_a_source_that_is_left_out_is_not_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set[str]()

    def noted(source: Source) -> Source:
        return replace(source, arms=lambda search: asked.add(source.name) or source.arms(search))  # type: ignore[func-returns-value]

    for table, rows in {"FIRST": FIRST, "AHEAD": AHEAD, "TURNS": TURNS, "ANEW": ANEW, "LAST": LAST}.items():
        monkeypatch.setattr(finder, table, tuple(map(noted, rows)))
    ours = search_of(state_of(0.4, without=name), 0)
    for _ in chain(finder.quick(ours), find(ours)):
        if ours.state.clock.left <= 0:
            break
    assert asked == {*NAMES} - {name}


def test_sources_have_their_time_in_order_and_turns_by_what_they_used() -> None:
    """Two arms that take 1 and 3 seconds a step: the first has three times as many steps."""
    state, taken = state_of(60.0), list[str]()

    def steps(name: str, seconds: float) -> Iterator[None]:
        while True:
            taken.append(name)
            state.clock.spend(seconds)
            yield

    rows = (Source("late", lambda s: [steps("b", 3.0)], late=lambda s: True), Source("early", lambda s: [steps("a", 1.0)]))
    ours = search_of(state, 0)
    for _ in islice(_in_turns(state, list(arms_of(rows, ours))), 8):
        pass
    assert taken == ["a", "b", "a", "a", "a", "b", "a", "a"]
    assert len(list(arms_of(rows, search_of(state_of(1.0, without="late"), 0)))) == 1


def test_a_short_search_of_many_passes_needs_no_paced_blocks_where_blocks_are_good() -> None:
    """A layout whose sharded vocabulary has collectives, which take memory on streams of their own."""
    layout = Layout(8, 1, 8, 3, LOOP, 1, 64, zero=1, vocabulary=SHARDED)
    problem = next(unsolved(shape_by_name("gpt-18.4b"), layout, CLUSTERS["a100"], 64 << 30)).problem
    state = State(problem, Clock(60.0, EFFORT_PER_PASS * len(problem.passes)), work_bound(problem))
    ours = search_of(state, 0)
    for _ in chain.from_iterable(arms_of(FIRST[: FIRST.index(PACED)], ours)):
        pass
    assert len(problem.passes) > MANY_PASSES
    assert state.solver == BLOCK_SOLVER
    assert state.value < POOR_OF_MANY * state.bound.value
    assert state.clock.used < 0.25 * state.clock.total
    assert not any(True for arm in PACED.arms(ours) for _ in arm)


def test_another_seed_is_searched_where_its_time_allows_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the time: it must allow two thousand decodings of 144 passes, and nobody may only ask for a value."""
    ours = search_of(state_of(1.0), 0)
    assert anew_seconds(ours) == 0.0  # a small step
    monkeypatch.setattr(sources, "ANEW_PASSES", 144)
    ours.anew = anew_seconds(ours)
    assert (anew_seconds(search_of(state_of(0.2), 0)), ours.anew) == (0.0, 0.25)
    (arm,) = arms_of(ANEW, ours)
    for _ in arm:
        pass
    assert ours.state.solver == ANEW_SOLVER
    assert ours.state.clock.used < 0.3
    ours.state.enough = 1
    assert anew_seconds(ours) == 0.0


def test_the_whole_search_ends_where_its_clock_does() -> None:
    state = state_of(0.3)
    ours = search_of(state, 0)
    for arm in arms_of(FIRST, ours):
        for _ in arm:
            pass
    for _ in find(ours):
        if state.done:
            break
    assert state.schedule is not None
    assert state.clock.used < 0.6
