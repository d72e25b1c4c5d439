"""Building blocks: periods, memory, published peaks, and that every schedule holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve import Edge, Pass, Problem, pipeline, verify
from zbsolve.greedy.annealing import Annealing, Pattern, anneal_pattern
from zbsolve.greedy.arrays.microbatch import microbatch_graph, reversed_graph
from zbsolve.greedy.arrays.problem_arrays import arrays_of
from zbsolve.greedy.blocks.block_search import block_schedules
from zbsolve.greedy.blocks.building_block import (
    BuildingBlock,
    block_peaks,
    earliest_offsets,
    period_lower_bound,
    serial_block,
    shift_lengths,
)
from zbsolve.greedy.blocks.period_search import anneal_block
from zbsolve.greedy.blocks.steady_state import microbatches_in_flight
from zbsolve.greedy.decoding import DecodeRule, decode, decode_fast, repeated_targets, to_schedule
from zbsolve.systems import preset
from zbsolve.util.clock import Clock

from ..support.problems import SMALL, random_problem, uniform


def offsets(t, formula) -> BuildingBlock:
    """A published block in unit slots: F and B by formula, W in the first free slot of T = 6 after its B."""
    lanes = {}
    d = len(t.capacity)
    for lane in range(len(t.duration)):
        rank = int(t.rank[lane])
        kind = [0, 1, 2][len([k for k in lanes if k[0] == rank]) // 2]
        turn = len([k for k in lanes if k[0] == rank]) % 2
        lanes[rank, kind, turn] = lane
    offset = np.zeros(len(t.duration), np.int64)
    for rank in range(d):
        slots = formula(rank, d)
        for (kind, turn), at in zip([(0, 0), (0, 1), (1, 0), (1, 1)], slots, strict=True):
            offset[lanes[rank, kind, turn]] = at
        busy = {at % 6 for at in slots}
        for turn in (0, 1):
            lane = lanes[rank, 2, turn]
            at = int(offset[t.in_lane[t.in_first[lane] : t.in_first[lane + 1]]].max()) + 1
            while at % 6 in busy:
                at += 1
            busy.add(at % 6)
            offset[lane] = at
    return BuildingBlock(offset, 6)


def v_min(i, d):
    shift = 2 if d % 3 == 0 else 0
    return i, 2 * d - i - 1, 2 * d + shift + i, 4 * d + shift - i - 1


def v_half(i, d):
    shift = 3 if d % 2 == 0 else 0
    return 2 * i, 3 * d - i - 2, 3 * d + shift + 2 * i - 1, 6 * d + shift - i - 2


def value(problem, effort, seed=0):
    last = None
    for schedule in block_schedules(problem, Clock(600.0, effort), effort, seed):
        assert verify(problem, schedule) == ()
        assert last is None or schedule.timeline().value < last
        last = schedule.timeline().value
    return last


def legal_block(t, period, rounds, seeds=1) -> BuildingBlock | None:
    """A legal block of this period, or None where annealing finds none with any of the seeds."""
    start = np.zeros(len(t.duration), np.int64)
    found = (anneal_block(t, start, period, rounds, seed) for seed in range(seeds))
    return next((block for block, legal in found if legal), None)


@pytest.mark.parametrize("ranks", [4, 5, 6, 8, 9, 12, 16])
@pytest.mark.parametrize(("formula", "peak"), [(v_min, lambda p: (p + 4) // 3), (v_half, lambda p: (p + 2) // 2)])
def test_published_blocks_hold_their_peaks(ranks, formula, peak):
    """arXiv 2405.15362, table 2 and appendix: at most (p + 4)//3 and (p + 2)//2 microbatches, two halves each."""
    t = microbatch_graph(uniform("vee", ranks, 4))
    assert block_peaks(t, offsets(t, formula)).max() <= 2 * peak(ranks)


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
def test_no_bubble_repeats_at_v_min_memory(ranks):
    """Unit times: period 6 = the work of a rank, at 2⌊(p + 4)/3⌋ half microbatches."""
    problem = uniform("vee", ranks, 4, (1, 1, 1), 2 * ((ranks + 4) // 3))
    t = microbatch_graph(problem)
    found = legal_block(t, 6, 4000, seeds=8)
    assert found is not None
    assert (block_peaks(t, found) <= t.capacity).all()


def test_period_21_at_half_memory():
    """Times 3, 4, 2, capacity 8 halves, p = 8: the best published scheduler repeats every 24 µs."""
    t = microbatch_graph(uniform("vee", 8, 4, (3, 4, 2), 8))
    found = legal_block(t, 21, 4000, seeds=8)
    assert found is not None
    assert (block_peaks(t, found) <= t.capacity).all()


def test_a_serial_block_needs_one_microbatch_of_memory():
    problem = uniform("vee", 4, 4, (3, 4, 2), 2)
    t = microbatch_graph(problem)
    assert block_peaks(t, serial_block(t)).tolist() == [2, 2, 2, 2]
    assert period_lower_bound(t) <= serial_block(t).period


@pytest.mark.parametrize(("ranks", "microbatches", "capacity", "most"), [(8, 64, 8, 1439), (8, 24, 6, 687)])
@pytest.mark.slow
def test_v_at_half_memory(ranks, microbatches, capacity, most):
    assert value(uniform("vee", ranks, microbatches, (3, 4, 2), capacity), 1) <= most


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow
def test_small_problems(name):
    assert value(SMALL[name], 0.03) is not None


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow
def test_random_problems(seed):
    assert value(random_problem(seed), 0.03) is not None


@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
def test_eager_offsets_are_longest_paths(placement):
    problem = uniform(placement, 4, 3, (30, 41, 22), 2, comm=5)
    t = microbatch_graph(problem)
    assert earliest_offsets(t).tolist() == arrays_of(problem).depth[t.passes[:, 0]].tolist()


def test_rows_of_a_pattern_take_turns():
    t = microbatch_graph(uniform("single", 2, 5, (3, 4, 2), 2))
    rows = np.arange(2 * len(t.duration)).reshape(2, -1)
    target = repeated_targets(t, rows, 100)
    assert target[:, 0].tolist() == rows[0].tolist()
    assert target[:, 3].tolist() == (rows[1] + 300).tolist()
    assert (repeated_targets(t, rows[0], 7) == rows[0][:, None] + 7 * np.arange(5)).all()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
def test_a_pattern_is_improved(placement, rows):
    """Better than what it began from (as good with the one trial that is the beginning itself), and decodes to its value."""
    problem = uniform(placement, 6, 24, (3, 4, 2), 4 if placement == "single" else 8)
    t, rule = microbatch_graph(problem), DecodeRule(0, 0, 1)
    block = serial_block(t)
    first = decode(t, repeated_targets(t, *block), rule)
    begin = Pattern(np.repeat(block.offset[None], rows, axis=0), block.period, rule)
    once = Annealing(shift_lengths(t), 0, 1, 9.0, 5)
    alone = anneal_pattern(t, begin, (), once)
    assert first is not None
    assert alone is not None
    assert alone[1].value == first.value
    longer = once._replace(rounds=500)
    one, other = (anneal_pattern(t, begin, (DecodeRule(), rule), longer) for _ in range(2))
    assert one is not None
    assert other is not None
    pattern, found = one
    assert found.value < first.value
    assert (other[1].order == found.order).all()
    assert decode(t, repeated_targets(t, pattern.offset, pattern.period), pattern.rule).value == found.value
    schedule = to_schedule(problem, t, found.order)
    assert verify(problem, schedule) == ()
    assert schedule.timeline().value == found.value
    reached = anneal_pattern(t, begin, (DecodeRule(), rule), longer._replace(target=first.value))
    assert reached is not None
    assert reached[1].value == first.value


def test_a_pattern_without_room_is_none():
    t = microbatch_graph(uniform("single", 2, 3, (3, 4, 2), 2))
    block = serial_block(t)
    begin = Pattern(block.offset[None], block.period, DecodeRule())
    annealing = Annealing(shift_lengths(t), 0, 9, 1.0, 0)
    assert anneal_pattern(t._replace(capacity=np.zeros(2, np.int64)), begin, (), annealing) is None


@pytest.mark.parametrize(
    ("placement", "ranks", "microbatches", "capacity", "most"),
    [("loop", 16, 64, 16, 14400), ("single", 16, 64, 8, 9350)],
)
@pytest.mark.slow
def test_tight_memory_on_many_ranks(placement, ranks, microbatches, capacity, most):
    """Half of 1F1B's memory: 15219 and 9592 without annealing of patterns."""
    problem = uniform(placement, ranks, microbatches, (30, 30, 21), capacity, comm=2)
    found = list(block_schedules(problem, Clock(60, 2), 2))
    assert verify(problem, found[-1]) == ()
    assert found[-1].timeline().value <= most


def test_a_reversed_problem_is_as_long():
    problem = uniform("vee", 4, 6, (3, 4, 2), 6)
    t = microbatch_graph(problem)
    back = reversed_graph(t)
    again = reversed_graph(back)
    assert (again.before == t.before).all()
    assert (again.passes == t.passes).all()
    block = serial_block(back)
    length, start, *_ = decode(back, repeated_targets(back, *block))
    assert length == start.max() + back.duration[start.max(axis=1).argmax()]


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_decoding_is_given_up_only_beyond_its_limit(objective: str) -> None:
    """With a limit: the same schedule where it keeps to it, and none where every schedule or this one is longer."""
    given_up, random = 0, np.random.default_rng(5)
    for seed in range(40):
        problem = replace(random_problem(seed), objective=objective)
        g = microbatch_graph(problem)
        if g is None:
            continue
        target = random.integers(0, 60, (len(g.rank), g.microbatches))
        value, start, order = decode_fast(g, target, DecodeRule())
        for limit in (value - 1, value - 10, value / 2) if value > 0 else ():
            given_up += decode_fast(g, target, DecodeRule(), limit)[0] < 0
            assert decode_fast(g, target, DecodeRule(), limit)[0] in (-1, value)
        for limit in (value, value + 5) if value >= 0 else ():
            again = decode_fast(g, target, DecodeRule(), limit)
            assert (again[0], again[1].tolist(), again[2].tolist()) == (value, start.tolist(), order.tolist())
    assert given_up > 30


def test_the_order_decodes_to_its_value():
    problem = uniform("loop", 4, 6, (3, 4, 2), 6)
    t = microbatch_graph(problem)
    length, start, order, _ = decode(t, repeated_targets(t, *serial_block(t)))
    schedule = to_schedule(problem, t, order)
    assert schedule.timeline().value == length
    assert (schedule.timeline().start[t.passes] == start).all()


def test_effort_is_obeyed_and_gives_the_same_schedules():
    problem = uniform("vee", 16, 64, (3, 4, 2), 12)
    found = []
    for _ in range(2):
        clock = Clock(60, 0.5)
        found.append([schedule.order for schedule in block_schedules(problem, clock, 0.5)])
        assert 0.4 < clock.used < 0.6
    assert found[0] == found[1]


def test_what_others_found_is_improved():
    """ZB-V's order needs p microbatches; at less it is mended, at p it is the first of what comes."""
    for capacity in (16, 9):
        problem = uniform("vee", 8, 24, (3, 4, 2), capacity)
        named = preset("zb-v", problem)
        found = list(block_schedules(problem, Clock(60, 0.6), 0.6, others=lambda named=named: [named]))
        assert found
        assert all(verify(problem, schedule) == () for schedule in found)
        if capacity == 16:
            assert min(schedule.timeline().value for schedule in found) <= named.timeline().value


def test_what_is_in_flight_fits_the_memory():
    assert microbatches_in_flight(microbatch_graph(uniform("single", 8, 64, (3, 4, 2), 4))) == 4


def test_problems_that_do_not_repeat_give_nothing():
    odd = Problem.of([Pass("F", 0, 0, 0, 2), Pass("F", 0, 1, 0, 3), Pass("B", 0, 1, 0, 3)], [Edge("0F1", "0B1")])
    assert list(block_schedules(odd, Clock(1), 1)) == []
    linked = Problem.of([Pass("F", 0, 0, 0, 2), Pass("F", 0, 1, 0, 2)], [Edge("0F0", "0F1")])
    assert list(block_schedules(linked, Clock(1), 1)) == []


@pytest.mark.slow
def test_a_large_problem_is_searched_with_few_microbatches():
    problem = pipeline([5] * 32, [6] * 32, [4] * 32, placement="vee", microbatches=128, held_until_W=1, capacity=8)
    found = list(block_schedules(problem, Clock(60, 1.5), 1.5))
    assert found
    assert verify(problem, found[-1]) == ()
