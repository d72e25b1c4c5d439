"""What a process sees of a step that it lowers and runs: all of it, or one rank's part of a step of very many microbatches.

Both are lowered and run by the same code. Only what asks for passes of ranks that exchange nothing with this one needs all.
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
from ..timeline import Timeline
from ..util.errors import BadInput
from ..verifier import verify


@dataclass(frozen=True, eq=False)
class StepView:
    """A step as a process sees it. schedule: passes in order, with their times: all of the step, or those of one rank and of
    others that exchange messages with it. step: a problem that says what holds for all of the step: ranks, stages, routes,
    layers, capacity. It has all microbatches, or the one that they are all like. part: where the schedule is a rank's
    part."""

    schedule: Schedule
    step: Problem
    part: RankPart | None = None

    @classmethod
    def of(cls, given: Schedule | RankPart) -> StepView:
        """Of a schedule, or of a rank's part of one."""
        if isinstance(given, Schedule):
            return cls(given, given.problem)
        return cls(given.schedule, given.one, given)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose passes are all seen."""
        return range(self.step.ranks) if self.part is None else (self.part.rank,)

    @property
    def microbatches(self) -> int:
        """How many the step has."""
        return self.schedule.problem.microbatches

    @cached_property
    def content(self) -> str:
        """What all ranks must have alike, as text: the problem, orders and syncs, without a certificate."""
        if self.part is not None:
            return self.part.digest
        order = sorted((stream, list(names)) for stream, names in self.schedule.order.items())
        return json.dumps([self.step.digest, order, sorted(map(list, self.schedule.syncs))])

    @cached_property
    def messages(self) -> dict[tuple[int, int], int]:
        """(source, destination) → how many messages a step has from one rank to the other, all pairs that have some."""
        e, rank = self.step.edges, self.step.passes.rank
        rows = np.flatnonzero(e.handing)
        ends = np.stack([rank[e.before[rows]], rank[e.after[rows]]], axis=1)
        pairs, counts = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0, return_counts=True)
        times = 1 if self.part is None else self.microbatches
        return {(a, b): times * n for (a, b), n in zip(pairs.tolist(), counts.tolist(), strict=True)}

    @cached_property
    def rows(self) -> dict[str, int]:
        """Pass that is seen → its row in the table of the whole step."""
        index = self.schedule.problem.index
        if self.part is None:
            return index
        lanes, count = self.part.lanes, self.microbatches
        rows = (lanes[:, None] * count + np.arange(count)).ravel().tolist()
        return dict(zip(index, rows, strict=True))

    @property
    def passes(self) -> int:
        """How many the whole step has."""
        return len(self.step.passes) if self.part is None else len(self.step.passes) * self.microbatches

    def forwards(self, count: int) -> StepView:
        """The forwards of `count` microbatches alone, in the same order. In a rank's part they keep the step's times: any
        that follow one order on all ranks will do."""
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
        """Raise BadInput where the schedule does not hold; a rank's part is of one that does."""
        if self.part is None and (wrong := verify(self.step, self.schedule)):
            raise BadInput(f"schedule: {wrong[0]}")


def forwards_only(problem: Problem, microbatches: int) -> Problem:
    """The forwards of `problem`'s first `microbatches` microbatches, with what runs behind them (AF) or makes the embedding
    and the loss of a sharded vocabulary (VE, VB, S, VR), and the activations that they hand on. Nothing holds memory for a
    backward, so no capacity limits them."""
    first = problem.head(microbatches)
    p = first.passes  # F is all of its attention where nobody waits for a backward
    kept = p.that(half="forward") & ~p.that(feature=ATTENTION)
    return replace(first.only(np.flatnonzero(kept)), capacity=None)
