"""Orders of engines that take none: 1F1B with one stage a rank, interleaved 1F1B in groups of g microbatches with more
(Megatron core 0.16.1, `pipeline_parallel/schedules.py`; Galvatron 2.4.1 has one stage a rank). And the named orders that
everybody knows: neither needs a search."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from ..greedy.side_stream import with_side_streams, without_side_streams
from ..problem import Problem
from ..schedule import GIVEN, Schedule
from ..search.certify import certified
from ..systems.one_direction import interleaved_in_groups, takes_groups
from ..systems.table import preset, presets_of
from ..verifier import verify
from .candidate import Candidate, Unsolved, unsolved
from .cluster import Cluster
from .costs.layer_costs import Model
from .layout import Layout

MAX_TRIED = 1_000_000  # passes of all orders that are tried: some seconds


def in_its_order(model: Model, layout: Layout, cluster: Cluster, memory: int) -> Candidate | None:
    """The layout with the best of these orders that holds within the memory; None where none does."""
    return _best(found for step in unsolved(model, layout, cluster, memory, (True,)) for found in _in_groups(step))


def in_a_named_order(model: Model, layout: Layout, cluster: Cluster, memory: int) -> Candidate | None:
    """The layout with the best of all named orders that holds within the memory; None where none does."""
    steps = unsolved(model, layout, cluster, memory)
    return _best(step.solved(schedule) for step in steps for _, schedule in presets_of(step.problem, searched=False))


def _in_groups(one: Unsolved) -> Iterator[Candidate]:
    """Groups of p times powers of two, and of m."""
    return (one.solved(order) for _, order in grouped_orders(one.problem, _powers(one.problem)))


def _powers(problem: Problem) -> set[int]:
    return {problem.ranks << shift for shift in range(problem.microbatches.bit_length())} | {problem.microbatches}


def _best(orders: Iterable[Candidate]) -> Candidate | None:
    """The shortest that is legal and holds within the memory."""
    for one in sorted(orders, key=lambda order: order.value):
        if not verify(one.schedule.problem, one.schedule):
            return replace(one, schedule=certified(one.schedule, GIVEN))
    return None


def grouped_orders(problem: Problem, only: Collection[int] = ()) -> Iterator[tuple[int | None, Schedule]]:
    """(g, order) of each g that Megatron allows, or as many as MAX_TRIED lets us try: then evenly spread ones, powers of two
    times p, and m. only: those of these alone. (None, 1F1B) with one stage a rank."""
    p, m = problem.ranks, problem.microbatches
    if problem.stages == p:
        yield None, preset("1f1b", problem)
        return
    alone = without_side_streams(problem)  # sums over replicas begin when their gradients are there
    allowed = [g for g in range(p, m + 1) if takes_groups(problem, g) and (not only or g in only)]
    if len(allowed) * len(problem.passes) > MAX_TRIED:
        powers = _powers(problem)
        spread = -(-len(allowed) * len(problem.passes) // MAX_TRIED)
        allowed = [g for i, g in enumerate(allowed) if g in powers or i % spread == 0]
    for g in allowed:
        yield g, with_side_streams(problem, interleaved_in_groups(alone, g))
