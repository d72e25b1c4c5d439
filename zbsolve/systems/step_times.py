"""What one microbatch of a plain step takes, as tables for schedules that are made by a step's own times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..greedy.arrays.microbatch import microbatch_graph, with_mean_microbatches
from ..problem import Problem
from ..tables import Ints
from ..util.errors import BadInput

KINDS = "FBW"
F, B, W = range(3)


class StepTimes(NamedTuple):
    """What one microbatch takes: duration (µs), taken and freed (bytes), shape (3, stages) for F, B and W; lag, µs of the
    message that F and B wait for, shape (2, stages); room, bytes a rank."""

    duration: Ints
    taken: Ints
    freed: Ints
    lag: Ints
    room: Ints


def times_of(problem: Problem, name: str) -> tuple[StepTimes, Ints]:
    """The step that one microbatch takes, and the rows of each kind · stages + stage, shape (3 · stages, microbatches).
    Raises BadInput, naming the schedule `name`, where microbatches are not alike."""
    g = microbatch_graph(with_mean_microbatches(problem))
    if g is None:
        raise BadInput(f"{name}: microbatches differ in what they wait for")
    passes, first, stages = problem.passes, g.passes[:, 0], problem.stages
    kind = np.array([KINDS.index(one) for one in passes.kinds], np.int64)[passes.kind[first]]
    lane = np.empty((3, stages), np.int64)
    lane[kind, passes.stage[first]] = np.arange(len(first))
    lag = np.zeros(len(first), np.int64)
    moves = kind[g.after] < W
    np.maximum.at(lag, g.after[moves], g.lag[moves])
    step = StepTimes(g.duration[lane], g.taken[lane], g.freed[lane], lag[lane[:W]], g.capacity)
    return step, g.passes[lane.ravel()]
