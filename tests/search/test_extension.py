"""Schedules of few microbatches, their steady state repeated by a cut at a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import pytest

from zbsolve import Problem, pipeline, preset, verify
from zbsolve.build.plain import with_all_to_all
from zbsolve.greedy.arrays.microbatch import microbatch_graph
from zbsolve.greedy.decoding import decode
from zbsolve.problem.placement import mirror
from zbsolve.search import finder
from zbsolve.search.certify import work_bound
from zbsolve.search.extension import extended, sizes_of, targets_cut_by_time
from zbsolve.search.finder import find, search_of
from zbsolve.search.sources import Search
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from ..support.problems import uniform


def tight(microbatches: int, ranks: int = 8) -> Problem:
    """Single placement at 1F1B's memory, where freeing W's bytes late costs much: ZB-H1 is not optimal."""
    times = [20] * ranks, [20] * ranks, [18] * ranks
    return pipeline(*times, microbatches=microbatches, comm=1, held_until_B=4, held_until_W=2, capacity=6 * ranks)


def test_a_periodic_schedule_goes_on_with_its_period() -> None:
    """Lanes that start apart and end at one moment: what is cut in the middle is all lanes' period, again and again."""
    few, many, period = 12, 31, 7
    offset = np.array([0, 5, 23, 40])[:, None]
    start, whole = offset + period * np.arange(few), offset + period * np.arange(many)
    assert (next(targets_cut_by_time(start, many)) == whole).all()


@pytest.mark.parametrize("wave", [3, 20])
def test_waves_of_as_many_microbatches_as_memory_holds_are_repeated_whole(wave: int) -> None:
    """Three waves, fast within and far apart: fewer microbatches show no period, and a ramp is shorter than any."""
    offset, microbatches = np.array([0, 5, 23, 40])[:, None], np.arange(5 * wave)
    whole = offset + 30 * wave * (microbatches // wave) + 10 * (microbatches % wave)
    least = int(whole.max()) - 20
    first, other = islice(targets_cut_by_time(whole[:, : 3 * wave], len(microbatches), least, wave), 2)
    assert (first == whole).all() or (other == whole).all()
    ramp = next(targets_cut_by_time(whole[:, : 3 * wave], len(microbatches), 0, wave))
    assert ramp.max() < whole.max() - 20


def test_what_was_before_the_moment_stays_and_the_cool_down_comes_behind() -> None:
    """Ranks 0 and 1 of 1F1B: a warm-up, a steady state, a cool-down."""
    problem = uniform("single", 4, 10, (2, 3, 1), 4)
    g = microbatch_graph(problem)
    assert g is not None
    start = np.asarray(preset("zb-h1", problem).timeline().start)[g.passes]
    many, seen = 17, 0
    for target in islice(targets_cut_by_time(start, many), 40):
        assert target.shape == (len(start), many)
        kept = (target[:, :10] == start).argmin(axis=1)  # of each lane, up to the moment
        moved = target[:, -3:] - start[:, -3:]
        seen += len(np.unique(kept)) > 1 and len(np.unique(moved)) == 1
        assert (moved > 0).all()
        assert (np.diff(target, axis=1) >= 0).all()
    assert seen > 5


def test_a_steady_state_is_decoded_to_a_schedule_that_is_only_periods_longer() -> None:
    """From 20 to 33 microbatches: what is above the work stays."""
    few, many = tight(20, 4), tight(33, 4)
    g, small = microbatch_graph(many), preset("zb-h1", few).timeline()
    assert g is not None
    graph = microbatch_graph(few)
    assert graph is not None
    start = np.asarray(small.start)[graph.passes]
    found = [decode(g, target) for target in islice(targets_cut_by_time(start, 33), 12)]
    assert min(one.value for one in found if one is not None) == small.makespan + 13 * 58


def test_it_finds_what_no_named_schedule_has() -> None:
    problem = tight(24)
    state = State(problem, Clock(60.0, 2.0), work_bound(problem))
    state.raise_closed_forms()
    state.offer(preset("zb-h1", problem), "zb-h1")
    before = state.value
    for _ in extended(state, search_of(state, 0).small):
        pass
    assert (before, state.solver) == (1574, "extension")
    assert state.value < 1566
    assert state.schedule is not None
    assert verify(problem, state.schedule) == ()
    assert 0 < state.clock.used < 0.5 * 2.0


def test_only_steps_whose_microbatches_repeat_are_extended() -> None:
    assert sizes_of(tight(24)) == [20, 16, 18]
    assert sizes_of(tight(64)) == [20, 16, 24, 18]
    assert sizes_of(tight(17)) == [12]
    assert sizes_of(tight(16)) == []  # of few passes
    assert sizes_of(tight(24).scaled([1.0, 1.1] * 12)) == []
    assert sizes_of(with_all_to_all(tight(24), 3, 3)) == []
    assert sizes_of(pipeline([3] * 4, [4] * 4, [2] * 4, placement=mirror(4), microbatches=48)) == []


@pytest.mark.parametrize("effort", [0.05, 0.4])
def test_a_search_ends_where_its_clock_does(effort: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the schedules of few microbatches, which are looked for where there is time for them alone."""
    problem = uniform("single", 4, 12, (3, 4, 2), 3)
    state, small = State(problem, Clock(60.0, effort), work_bound(problem)), []
    monkeypatch.setattr(finder, "quick", partial(_noted, finder.quick, small))
    for _ in find(search_of(state, 0)):
        if state.done:
            break
    assert small[:1] == ([] if effort < 0.1 else [10])
    assert state.schedule is not None
    assert verify(problem, state.schedule) == ()
    assert state.clock.used < effort + 0.3  # no more than one neighbourhood longer


def _noted(quick: Callable[..., Iterator[None]], small: list[int], search: Search) -> Iterator[None]:
    """`quick`, with the microbatches of the problem that it is asked about noted."""
    small.append(search.problem.microbatches)
    return quick(search)
