"""Work beside a step: hand numbers, exhaustive optima, what fits for nothing, wrong use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Problem, Step, pipeline, preset, solve, verify
from zbsolve.build import Work, with_work
from zbsolve.cli import main
from zbsolve.features.work import WORK
from zbsolve.profile.known_steps import step_again
from zbsolve.search.idle_room import Placed, Room, place_work, with_open_work, work_room

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


def random_works(seed: int) -> tuple[Problem, list[Work]]:
    """Two ranks, two microbatches, works of all kinds."""
    rng = random.Random(seed)
    times = [[rng.randint(1, 6) for _ in range(2)] for _ in range(3)]
    room = rng.choice((None, [4, 4]))
    held: dict[str, Any] = {"held_until_B": 1, "held_until_W": 1, "capacity": room}
    plain = pipeline(times[0], times[1], times[2], microbatches=2, comm=rng.randint(0, 3), **held)
    works: list[Work] = []
    for _ in range(rng.randint(1, 3)):
        rank, pieces = rng.randrange(2), rng.randint(1, 2)
        each = tuple(rng.randint(1, 6) for _ in range(pieces))
        more: dict[str, Any] = rng.choice(
            (
                {},
                {"before": rank, "held": rng.randint(0, 1)},
                {"after": rank, "held": rng.randint(0, pieces - 1)},
                {"stream": "d2h"},
                {rng.choice(("before", "after")): rank, "microbatches": tuple(rng.sample(range(2), pieces))},
                {"rank": None},
            )
        )
        givers = [i for i, work in enumerate(works) if work.pieces == pieces and work.after is None]
        if givers and rng.random() < 0.4:
            more |= {"takes": rng.choice(givers), "comm": rng.randint(0, 3)}
        works.append(Work(**{"rank": rank, "time": each if rng.random() < 0.5 else sum(each), "pieces": pieces, **more}))
    return plain, works


def every_choice(works: list[Work]) -> Iterator[list[Work]]:
    """The works with each choice of ranks that they leave open."""

    def choices(work: Work) -> list[Work]:
        homes = product(range(2), repeat=len(work.times)) if work.chosen else [()]
        return [replace(work, homes=one) for one in homes]

    return map(list, product(*map(choices, works)))


@pytest.mark.parametrize("seed", range(60))
def test_bounds_and_values_on_random_works(seed: int) -> None:
    plain, works = random_works(seed)
    steps = [with_work(plain, *chosen) for chosen in every_choice(works)]
    bounds_hold(steps[0])
    best = min(optimum(step) for step in steps)  # type: ignore[type-var]
    schedule, bound = place_work(plain, *works, effort=0.3)
    assert verify(schedule.problem, schedule) == ()
    assert schedule.problem.digest in {step.digest for step in steps}
    assert bound <= best == schedule.timeline().value  # type: ignore[operator]
    if seed % 8 == 0:
        solve_is_exact(steps[-1])


def test_works_of_a_rank_run_in_any_order() -> None:
    """Whichever is named first: rank 1 runs the longer one before the shorter ones here, and before that was seen the step
    took 28 µs in three of six orders."""
    plain = pipeline([2, 1], [6, 4], [3, 2], microbatches=2, comm=1)
    for times in permutations((6, 2, 3)):
        schedule = solve(with_work(plain, *(Work(1, time) for time in times)), effort=0.1, prefer=None)
        assert schedule.certificate is not None
        assert schedule.certificate.value == schedule.certificate.bound == 27


def test_a_microbatch_with_an_image_may_wait() -> None:
    """Two ranks, two microbatches. The image of microbatch 1 takes 20 µs on rank 1, whose passes take 60: 80 is least, and
    is reached since microbatch 0, which has none, does not wait."""
    plain = textbook(2, 2)
    problem = with_work(plain, Work(1, 20, before=1, microbatches=(1,)))
    names, e = problem.names, problem.edges
    waits = [(names[a], names[b]) for a, b in zip(e.before.tolist(), e.after.tolist(), strict=True)]
    assert [pair for pair in waits if "1J0" in pair] == [("1J0", "1F1")]
    assert not problem.alike
    assert with_work(plain, Work(1, 20, before=1)).alike
    schedule = solve(problem, effort=0.2)
    assert schedule.certificate is not None
    assert schedule.certificate.bound == schedule.certificate.value == 80


def test_a_piece_takes_what_another_rank_has_made() -> None:
    """Rank 0's pieces of 10 µs end at 10 and 20 at the earliest, and are on rank 1 5 µs later: its piece of 30 µs runs from
    25 to 55 at the earliest, behind the first one's of 7."""
    problem = with_work(textbook(2, 2), Work(0, 20, 2), Work(1, (7, 30), takes=0, comm=5))
    e, names = problem.edges, problem.names
    taken = np.flatnonzero(e.carrying("activation") & problem.passes.are("J")[e.before])
    assert [(names[e.before[i]], names[e.after[i]], int(e.lag[i])) for i in taken] == [("0J0", "1J2", 5), ("0J1", "1J3", 5)]
    assert solve(problem, effort=0.1).certificate.value >= 55  # type: ignore[union-attr]
    near = with_work(textbook(2, 2), Work(0, 20, 2), Work(0, 20, 2, takes=0, comm=5))
    assert near.edges.lag[near.edges.carrying("activation") & near.passes.are("J")[near.edges.before]].tolist() == [0, 0]


def test_ranks_are_chosen_and_the_bound_holds_for_every_choice() -> None:
    """Four ranks with 240 of 270 µs to do each, and 12 pieces of 10: three each. Of 15 pieces some rank takes four, and has
    280 to do. Two ranks alone have room for 6, and do 8 by 280. Of 8 pieces of 20 each takes two, as three make 300: that
    leaves 10 of 290, for no rank but the first and the last begins or ends with the step."""
    plain = textbook()
    for pieces, time, ranks, least in ((12, 10, None, 270), (15, 10, None, 280), (8, 10, (0, 1), 280), (8, 20, None, 290)):
        found = place_work(plain, Work(ranks, time * pieces, pieces), effort=2)
        assert found.bound == found.schedule.timeline().value == least
        assert {one.rank for one in found.schedule.problem.passes if one.kind == "J"} <= set(ranks or range(4))


def test_how_much_fits_is_asked_in_words() -> None:
    """Of four ranks each is idle for 30 of 270 µs: three pieces of 10 each, or twelve, whichever does them."""
    alone = solve(textbook(), effort=0.3)
    for said, pieces in (("0-3:10us/most", 3), ("any:10us/most", 12), ("any0,2:10us/most", 6)):
        room = with_open_work(alone, read(said), effort=1.5)
        assert isinstance(room, Room)
        assert (room.pieces, room.most) == (pieces, pieces)
    assert isinstance(with_open_work(alone, read("any:10us"), effort=0.3), Placed)
    with pytest.raises(BadInput, match=r"^work: how much fits \('most'\) is for one work alone"):
        with_open_work(alone, read("any:10us/most 0:5us"))


def test_solve_says_what_work_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks compute for 240 µs of 260, as rank 1 waits for the first F of 20: four pieces of 10 fit, 40 / 520 of all
    ranks' time. 60 µs of any rank make 540 in all, and 270 on each; 20 on rank 0 cost nothing."""
    path = tmp_path / "profile.json"
    equal_layers(4).save(path)
    command = ["solve", str(path), "--ranks", "2", "--microbatches", "4", "--effort", "1", "--work"]
    idle = "without it 7.7% of all ranks' time is idle"
    for said, line in (
        (
            "any:10us/most",
            f"{idle}; 7.7% of all ranks' time (4 pieces) does this work; proven: no order does more without being",
        ),
        (
            "any:60us/6",
            f"{idle}; 11.1% of all ranks' time does this work; the step is 10 µs longer than without it; proven: ",
        ),
        ("0:20us/2", f"{idle}; 3.8% of all ranks' time does this work; proven: no order is shorter without it"),
        ("0:40us", "7.1% of all ranks' time does this work; proven: without it the step takes at least 260 µs"),
    ):
        assert main([*command, said]) == 0
        assert f"\nwork: {line}" in capsys.readouterr().out
    assert main([*command, "any:60us/6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["work"]
    assert (told["value_alone"], told["bound_alone"], told["bound_of_every_choice"]) == (260, 260, 270)
    assert told["share"] == pytest.approx(60 / 540)


def test_what_never_fits_says_which_work() -> None:
    plain = textbook(1, 2, room=3)
    for work, why in (
        (Work(0, 10, 2, held=4), "work 0: it holds 4 bytes, and rank 0 has 3 bytes"),
        (Work(0, 10, before=0, held=2), "work 0: it holds 4 bytes with the F that waits for it, and rank 0 has 3 bytes"),
    ):
        with pytest.raises(Infeasible, match=f"^{why}: no schedule exists"):
            with_work(plain, work)
    both = with_work(plain, Work(0, 10, before=0, held=1), Work(0, 10, before=0, held=1))
    with pytest.raises(Infeasible, match=r"work beside the step, pass 0J0, holds 1 bytes of rank 0's 3 bytes"):
        solve(both, effort=0.5)


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


def test_pieces_on_a_copy_engine_keep_their_turn_in_a_named_order() -> None:
    """The first piece takes 4 bytes until the F that waits for the second one has ended, and is best taken late."""
    problem = pipeline([1, 1], BW=[2, 2], placement=(0, 0), microbatches=3, held_until_B=1, capacity=9)
    schedule = preset("breadth-first", with_work(problem, Work(0, (4, 4), before=0, held=4, stream="h2d")))
    assert schedule.order["h2d:0"] == ("0J0", "0J1")
    assert verify(schedule.problem, schedule) == ()


def test_words_say_it() -> None:
    assert read("0-1:40ms/8") == (Work(0, 40_000, 8), Work(1, 40_000, 8))
    assert read("2:5ms:before=2:held=1KiB any:1s/100") == (
        Work(2, 5_000, 1, before=2, held=1024),
        Work(None, 1_000_000, 100),
    )
    assert read("0,2-3:1ms+2ms:after=0:microbatches=1,3") == tuple(
        Work(rank, (1_000, 2_000), 2, after=0, microbatches=(1, 3)) for rank in (0, 2, 3)
    )
    assert read("any0,2:5ms/most 0:8us/2:takes=0:comm=2us 1:1ms:on=d2h") == (
        Work((0, 2), 5_000, None),
        Work(0, 8, 2, takes=0, comm=2),
        Work(1, 1_000, stream="d2h"),
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
        (Work(None, 5, before=0), "work 0: before, after and held need a rank; work on any rank"),
        (Work((0, 7), 5), "work 0: there is no rank 7"),
        (Work(0, (5, 6), 3), "work 0: 3 pieces: 1 to 10000 are possible, and as many as there are times"),
        (Work(0, 5, None), "work 0: how many pieces fit is open"),
        (Work(0, 5, microbatches=(1,)), "work 0: microbatches are of a moment: say 'before' or 'after'"),
        (Work(0, 5, before=0, microbatches=(8,)), "work 0: there is no microbatch 8"),
        (Work(0, 5, before=0, microbatches=(0, 1)), "work 0: microbatches: 2, not one for each of 1 pieces"),
        (Work(0, 5, takes=0), "work 0: takes: there is no work 0 before it"),
        (Work(0, 5, stream="nvlink"), "work 0: stream 'nvlink': one of compute, d2h, h2d"),
        (Work((0, 1), 5, homes=(2,)), "work 0: homes: rank 2 is none of its ranks"),
        (Work(0, 5, held=1), "work 0: bytes are held from a first piece to a last one"),
    ],
)
def test_wrong_use_is_named(work: Work, why: str) -> None:
    with pytest.raises(BadInput, match=f"^{why}"):
        with_work(textbook(), work)


def test_a_microbatch_that_takes_another_route_is_named() -> None:
    both_ways = pipeline([1, 1], BW=[2, 2], placement="mirror", microbatches=2)
    assert with_work(both_ways, Work(0, 5, before=1, microbatches=(1,))).names[-1] == "0J0"
    with pytest.raises(BadInput, match="work 0: microbatch 0 runs that stage on another rank"):
        with_work(both_ways, Work(0, 5, before=1, microbatches=(0,)))


def test_works_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(BadInput, match=r"^work: its latest moment lies before its earliest: .*0J0 → 0J1"):
        with_work(textbook(), Work(0, 5, after=0), Work(0, 5, before=0, takes=0))
    with pytest.raises(BadInput, match=r"^work 1: takes: work 0 has 2 pieces, and this one 1"):
        with_work(textbook(), Work(0, 5, 2), Work(0, 5, takes=0))


@pytest.mark.parametrize("said", ["40ms", "0:1ms/x", "0:1ms:when=0", "0:1ms:before=x", "0:soon", "0,:1ms", "0:1ms+x"])
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
