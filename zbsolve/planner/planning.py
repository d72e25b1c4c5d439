"""`plan`: the best layout found for a model on a cluster, and a lower bound on the steps of all layouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache

import numpy as np

from ..search.task_runner import TaskRunner
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible, NotFound, WrongBound, interruption
from ..util.text import parse_bytes
from ..util.workers import Workers, WorkersLost
from .bounds.space_bounds import cheap_bounds, raising, unproven
from .candidate import Candidate, in_a_named_order, in_its_order
from .cluster import Cluster, cluster_of
from .plan_file import Plan
from .profiled_model import Model
from .searches import Progress, SpaceRace, price_first, price_space, search_at_start, search_space
from .shape import Shape, shape_by_name
from .solved_space import SAME_US
from .space import ALL, Only, layouts


def plan(
    model: Model | str,
    devices: int,
    batch: int,
    cluster: Cluster | str | os.PathLike[str],
    *,
    memory: str | int | None = None,
    seconds: float = 60.0,
    effort: float | None = None,
    seed: int = 0,
    progress: Progress = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    start: Sequence[Candidate] = (),
    workers: Workers | None = None,
    only: Only = ALL,
) -> Plan:
    """Choose the layout that splits a model's step over devices, with a lower bound over the whole space of layouts.

    model: its shape, the name of one (see `shape_by_name`), or its profiles at several sizes.
    devices: their number.
    batch: sequences in a step.
    cluster: a cluster, a preset's name, or the path of a cluster file.
    memory: bytes of a device, or text such as "80GiB"; None: the cluster's.
    seconds: of real time for bounds and searches together.
    effort: a limit on counted work in place of seconds, which gives the same answer on every machine.
    seed: of the searches' random numbers.
    progress: called with each line of progress.
    stop: called now and then. Once it returns True, or after KeyboardInterrupt, the plan is the best found so far. Where
        the bounds of the whole space are not computed yet, that plan is over plain layouts only, as its `only` tells.
    start: candidates of other plans, the best first, whose orders are tried here.
    workers: the processes that solve layouts (`zbsolve.solvers_on`); None: this process.
    only: limits the space to layouts of an engine, with its gradients, or to layouts with given fields. An engine that
        takes no order gets its own orders.

    Every legal layout is enumerated. Dominance, the least memory, and lower bounds over all partitions and schedules exclude
    layouts. The others are searched on their balanced partition, the most promising first, and the best of them longer.

    Raises BadInput; Infeasible where no layout fits; NotFound where no schedule was found in time; WorkersLost.
    """
    compiled()
    model = shape_by_name(model) if isinstance(model, str) else model
    model = model if only.target is None else replace(model, gradients=only.target.gradients)
    cluster = cluster_of(cluster)
    limit = memory_of(cluster, memory)
    clock = Clock(seconds, effort)
    runner = TaskRunner(workers, clock.counted)
    races = list[tuple[Only, SpaceRace]]()

    def race_of(these: Only) -> SpaceRace:
        bounds = cheap_bounds(model, layouts(model, devices, batch, cluster, these), cluster, limit)
        races.append((these, SpaceRace(model, cluster, limit, clock, runner, seed, bounds, progress, stop)))
        return races[-1][1]

    with _until_ended(races):
        first = None if start else _first_of(race_of, only)
        race = race_of(only)
        race.begin(first)
        runner.rival, runner.stop, runner.left = lambda: race.rival, lambda: race.over, lambda: clock.left
        if only.takes_no_order:
            price_space(race)
        else:
            search_at_start(race, start)
            search_space(race)
    looked_at = [race for race in races if race[1].candidates]
    if not looked_at:
        raise NotFound("plan: no schedule of any layout was found in this time, and it is not proven that there is none")
    only, race = looked_at[-1]
    candidates = tuple(sorted(race.candidates, key=lambda candidate: candidate.value))
    if race.bounds.least > candidates[0].value + SAME_US:
        raise WrongBound(
            f"plan: the bound over the space, {race.bounds.least:.3f} µs, is above the step of "
            f"{candidates[0].layout.title}, {candidates[0].value:.3f} µs; this is a defect in zbsolve: please report it"
        )
    return Plan(model, cluster, devices, batch, limit, race.bounds, candidates, only)


def _first_of(race_of: Callable[[Only], SpaceRace], only: Only) -> Candidate | None:
    """A candidate with a known order of a plain layout. There are few of these, so it comes before all other bounds."""
    with suppress(Infeasible, BadInput):  # others may need less, or have the fields that are given
        race = race_of(only.plain)
        price_first(race, in_its_order if only.takes_no_order else in_a_named_order)
        return race.candidates[0] if race.candidates else None
    return None


@cache
def compiled() -> None:
    """Compute the bounds of a tiny space, which compiles every kernel of bounds, or loads it from the cache on disk."""
    model, cluster = Shape.gpt(64, 2, 4, vocabulary=256), cluster_of("a100")
    table = layouts(model, 4, 4, cluster)
    *_, bounds = raising(cheap_bounds(model, table, cluster, cluster.memory), cluster.memory, np.inf)
    assert not len(unproven(bounds, cluster.memory))


def memory_of(cluster: Cluster, asked: str | int | None) -> int:
    """Bytes of a device: those asked for, or the cluster's. Raises BadInput."""
    return cluster.memory if asked is None else parse_bytes(asked)


@contextmanager
def _until_ended(races: Sequence[tuple[Only, SpaceRace]]) -> Iterator[None]:
    """End the block quietly on KeyboardInterrupt or lost workers where a candidate was found; else let the error through."""

    def found() -> bool:
        return any(race.candidates for _, race in races)

    try:
        yield
    except (KeyboardInterrupt, SystemError) as error:
        pressed = interruption(error)
        if pressed is None:
            raise
        if not found():
            raise pressed from None
    except WorkersLost:  # a progress line told of it already
        if not found():
            raise
