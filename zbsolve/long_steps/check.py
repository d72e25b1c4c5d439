"""Whether a repeated schedule is valid, for every number of rounds: by induction over them.

The short order of few microbatches is simulated as it is, without any solver's code. Let a round have k microbatches, the
period be P, the copies c, and the first repeated microbatch of lane l be n(l). Three conditions are checked:

1. Order. Each rank first runs the passes before microbatch n(l) of each lane l. Then come c equal copies of a round, which
   has k microbatches of each of its lanes; then the rest.
2. Time. In the copies behind the first, each pass also waits until P µs after the start of its like of the copy before, and
   starts just then. (Where starts drift, this waits a little; run as early as the order allows, it takes no longer.)
3. Reach. (c − 2) k is at least the difference between the largest and the least n of any lane and those that it waits for.

Claim: with one more copy the conditions hold again, no rank holds more bytes, and passes behind the new copy start P µs
later. So they hold for any number of copies, and the value grows by P with each copy.

Proof. The order is as stated by construction. Let passes up to the old copies keep their starts, and let passes of the new
last copy and behind it have the starts of k microbatches before, plus P µs. The graph has no cycle, since all passes take
time. So these are the earliest starts if each pass starts as soon as the last of what it waits for is over. Take a pass of
lane l and microbatch i, and let n⁻ and n⁺ be the least and the largest n of l and of the lanes that it waits for. If
i < n⁻ + c k, the pass, all that it waits for, and the pass before it on its rank keep their starts. If i ≥ n⁺ + 2 k, all of
these have the starts of microbatch i − k in the shorter order plus P µs: all are in the second copy or later, or behind the
copies. One of both cases applies, as n⁺ + 2 k ≤ n⁻ + c k by condition 3. A pass of the new copy waits for its like of the
copy before, as that did for its own. A pass waits for nothing else: edges stay within a microbatch, and memory delays a pass
only through the order. A round takes as many bytes as it frees, so each copy begins with the same bytes held; and with one
stream a rank, the order alone decides what is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..build.mixing import with_microbatches
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..util.columns import compiled
from ..util.errors import BadInput
from ..verifier import Violation
from .repeated import RepeatedSchedule, Round, counted, enough_copies, rank_lanes, times_apart


def earliest_starts(problem: Problem, few: int, order: Sequence[Ints], round: Round | None = None) -> Ints:
    """Earliest starts of a short order, µs, shape (lanes, few); −1 for passes that wait for each other. problem: the step of
    one microbatch. order: lanes of each rank, each `few` times. round: its copies wait for each other, by condition 2."""
    e = problem.edges
    rows = np.argsort(e.after, kind="stable")
    first = np.searchsorted(e.after[rows], np.arange(len(problem.passes) + 1)).astype(np.int64)
    ends = np.cumsum([0, *(len(own) for own in order)]).astype(np.int64)
    round = round or Round(1, 1, np.zeros(len(problem.passes), np.int64), 1)  # of one copy, which waits for none
    every = np.array([round.every, round.every * round.copies, round.every, round.period])
    pace = np.outer(round.begin, [1, 1, 0, 0]) + every
    columns = e.before[rows], e.lag[rows], problem.passes.duration, np.concatenate(order), ends, pace
    return compiled(_earliest)(first, *(np.ascontiguousarray(column, np.int64) for column in columns))


def _earliest(first: Ints, source: Ints, lag: Ints, duration: Ints, order: Ints, ends: Ints, pace: Ints) -> Ints:
    """`earliest_starts`: visits the ranks down and up again; each goes on while the inputs of its next pass are known. pace:
    for each lane its first microbatch that waits for the copy before, its first behind, microbatches of a round, period."""
    ranks, lanes = len(ends) - 1, len(duration)
    start = np.full((lanes, len(order) // lanes), -1, np.int64)
    count = np.zeros(lanes, np.int64)
    at, free = ends[:-1].copy(), np.zeros(ranks, np.int64)
    moved = True
    while moved:
        moved = False
        for turn in range(2 * ranks):
            rank = turn if turn < ranks else 2 * ranks - 1 - turn
            while at[rank] < ends[rank + 1]:
                lane = order[at[rank]]
                j = count[lane]
                begin = free[rank]
                for e in range(first[lane], first[lane + 1]):
                    known = start[source[e], j]
                    if known < 0:
                        begin = -1
                        break
                    begin = max(begin, known + duration[source[e]] + lag[e])
                if begin < 0:
                    break
                if pace[lane, 0] <= j < pace[lane, 1]:
                    begin = max(begin, start[lane, j - pace[lane, 2]] + pace[lane, 3])
                start[lane, j] = begin
                free[rank] = begin + duration[lane]
                count[lane] += 1
                at[rank] += 1
                moved = True
    return start


def peaks(problem: Problem, order: Sequence[Ints]) -> Ints:
    """The most bytes that each rank holds at once, shape (ranks,): with one stream a rank the order alone decides."""
    change = problem.taken - problem.freed
    return np.array([int((np.cumsum(change[own]) + problem.freed[own]).max()) for own in order], np.int64)


def value_of(problem: Problem, start: Ints) -> int:
    """The problem's objective (makespan or span) of these starts, µs. start: µs, shape (lanes, microbatches)."""
    end = start[:, -1] + problem.passes.duration
    if problem.objective == "makespan":
        return int(end.max() - start[:, 0].min())
    first, last = np.full(problem.ranks, int(end.max())), np.zeros(problem.ranks, np.int64)
    np.minimum.at(first, problem.passes.rank, start[:, 0])
    np.maximum.at(last, problem.passes.rank, end)
    return int((last - first).max())


def violations(long: RepeatedSchedule) -> tuple[Violation, ...]:
    """All violations of a repeated schedule; () if it is valid."""
    return _judged(long)[0]


def checked_starts(long: RepeatedSchedule) -> Ints:
    """Earliest starts in the short order, µs, shape (lanes, few). Raises BadInput for a schedule that is not valid."""
    faults, start = _judged(long)
    if faults:
        raise BadInput(f"schedule: {faults[0]}")
    return start


def _judged(long: RepeatedSchedule) -> tuple[tuple[Violation, ...], Ints]:
    """The violations, and the earliest starts if the shape is right."""
    if wrong := tuple(_wrong_shape(long)):
        return wrong, np.zeros((0, 0), np.int64)
    start = earliest_starts(long.one, long.few, long.order, long.round)
    if start.min() < 0:
        stuck = np.argwhere(start < 0)[0]
        name = long.name_of(*stuck.tolist())
        return (Violation("deadlock", (name,), f"{name} waits for itself"),), start
    return (*_memory(long), *_rounds(long, start), *_certificate(long, start)), start


def _wrong_shape(long: RepeatedSchedule) -> Iterator[Violation]:
    """What is wrong with the step, or with the number of times that lanes occur in the orders."""
    p, e = long.one.passes, long.one.edges
    if long.one.microbatches != 1 or not long.one.in_microbatch.all() or len(long.one.pools) or len(e.pool[e.pool > 0]):
        yield Violation("step", (), "the step is not one of a single microbatch with its memory on devices")
    elif len(long.one.streams) != long.one.ranks or len(long.one.side_stream) or (long.one.collective >= 0).any():
        yield Violation("step", (), "the step has several streams on a rank, or collectives")
    elif int(p.duration.min()) < 1:
        yield Violation("step", (), "the step has passes that take no time")
    else:
        yield from _counts(long)


def _counts(long: RepeatedSchedule) -> Iterator[Violation]:
    lanes, round = rank_lanes(long.one), long.round
    if len(long.order) != len(lanes):
        yield Violation("missing", (), f"orders of {len(long.order)} ranks, but there are {len(lanes)}")
        return
    for rank, (own, here) in enumerate(zip(long.order, lanes, strict=True)):
        if len(own) != long.few * len(here) or (np.sort(own) != np.repeat(here, long.few)).any():
            yield Violation("missing", (), f"rank {rank} does not run each of its lanes {long.few} times")
    if round.every < 1 or round.period < 1 or len(round.begin) != len(long.one.passes) or round.begin.min() < 0:
        yield Violation("round", (), "its microbatches, its period or where it begins make no sense")
    elif (round.begin + round.copies * round.every).max() > long.few:
        yield Violation("round", (), f"its {round.copies} copies are more than the order of {long.few} microbatches has")
    else:
        try:
            long.further  # noqa: B018
        except BadInput as error:
            yield Violation("round", (), str(error))


def _memory(long: RepeatedSchedule) -> Iterator[Violation]:
    if long.one.capacity is None:
        return
    held = peaks(long.one, long.order)
    for rank in np.flatnonzero(held > np.array(long.one.capacity)).tolist():
        text = f"rank {rank} holds {held[rank]} bytes; its capacity is {long.one.capacity[rank]}"
        yield Violation("memory", (), text)


def _rounds(long: RepeatedSchedule, start: Ints) -> Iterator[Violation]:
    """Violations of the three conditions."""
    round, lanes = long.round, rank_lanes(long.one)
    for rank, (own, here) in enumerate(zip(long.order, lanes, strict=True)):
        width, first = round.every * len(here), int(round.begin[here].sum())
        last = first + round.copies * width
        before, middle = np.bincount(own[:first], minlength=len(round.begin)), own[first:last]
        if (before[here] != round.begin[here]).any() or (np.sort(middle[:width]) != np.repeat(here, round.every)).any():
            yield Violation("round", (), f"rank {rank} does not begin its rounds where the file says")
        elif (middle[width:] != middle[:-width]).any():
            at = first + width + int(np.flatnonzero(middle[width:] != middle[:-width])[0])
            name = long.name_of(int(own[at]), int(counted(own)[at]))
            yield Violation("round", (name,), f"rank {rank} runs {name} in another order than in the round before")
    late = np.argwhere(times_apart(round, start).reshape(len(start), -1) != round.period)
    if len(late):
        name = long.name_of(int(late[0, 0]), int(round.begin[late[0, 0]] + round.every + late[0, 1]))
        yield Violation("round", (name,), f"{name} does not start {round.period} µs after its like of the round before")
    if not enough_copies(long.one, round):
        text = f"{round.copies} copies of the round do not reach as far as passes wait for each other"
        yield Violation("round", (), text)


def _certificate(long: RepeatedSchedule, start: Ints) -> Iterator[Violation]:
    certificate = long.certificate
    if certificate is None:
        return
    value = value_of(long.one, start) + long.further * long.round.period
    if certificate.digest != long.one.digest:
        yield Violation("certificate", (), f"it was made for step {certificate.digest}, not for {long.one.digest}")
    if certificate.objective != long.one.objective:
        yield Violation("certificate", (), f"it is about {certificate.objective}, the step about {long.one.objective}")
    if certificate.value != value:
        yield Violation("certificate", (), f"it states {certificate.value} µs, but the order takes {value} µs")
    if certificate.bound > value:
        yield Violation("certificate", (), f"its bound {certificate.bound} µs is above the value {value} µs")


# --- What one rank needs of a schedule that holds ---


@dataclass(frozen=True, eq=False)
class RankPart:
    """One rank's part of a valid repeated schedule: its own passes, those with which they exchange messages, and their
    starts. No other passes are made, so that its size depends on the passes of one rank.

    With period P, c copies in the short order and R further ones: passes up to copy c start as in the short order, passes of
    each further copy P µs after those of the copy before, and passes behind all copies R P µs later than in the short order.

    one: the step of one microbatch, of all ranks. microbatches: of the whole step. lanes: rows of `one`, the rank's own and
    those at the other ends of their edges (see `near_lanes`). start: their earliest starts in the short order, µs, shape
    (lanes, few). digest: of the repeated schedule.
    """

    one: Problem
    microbatches: int
    round: Round
    rank: int
    lanes: Ints
    start: Ints
    digest: str

    @property
    def further(self) -> int:
        """How many rounds are inserted into the short order."""
        return (self.microbatches - int(self.start.shape[1])) // self.round.every

    @cached_property
    def starts(self) -> Ints:
        """When the passes start in the whole step, µs, shape (lanes, microbatches)."""
        round, microbatch = self.round, np.arange(self.microbatches)
        copy = (microbatch - round.begin[self.lanes, None]) // round.every
        shift = np.clip(copy - (round.copies - 1), 0, self.further)
        return np.asarray(
            np.take_along_axis(self.start, microbatch - shift * round.every, axis=1) + shift * round.period, np.int64
        )

    @cached_property
    def window(self) -> tuple[int, int]:
        """When the rank starts its first pass of the whole step and ends its last one, µs."""
        own = self.one.passes.rank[self.lanes] == self.rank
        end = self.starts[own, -1] + self.one.passes.duration[self.lanes[own]]
        return int(self.starts[own, 0].min()), int(end.max())

    @cached_property
    def schedule(self) -> Schedule:
        """The rank's passes of the whole step and those near them, by start, with their times. Numbers of ranks and stages,
        and capacity, are not those of the whole step."""
        near = replace(self.one, capacity=None).only(self.lanes)
        problem, start = with_microbatches(near, self.microbatches), self.starts.ravel()
        p = problem.passes
        rows = np.lexsort((start, p.rank))
        orders = np.split(rows, np.flatnonzero(np.diff(p.rank[rows])) + 1)
        streams = [p.stream_sets[p.streams[own[0]]][0] for own in orders]
        schedule = Schedule.of(problem, dict(zip(streams, orders, strict=True)))
        return schedule.timed(Timeline(problem, start, start + p.duration))


def near_lanes(problem: Problem, rank: int) -> Ints:
    """The lanes of a rank and those at the other ends of their edges, ascending."""
    e, own = problem.edges, problem.passes.rank == rank
    touching = own[e.before] | own[e.after]
    return np.unique(np.concatenate([np.flatnonzero(own), e.before[touching], e.after[touching]])).astype(np.int64)


@dataclass(frozen=True, eq=False)
class CheckedRounds:
    """A valid repeated schedule. start: earliest starts in the short order, µs, shape (lanes, few)."""

    long: RepeatedSchedule
    start: Ints

    @classmethod
    def of(cls, long: RepeatedSchedule) -> CheckedRounds:
        """Check a schedule. Raises BadInput if it is not valid."""
        return cls(long, checked_starts(long))

    def part(self, rank: int) -> RankPart:
        """The part of one rank."""
        long, lanes = self.long, near_lanes(self.long.one, rank)
        return RankPart(long.one, long.microbatches, long.round, rank, lanes, self.start[lanes], long.digest)

    @cached_property
    def makespan(self) -> int:
        """The makespan of the whole step, µs."""
        end = self.start[:, -1] + self.long.one.passes.duration
        return int(end.max() - self.start[:, 0].min()) + self.long.further * self.long.round.period
