"""What a rank has left takes at least what tables say: against all orders of the rest, one by one."""

from __future__ import annotations

import itertools
from math import inf

import numpy as np
import pytest

from zbsolve import pipeline
from zbsolve.ilp.ranks import times_to_go
from zbsolve.ilp.ranks.end_losses import Answer, refute
from zbsolve.ilp.ranks.lanes import Lanes, lanes_of
from zbsolve.ilp.ranks.search_tables import NOTHING_KNOWN, ToGo, place_of_key
from zbsolve.ilp.ranks.times_to_go import TimesToGo

MANY = 1_000_000


def vee(seed: int, ranks: int, microbatches: int, room: int):
    """A V with stages of their own times, in little memory."""
    random = np.random.default_rng(seed)
    F, B, W = (random.integers(*limits, 2 * ranks).tolist() for limits in ((3, 8), (3, 9), (2, 7)))
    u, w = ((1, 1), (3, 1), (1, 0))[seed % 3]
    held = {"held_until_B": u, "held_until_W": w, "capacity": room * (u + w)}
    return pipeline(F, B, W, placement="vee", microbatches=microbatches, comm=int(random.integers(3)), **held)


def least_to_go(lanes: Lanes, placed: tuple[int, ...]) -> float:
    """The least time that the rest of a rank's passes take, µs, over all of their orders; ∞ where none fits the memory."""
    m, best = lanes.head.shape[1], inf
    ends: dict[tuple[int, int], int] = {}

    def go_on(position: tuple[int, ...], free: int, latest: int) -> None:
        nonlocal best
        if latest >= best:
            return
        if sum(position) == m * len(position):
            best = latest
        used = sum(n * int(t - f) for n, t, f in zip(position, lanes.taken, lanes.freed, strict=True))
        for a, j in enumerate(position):
            before = [b for b in range(len(position)) if lanes.lag[b, a] >= 0]
            if j == m or used + lanes.taken[a] > lanes.capacity[0] or any(position[b] <= j for b in before):
                continue
            start = max([free, *(ends[b, j] + int(lanes.lag[b, a]) for b in before if (b, j) in ends)])
            ends[a, j] = end = start + int(lanes.duration[a])
            go_on((*position[:a], j + 1, *position[a + 1 :]), end, max(latest, end + max(0, int(lanes.tail[a, j]))))
            del ends[a, j]

    go_on(placed, 0, 0)
    return best


def told(to_go: ToGo, rank: int, lanes: Lanes, placed: tuple[int, ...]) -> float:
    """What the table of a rank says, µs; ∞ where it says that no order fits."""
    key, first = 0, int(to_go.first[rank])
    for n in placed:
        key = key * (lanes.head.shape[1] + 1) + n
    row = to_go.rows[place_of_key(to_go.rows, first, int(to_go.first[rank + 1]) - first, key)]
    return inf if row[0] < 0 else float(row[1])


@pytest.mark.parametrize(("seed", "rank"), itertools.product(range(6), range(2)))
def test_times_to_go_are_those_of_the_best_order(seed: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact where nothing is merged, never above that where all is; and what fits no window is left out."""
    problem = vee(seed, 2, 2, 3)
    group, alone = lanes_of(problem, (0, 1)), lanes_of(problem, (rank,))
    assert group is not None
    assert alone is not None
    merged, _ = TimesToGo().of(group, MANY, MANY, MANY)
    monkeypatch.setattr(times_to_go, "BREADTH", 1000)
    exact, _ = TimesToGo().of(group, MANY, MANY, MANY)
    window = int(least_to_go(alone, (0,) * 6)) + 3
    within, _ = TimesToGo().of(group, window, window, MANY)
    seen = 0
    for placed in itertools.product(range(3), repeat=6):
        far = alone.lag >= 0
        if any(far[b, a] and placed[b] < placed[a] for a in range(6) for b in range(6)) or sum(placed) < 3:
            continue
        best = least_to_go(alone, placed)
        assert told(exact, rank, alone, placed) == best
        assert told(merged, rank, alone, placed) <= best
        before = sum(n * int(d) for n, d in zip(placed, alone.duration, strict=True))
        assert told(within, rank, alone, placed) == best or before + best > window or int(alone.head.min()) > 0
        seen += best < inf
    assert seen > 20


def test_tables_save_partial_orders() -> None:
    """A V on 4 ranks in half of 1F1B's memory, the two last ranks: the same answers with less than half as many."""
    random = np.random.default_rng(100)
    F, B, W = ([round(t * (1 + random.uniform(-0.2, 0.2))) for _ in range(8)] for t in (500, 550, 450))
    held = {"held_until_B": 5, "held_until_W": 5, "capacity": 40}
    lanes = lanes_of(pipeline(F, B, W, placement="vee", microbatches=8, comm=5, **held), (3, 2))
    assert lanes is not None
    to_go, tried = TimesToGo().of(lanes, 32_386, 32_396, MANY)
    (plain, without), (answer, count) = (refute(lanes, 32_386, 8, MANY, to_go=known) for known in (NOTHING_KNOWN, to_go))
    assert plain is answer is Answer.REFUTED
    assert 2 * (count + tried) < without


def test_tables_are_made_once_and_for_their_windows_alone() -> None:
    lanes, times = lanes_of(vee(0, 2, 4, 3), (0, 1)), TimesToGo()
    assert lanes is not None
    assert times.of(lanes, 300, 400, MANY)[1] > 0
    assert times.of(lanes, 399, 399, MANY)[1] == 0
    assert times.of(lanes, 401, 401, MANY)[1] > 0  # it would be cut too short there
    few, _ = TimesToGo().of(lanes, 300, 400, 4)
    assert len(few.rows) == 0


def test_a_key_that_comes_twice_keeps_the_least_time_and_a_table_is_never_cut_shorter_than_its_window() -> None:
    """Else what is proven by it may be wrong: sorting by a hash may put another set of positions between two alike."""
    keys, least = np.array([5, 9, 5]), np.array([3, 4, 8])
    for order in (slice(None), slice(None, None, -1)):
        table = times_to_go._hashed(keys[order].copy(), least[order].copy())
        assert [table[place_of_key(table, 0, len(table), key), 1] for key in (5, 9)] == [3, 4]
    lanes = lanes_of(vee(0, 2, 4, 3), (0, 1))
    assert lanes is not None
    short, whole = (TimesToGo().of(lanes, 300, within, MANY)[0] for within in (1, 300))
    assert (short.rows[:, 0] >= 0).sum() > 10
    np.testing.assert_array_equal(short.rows, whole.rows)
