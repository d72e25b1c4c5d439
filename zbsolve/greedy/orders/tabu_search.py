"""Tabu search over the orders of passes: one move after the other along a critical path. Compiled.

A step is as long as its longest path. A *block* is a run of passes on that path that follow each other on one stream. The
step gets shorter only if some block begins or ends with another pass. So a pass moves behind the last one of its block or
before its first one, or the first or last one moves inwards (neighbourhood N6 of job shops: Balas and Vazacopoulos, 1998).
The move with the shortest step is made, even if that is longer than before; for some turns it may not be undone (tabu;
Nowicki and Smutnicki, 1996). Moves that exceed the memory are left out: the order of a rank's stream decides it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel, subkernel
from .critical_moves import OrderTables, estimate, move, possible
from .order_times import CIRCLE, hold, longest_inside, retime, time_all

REACH = 16  # places that a pass moves at most
TABU = (8, 24)  # turns for which a move may not be undone, from … to
PATIENCE = 1_000  # after so many turns without a better step, the search restarts from the best order with random moves
KICKS = (1, 24)  # the number of these random moves, from … to
TRIES = 200  # to find a possible random move
# Parts have PART << k passes, about, for k below PART_SIZES. A search in one takes so many turns at most, and ends after so
# many without a gain.
PART, PART_SIZES, MOST_IN_PART, PATIENCE_IN_PART = 100, 4, 1_000, 200
SECONDS_PER_TURN, SECONDS_PER_PASS = 4e-6, 2.5e-8  # the time of one turn, about
SECONDS_TO_PUT_BACK = 1.6e-7  # of a pass, to go back to the best order, about
SLOTS = 1 << 18  # slots of the hash table of tabu pairs; pairs in one slot are tabu together


class Tabu(NamedTuple):
    """The state of a search beside its tables. best: the best order. until: the turn until which each slot (see `_slot`) is
    tabu. numbers: the best value, µs, the turn, and the turn of the last gain. path, ends: scratch."""

    best: Ints
    until: Ints
    numbers: Ints
    path: Ints
    ends: Ints


def turn_seconds(passes: int) -> float:
    """The time of a turn among so many passes, s, about."""
    return SECONDS_PER_TURN + passes * SECONDS_PER_PASS


def begun(tables: OrderTables, value: int) -> Tabu:
    """The state of a search that begins with an order of this value, µs."""
    numbers = np.array([value, 0, 0], np.int64)
    scratch = np.empty(len(tables.order), np.int64), np.empty(REACH + 1, np.int64)
    return Tabu(tables.order.copy(), np.zeros(SLOTS, np.int64), numbers, *scratch)


@kernel
def search_orders(t: OrderTables, state: Tabu, turns: int, target: int, seed: int) -> bool:
    """Take so many turns from the order in the tables, and keep the best order; stop early at `target` µs. Returns False if
    no move is possible any more."""
    np.random.seed(seed)
    value, best = time_all(t), state.numbers[0]
    for _ in range(turns):
        state.numbers[1] += 1
        if best <= target:
            return True
        if state.numbers[1] - state.numbers[2] > PATIENCE:
            value = _begin_again(t, state)
        a, b, forward = _best_move(t, state, value, best)
        if a < 0:
            a, b, forward = _random_move(t)
            if a < 0:
                return False
        value = _made(t, state, a, b, forward, value)
        if value < best:
            state.numbers[0] = best = value
            state.numbers[2] = state.numbers[1]
            state.best[:] = t.order
    return True


@kernel
def search_parts(t: OrderTables, state: Tabu, seconds: float, target: int, seed: int) -> None:
    """Search parts of the step for about so many seconds, from the best order, and keep better ones. A part is all passes
    that start within some time; only these move.

    No path leads out of a part and back into it, so the paths to its passes and from them keep their lengths. A turn takes
    time in proportion to the part. The step is then as long as the longest path through the part, or as one past it, none of
    which gets longer."""
    np.random.seed(seed)
    value, n, sizes = _put_back(t, state), len(t.order), 1
    while sizes < PART_SIZES and PART << sizes < n:
        sizes += 1
    while seconds > 0 and value > target:
        size = PART << np.random.randint(sizes)
        _begin_part(t, size)
        taken = _search_part(t, state, target)
        t.part[0] = 0
        t.passes["inside"][:] = 1
        seconds -= taken * (SECONDS_PER_TURN + size * SECONDS_PER_PASS) + n * SECONDS_TO_PUT_BACK
        value = _put_back(t, state)
        if value < state.numbers[0]:
            state.numbers[0], state.numbers[2] = value, state.numbers[1]


@subkernel
def _begin_part(t: OrderTables, size: int) -> None:
    """Choose a time in which about so many passes start."""
    passes, first, last = t.passes, 0, 0
    for i in range(len(passes)):
        last = max(last, passes[i].head)
    width = max(1, size * last // len(passes))
    begin = passes[np.random.randint(len(passes))].head - np.random.randint(width)
    for s in range(len(t.streams) if t.span else 0):  # a rank's first pass decides what others of it count
        first = max(first, passes[t.order[t.streams[s].first]].head + 1)
    for i in range(len(passes)):
        passes[i].inside = max(first, begin) <= passes[i].head < begin + width
        if passes[i].inside:
            t.part[0] += 1
            t.part[t.part[0]] = i


@subkernel
def _search_part(t: OrderTables, state: Tabu, target: int) -> int:
    """Take turns inside the part, and keep the order with the shortest paths through it. Returns how many there were."""
    value = least = longest_inside(t)
    taken, gained = 0, 0
    while taken < MOST_IN_PART and taken - gained < PATIENCE_IN_PART and least > target:
        taken += 1
        state.numbers[1] += 1
        a, b, forward = _best_move(t, state, value, least)
        if a < 0:
            break
        value = _made(t, state, a, b, forward, value)
        if value < least:
            least, gained = value, taken
            state.best[:] = t.order
    return taken


@subkernel
def _put_back(t: OrderTables, state: Tabu) -> int:
    """Restore the best order. Returns its value, µs."""
    t.order[:] = state.best
    for k in range(len(t.order)):
        t.passes[t.order[k]].place = k
    return time_all(t)


@subkernel
def _begin_again(t: OrderTables, state: Tabu) -> int:
    """Restart from the best order with some random moves. Returns the value, µs."""
    state.numbers[2] = state.numbers[1]
    state.until[:] = 0
    value = _put_back(t, state)
    for _ in range(KICKS[0] + np.random.randint(KICKS[1] - KICKS[0] + 1)):
        a, b, forward = _random_move(t)
        value = _made(t, state, a, b, forward, value)
    return value


@subkernel
def _made(t: OrderTables, state: Tabu, a: int, b: int, forward: bool, value: int) -> int:
    """Make a move and mark its reversal tabu for some turns. Returns the value, µs. If it closes a cycle, or is none
    (a < 0), nothing changes."""
    if a < 0:
        return value
    move(t, a, b, forward)
    new = retime(t, a, b, 1 if forward else b - a)
    if new == CIRCLE:
        move(t, a, b, not forward)
        return value
    hold(t, a, b + 1)
    until = state.numbers[1] + TABU[0] + np.random.randint(TABU[1] - TABU[0] + 1)
    for k in range(a, b):
        if forward:
            state.until[_slot(t.order[b], t.order[k])] = until
        else:
            state.until[_slot(t.order[k + 1], t.order[a])] = until
    return new


@subkernel
def _slot(moved: int, other: int) -> int:
    """The slot of the pair: pass `moved` may not go from behind pass `other` to before it."""
    return ((moved * 1_000_003 + other) * 2_654_435_761 >> 7) & (SLOTS - 1)


@subkernel
def _is_tabu(t: OrderTables, state: Tabu, a: int, b: int, forward: bool) -> bool:
    """Whether a move reverses the order of a pair that a recent move made."""
    for k in range(a, b):
        pair = _slot(t.order[k + 1], t.order[a]) if forward else _slot(t.order[b], t.order[k])
        if state.until[pair] > state.numbers[1]:
            return True
    return False


@subkernel
def _best_move(t: OrderTables, state: Tabu, value: int, best: int) -> tuple[int, int, bool]:
    """The move in the blocks of a critical path with the least estimate, among those that are not tabu or may beat the best;
    of equals a random one. If all are tabu, a random one of them; a = −1: there is no move."""
    length = _critical_path(t, value, state.path)
    move_a, move_b, move_forward, least, equals = -1, -1, True, 1 << 60, 0
    other_a, other_b, other_forward, seen = -1, -1, True, 0
    high = length - 1
    while high >= 0:
        low, end = high, t.streams[t.passes[state.path[high]].stream].last
        while low > 0 and t.passes[state.path[low]].place + 1 == t.passes[state.path[low - 1]].place < end:
            low -= 1
        first, last = t.passes[state.path[high]].place, t.passes[state.path[low]].place
        high = low - 1
        for step in range(1, min(REACH, last - first) + 1):
            for way in range(4):
                forward = way < 2
                a = first if way == 1 or way == 2 else last - step
                b = a + step
                # A swap of neighbours is tried once; so is a move over the whole block, which is the same from both ends.
                if (step == 1 and not forward) or (step == last - first and way % 2 == 1):
                    continue
                if not possible(t, a, b, forward):
                    continue
                seen += 1
                if np.random.randint(seen) == 0:
                    other_a, other_b, other_forward = a, b, forward
                estimated = estimate(t, a, b, forward, least, state.ends)
                if estimated > least or (estimated >= best and _is_tabu(t, state, a, b, forward)):
                    continue
                equals = 1 if estimated < least else equals + 1
                if estimated < least or np.random.randint(equals) == 0:
                    move_a, move_b, move_forward, least = a, b, forward, estimated
    return (other_a, other_b, other_forward) if move_a < 0 else (move_a, move_b, move_forward)


@subkernel
def _critical_path(t: OrderTables, value: int, path: Ints) -> int:
    """Fill `path` with a random critical path, its last pass first, and return its length."""
    passes, links, streams, order = t.passes, t.links, t.streams, t.order
    at, count, latest = -1, 0, -1
    for s in range(len(streams) if t.part[0] == 0 else 0):
        last = order[streams[s].last - 1]
        if passes[last].head + passes[last].duration - streams[s].origin == value:
            count += 1
            if np.random.randint(count) == 0:
                at = last
    for k in range(1, 1 + t.part[0]):
        row = passes[t.part[k]]
        if row.head + row.duration + row.tail == value and row.level > latest:
            at, latest = t.part[k], row.level
    length = 0
    while at >= 0 and passes[at].inside:
        path[length] = at
        length += 1
        row, at, count = passes[at], -1, 0
        if row.place > streams[row.stream].first:
            before = order[row.place - 1]
            if passes[before].head + passes[before].duration == row.head:
                at, count = before, 1
        for x in range(row.in_first, row.in_last):
            before = links[x].other
            if passes[before].head + passes[before].duration + links[x].lag == row.head:
                count += 1
                if np.random.randint(count) == 0:
                    at = before
    return length


@subkernel
def _random_move(t: OrderTables) -> tuple[int, int, bool]:
    """A random possible move; a = −1: none was found."""
    for _ in range(TRIES):
        a = np.random.randint(len(t.order))
        stream = t.streams[t.passes[t.order[a]].stream]
        b = min(stream.last - 1, a + 1 + np.random.randint(REACH))
        forward = np.random.randint(2) == 0
        if b > a and possible(t, a, b, forward):
            return a, b, forward
    return -1, -1, True
