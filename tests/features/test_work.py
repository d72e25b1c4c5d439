"""Work beside a step: hand numbers, exhaustive optima, what fits for nothing, wrong use."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Problem, Step, pipeline, solve, verify
from zbsolve.build import Work, with_work
from zbsolve.features.work import WORK
from zbsolve.known_steps import step_again
from zbsolve.search.idle_room import work_room

from ..support.exact_streams import optimum
from ..support.profiles import equal_layers
from ..support.stream_checks import bounds_hold, solve_is_exact

read = WORK.fields[0].read


def textbook(ranks: int = 4, microbatches: int = 8, room: int | None = None) -> Problem:
    """F = B = W = 10 µs; a microbatch keeps 1 byte until B and 1 until W."""
    capacity = None if room is None else [room] * ranks
    times = [10] * ranks
    return pipeline(times, times, times, microbatches=microbatches, held_until_B=1, held_until_W=1, capacity=capacity)


def test_a_zero_bubble_step_has_room_for_its_ends_alone() -> None:
    """ZB-H2's step: (p − 1)(F + B − 2W) = 0 of bubble between a rank's first and last pass, so of a makespan of
    m(F + B + W) + (p − 1)F = 270 each rank is idle for (p − 1)F = 30: three pieces of 10 fit, and four do not."""
    found = work_room(textbook(), 10, range(4), effort=0.3)
    assert (found.value, found.pieces, found.most) == (270, 3, 3)
    assert found.share == pytest.approx(30 / 270) == pytest.approx(found.bubble)
    assert verify(found.schedule.problem, found.schedule) == ()
    assert len(found.schedule.problem.rows("J")) == 12


def test_work_that_waits_for_gradients_makes_the_step_longer() -> None:
    """The last rank starts at 30 and works until 270: work of 20 behind its last gradients ends at 290. Before stage 0's
    first F it delays all by 20."""
    for where in ({"rank": 3, "after": 3}, {"rank": 0, "before": 0}):
        problem = with_work(textbook(), Work(time=20, pieces=2, **where))
        schedule = solve(problem, effort=0.3, prefer=None)
        assert schedule.certificate is not None
        assert schedule.certificate.bound <= schedule.certificate.value <= 290
        assert verify(problem, schedule) == ()
    first = schedule.timeline()
    assert first["0J1"][1] <= first["0F0"][0]


def random_step(seed: int) -> Problem:
    """Two ranks, two microbatches, works of all kinds."""
    rng = random.Random(seed)
    times = [[rng.randint(1, 6) for _ in range(2)] for _ in range(3)]
    plain = pipeline(
        times[0], times[1], times[2], microbatches=2, comm=rng.randint(0, 3), held_until_B=1, held_until_W=1, capacity=[4, 4]
    )
    works = []
    for _ in range(rng.randint(1, 2)):
        rank, pieces = rng.randrange(2), rng.randint(1, 2)
        moment: dict[str, Any] = rng.choice(({}, {"before": rank}, {"after": rank}))
        held = rng.randint(0, 1) if pieces > 1 or "before" in moment else 0
        works.append(Work(rank, rng.randint(pieces, 8), pieces, held=held, **moment))
    return with_work(plain, *works)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_values_on_random_works(seed: int) -> None:
    problem = random_step(seed)
    bounds_hold(problem)
    if seed % 4 == 0:
        solve_is_exact(problem)


def test_more_never_fits_than_the_exhaustive_optimum_says() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        plain = pipeline([rng.randint(1, 5) for _ in range(2)], BW=[rng.randint(1, 7) for _ in range(2)], microbatches=2)
        found = work_room(plain, 2, [1], effort=0.1)
        assert found.value == optimum(plain)
        for count in range(1, found.most + 2):
            longer = optimum(with_work(plain, Work(1, 2 * count, count))) > found.value  # type: ignore[operator]
            assert longer == (count > found.most)
        assert found.pieces == found.most


@pytest.mark.parametrize(
    ("piece", "ranks", "why"),
    [
        (10, [0, 9], r"work 1: there is no rank 9 \(they are 0 to 3\)"),
        (0, [0], "work 0: time and bytes are whole numbers, the time at least 1"),
        (10, [], "work: on one rank at least"),
    ],
)
def test_no_room_is_asked_of_what_cannot_be(piece: int, ranks: list[int], why: str) -> None:
    with pytest.raises(BadInput, match=f"^{why}"):
        work_room(textbook(), piece, ranks)


def test_pieces_that_are_too_many_are_refused() -> None:
    """Each rank is idle for 20,000 of 260,000 µs, and a work has 10,000 pieces at most: no number of them is proven."""
    times = [20_000] * 2
    step = pipeline(times, times, times, microbatches=4)
    with pytest.raises(BadInput, match=r"^work: 20000 pieces of 1 µs may fit, and 10000 are possible: take longer ones"):
        work_room(step, 1, [0], effort=0.05)
    assert work_room(step, 4_000, [0, 0], effort=0.05).most == 5


def test_what_it_holds_counts() -> None:
    """While its two pieces hold 1 byte, no second microbatch is there on a rank with room for one and a byte."""
    plain = textbook(1, 2, room=2)
    assert solve(with_work(plain, Work(0, 10, 2)), effort=0.1).certificate.value == 70  # type: ignore[union-attr]
    problem = with_work(plain, Work(0, 10, 2, held=2))
    schedule = solve(problem, effort=0.1)
    assert schedule.certificate is not None
    assert schedule.certificate.value == schedule.certificate.bound == 70
    assert max(schedule.timeline().peak_bytes) == 2
    with pytest.raises(Infeasible):
        solve(with_work(plain, Work(0, 10, 2, held=3)), effort=0.1)


def test_words_say_it() -> None:
    assert read("0-1:40ms/8") == (Work(0, 40_000, 8), Work(1, 40_000, 8))
    assert read("2:5ms:before=2:held=1KiB any:1s/100") == (
        Work(2, 5_000, 1, before=2, held=1024),
        Work(None, 1_000_000, 100),
    )
    problem = Step(2, 4, work=read("1:30us/3")).problem(equal_layers(4))
    assert [problem.names[i] for i in problem.rows("J")] == ["1J0", "1J1", "1J2"]


def test_work_of_any_rank_goes_where_least_is_to_do() -> None:
    """Ranks have 40 and 80 µs to do; 60 µs in pieces of 10: five and one make 90 each."""
    plain = pipeline([10, 20], BW=[10, 20], microbatches=2)
    problem = with_work(plain, *read("any:61us/6"))
    rows, p = problem.rows("J"), problem.passes
    assert np.bincount(p.rank[rows]).tolist() == [5, 1]
    assert p.duration[rows].sum() == 61


def test_steps_made_anew_keep_its_times_or_say_that_they_cannot() -> None:
    free, bound = (Step(2, 4, work=read(f"1:30us/3{more}")).problem(equal_layers(4)) for more in ("", ":before=1"))
    assert step_again(free, equal_layers(4)).passes.duration.tolist() == free.passes.duration.tolist()
    with pytest.raises(BadInput, match="it has work with a moment or bytes of its own"):
        step_again(bound, equal_layers(4))


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (Work(4, 5), "work 0: there is no rank 4"),
        (Work(0, 5, 0), "work 0: 0 pieces"),
        (Work(0, 0), "work 0: time and bytes"),
        (Work(0, 5, before=0, after=0), "work 0: its latest moment, before stage 0, lies before its earliest, after 0"),
        (Work(0, 5, before=1), "work 0: stage 1 does not lie on rank 0"),
        (Work(None, 5, before=0), "work 0: what has a moment or bytes has a rank"),
        (Work(0, 5, held=1), "work 0: bytes are held from a first piece to a last one"),
    ],
)
def test_wrong_use_is_named(work: Work, why: str) -> None:
    with pytest.raises(BadInput, match=f"^{why}"):
        with_work(textbook(), work)


@pytest.mark.parametrize("said", ["40ms", "0:1ms/x", "0:1ms:when=0", "0:1ms:before=x", "0:soon"])
def test_wrong_words_are_named(said: str) -> None:
    with pytest.raises(BadInput, match=r"work '.*'"):
        read(said)


def test_a_rank_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match=r"work 0: there is no rank 9 \(they are 0 to 1\)"):
        Step(2, 4, work=read("9:30us/3")).problem(equal_layers(4))


def test_what_makes_no_gradients_is_not_waited_for() -> None:
    with pytest.raises(BadInput, match="work 0: stage 0 makes no gradients that it could wait for"):
        with_work(pipeline([1, 1], [1, 1], [1, 1], microbatches=1, untrained=1), Work(0, 5, after=0))


def test_work_comes_in_last() -> None:
    problem = with_work(textbook(), Work(0, 5))
    with pytest.raises(BadInput, match="work: the problem has work already"):
        with_work(problem, Work(0, 5))
