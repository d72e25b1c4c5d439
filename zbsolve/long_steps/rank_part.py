"""What one rank needs of a repeated schedule: its own passes, those that exchange messages with them, and when they start.

No other pass of the step is made, so its size goes with the passes of the rank. When a pass starts in the whole step follows
from when it starts in the order of few microbatches. With P the period, k the microbatches of a round, c the copies in the
order of few and R the further ones (see `check`): those of the first c copies of a lane and before them start as there, in
each further copy P µs later than in the one before, and R P µs later behind all copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..build.mixing import with_microbatches
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..timeline import Timeline
from .check import checked_starts
from .repeated import RepeatedSchedule, Round


@dataclass(frozen=True, eq=False)
class RankPart:
    """One rank's part of a repeated schedule that holds.

    one: the step of one microbatch, of all ranks. microbatches: of the whole step. lanes: rows of `one`, the rank's own and
    those at the other ends of their edges (see `near_lanes`). start: their earliest starts in the order of few microbatches,
    µs, shape (lanes, few). digest: of the repeated schedule.
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
        """How many rounds the whole step has beyond those of the order of few microbatches."""
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
        """The rank's passes of the whole step and those near them, in the order in which they start, with their times. What
        it says of ranks, stages and capacity is not the whole step's."""
        near = replace(self.one, capacity=None).only(self.lanes)
        problem, start = with_microbatches(near, self.microbatches), self.starts.ravel()
        p = problem.passes
        rows = np.lexsort((start, p.rank))
        orders = np.split(rows, np.flatnonzero(np.diff(p.rank[rows])) + 1)
        streams = [p.stream_sets[p.streams[own[0]]][0] for own in orders]
        found = Schedule.of(problem, dict(zip(streams, orders, strict=True)))
        return found.timed(Timeline(problem, start, start + p.duration))


def near_lanes(one: Problem, rank: int) -> Ints:
    """The lanes of a rank and those at the other ends of their edges, ascending."""
    e, own = one.edges, one.passes.rank == rank
    touching = own[e.before] | own[e.after]
    return np.unique(np.concatenate([np.flatnonzero(own), e.before[touching], e.after[touching]])).astype(np.int64)


@dataclass(frozen=True, eq=False)
class CheckedRounds:
    """A repeated schedule that holds. start: earliest starts in the order of few microbatches, µs, shape (lanes, few)."""

    long: RepeatedSchedule
    start: Ints

    @classmethod
    def of(cls, long: RepeatedSchedule) -> CheckedRounds:
        """Raises BadInput for a schedule that does not hold."""
        return cls(long, checked_starts(long))

    def part(self, rank: int) -> RankPart:
        """A rank's part."""
        long, lanes = self.long, near_lanes(self.long.one, rank)
        return RankPart(long.one, long.microbatches, long.round, rank, lanes, self.start[lanes], long.digest)

    @cached_property
    def makespan(self) -> int:
        """Of the whole step, µs: first start to last end over all ranks."""
        end = self.start[:, -1] + self.long.one.passes.duration
        return int(end.max() - self.start[:, 0].min()) + self.long.further * self.long.round.period
