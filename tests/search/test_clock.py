"""A clock that jumps between two lines, and shares of its time: no search dies of it, and its best comes out verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, HostLink, Profile, Schedule, Step, pipeline, solve, verify
from zbsolve.partition.layer import Layer, Link
from zbsolve.planner import CLUSTERS, Shape
from zbsolve.planner.planning import plan
from zbsolve.problem import Problem
from zbsolve.search import auto, race
from zbsolve.search.auto import solve_auto
from zbsolve.search.extension import extended
from zbsolve.search.keeping import curves
from zbsolve.search.many import solve_many
from zbsolve.search.pareto import frontier
from zbsolve.search.state import State
from zbsolve.util import clock
from zbsolve.util.clock import LEAST_TIME, Clock, limit_of

SECONDS = 0.5  # that each search is told
HOST = HostLink(0, 0.5, 0.5, 0.5, 0.5, 10**6, 2)
LAYERS = tuple(Layer(f"layer{i}", 1000, 1000, 1000, 2000, 200, 800, 0, 200 if i < 7 else 0) for i in range(8))
PROFILE = Profile("given", "toy", LAYERS, Link(1, 1000), 4.0, None, {}, {}, host=HOST)
SHAPE = Shape("toy", 8, 1024, 8, 8, 128, 4096, 1024, 8192)


class Jumping:
    """Seconds since some begin, in place of `time.monotonic`. Each read is some way behind the last, up to `step`; one in
    fifty up to `stall`."""

    def __init__(self, seed: int, step: float, stall: float) -> None:
        self.now, self.random, self.step, self.stall = 0.0, random.Random(seed), step, stall

    def monotonic(self) -> float:
        """The time now."""
        self.now += self.random.random() * (self.stall if self.random.random() < 0.02 else self.step)
        return self.now


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Plants a clock that jumps by up to 1/2 down to 1/128 of a search's time at each read, or, for each second seed, by a
    third of it now and then."""

    def plant(seed: int) -> None:
        step = SECONDS / 2 ** (1 + seed // 2 % 7)
        planted = Jumping(seed, step, 20 * step) if seed % 2 else Jumping(seed, SECONDS / 2000, SECONDS / 3)
        for module in (clock, race, auto):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=planted.monotonic))

    return plant


def drawn(seed: int) -> Problem:
    """A plain step at random: one stage a rank or two, memory tight or ample, with and without sums over replicas."""
    draw = random.Random(seed)
    ranks, placement = draw.choice((2, 3, 4)), draw.choice(("single", "loop", "vee"))
    stages = ranks if placement == "single" else 2 * ranks
    F, B, W = ([draw.randint(5, 40) for _ in range(stages)] for _ in range(3))
    return pipeline(
        F,
        B,
        W,
        placement=placement,
        microbatches=draw.choice((2, 4, 8)) * ranks,
        held_until_W=2,
        capacity=2 * stages if draw.random() < 0.5 else None,
        comm=draw.choice((0, 3)),
        objective=draw.choice(("makespan", "span")),
        exchange=draw.choice((None, None, 9)) if placement != "single" else None,
    )


def assert_holds(schedule: Schedule) -> None:
    """It was verified, and its certificate says what it takes."""
    assert verify(schedule.problem, schedule) == ()
    assert schedule.certificate is not None
    assert schedule.certificate.bound <= schedule.certificate.value == schedule.timeline().value


@pytest.mark.parametrize("seed", range(40))
def test_searches_of_plain_steps(jumping: Callable[[int], None], seed: int) -> None:
    """With both preferences and with CP-SAT alone."""
    problem = drawn(seed)
    jumping(seed)
    how: dict[str, Any] = ({}, {}, {"prefer": "memory"}, {"method": "cp"})[seed // 2 % 4]
    assert_holds(solve(problem, seconds=SECONDS, seed=seed, **how))


def test_what_comes_first_takes_the_share_of_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls while a small step is extended: nothing is left of the share of all sources, but something of
    the search, in which a small step is to be searched again."""
    planted = Jumping(0, SECONDS / 2000, 0.0)

    def stalled(state: State, search: Callable[[State], Iterator[None]]) -> Generator[None, None, int]:
        yield from extended(state, search)
        planted.now += 0.6 * SECONDS
        return 6

    for module in (clock, race, auto):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=planted.monotonic))
    monkeypatch.setattr("zbsolve.search.sources.extended", stalled)
    problem = pipeline([8, 10, 10, 28], [15, 24, 21, 18], [7, 15, 32, 30], microbatches=24, held_until_W=2, capacity=[4] * 4)
    assert_holds(solve(problem, seconds=SECONDS))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("what", ["offload", "sharding", "messages"])
def test_searches_with_streams_and_pools(jumping: Callable[[int], None], what: str, seed: int) -> None:
    """Copies to the host in a full pool, collectives beside passes, and messages that lack room: the searches that have
    searches within them."""
    step = Step(2, 8, "vee", memory=6500, offload="half", objective=("makespan", "span")[seed % 2])
    if what == "sharding":
        step = replace(step, memory=None, offload=(0, 0, 0, 0), shards=2)
    if what == "messages":
        step = replace(step, memory=8800, offload=(0, 0, 0, 0))
    profile = replace(PROFILE, shard_link=Link(5, 100)) if what == "sharding" else PROFILE
    problem = step.problem(profile)
    jumping(seed)
    assert_holds(solve(problem, seconds=SECONDS, seed=seed))


@pytest.mark.parametrize("seed", range(10))
def test_races_of_what_is_left_open(jumping: Callable[[int], None], seed: int) -> None:
    """Placement and partition, or what stages keep, with a search for less memory at the end."""
    step = Step(2, 6, "auto", partition="auto") if seed % 2 else Step(2, 6, "vee", memory=9000, recompute="auto")
    jumping(seed)
    schedule, tried = solve_auto(PROFILE, step, seconds=SECONDS, seed=seed)
    assert_holds(schedule)
    assert [one.why for one in tried].count("") == 1


@pytest.mark.parametrize("seed", range(6))
def test_frontiers(jumping: Callable[[int], None], seed: int) -> None:
    """Of one step, and of several beside each other. Each point's schedule holds in its memory."""
    jumping(seed)
    if seed % 2:
        found = curves(PROFILE, Step(2, 6, "vee", recompute="auto"), points=4, seconds=SECONDS)
        points = [one for each in found.frontiers.values() for one in each.points]
    else:
        points = list(frontier(PROFILE, Step(2, 6, "vee"), points=4, seconds=SECONDS).points)
    assert points
    for one in points:
        assert_holds(one.schedule)
        assert one.peak <= one.memory


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("placement", ["single", "loop", "vee"])
def test_very_long_steps(jumping: Callable[[int], None], placement: str, seed: int) -> None:
    """An order of few microbatches with its round. All passes are looked at in `tests/long_steps`; here a part is."""
    stages = 2 if placement == "single" else 4
    one = pipeline([3] * stages, [4] * stages, [2] * stages, placement=placement, microbatches=1, comm=1)
    jumping(seed)
    long = solve_many(one, 50_000, seconds=SECONDS, seed=seed)
    sample = long.sample()
    assert verify(sample.problem, sample) == ()


@pytest.mark.parametrize("seed", range(4))
def test_plans(jumping: Callable[[int], None], seed: int) -> None:
    """A plan has a schedule that holds, and no bound above it."""
    jumping(seed)
    found = plan(SHAPE, 8, 16, CLUSTERS["a100"], seconds=SECONDS, seed=seed)
    assert found.bound <= found.best.value
    schedule = found.best.schedule
    assert verify(schedule.problem, schedule) == ()


def test_shares_are_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used up before it was read, of a clock that stopped, and of a time that is below nothing."""
    planted = SimpleNamespace(now=0.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: planted.now))
    whole = Clock(2.0)
    half, rest = whole.part(0.5), whole.share(5.0)
    assert (half.left, half.over, rest.left) == (1.0, False, 2.0)
    planted.now = 1.5
    assert (half.left, half.over, rest.left) == (0.0, True, 0.5)
    assert whole.share(-1.0).left == 0.0
    own = whole.apart(-1.0)
    assert (own.left, own.counted, whole.apart(0.25).left) == (0.0, False, 0.25)
    assert whole.limit(-1.0) == {"seconds": LEAST_TIME}
    assert limit_of(3.0, counted=True) == Clock(1.0, 1.0).limit(3.0) == {"effort": 3.0}
    whole.stop()
    assert (rest.left, rest.over) == (0.0, True)
    with pytest.raises(BadInput, match=r"seconds: -0\.03 is not a positive time"):
        Clock(-0.03)


@pytest.mark.slow
def test_many_short_searches_by_the_real_clock() -> None:
    """On whatever machine this runs, beside whatever else."""
    draw = np.random.default_rng(0)
    for seed in range(20):
        how: dict[str, Any] = {"effort": 0.1} if seed % 2 else {"seconds": float(draw.uniform(0.05, 0.3))}
        assert_holds(solve(drawn(seed), seed=seed, **how))
