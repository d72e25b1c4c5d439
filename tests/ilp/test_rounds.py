"""Training without an end: a round's mean time, its bounds, and the best found."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from zbsolve import BadInput, Deadlock, Infeasible, Schedule, Slowdown, pipeline, updates, verify
from zbsolve.cli import main
from zbsolve.ilp.steady.periodic import least_period, lower_bound
from zbsolve.ilp.steady.rounds import period, rounds_of, steady_peaks
from zbsolve.problem.placement import mirror
from zbsolve.show.gallery import exhibits
from zbsolve.systems import preset
from zbsolve.systems.one_direction import in_flight
from zbsolve.systems.problems import problem_for

from ..support.exec_tools import random_schedule
from ..support.problems import uniform


def pipedream(p: int, m: int, F=3, BW=6, U=1, **options):
    step = pipeline(F, BW=BW, placement=tuple(range(p)), microbatches=m, **options)
    return updates(step, U, every=1, delay=[p - s for s in range(p)])


@pytest.mark.parametrize("slowed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_mean_is_what_simulation_comes_to(seed, slowed):
    """A cycle's mean against two late rounds of the finite schedule, as far apart as rounds the cycle spans; also where
    passes slow each other, and several rounds repeat together."""
    rng = random.Random(seed)
    p, every = rng.choice([(2, 1), (3, 1), (3, 4), (4, 4)])
    times = [[rng.randint(1, 9) for _ in range(p)] for _ in range(2)]
    rounds = 150 if slowed else 60
    step = pipeline(
        times[0],
        BW=times[1],
        placement=tuple(range(p)),
        microbatches=every * rounds,
        comm=rng.randint(0, 3),
        AF=rng.randint(0, 4),
    )
    problem = updates(step, rng.randint(0, 3), every=every, delay=[p - s for s in range(p)] if every == 1 else 2)
    pairs = (("F", "AF"), ("AF", "F"), ("BW", "AB"), ("AB", "BW"), ("AB", "F")) if slowed else ()
    problem = replace(problem, slowdowns=tuple(Slowdown(*pair, rng.choice([1.25, 1.5, 2.2])) for pair in pairs))
    schedule = preset("pipedream", problem)
    found, timeline = period(schedule), schedule.timeline()
    assert found.time >= period(replace(schedule, problem=replace(problem, slowdowns=()))).time
    apart = found.time.denominator * 12  # all rounds that a cycle can span divide it
    begin = rounds - 6 - apart if apart < rounds - 12 else None
    assert begin is not None
    ends = [max(timeline[f"{s}U{k}"][1] for s in range(p)) for k in (begin, begin + apart)]
    assert ends[1] - ends[0] == found.time * apart


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("a", [0, 10, 20])
def test_pipedream_and_2bw_as_published_and_with_all_to_alls(p, a):
    """No bubble in the steady state (arXiv 1806.03377, section 3.1; 2006.09503, section 3): the bound is the work. An
    all-to-all is exposed 2p − 1 times while p microbatches pass (derived; rank 0's U stands in that way too), and in its
    memory PipeDream's order is the best there is."""
    F, BW, U = 30, 60, 5
    one = pipedream(p, 4 * p, F, BW, U, AF=a, held_until_W=1)
    schedule = preset("pipedream", one)
    limited = replace(one, capacity=schedule.timeline().peak_bytes)
    time = Fraction(p * (F + BW) + (2 * p - 1) * a + U, p) if a else F + BW + U
    assert period(schedule).time == max(time, F + BW + U)
    assert lower_bound(rounds_of(limited))[0] == period(schedule).time
    two = updates(pipeline(F, BW=BW, placement=tuple(range(p)), microbatches=5 * p, AF=a), U, every=p, delay=2)
    assert period(preset("pipedream-2bw", two)).time == p * (F + BW) + (2 * p - 1) * a + U


def test_what_a_plain_step_comes_to_when_it_goes_on():
    problem = pipeline(30, 40, 20, placement=(0, 1, 2, 3), microbatches=16)
    found = period(preset("zb-h1", problem))
    assert found.time == 90
    assert rounds_of(problem).microbatches == 1
    assert period(in_flight(pipeline(30, BW=60, placement=(0, 1), microbatches=8), 1)).time == 180


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("synced", [False, True])
def test_orders_in_groups_and_syncs_as_simulation_has_them(p, synced):
    """Interleaved 1F1B repeats groups of p microbatches. The time that a further microbatch takes, by two finite steps."""

    def build(m):
        times = [[(2 + i % 3) * (1 + (i == 0)) for i in range(2 * p)], [5 + i % 2 for i in range(2 * p)]]
        problem = pipeline(times[0], BW=times[1], placement="loop", microbatches=m, comm=1, held_until_W=1)
        waits = [(f"{p - 1}BW{i}", f"{p}BW{i + 1}") for i in range(m - 1)] if synced else []
        return Schedule(problem, preset("interleaved", problem).order, waits)

    short, long = build(12 * p), build(20 * p)
    found = period(short).time
    assert found == (long.timeline().makespan - short.timeline().makespan) / (8 * p)
    assert (found > period(replace(short, syncs=())).time) == synced
    if synced:
        with pytest.raises(BadInput, match="the waits \\(syncs\\) of one round"):
            period(replace(short, syncs=short.syncs[: 6 * p]))
    else:
        assert steady_peaks(short) == long.timeline().peak_bytes


def test_one_round_is_repeated_as_a_whole():
    """What another round would wait for is known of the order all the same: 0BW0 and the next 0F, over both ranks."""
    assert period(preset("1f1b", pipeline(3, BW=6, placement=(0, 1), microbatches=1))).time == 18


def test_versions_that_are_all_there_only_later_count():
    """Six rounds end before stage 0 has all its versions of weights: what fits then does not fit for ever."""

    def build(m):
        step = pipeline(3, BW=6, placement=(0, 1, 2, 3), microbatches=m, held_until_W=1)
        return updates(step, 1, every=1, delay=[4, 3, 2, 1], parameter_bytes=4)

    short, long = preset("pipedream", build(6)), preset("pipedream", build(40))
    assert steady_peaks(short) == steady_peaks(long) == long.timeline().peak_bytes
    room = short.timeline().peak_bytes
    assert room[0] < steady_peaks(short)[0]
    problem = replace(build(6), capacity=room)
    known = Schedule(problem, short.order)
    assert verify(problem, known) == ()
    found = least_period(problem, 400.0, known=[known])
    assert all(held <= most for held, most in zip(steady_peaks(found.schedule), room, strict=True))
    assert found.time > period(known).time


@pytest.mark.parametrize(
    ("capacity", "time", "strict"), [((3, 2, 1), 14, 14), ((2, 2, 1), 20, 20), ((1, 2, 1), 40, 40), (None, 14, 14)]
)
def test_the_least_period_in_a_memory(capacity, time, strict):
    """Uneven stages; the least that there is, found and proven. In (2, 2, 1) two rounds repeat together in 40 µs; of the
    schedules that are strictly periodic none takes less than 25 µs a round."""
    problem = pipedream(3, 24, [3, 5, 2], [6, 7, 9], 1, held_until_W=1, comm=2)
    problem = replace(problem, capacity=capacity)
    found = least_period(problem, 400.0)
    assert (found.time, found.strict) == (time, strict)
    assert found.bound <= found.time
    assert verify(problem, found.schedule) == ()
    assert period(found.schedule).time == found.time


@pytest.mark.parametrize(
    ("placement", "p", "times", "capacity", "time"),
    [
        ("vee", 4, (3, 4, 2), 4, 21),
        ("loop", 4, (3, 4, 2), 4, 25),
        ("vee", 8, (3, 4, 2), 6, 25),
        ("loop", 8, (2, 2, 1), 8, 14),
        ("single", 8, (3, 4, 2), 4, 16),
    ],
)
@pytest.mark.slow
def test_the_least_period_of_placements(placement, p, times, capacity, time):
    """Several stages a rank, in tight memory: strictly periodic schedules that are proven to be the best such ones."""
    found = least_period(uniform(placement, p, 3 * p, times, [capacity] * p), 400.0)
    assert (found.time, found.strict) == (time, time)
    assert verify(found.schedule.problem, found.schedule) == ()


def test_an_update_before_the_next_round():
    """Delay 1: the next round's forwards wait for all of this one: a step's makespan, (m + p − 1)(F + BW) for m = 2
    microbatches, and the update."""
    problem = updates(pipeline(3, BW=6, placement=(0, 1, 2), microbatches=8), 1, every=2, delay=1)
    found = least_period(problem, 400.0)
    assert found.time == found.strict == (2 + 3 - 1) * 9 + 1
    assert found.bound <= found.time


def test_wrong_use_is_named():
    with pytest.raises(BadInput, match="passes C end a step"):
        rounds_of(pipeline(3, BW=4, placement=mirror(2), microbatches=4, exchange=1))
    with pytest.raises(BadInput, match=r"rounds of 1 microbatches are not alike \(rank\)"):
        rounds_of(pipeline(3, BW=4, placement=mirror(2), microbatches=4))
    with pytest.raises(BadInput, match="of 2 rounds the last two wait for others differently"):
        rounds_of(updates(pipeline(3, BW=4, placement=(0, 1), microbatches=4), 1, every=2, delay=2))
    with pytest.raises(BadInput, match="compute:0 runs no two rounds in one order: give 8 microbatches"):
        period(random_schedule(pipeline(3, BW=4, placement=(0, 1), microbatches=3), 1))
    with pytest.raises(Infeasible, match="the memory fits no schedule that repeats"):
        least_period(replace(pipedream(2, 8, held_until_W=2), capacity=(1, 2)), 400.0)
    problem = pipeline(3, BW=4, placement=(0, 1), microbatches=4)
    order = {"compute:0": [f"0{kind}{m}" for m in range(4) for kind in ("BW", "F")], "compute:1": problem.names[4:8]}
    order["compute:1"] = [f"1{kind}{m}" for m in range(4) for kind in ("F", "BW")]
    with pytest.raises(Deadlock, match="0BW3"):
        period(Schedule(problem, {stream: tuple(names) for stream, names in order.items()}))


def test_from_the_command_line(tmp_path, capsys):
    path, out = str(tmp_path / "schedule.json"), str(tmp_path / "better.json")
    problem = problem_for("pipedream-2bw", 2, 10, 30, 40, 20, update=5, AF=50, held_until_W=1)
    preset("pipedream-2bw", problem).save(path)
    assert main(["check", path, "--period", "--seconds", "4", "-o", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("this order: 175 µs a microbatch (350 µs a round of 2), bubble 47.14%; set by ")
    assert lines[1].startswith("bound: 100 µs a microbatch (200 µs a round of 2), bubble 7.50%; comm:0")
    assert main(["check", out, "--period", "--seconds", "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["bound"] == 200 <= body["period"] <= 350
    assert main(["check", path, "--period", "--seconds", "-1"]) == 2
    assert main(["check", path, "--period", "--bound"]) == 2
    shown = {one.system.name: one.period_bubble for one in exhibits()[0]}
    assert shown["1f1b"] is None
    assert shown["pipedream"] == pytest.approx(0)
