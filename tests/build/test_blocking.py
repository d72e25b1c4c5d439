"""Links that block their sender, and a time for each stage and microbatch: against a simulation written here."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Problem, Profile, pipeline, preset, solve, verify
from zbsolve.build.joined import with_fused_backward
from zbsolve.build.restage import restaged
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule

from ..support.exhaustive import optimum


def by_hand(order: dict[str, tuple[str, ...]], rank_of: tuple[int, ...], times, comm) -> dict[str, tuple[int, int]]:
    """Start and end of each pass where a rank that has computed F or B sends its message and does nothing else meanwhile.
    times(kind, stage, microbatch), comm(boundary, microbatch): µs."""
    done: dict[str, tuple[int, int]] = {}
    free, place = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    while any(place[stream] < len(names) for stream, names in order.items()):
        for stream, names in order.items():
            if place[stream] == len(names):
                continue
            name = names[place[stream]]
            kind = name.strip("0123456789")
            stage, i = map(int, name.split(kind))
            waits = {
                "F": [f"{stage - 1}F{i}"] if stage else [],
                "B": [f"{stage}F{i}", *([f"{stage + 1}B{i}"] if stage + 1 < len(rank_of) else [])],
                "W": [f"{stage}B{i}"],
            }[kind]
            if not all(one in done for one in waits):
                continue
            start = max([free[stream], *(done[one][1] for one in waits)])
            free[stream] = start + times(kind, stage, i)
            to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
            if 0 <= to < len(rank_of) and rank_of[to] != rank_of[stage]:
                free[stream] += comm(min(stage, to), i)
            done[name] = start, free[stream]
            place[stream] += 1
    return done


@pytest.mark.parametrize("seed", range(20))
def test_a_message_occupies_its_sender(seed):
    rng = random.Random(seed)
    ranks, m = rng.randint(2, 4), rng.randint(2, 5)
    placement = rng.choice([tuple(range(ranks)), (*range(ranks), *reversed(range(ranks)))])
    stages = len(placement)
    times = {kind: [[rng.randint(1, 9) for _ in range(m)] for _ in range(stages)] for kind in "FBW"}
    comm = [[rng.randint(0, 4) for _ in range(m)] for _ in range(stages - 1)]
    problem = pipeline(**times, comm=comm, placement=placement, microbatches=m, blocking=True)
    schedule = list_schedule(problem, deepest_first(problem))
    found = by_hand(schedule.order, placement, lambda kind, s, i: times[kind][s][i], lambda s, i: comm[s][i])
    assert verify(problem, schedule) == ()
    assert dict(schedule.timeline()) == found
    own = {problem.names[i]: int(us) for i, us in enumerate(problem.passes.duration - problem.sending)}
    assert own == {f"{s}{kind}{i}": times[kind][s][i] for kind in "FBW" for s in range(stages) for i in range(m)}


def test_a_blocking_step_takes_longer_where_a_free_link_hides_messages():
    """F, then its message, then the next F: 3 F of 2 µs and 3 messages of 3 µs in a row on rank 0."""
    free, blocking = (
        pipeline([2, 1], BW=[2, 1], comm=3, microbatches=3, blocking=one, held_until_W=1, capacity=[3, 3])
        for one in (False, True)
    )
    assert optimum(free) < optimum(blocking) == solve(blocking, effort=0.1).certificate.value
    assert blocking.work == 3 * (2 + 3 + 2)


def test_what_a_message_carries_is_held_until_it_is_sent():
    problem = pipeline([2, 2], BW=[2, 2], comm=[4], microbatches=1, held_until_W=[1, 5], blocking=True)
    held = preset("1f1b", problem).timeline()
    assert held["1BW0"] == (8, 14)  # sends until 14
    assert held["0BW0"] == (14, 16)


def test_messages_keep_their_length_on_a_slow_rank_and_follow_their_microbatch():
    problem = pipeline([2, 2], [3, 3], [1, 1], comm=4, microbatches=2, blocking=True)
    assert problem.slowed([2, 1]).passes.duration[:4].tolist() == [8, 8, 2, 2]
    large = problem.scaled([1, 3])
    assert large.passes.duration[:4].tolist() == [6, 18, 2, 6]
    assert large.sending[:4].tolist() == [4, 12, 0, 0]
    assert problem.scaled([1, 3], latency=1).passes.duration[:4].tolist() == [6, 16, 2, 6]
    assert problem.scaled([1, 3], latency=inf).passes.duration[:4].tolist() == [6, 10, 2, 6]


def test_a_factor_a_microbatch():
    """Times, messages and bytes follow the size; with a latency of 4 µs messages are 4 µs and 2 µs a size."""
    problem = pipeline([2, 4], [3, 5], [1, 2], comm=6, microbatches=3, held_until_B=2, held_from_B=4)
    table = [1, 0.5, 2]
    each = [[[round(us * one) for one in table] for us in row] for row in ([2, 4], [3, 5], [1, 2])]
    held = {"held_until_B": [[2, 1, 4]] * 2, "held_from_B": [[4, 2, 8]] * 2}
    same = pipeline(*each, comm=[[6, 3, 12]], microbatches=3, **held)
    assert problem.scaled(table) == same
    assert problem.scaled(table, latency=4) == pipeline(*each, comm=[[6, 5, 8]], microbatches=3, **held)
    assert problem.scaled(table, latency=inf) == pipeline(*each, comm=6, microbatches=3, **held)
    assert problem.alike
    assert not same.alike
    assert problem.scaled([1, 1, 1]) == problem
    for wrong in ([1, 2], [1, 2, -1], [1, 2, float("nan")], [[1, 2, 3]]):
        with pytest.raises(BadInput, match="factors"):
            problem.scaled(wrong)


def test_rows_a_stage_have_one_number_or_one_a_microbatch():
    mixed = pipeline([5, [1, 2, 3]], [[2, 2, 2], 1], np.array([[1, 2, 3], [4, 5, 6]]), microbatches=3, comm=[[1, 2, 3]])
    assert mixed.passes.duration.tolist() == [5, 5, 5, 1, 2, 3, 2, 2, 2, 1, 1, 1, 1, 2, 3, 4, 5, 6]
    assert mixed.edges.lag[:6].tolist() == [1, 2, 3, 1, 2, 3]
    again = pipeline([2, 2], BW=[3, 3], microbatches=2, recompute="all", X=[[4, 5], 6], held_until_B=[[1, 2], 3])
    assert again.passes.duration[again.rows("X")].tolist() == [4, 5, 6, 6]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"F": [[1, 2], [3, 4, 5]]}, r"F\[1\]: 3 values, 2 are needed"),
        ({"F": [[1, 2], [3, -4]]}, r"F\[1\]\[1\]: -4 is negative"),
        ({"F": [[1, [2]], 3]}, r"F\[0\]\[1\]: not a number"),
        ({"comm": [[1, 2], [3, 4]]}, "comm: 2 rows, 1 are needed"),
        ({"blocking": True, "AF": 2}, "blocking: AF and AB"),
    ],
)
def test_wrong_tables_are_refused_by_name(given, said):
    with pytest.raises(BadInput, match=said):
        pipeline(**{"F": [1, 2], "BW": [2, 3], "microbatches": 2, **given})


def test_the_largest_microbatch_must_fit():
    with pytest.raises(Infeasible, match="rank 1 needs 5 bytes for one microbatch, but has 4"):
        pipeline([1, 1], BW=[1, 1], microbatches=3, held_until_W=[1, [1, 5, 2]], capacity=[4, 4])


def test_files_keep_what_of_a_pass_is_its_message():
    problem = pipeline([2, 2], BW=[3, 3], comm=4, microbatches=2, blocking=True)
    body = problem.to_json()
    again = Problem.from_json(body)
    assert again == problem
    assert np.array_equal(again.sending, problem.sending)
    assert "sent" not in pipeline([2, 2], BW=[3, 3], comm=4, microbatches=2).to_json()["edges"]
    body["edges"]["sent"] = [9] * len(problem.edges)
    with pytest.raises(BadInput, match=r"sends for \d+ µs of its"):
        Problem.from_json(body)


def test_other_builders_keep_messages():
    problem = pipeline([2, 3], [4, 5], [1, 1], comm=4, microbatches=2, blocking=True)
    fused = with_fused_backward(problem, np.ones((2, 2), bool), [5, 6])
    other = pipeline([2, 3], BW=[5, 6], comm=4, microbatches=2, blocking=True)
    assert np.array_equal(fused.passes.duration, other.passes.duration)
    assert np.array_equal(fused.sending, other.sending)
    assert restaged(problem, (1, 0)) == pipeline(
        [2, 3], [4, 5], [1, 1], placement=(1, 0), comm=4, microbatches=2, blocking=True
    )


def test_a_profile_says_that_its_link_blocks(tmp_path):
    body = {"layers": [{"F": 10, "BW": 20, "output_bytes": 100}] * 2, "link": {"latency": 1, "bytes_per_us": 50}}
    free = Profile.from_json(body)
    blocking = Profile.from_json({**body, "link": {**body["link"], "blocking": True}})
    problem = blocking.problem(2, 3, fused=True)
    assert problem == pipeline(
        [10, 10], BW=[20, 20], comm=3, microbatches=3, blocking=True, layers=(1, 1), source=problem.source
    )
    assert free.problem(2, 3, fused=True, blocking=True) == problem
    assert blocking.problem(2, 3, fused=True, blocking=False) == free.problem(2, 3, fused=True)
    for one, said in ((free, False), (blocking, True)):
        one.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json").link.blocking is said
        assert ("blocking" in (tmp_path / "profile.json").read_text()) is said
