"""Building blocks: periods, memory, published peaks, and that every schedule holds."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve import Edge, Pass, Problem, pipeline, verify
from zbsolve.clock import Clock
from zbsolve.greedy.arrays import arrays
from zbsolve.greedy.blocks import blocks
from zbsolve.greedy.modulo import Block, eager, excess, least_period, peaks, serial, settle, strides
from zbsolve.greedy.presets import preset
from zbsolve.greedy.ramps import walk
from zbsolve.greedy.shapes import Shape, improve_shape
from zbsolve.greedy.steady import extended, few_microbatches, in_flight, shrunk
from zbsolve.greedy.template import reversed_template, shortened, template
from zbsolve.greedy.unroll import Habit, decode, repeat, to_schedule

from .problems import SMALL, random_problem, uniform


def offsets(t, formula) -> Block:
    """A published block in unit slots: F and B by formula, W in the first free slot of T = 6 after its B."""
    lanes = {}
    d = len(t.room)
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
    return Block(offset, 6)


def v_min(i, d):
    shift = 2 if d % 3 == 0 else 0
    return i, 2 * d - i - 1, 2 * d + shift + i, 4 * d + shift - i - 1


def v_half(i, d):
    shift = 3 if d % 2 == 0 else 0
    return 2 * i, 3 * d - i - 2, 3 * d + shift + 2 * i - 1, 6 * d + shift - i - 2


def value(problem, seconds, seed=0):
    last = None
    for schedule in blocks(problem, Clock(seconds), seconds, seed):
        assert verify(problem, schedule) == ()
        assert last is None or schedule.timeline().value < last
        last = schedule.timeline().value
    return last


@pytest.mark.parametrize("ranks", [4, 5, 6, 8, 9, 12, 16])
@pytest.mark.parametrize(("formula", "peak"), [(v_min, lambda p: (p + 4) // 3), (v_half, lambda p: (p + 2) // 2)])
def test_published_blocks_hold_their_peaks(ranks, formula, peak):
    """arXiv 2405.15362, table 2 and appendix: at most (p + 4)//3 and (p + 2)//2 microbatches, two halves each."""
    t = template(uniform("vee", ranks, 4))
    assert peaks(t, offsets(t, formula)).max() <= 2 * peak(ranks)


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
def test_no_bubble_repeats_at_v_min_memory(ranks):
    """Unit times: period 6 = the work of a rank, at 2⌊(p + 4)/3⌋ half microbatches."""
    problem = uniform("vee", ranks, 4, (1, 1, 1), 2 * ((ranks + 4) // 3))
    t = template(problem)
    found = None
    for seed in range(8):
        found = found or settle(t, np.zeros(len(t.duration), np.int64), 6, 4000, seed)
    assert found is not None
    assert not excess(t, found).any()


def test_period_21_at_half_memory():
    """Times 3, 4, 2, capacity 8 halves, p = 8: the best published scheduler repeats every 24 µs."""
    t = template(uniform("vee", 8, 4, (3, 4, 2), 8))
    found = None
    for seed in range(8):
        found = found or settle(t, np.zeros(len(t.duration), np.int64), 21, 4000, seed)
    assert found is not None
    assert not excess(t, found).any()


def test_a_serial_block_needs_one_microbatch_of_memory():
    problem = uniform("vee", 4, 4, (3, 4, 2), 2)
    t = template(problem)
    assert peaks(t, serial(t)).tolist() == [2, 2, 2, 2]
    assert least_period(t) <= serial(t).period


@pytest.mark.parametrize(("ranks", "microbatches", "capacity", "most"), [(8, 64, 8, 1439), (8, 24, 6, 687)])
def test_v_at_half_memory(ranks, microbatches, capacity, most):
    assert value(uniform("vee", ranks, microbatches, (3, 4, 2), capacity), 4) <= most


@pytest.mark.parametrize("name", SMALL)
def test_small_problems(name):
    assert value(SMALL[name], 0.2) is not None


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed):
    assert value(random_problem(seed), 0.15) is not None


@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
def test_eager_offsets_are_longest_paths(placement):
    problem = uniform(placement, 4, 3, (30, 41, 22), 2, comm=5)
    t = template(problem)
    assert eager(t).tolist() == arrays(problem).depth[t.rows[:, 0]].tolist()


def test_rows_of_a_shape_take_turns():
    t = template(uniform("single", 2, 5, (3, 4, 2), 2))
    rows = np.arange(2 * len(t.duration)).reshape(2, -1)
    wish = repeat(t, rows, 100)
    assert wish[:, 0].tolist() == rows[0].tolist()
    assert wish[:, 3].tolist() == (rows[1] + 300).tolist()
    assert (repeat(t, rows[0], 7) == rows[0][:, None] + 7 * np.arange(5)).all()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
def test_a_shape_is_improved(placement, rows):
    """Better than what it began from (as good with the one trial that is the beginning itself), and its walk is its own."""
    problem = uniform(placement, 6, 24, (3, 4, 2), 4 if placement == "single" else 8)
    t, habit = template(problem), Habit(0, 0, 1)
    block = serial(t)
    first = walk(t, repeat(t, *block), habit)
    begin = Shape(np.repeat(block.offset[None], rows, axis=0), block.period, habit)
    alone = improve_shape(t, begin, (), strides(t), 0, 1, 9.0, 5)
    assert first is not None
    assert alone is not None
    assert alone[1].value == first.value
    one, other = (improve_shape(t, begin, (Habit(), habit), strides(t), 0, 500, 9.0, 5) for _ in range(2))
    assert one is not None
    assert other is not None
    shape, found = one
    assert found.value < first.value
    assert (other[1].order == found.order).all()
    assert walk(t, repeat(t, shape.offset, shape.period), shape.habit).value == found.value
    schedule = to_schedule(problem, t, found.order)
    assert verify(problem, schedule) == ()
    assert schedule.timeline().value == found.value
    reached = improve_shape(t, begin, (Habit(), habit), strides(t), first.value, 500, 9.0, 5)
    assert reached is not None
    assert reached[1].value == first.value


def test_a_shape_without_room_is_none():
    t = template(uniform("single", 2, 3, (3, 4, 2), 2))
    block = serial(t)
    begin = Shape(block.offset[None], block.period, Habit())
    assert improve_shape(t._replace(room=np.zeros(2, np.int64)), begin, (), strides(t), 0, 9, 1.0, 0) is None


@pytest.mark.parametrize(
    ("placement", "ranks", "microbatches", "capacity", "most"),
    [("loop", 16, 64, 16, 14400), ("single", 16, 64, 8, 9350)],
)
def test_tight_memory_on_many_ranks(placement, ranks, microbatches, capacity, most):
    """Half of 1F1B's memory: 15219 and 9592 without annealing of shapes."""
    problem = uniform(placement, ranks, microbatches, (30, 30, 21), capacity, comm=2)
    found = list(blocks(problem, Clock(60, 2), 2))
    assert verify(problem, found[-1]) == ()
    assert found[-1].timeline().value <= most


def test_a_reversed_problem_is_as_long():
    problem = uniform("vee", 4, 6, (3, 4, 2), 6)
    t = template(problem)
    back = reversed_template(t)
    again = reversed_template(back)
    assert (again.before == t.before).all()
    assert (again.rows == t.rows).all()
    block = serial(back)
    length, start, _ = decode(back, repeat(back, *block))
    assert length == start.max() + back.duration[start.max(axis=1).argmax()]


def test_the_order_decodes_to_its_value():
    problem = uniform("loop", 4, 6, (3, 4, 2), 6)
    t = template(problem)
    length, start, order = decode(t, repeat(t, *serial(t)))
    schedule = to_schedule(problem, t, order)
    assert schedule.timeline().value == length
    assert (schedule.timeline().start[t.rows] == start).all()


def test_effort_is_obeyed_and_gives_the_same_schedules():
    problem = uniform("vee", 16, 64, (3, 4, 2), 12)
    found = []
    for _ in range(2):
        clock = Clock(60, 0.5)
        found.append([schedule.order for schedule in blocks(problem, clock, 0.5)])
        assert 0.4 < clock.used < 0.6
    assert found[0] == found[1]


def test_what_others_found_is_improved():
    """ZB-V's order needs p microbatches; at less it is mended, at p it is the first of what comes."""
    for capacity in (16, 9):
        problem = uniform("vee", 8, 24, (3, 4, 2), capacity)
        named = preset("zb-v", problem)
        found = list(blocks(problem, Clock(60, 0.6), 0.6, others=lambda named=named: [named]))
        assert found
        assert all(verify(problem, schedule) == () for schedule in found)
        if capacity == 16:
            assert min(schedule.timeline().value for schedule in found) <= named.timeline().value


@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
def test_a_steady_state_repeats(placement):
    """A schedule of few microbatches, stretched, is one of many that costs at most a period each more; and back again."""
    room = 6 if placement == "single" else 12
    few, many = 19, 61
    t = template(uniform(placement, 6, many, (3, 4, 2), room))
    block = settle(t, np.zeros(len(t.duration), np.int64), 2 * least_period(t), 1000)
    assert block is not None
    plain = Habit(0, 0, 1)
    short = walk(shortened(t, few), repeat(shortened(t, few), *block), plain)
    assert short is not None
    period = np.diff(short.start[:, 8:11], axis=1).mean()
    best = min(w.value for wish in extended(short.start, many, 10) if (w := walk(t, wish, plain)) is not None)
    assert (many - few) * least_period(t) <= best - short.value <= (many - few + 2) * period
    assert (shrunk(next(extended(short.start, many, 1)), few, 1).argsort(axis=1) == np.arange(few)).all()


def test_few_microbatches_are_a_few_times_what_is_in_flight():
    t = template(uniform("single", 8, 64, (3, 4, 2), 4))
    assert in_flight(t) == 4
    assert few_microbatches(t) == (17, 13, 9)
    assert few_microbatches(template(uniform("single", 8, 10, (3, 4, 2), 4))) == ()


def test_problems_that_do_not_repeat_give_nothing():
    odd = Problem.of([Pass("F", 0, 0, 0, 2), Pass("F", 0, 1, 0, 3)], [])
    assert list(blocks(odd, Clock(1), 1)) == []
    linked = Problem.of([Pass("F", 0, 0, 0, 2), Pass("F", 0, 1, 0, 2)], [Edge("0F0", "0F1")])
    assert list(blocks(linked, Clock(1), 1)) == []


def test_a_large_problem_is_searched_with_few_microbatches():
    problem = pipeline([5] * 32, [6] * 32, [4] * 32, placement="vee", microbatches=128, held_until_W=1, capacity=8)
    found = list(blocks(problem, Clock(60, 1.5), 1.5))
    assert found
    assert verify(problem, found[-1]) == ()
