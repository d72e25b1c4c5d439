"""Endless training: the rounds that repeat in it, and the time of one round.

A problem with updates is a part of endless training. A *round* is the microbatches of one update and the update itself (one
microbatch where there are no updates). Where an order repeats for ever, the mean time of a round is the largest mean weight
of a cycle of passes that wait for each other (timed event graphs: Baccelli et al., *Synchronization and Linearity*, 1992,
theorem 3.112). This value is exact and rational, and does not depend on warm-up and end.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...schedule import Schedule
from ...schedule.timeline import Paced, paced
from ...util.errors import BadInput, Deadlock

MOST_SIMULATED = 2**16  # passes that are simulated at most until slowed rounds repeat, beyond 32 rounds
NEVER = 2**62  # the start of a pass that waits for rounds that are not simulated


class RoundArcs(NamedTuple):
    """Arcs between passes of rounds, one value for each arc. In every round, pass `after` starts at least `lag` µs after the
    end of pass `before` of the round `distance` rounds earlier. Passes are indices into `Rounds.rows`."""

    before: Ints
    after: Ints
    lag: Ints
    distance: Ints


@dataclass(frozen=True, eq=False)
class Rounds:
    """A problem as rounds. rows: the passes of its last round; microbatches: how many each round has; round, place: for
    every pass of the problem, its round and its index in `rows`."""

    problem: Problem
    rows: Ints
    microbatches: int
    round: Ints
    place: Ints

    @property
    def last(self) -> int:
        """The number of the last round."""
        return int(self.round.max())

    def into(self, before: Ints, after: Ints, lag: Ints, number: int | None = None) -> RoundArcs:
        """The arcs between rows of the problem that lead into round `number` (None: the last), as arcs between rounds."""
        number = self.last if number is None else number
        arcs = np.flatnonzero(self.round[after] == number)
        distance = number - self.round[before[arcs]]
        return RoundArcs(self.place[before[arcs]], self.place[after[arcs]], lag[arcs], distance)

    @cached_property
    def edges(self) -> RoundArcs:
        """The graph's edges into the last round."""
        e = self.problem.edges
        return self.into(e.before, e.after, e.lag)

    @cached_property
    def work(self) -> int:
        """µs of the busiest compute stream's work in a round."""
        p = self.problem.passes
        durations = np.where(self.problem.computing[self.rows], p.duration[self.rows], 0)
        return int(np.bincount(p.rank[self.rows], durations).max())


@dataclass(frozen=True, slots=True)
class CycleMean:
    """time: the mean time of a round, µs, in an order that repeats for ever. cycle: the passes, of the last round or earlier
    ones, that wait for each other in turn and so determine it."""

    time: Fraction
    cycle: tuple[str, ...]


def rounds_of(problem: Problem, several: int = 1) -> Rounds:
    """The problem's rounds, or `several` taken as a round, which divides their number. Raises BadInput where rounds differ,
    or are too few to show how one waits for others."""
    p = problem.passes
    update = problem.updating
    others = np.flatnonzero(~problem.in_microbatch & ~update)
    if len(others):
        kind = p.kind_names[others[0]]
        raise BadInput(f"period: passes {kind} end a step, and this is about training without an end")
    if problem.edges.pool.any():
        raise BadInput("period: bytes in pools beside the devices are not modelled")
    every = (problem.round or 1) * several
    rounds = problem.microbatches // every
    turns = np.where(update, several, every)
    number, within = p.microbatch // turns, p.microbatch % turns
    columns = np.stack([p.kind, p.stage, within, p.slice])
    _, place = np.unique(columns, axis=1, return_inverse=True)
    place = place.reshape(-1).astype(np.int64)
    rows = np.flatnonzero(number == rounds - 1)
    rows = rows[np.argsort(place[rows])]
    for what in ("rank", "duration", "streams"):
        column = getattr(p, what)
        if len(rows) * rounds != len(p) or (column != column[rows][place]).any():
            raise BadInput(f"period: rounds of {every} microbatches are not alike ({what})")
    built = Rounds(problem, rows, every, number, place)
    _check_edges(built)
    if rounds > 1 and _sorted_arcs(problem, built, rounds - 1) != _sorted_arcs(problem, built, rounds - 2):
        raise BadInput(f"period: of {rounds} rounds the last two wait for others differently: give more microbatches")
    if rounds == 1 and update.any():
        raise BadInput("period: one round shows nothing of how the next waits for it: give more microbatches")
    return built


def _check_edges(rounds: Rounds) -> None:
    """Raise BadInput where an edge into some round differs in lag or bytes from the same edge into the last round."""
    e, into = rounds.problem.edges, rounds.round[rounds.problem.edges.after]
    key = np.stack([rounds.place[e.before], rounds.place[e.after], into - rounds.round[e.before]])
    kind = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    single = np.bincount(kind * (rounds.last + 1) + into)[kind * (rounds.last + 1) + into] == 1
    like = np.full(len(e), -1, np.int64)
    ours = np.flatnonzero(single & (into == rounds.last))
    like[kind[ours]] = ours
    other = np.flatnonzero(single & (like[kind] >= 0))
    for what, column in (("lag", e.lag), ("bytes", e.bytes)):
        wrong = other[column[other] != column[like[kind[other]]]]
        if len(wrong):
            a, b = (rounds.problem.names[end[wrong[0]]] for end in (e.before, e.after))
            raise BadInput(f"period: rounds are not alike: edge {a} → {b} has another {what} than in the last one")


def _sorted_arcs(problem: Problem, rounds: Rounds, number: int) -> list[tuple[int, ...]]:
    """The edges into a round, with their bytes, in one order: equal for rounds that wait for others alike."""
    e = problem.edges
    arcs = rounds.into(e.before, e.after, e.lag, number)
    size = e.bytes[rounds.round[e.after] == number]
    return sorted(zip(*(column.tolist() for column in (*arcs, size)), strict=True))


def period(schedule: Schedule) -> CycleMean:
    """The mean time of a round if the schedule's order, and its syncs, go on for ever as in its middle.

    Raises BadInput where the order or the syncs do not repeat, Deadlock where what repeats waits for itself.
    """
    rounds, several, repeated = _repeated(schedule)
    orders = list(repeated.values())
    parts = rounds.edges, _syncs(schedule, rounds), *map(_order_as_arcs, orders)
    arcs = RoundArcs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    mean = largest_mean(rounds, arcs)
    if schedule.problem.slowdowns:
        begun = np.zeros(len(rounds.rows), np.int64)  # by the first pass of the repeated order
        for place, later in (entry for order in orders for entry in order):
            begun[place] = max(begun[place], later)
        mean = slowed_mean(rounds, arcs._replace(distance=arcs.distance + begun[arcs.before] - begun[arcs.after]))
    return CycleMean(mean.time / several, mean.cycle)


def _repeated(schedule: Schedule) -> tuple[Rounds, int, dict[str, list[tuple[int, int]]]]:
    """The shortest rounds of which every stream repeats its order, as one or several of the problem's; how many; and the
    order of each stream (see `_repeated_order`). Orders in groups of microbatches, such as Megatron's, repeat only so."""
    rounds, streams = rounds_of(schedule.problem), {name: rows for name, rows in schedule.sequences.items() if len(rows)}
    count, failed = rounds.last + 1, list[BadInput]()
    for several in (number for number in range(1, max(1, count // 2) + 1) if count % number == 0):
        try:
            rounds = rounds_of(schedule.problem, several)
            return rounds, several, {name: _repeated_order(name, rounds, rows) for name, rows in streams.items()}
        except BadInput as error:
            failed.append(error)
    raise failed[0]


def _syncs(schedule: Schedule, rounds: Rounds) -> RoundArcs:
    """The schedule's syncs into a round in its middle. Raises BadInput where those into the next one are others."""
    index, middle = schedule.problem.index if schedule.syncs else {}, rounds.last // 2
    before, after = np.array([[index[name] for name in pair] for pair in schedule.syncs], np.int64).reshape(-1, 2).T
    own, following = (rounds.into(before, after, 0 * before, number) for number in (middle, min(middle + 1, rounds.last)))
    if {*zip(*(c.tolist() for c in own), strict=True)} != {*zip(*(c.tolist() for c in following), strict=True)}:
        raise BadInput("period: the waits (syncs) of one round are not those of the next: give more microbatches")
    return own


def slowed_mean(rounds: Rounds, arcs: RoundArcs) -> CycleMean:
    """`largest_mean` where passes slow each other: rounds are simulated until some of them repeat. It names no cycle.

    What follows a moment depends only on which passes have begun, on the work left in those that run, and on ends for which
    others wait. If all that is as it was some rounds before, those rounds repeat for ever, and their mean is exact. (Rounds
    that begin otherwise may come to another mean.) arcs: between rounds that begin with the first pass of each stream's
    repeated order. Raises BadInput if none repeat.
    """
    number = 32
    while number == 32 or number * len(rounds.rows) <= MOST_SIMULATED:
        start, end, now = _simulated(rounds, arcs, number)
        since = _since(arcs, start, now)
        for apart in range(1, number // 4):
            if time := _repeated_after(apart, start, end, now, since):
                return CycleMean(Fraction(time, apart), ())
        number *= 2
    raise BadInput(f"period: passes slow each other, and no {number // 8 - 1} rounds of this order or fewer repeat exactly")


def _simulated(rounds: Rounds, arcs: RoundArcs, number: int) -> tuple[Ints, Ints, int]:
    """Starts and ends of so many rounds, µs, shape (rounds, passes) each, and the time until which they are known. Rounds
    before have ended. A pass that waits for a later round never starts here. In truth it starts no earlier than the last
    pass that does on its stream ends; so all is known until the first such end."""
    count, passes = len(rounds.rows), rounds.problem.passes.only(rounds.rows)
    turn = np.arange(number)[:, None]
    known = turn >= arcs.distance
    before, after = ((turn - arcs.distance) * count + arcs.before)[known], (turn * count + arcs.after)[known]
    order, lag = np.argsort(before, kind="stable"), np.broadcast_to(arcs.lag, known.shape)[known]
    waiting = np.bincount(after, minlength=number * count)
    first = np.searchsorted(before[order], np.arange(number * count + 1))
    rank, kind = np.unique(passes.rank, return_inverse=True)[1], passes.kind
    columns = first, after[order], lag[order], waiting, np.tile(rank, number), np.tile(kind, number), rounds.problem.paces
    _, left, *times = paced(Paced(*(c.tolist() for c in columns)), np.tile(passes.duration, number).tolist())
    start, end = (np.where(np.array(left) > 0, NEVER, column).reshape(number, count) for column in times[:2])
    return start, end, int(np.where(end == NEVER, -1, end).max(axis=0).min())


def _since(arcs: RoundArcs, start: Ints, now: int) -> int:
    """The earliest start, µs, on which what follows `now` depends: of the last pass that began of each place (one that runs
    is such a pass), and of passes for which others wait."""
    begun, turn = start < now, np.arange(len(start))[:, None] + arcs.distance
    later = np.where(turn < len(start), start[np.clip(turn, 0, len(start) - 1), arcs.after], NEVER) >= now
    held = np.where((turn >= 0) & later & begun[:, arcs.before], start[:, arcs.before], now)
    return int(min(held.min(), np.where(begun, start, -1).max(axis=0).min()))


def _repeated_after(apart: int, start: Ints, end: Ints, now: int, since: int) -> int:
    """µs after which everything is as it was, so many rounds later; 0 if it is not. All passes that run at or after `since`
    are compared, so also those that ran beside one that still runs and slowed it."""
    last = int((start[:, 0] < now).sum()) - 1
    time = int(start[last, 0] - start[last - apart, 0]) if last >= apart else 0
    own, twins = (end >= since) & (start < now), (end >= since - time) & (start < now - time)
    if own[:apart].any() or (own[apart:] != twins[:-apart]).any() or twins[-apart:].any():
        return 0
    over, before = np.minimum(end, now)[own] - time, np.minimum(end, now - time)[twins]
    return time * int((start[own] - time == start[twins]).all() and (over == before).all())


def steady_peaks(schedule: Schedule) -> tuple[int, ...]:
    """The most bytes that each rank holds if the schedule's order goes on for ever, as in `period`.

    A finite piece may hold less, since its first rounds have nothing from rounds before. Raises BadInput as `period` does,
    and where the order of one stream does not decide what its rank holds.
    """
    rounds, _, repeated = _repeated(schedule)
    e, p = schedule.problem.edges, schedule.problem.passes
    into = np.flatnonzero((e.bytes > 0) & (rounds.round[e.after] == rounds.last))
    arcs, size = rounds.into(e.before[into], e.after[into], e.lag[into]), e.bytes[into]
    home, seat, later = (np.full(len(rounds.rows), -1, np.int64) for _ in range(3))
    peaks = [0] * schedule.problem.ranks
    for number, entries in enumerate(repeated.values()):
        order = np.array(entries, np.int64)
        home[order[:, 0]], seat[order[:, 0]], later[order[:, 0]] = number, np.arange(len(order)), order[:, 1]
    if (home[arcs.before] != home[arcs.after]).any():
        raise BadInput("period: memory that passes of several streams take and free is not modelled")
    for number in np.unique(home[arcs.before]).tolist():
        held_here = np.flatnonzero(home[arcs.before] == number)
        a, b, at = arcs.before[held_here], arcs.after[held_here], np.arange((home == number).sum())[:, None]
        taken = later[a] - (seat[a] > at)  # when each pass of the order starts: the last round whose a has begun
        freed = later[b] - (seat[b] >= at)  # and the last one whose b has ended
        held = np.maximum(taken + arcs.distance[held_here] - freed, 0) @ size[held_here]
        peaks[int(p.rank[rounds.rows[a[0]]])] += int(held.max())
    return tuple(peaks)


def _order_as_arcs(order: list[tuple[int, int]]) -> RoundArcs:
    """A stream's repeated order as arcs, each pass behind the one before, round after round."""
    behind = [*order[1:], (order[0][0], order[0][1] + 1)]
    pairs = [(a, b, 0, later - earlier) for (a, earlier), (b, later) in zip(order, behind, strict=True)]
    return RoundArcs(*np.array(pairs, np.int64).T)


def _repeated_order(stream: str, rounds: Rounds, rows: Ints) -> list[tuple[int, int]]:
    """The order that a stream repeats, taken from the longest run of rounds with equal order. Each entry has a pass, as an
    index into `rounds.rows`, and its round, counted from that of the first entry. Each pass comes once."""
    place, number = rounds.place[rows], rounds.round[rows]
    if rounds.last == 0:
        return [(at, 0) for at in place.tolist()]
    width = len(np.unique(place))
    anchors = np.flatnonzero(place == place[int(rows.argmax())])
    parts = [
        tuple(zip(place[a : a + width].tolist(), (number[a : a + width] - number[a]).tolist(), strict=True))
        for a in anchors.tolist()
    ]
    best, length, run = parts[0], 0, 0
    for part, before in zip(parts[1:], parts, strict=False):
        run = run + 1 if part == before else 0
        if run > length and len({key for key, _ in part}) == width:
            best, length = part, run
    if length == 0:
        more = 2 * rounds.problem.ranks * -(-rounds.problem.microbatches // rounds.problem.ranks)
        raise BadInput(f"period: {stream} runs no two rounds in one order: give {more} microbatches, or another order")
    return list(best)


def largest_mean(rounds: Rounds, arcs: RoundArcs) -> CycleMean:
    """The largest mean weight of a cycle: its durations and lags, divided by its rounds. Raises Deadlock if these are 0.

    From the mean of each cycle found, a cycle of larger mean is searched for, until there is none (Lawler, 1976; exact).
    """
    duration, names = rounds.problem.passes.duration[rounds.rows], rounds.problem.names
    weight, best, cycle = duration[arcs.before] + arcs.lag, Fraction(0), list[int]()
    while True:
        larger = _positive_cycle(len(rounds.rows), arcs, weight * best.denominator - arcs.distance * best.numerator)
        if not larger:
            return CycleMean(best, tuple(names[rounds.rows[arcs.before[a]]] for a in cycle))
        turns = int(arcs.distance[larger].sum())
        if turns <= 0:
            raise Deadlock(tuple(names[rounds.rows[arcs.before[a]]] for a in larger))
        cycle, best = larger, Fraction(int(weight[larger].sum()), turns)


def _positive_cycle(count: int, arcs: RoundArcs, gain: Ints) -> list[int]:
    """The arcs of a cycle whose gains add up to more than 0; empty where there is none (Bellman, Ford)."""
    reach, source = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    while True:  # a positive cycle shows among the best arcs sooner or later (Tarjan, 1981)
        new = reach[arcs.before] + gain
        better = np.flatnonzero(new > reach[arcs.after])
        if not len(better):
            return []
        better = better[np.argsort(new[better], kind="stable")]  # of several into one pass, the longest is written last
        reach[arcs.after[better]] = new[better]
        source[arcs.after[better]] = better
        cycle = _cycle(arcs, source)
        if cycle:
            return cycle


def _cycle(arcs: RoundArcs, source: Ints) -> list[int]:
    """The arcs of a cycle, in order, among the best arc into each pass (`source`; −1: none); empty if there is none."""
    state = np.zeros(len(source), np.int64)
    before = arcs.before.tolist()
    into = source.tolist()
    for begin in range(len(into)):
        at, path = begin, []
        while into[at] >= 0 and state[at] == 0:
            state[at] = begin + 1
            path.append(at)
            at = before[into[at]]
        if into[at] >= 0 and state[at] == begin + 1 and at in path:
            loop = path[path.index(at) :]
            return [into[place] for place in reversed(loop)]
    return []
