"""`StepView`: the part of a step that a process lowers and runs: all of it, or one rank's part of a very long step.

The same code lowers and runs both. Only features that depend on ranks without messages to this one need the whole step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..kinds import ATTENTION
from ..long_steps.check import RankPart
from ..problem import Problem
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..util.errors import BadInput
from ..verifier import verify


@dataclass(frozen=True, eq=False)
class StepView:
    """A step as a process sees it. schedule: passes in order, with their times: of the whole step, or of one rank and those
    passes of others that exchange messages with it. step: a problem with what holds for the whole step: ranks, stages,
    routes, layers, capacity; of all microbatches, or of one if the schedule is a rank's part. part: that, or None."""

    schedule: Schedule
    step: Problem
    part: RankPart | None = None

    @classmethod
    def of(cls, given: Schedule | RankPart) -> StepView:
        """The view of a schedule, or of a rank's part of one."""
        if isinstance(given, Schedule):
            return cls(given, given.problem)
        return cls(given.schedule, given.one, given)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks all of whose passes are known."""
        return range(self.step.ranks) if self.part is None else (self.part.rank,)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of the step."""
        return self.schedule.problem.microbatches

    @cached_property
    def content(self) -> str:
        """What must be equal on all ranks, as text: the problem, orders and syncs, without a certificate."""
        if self.part is not None:
            return self.part.digest
        order = sorted((stream, list(names)) for stream, names in self.schedule.order.items())
        return json.dumps([self.step.digest, order, sorted(map(list, self.schedule.syncs))])

    @cached_property
    def messages(self) -> dict[tuple[int, int], int]:
        """(source, destination) → number of messages in a step, for all pairs that have any."""
        e, rank = self.step.edges, self.step.passes.rank
        rows = np.flatnonzero(e.handing)
        ends = np.stack([rank[e.before[rows]], rank[e.after[rows]]], axis=1)
        pairs, counts = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0, return_counts=True)
        times = 1 if self.part is None else self.microbatches
        return {(a, b): times * n for (a, b), n in zip(pairs.tolist(), counts.tolist(), strict=True)}

    @cached_property
    def rows(self) -> dict[str, int]:
        """Known pass → its row in the table of the whole step."""
        index = self.schedule.problem.index
        if self.part is None:
            return index
        lanes, count = self.part.lanes, self.microbatches
        rows = (lanes[:, None] * count + np.arange(count)).ravel().tolist()
        return dict(zip(index, rows, strict=True))

    @property
    def passes(self) -> int:
        """The number of passes of the whole step."""
        return len(self.step.passes) if self.part is None else len(self.step.passes) * self.microbatches

    def forwards(self, count: int) -> StepView:
        """The forwards of `count` microbatches alone, in the same order. A rank's part keeps the step's times: any times
        that follow the same order on all ranks will do."""
        problem, order = forwards_only(self.schedule.problem, count), self.schedule.order
        kept = {stream: tuple(name for name in names if name in problem.index) for stream, names in order.items()}
        schedule = Schedule(problem, {stream: names for stream, names in kept.items() if names})
        if self.part is None:
            return StepView.of(schedule)
        timeline, index = self.schedule.timeline(), self.schedule.problem.index
        rows = [index[name] for name in problem.names]
        known = Timeline(problem, timeline.start[rows], timeline.end[rows])
        return StepView(schedule.timed(known), forwards_only(self.step, 1), self.part)

    def check(self) -> None:
        """Raise BadInput where the schedule is not valid; a rank's part comes from a valid one."""
        if self.part is None and (wrong := verify(self.step, self.schedule)):
            raise BadInput(f"schedule: {wrong[0]}")


def forwards_only(problem: Problem, microbatches: int) -> Problem:
    """The forwards of `problem`'s first `microbatches` microbatches, with the passes of features that are part of a
    forward, and the activations that they pass on. Nothing is held, so there is no capacity."""
    first = problem.head(microbatches)
    p = first.passes  # without a backward, F does all of its attention
    kept = p.that(half="forward") & ~p.that(feature=ATTENTION)
    return replace(first.only(np.flatnonzero(kept)), capacity=None)
