"""Memory in pools beside the devices (offload to a host that ranks share): found, proven, kept within under any timing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from zbsolve import Infeasible, Problem, Schedule, pipeline, solve, verify
from zbsolve.build import Host, with_offload
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule, one_after_another
from zbsolve.greedy.syncs import pools_with_syncs
from zbsolve.util.errors import NotFound

from ..support.exact_streams import optimum
from ..support.problems import random_offloaded
from ..support.stream_checks import bounds_hold, models_are_exact, overfull, solve_is_exact


def offloaded(seeds: range, passes: int, **how) -> list[Problem]:
    """Those of the random problems that offload and have at most so many passes."""
    found = [random_offloaded(seed, **how) for seed in seeds]
    kept = [one for one in found if one.pools and len(one.passes) <= passes]
    assert kept  # or the checks of them would check nothing
    return kept


def tight(capacity: int = 8, host: int = 20, bus: int = 0) -> Problem:
    """Two stages a rank, six microbatches, four bytes each: two stages fit a device, five the host."""
    step = pipeline([30] * 4, [40] * 4, [20] * 4, placement=(0, 1, 1, 0), microbatches=6, held_until_W=4)
    return with_offload(replace(step, capacity=(capacity, capacity)), 15, 15, host=Host(host, shared_bus=bus))


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_no_bound_is_above_the_optimum(first: int) -> None:
    for problem in offloaded(range(first, first + 20), 20):
        bounds_hold(problem)


@pytest.mark.parametrize("first", range(300, 360, 20))
@pytest.mark.slow
def test_solve_finds_and_proves_the_optimum_or_that_there_is_none(first: int) -> None:
    for problem in offloaded(range(first, first + 20), 16):
        solve_is_exact(problem)


def test_both_exact_models_agree() -> None:
    for problem in offloaded(range(400, 440), 13)[:6]:
        models_are_exact(problem)


@pytest.mark.slow
def test_no_timing_holds_more_than_devices_and_host_have() -> None:
    """Random times for every pass, order and syncs kept. Orders alone let one stream run ahead and hold too much."""
    problems = [tight(), tight(8, 16), tight(bus=2), *offloaded(range(24), 100, ranks=4, microbatches=6)]
    found = {seed: over for seed, problem in enumerate(problems) if (over := overfull(problem, seed)) is not None}
    assert sum(max(pools_with_syncs(problems[seed]), default=0) >= problems[seed].ranks for seed in found) > 2
    assert sum(over[True] for over in found.values()) == 0 < sum(over[False] for over in found.values())


def follows(schedule: Schedule, sync: tuple[str, str]) -> bool:
    """Whether a sync follows from edges, orders and the other syncs."""
    arcs, index = schedule.precedence(), schedule.problem.index
    first, last = index[sync[0]], index[sync[1]]
    after: dict[int, list[int]] = {}
    for a, b in zip(arcs.before.tolist(), arcs.after.tolist(), strict=True):
        after.setdefault(a, []).append(b)
    after[first].remove(last)  # the sync itself
    seen, ahead = {first}, [first]
    while ahead:
        new = set(after.get(ahead.pop(), ())) - seen
        seen |= new
        ahead += new
    return last in seen


def test_no_sync_follows_from_the_others() -> None:
    """Of one pool, that is: those of a later one may imply one of an earlier one."""
    problems = [tight(), tight(8, 16), tight(bus=2), tight(16, 24), *offloaded(range(24), 100, ranks=4, microbatches=6)]
    count = following = 0
    for problem in problems:
        with suppress(NotFound):
            schedule = list_schedule(problem, deepest_first(problem))
            found = [sync for sync in schedule.syncs if follows(schedule, sync)]
            assert not found or len(pools_with_syncs(problem)) > 1
            count, following = count + len(schedule.syncs), following + len(found)
    assert count > 50
    assert following < 0.02 * count


@pytest.mark.parametrize(("host", "bus"), [(48, 0), (16, 0), (48, 2)])
def test_the_list_scheduler_needs_no_room_for_what_it_offloads_and_reloads_at_once(host: int, bus: int) -> None:
    """A device of one stage's bytes holds two stages of a microbatch, one after the other."""
    problem = tight(4, host, bus)
    schedule = list_schedule(problem, deepest_first(problem))
    assert verify(problem, schedule) == ()
    assert schedule.timeline().peak_bytes == (4, 4)
    assert schedule.timeline().pool_peaks[0] <= host


def test_room_that_a_copy_takes_ahead_lets_microbatches_overlap() -> None:
    """One microbatch's bytes fit a device. What a copy will send out counts as free once its room in the host is taken, so
    the second microbatch starts before the first is back."""
    step = pipeline([30] * 2, [32] * 2, [21] * 2, microbatches=4, comm=1, held_until_B=6, held_until_W=4)
    for host, bus in ((None, 0), (40, 0), (None, 2)):
        problem = replace(with_offload(step, 30, 30, host=Host(host, shared_bus=bus)), capacity=(10, 10))
        schedule = list_schedule(problem, deepest_first(problem))
        assert verify(problem, schedule) == ()
        assert schedule.timeline()["0F1"][0] < schedule.timeline()["0R0"][1]


def test_a_host_too_small_for_one_copy_is_named() -> None:
    with pytest.raises(Infeasible, match="host:0 needs 4 bytes for one pass, but has 3 bytes"):
        solve(tight(4, 3), effort=0.1)


@pytest.mark.parametrize("bus", [0, 4])
def test_a_host_that_holds_one_copy_of_all_ranks_is_enough(bus: int) -> None:
    """Each copy comes back at once: the ranks' devices hold a microbatch, the host never more than one stage of it."""
    step = pipeline([12] * 8, [14] * 8, [9] * 8, placement=(0, 1, 2, 3, 3, 2, 1, 0), microbatches=4, held_until_W=2)
    problem = with_offload(replace(step, capacity=(4,) * 4), 21, 21, host=Host(3, shared_bus=bus))
    schedule = solve(problem, effort=0.1)
    assert verify(problem, schedule) == ()
    assert schedule.timeline().pool_peaks == (2,)


def test_one_microbatch_after_the_other_is_found_wherever_any_schedule_is() -> None:
    """What one microbatch needs fits, or nothing does: by exhaustive search of small problems."""
    count = {True: 0, False: 0}
    for problem in offloaded(range(500, 600), 16):
        found = one_after_another(problem)
        exists = optimum(replace(problem, objective="makespan")) is not None
        assert (found is not None) == exists
        assert found is None or verify(problem, found) == ()
        count[exists] += 1
    assert min(count.values()) > 5
