"""`RepeatedSchedule`: a short order of few microbatches, and the part of it (its round) that is repeated for all others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..build.mixing import with_microbatches
from ..problem import Ints, Problem
from ..problem.tables import Bools
from ..schedule import Certificate, Schedule
from ..schedule.timeline import Timeline
from ..util.errors import BadInput


@dataclass(frozen=True, eq=False)
class Round:
    """The part of an order that repeats. every: microbatches of a round. period: µs from one round to the next. begin: for
    each lane the first microbatch of the first round. copies: how many rounds follow each other in the short order."""

    every: int
    period: int
    begin: Ints
    copies: int


@dataclass(frozen=True, eq=False)
class RepeatedSchedule:
    """A schedule of very many equal microbatches.

    one: the step of one microbatch, whose passes are the lanes of the whole step. microbatches: of the whole step. few:
    microbatches of the short order. order: for each rank its lanes in short order, shape (few · lanes of the rank,); the
    k-th occurrence of a lane is its microbatch k. round: the part that repeats; further copies are inserted until all
    microbatches are there. certificate: of the whole step, with the digest of `one`. `long_steps.check` checks it."""

    one: Problem
    microbatches: int
    few: int
    order: tuple[Ints, ...]
    round: Round
    certificate: Certificate | None = None

    @property
    def further(self) -> int:
        """How many rounds are inserted. Raises BadInput if whole rounds do not make up the microbatches."""
        rounds, left = divmod(self.microbatches - self.few, self.round.every)
        if left or rounds < 0:
            raise BadInput(f"{self.microbatches} microbatches: {self.few} and rounds of {self.round.every} do not add up")
        return rounds

    @property
    def passes(self) -> int:
        """The number of passes of the whole step."""
        return self.microbatches * len(self.one.passes)

    @cached_property
    def digest(self) -> str:
        """A digest of all but the certificate, 16 hexadecimal digits."""
        round, mark = self.round, hashlib.sha256()
        numbers = self.microbatches, self.few, round.every, round.period, round.copies
        mark.update(f"{self.one.digest} {' '.join(map(str, numbers))}".encode())
        for column in (round.begin, *self.order):
            mark.update(np.ascontiguousarray(column, np.int64).tobytes())
        return mark.hexdigest()[:16]

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The stream of each rank."""
        p = self.one.passes
        return tuple(p.stream_sets[p.streams[lanes[0]]][0] for lanes in rank_lanes(self.one))

    def lanes_of(self, rank: int) -> Ints:
        """The lanes that a rank runs in the whole step, in order, shape (microbatches · lanes of the rank,)."""
        own, round = self.order[rank], self.round
        lanes = rank_lanes(self.one)[rank]
        first = int(round.begin[lanes].sum())
        last = first + round.every * len(lanes)
        return np.concatenate([own[:first], np.tile(own[first:last], self.further), own[first:]])

    def rank_order(self, rank: int) -> tuple[Ints, Ints]:
        """Lanes and microbatches of a rank's passes in the whole step, in order, shape (passes of the rank,) each."""
        lanes = self.lanes_of(rank)
        return lanes, counted(lanes)

    def name_of(self, lane: int, microbatch: int) -> str:
        """The name of a lane's pass of this microbatch."""
        head, tail = self.words[lane]
        return f"{head}{microbatch}{tail}"

    @cached_property
    def words(self) -> list[tuple[str, str]]:
        """For each lane the text before and behind the microbatch in the names of its passes."""
        p = self.one.passes
        heads = zip(p.stage.tolist(), p.kind_names, p.slice.tolist(), strict=True)
        return [(f"{stage}{kind}", f".{part}" if part else "") for stage, kind, part in heads]

    def first(self) -> Schedule:
        """The schedule of the first microbatch alone: the short order without the others."""
        orders = [own[np.sort(np.unique(own, return_index=True)[1])] for own in self.order]
        return self._schedule(1, [(lanes, np.zeros(len(lanes), np.int64)) for lanes in orders])

    def sample(self, start: Ints | None = None) -> Schedule:
        """The schedule of the short order. start: of its passes, µs, shape (lanes, few); None: each as early as possible."""
        short = self._schedule(self.few, [(lanes, counted(lanes)) for lanes in self.order])
        if start is None:
            return short
        return short.timed(Timeline(short.problem, start.ravel(), start.ravel() + short.problem.passes.duration))

    def unrolled(self) -> Schedule:
        """The schedule of the whole step with all its passes, if they fit this machine. Rounds do not wait here."""
        whole = self._schedule(self.microbatches, [self.rank_order(rank) for rank in range(self.one.ranks)])
        if self.certificate is None:
            return whole
        return whole.certified(replace(self.certificate, value=int(whole.timeline().value), digest=whole.problem.digest))

    def _schedule(self, count: int, orders: list[tuple[Ints, Ints]]) -> Schedule:
        problem = with_microbatches(self.one, count)
        rows = (lanes * count + at for lanes, at in orders)
        return Schedule.of(problem, dict(zip(self.streams, rows, strict=True)))


def rank_lanes(problem: Problem) -> list[Ints]:
    """The lanes of each rank: rows of its passes in the step of one microbatch."""
    rank = problem.passes.rank
    rows = np.argsort(rank, kind="stable").astype(np.int64)
    return np.split(rows, np.cumsum(np.bincount(rank))[:-1])


def counted(lanes: Ints) -> Ints:
    """The microbatch of each pass in an order of lanes: how often its lane occurred before, shape (passes,)."""
    rows = np.argsort(lanes, kind="stable")
    number = lanes[rows]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    within = np.arange(len(rows)) - np.repeat(first, np.diff(np.append(first, len(rows))))
    microbatch = np.empty(len(rows), np.int64)
    microbatch[rows] = within
    return microbatch


def find_round(problem: Problem, order: Sequence[Ints], start: Ints, every: int) -> Round | None:
    """A round of `every` microbatches that an order repeats, with enough copies for `check`; or None. It has all copies
    whose starts repeat; where starts drift, the fewest copies, as late as possible, and the longest time between two.
    start: earliest starts, µs, shape (lanes, few)."""
    lanes, few = rank_lanes(problem), start.shape[1]
    if few < 3 * every:
        return None
    apart, middle = start[:, every:] - start[:, :-every], (few - every) // 2
    period = int(np.median(apart[:, middle]))
    for drift in (False, True) if period > 0 else ():
        rows = [_longest(_goes_on(own, every, drift | (apart[at] == period))) for own, at in zip(order, lanes, strict=True)]
        first, last = np.array(rows).T
        copies = 1 + (last - first) // [every * len(own) for own in lanes]
        before = [np.bincount(own[:at], minlength=len(start)) for own, at in zip(order, first.tolist(), strict=True)]
        times = np.array([start[own[at], n[own[at]]] for own, at, n in zip(order, first, before, strict=True)])
        for count in range(3 if drift else max(3, copies.min()), copies.min() + 1):
            when = (times + (copies - count) * period).min() if drift else times.max()  # about then all of its ranks begin
            later = np.clip((when - times) // period, 0, copies - count)
            round = Round(every, period, sum(before) + every * later[problem.passes.rank], count)
            if enough_copies(problem, round):
                return replace(round, period=int(times_apart(round, start).max()))
    return None


def times_apart(round: Round, start: Ints) -> Ints:
    """How long each pass of a copy starts after its like of the copy before, µs, shape (lanes, copies − 1, every)."""
    columns = round.begin[:, None] + np.arange(round.copies * round.every)
    return np.diff(np.take_along_axis(start, columns, axis=1).reshape(len(start), -1, round.every), axis=1)


def enough_copies(problem: Problem, round: Round) -> bool:
    """Whether there are enough copies of the round: condition 3 of `check`."""
    e, least, most = problem.edges, round.begin.copy(), round.begin.copy()
    np.minimum.at(least, e.after, round.begin[e.before])
    np.maximum.at(most, e.after, round.begin[e.before])
    return bool((round.copies - 2) * round.every >= (most - least).max())


def _goes_on(order: Ints, every: int, in_time: Bools) -> Bools:
    """For each pass in a rank's order whether its lane's pass `every` microbatches later comes exactly one round later, in
    time and in the order. in_time: whether it does in time, shape (lanes of the rank, few − every)."""
    where = np.argsort(order, kind="stable").reshape(len(in_time), -1)
    same = in_time & (where[:, every:] - where[:, :-every] == every * len(where))
    goes_on = np.zeros(len(order), bool)
    goes_on[where[:, :-every][same]] = True
    return goes_on


def _longest(row: Bools) -> tuple[int, int]:
    """The begin and the end of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(np.int8))).reshape(-1, 2)
    first, last = max(edges.tolist(), key=lambda edge: edge[1] - edge[0], default=(0, 0))
    return first, last
