"""Plain steps, for which most named schedules are defined: F, B, W (or F, BW) of every stage, each stage on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from ..greedy.arrays.microbatch import microbatch_graph, with_mean_microbatches
from ..kinds import ATTENTION, KINDS
from ..problem import Ints, Problem
from ..problem.placement import describe
from ..schedule import Schedule
from ..util.errors import BadInput


class WrongPlacement(BadInput):
    """A schedule is not defined for the placement of a problem."""


SPLIT, FUSED = {"F", "B", "W"}, {"F", "BW"}


Rows = dict[str, Ints]  # stream → results of `PlainStep.find`, in order


class PlainStep(NamedTuple):
    """A plain step, from which orders are made.

    name: of the schedule, for errors. stages: stage → rank. split: the step has B and W, not BW. find: (kind, stages,
    microbatches), the latter of shape (n,) → the numbers of these passes in orders, shape (n,): rows of a problem's table.
    """

    name: str
    ranks: int
    microbatches: int
    stages: tuple[int, ...]
    split: bool
    find: Callable[[str, Ints, Ints], Ints]


def step_in_rows(problem: Problem, name: str) -> PlainStep:
    """The plain step of a problem, for orders in rows of its table. Raises BadInput, naming `name`, if it is not plain."""
    stages, split = plain_stages(problem, name)

    def find(kind: str, stage: Ints, microbatch: Ints) -> Ints:
        rows = problem.passes.find(np.full(len(stage), KINDS.index(kind)), stage, microbatch)
        assert rows is not None  # a plain step has all of them
        return rows

    return PlainStep(name, problem.ranks, problem.microbatches, stages, split, find)


def step_in_lanes(problem: Problem, microbatches: int, name: str) -> PlainStep:
    """The step of `microbatches` microbatches like the only one of `problem`. Orders are rows of `problem` too, so that no
    table of the whole step is needed. Raises BadInput as `step_in_rows`."""
    lanes = step_in_rows(problem, name)
    return lanes._replace(
        microbatches=microbatches, find=lambda kind, stage, microbatch: lanes.find(kind, stage, 0 * microbatch)
    )


ORDERS: dict[str, Callable[[Problem], Schedule]] = {}  # of the systems in `systems.csv`, by name
Order = TypeVar("Order", bound=Callable[[Problem], Schedule])


def order_of(*names: str) -> Callable[[Order], Order]:
    """Decorator: makes a function the order of the systems with these names. The function returns the schedule of a problem
    without side streams, and raises BadInput if it is not defined for it. It need not check memory (`verify` does)."""

    def kept(order: Order) -> Order:
        ORDERS.update(dict.fromkeys(names, order))
        return order

    return kept


@dataclass(frozen=True)
class RowsOrder:
    """The order of the system called `name`. rows: plain step → the rows of each stream, in order."""

    name: str
    rows: Callable[[PlainStep], Rows]

    def __call__(self, problem: Problem) -> Schedule:
        return Schedule.of(problem, self.rows(step_in_rows(problem, self.name)))


def rows_of(name: str) -> Callable[[Callable[[PlainStep], Rows]], RowsOrder]:
    """As `order_of`, of a function that gives the rows of each stream of a plain step."""
    return lambda rows: order_of(name)(RowsOrder(name, rows))


def plain_stages(problem: Problem, name: str) -> tuple[tuple[int, ...], bool]:
    """(stage → rank, whether the backward is split). Raises BadInput, naming `name`, for other passes and shared stages."""
    passes, kinds = problem.passes, set(problem.passes.kinds)
    homes = problem.stage_ranks
    whole = len(passes) == len(kinds) * problem.stages * problem.microbatches
    if any(len(ranks) != 1 for ranks in homes):
        raise WrongPlacement(f"{name}: is defined where each stage is on one rank only")
    if problem.slices > 1:
        raise BadInput(
            f"{name}: is an order of whole sequences, and the step has {problem.slices} slices of each: slimpipe is one of "
            "slices, zbsolve show systems names more"
        )
    if passes.that(feature=ATTENTION).any():
        raise BadInput(f"{name}: says nothing of attention that ranks make for each other: slimpipe does, or leave it out")
    if kinds not in (SPLIT, FUSED) or not whole:
        counted = {kind: len(problem.rows(kind)) for kind in passes.kinds}
        raise BadInput(f"{name}: needs a plain pipeline of F, B, W (or F, BW) passes, not {counted}")
    return tuple(rank for (rank,) in homes), kinds == SPLIT


def check_plain(problem: Problem, name: str, shape: str, fused: bool = False) -> None:
    """Raise BadInput unless the problem is a plain step of F, B and W (F and BW if fused) on placement `shape`."""
    check_shape(step_in_rows(problem, name), shape, fused)


def check_shape(step: PlainStep, shape: str, fused: bool = False) -> None:
    """Raise BadInput unless the step has placement `shape`, and a fused (`fused`) or a split backward."""
    one_rank = shape == "vee" and step.stages == (0, 0)
    if describe(step.stages) != shape and not one_rank:
        raise WrongPlacement(f"{step.name}: is defined for placement {shape} only")
    if step.split == fused:
        raise BadInput(f"{step.name}: needs " + ("one backward BW" if fused else "B and W apart"))


STEP_KINDS = "FBW"
F, B, W = range(3)


class StepTimes(NamedTuple):
    """Costs of one microbatch. duration (µs), taken, freed (bytes): of F, B and W, shape (3, stages). lag: µs of the message
    that F and B wait for, shape (2, stages). room: bytes of each rank."""

    duration: Ints
    taken: Ints
    freed: Ints
    lag: Ints
    room: Ints


def schedule_of(problem: Problem, turns: Ints, rows: Ints) -> Schedule:
    """The schedule of a plain step. turns: each rank's passes in order, as kind · stages + stage, shape (ranks, passes of a
    rank). rows: from `times_of`."""
    order = {}
    for rank, lanes in enumerate(turns):
        own = np.empty(len(lanes), np.int64)
        for lane in np.unique(lanes).tolist():
            own[lanes == lane] = rows[lane]
        order[f"compute:{rank}"] = own
    return Schedule.of(problem, order)


def times_of(problem: Problem, name: str) -> tuple[StepTimes, Ints]:
    """(costs of one microbatch, rows of the passes of each kind · stages + stage, shape (3 · stages, microbatches)). name:
    of the schedule, in errors. Raises BadInput if microbatches wait for different passes."""
    g = microbatch_graph(with_mean_microbatches(problem))
    if g is None:
        raise BadInput(f"{name}: microbatches differ in what they wait for")
    passes, first, stages = problem.passes, g.passes[:, 0], problem.stages
    kind = np.array([STEP_KINDS.index(label) for label in passes.kinds], np.int64)[passes.kind[first]]
    lane = np.empty((3, stages), np.int64)
    lane[kind, passes.stage[first]] = np.arange(len(first))
    lag = np.zeros(len(first), np.int64)
    moves = kind[g.after] < W
    np.maximum.at(lag, g.after[moves], g.lag[moves])
    step = StepTimes(g.duration[lane], g.taken[lane], g.freed[lane], lag[lane[:W]], g.capacity)
    return step, g.passes[lane.ravel()]
